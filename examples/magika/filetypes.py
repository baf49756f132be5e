"""What type a file is, from its name and its first bytes: the truth that the classifier is measured against."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

Check = Callable[[bytes], bool]


def _begins(*magics: bytes) -> Check:
    return lambda head: head.startswith(magics)


def _text(head: bytes) -> bool:
    return b"\0" not in head


def _c_header(head: bytes) -> bool:
    """C++ headers are called .h too."""
    words = (b"namespace ", b"template <", b"template<", b"class ", b"std::", b'extern "C++"', b"public:")
    return _text(head) and not any(word in head for word in words)


def _json(head: bytes) -> bool:
    return head.lstrip()[:1] in (b"{", b"[") and _text(head)


def _markup(*tags: bytes) -> Check:
    return lambda head: any(tag in head.lstrip()[:512].lower() for tag in tags)


def _plain_xml(head: bytes) -> bool:
    return head.lstrip().startswith(b"<?xml") and b"<svg" not in head and b"<rdf" not in head.lower()


ELF = b"\x7fELF"

BY_SUFFIX: dict[str, tuple[str, Check]] = {
    ".awk": ("awk", _text),
    ".bat": ("batch", _text),
    ".bz2": ("bzip", _begins(b"BZh")),
    ".c": ("c", _text),
    ".cc": ("cpp", _text),
    ".class": ("javabytecode", _begins(b"\xca\xfe\xba\xbe")),
    ".cmake": ("cmake", _text),
    ".cpp": ("cpp", _text),
    ".crt": ("pem", _begins(b"-----BEGIN ")),
    ".css": ("css", _text),
    ".csv": ("csv", _text),
    ".deb": ("deb", _begins(b"!<arch>\ndebian")),
    ".diff": ("diff", _text),
    ".exe": ("pebin", _begins(b"MZ")),
    ".f90": ("fortran", _text),
    ".gif": ("gif", _begins(b"GIF8")),
    ".go": ("go", _text),
    ".gz": ("gzip", _begins(b"\x1f\x8b")),
    ".h": ("c", _c_header),
    ".hpp": ("cpp", _text),
    ".html": ("html", _markup(b"<html", b"<!doctype html")),
    ".ico": ("ico", _begins(b"\0\0\1\0")),
    ".ini": ("ini", _text),
    ".jar": ("jar", _begins(b"PK\3\4")),
    ".java": ("java", _text),
    ".jpg": ("jpeg", _begins(b"\xff\xd8\xff")),
    ".js": ("javascript", _text),
    ".json": ("json", _json),
    ".lua": ("lua", _text),
    ".m4": ("m4", _text),
    ".md": ("markdown", _text),
    ".npy": ("npy", _begins(b"\x93NUMPY")),
    ".npz": ("npz", _begins(b"PK\3\4")),
    ".pdf": ("pdf", _begins(b"%PDF")),
    ".pem": ("pem", _begins(b"-----BEGIN ")),
    ".php": ("php", _markup(b"<?php")),
    ".pl": ("perl", _text),
    ".pm": ("perl", _text),
    ".png": ("png", _begins(b"\x89PNG")),
    ".po": ("po", _text),
    ".proto": ("proto", _text),
    ".ps": ("postscript", _begins(b"%!PS")),
    ".ps1": ("powershell", _text),
    ".py": ("python", _text),
    ".pyc": ("pythonbytecode", lambda head: head[2:4] == b"\r\n"),
    ".rb": ("ruby", _text),
    ".rs": ("rust", _text),
    ".rst": ("rst", _text),
    ".sh": ("shell", _begins(b"#!")),
    ".so": ("elf", _begins(ELF)),
    ".sql": ("sql", _text),
    ".svg": ("svg", _markup(b"<svg")),
    ".tar": ("tar", lambda head: head[257:262] == b"ustar"),
    ".tcl": ("tcl", _text),
    ".toml": ("toml", _text),
    ".ttf": ("ttf", _begins(b"\0\1\0\0\0")),
    ".wav": ("wav", _begins(b"RIFF")),
    ".whl": ("zip", _begins(b"PK\3\4")),
    ".woff2": ("woff2", _begins(b"wOF2")),
    ".xml": ("xml", _plain_xml),
    ".xz": ("xz", _begins(b"\xfd7zXZ")),
    ".yaml": ("yaml", _text),
    ".yml": ("yaml", _text),
    ".zip": ("zip", _begins(b"PK\3\4")),
}
BY_NAME: dict[str, tuple[str, Check]] = {
    "Makefile": ("makefile", _text),
    "CMakeLists.txt": ("cmake", _text),
}
PROGRAM = "elf"  # what has no suffix is a program, a script or text: only its bytes tell
SCRIPTS = {b"sh": "shell", b"bash": "shell", b"dash": "shell", b"perl": "perl", b"python3": "python"}

LABELS = tuple(sorted({label for label, _ in (*BY_SUFFIX.values(), *BY_NAME.values())}))


def known_type(name: str, head: bytes | None = None) -> str | None:
    """The label of a file called `name` that begins with `head`, None where the two do not agree or say nothing.

    Without `head`: what it may turn out to be.
    """
    path = PurePath(name)
    # Installed libraries carry their version behind the suffix: libc.so.6
    suffix = ".so" if ".so." in name else path.suffix.lower()
    if name in BY_NAME or suffix in BY_SUFFIX:
        label, agrees = BY_NAME.get(name) or BY_SUFFIX[suffix]
        return label if head is None or agrees(head) else None
    if suffix:
        return None
    return PROGRAM if head is None else _program(head)


def _program(head: bytes) -> str | None:
    if head.startswith(ELF):
        return PROGRAM
    if head.startswith(b"#!"):
        words = head.split(b"\n", 1)[0][2:].replace(b"/usr/bin/env ", b"").split()
        return SCRIPTS.get(words[0].rsplit(b"/", 1)[-1]) if words else None
    return None
