"""What the site has beside docs/: pages and files of the repository that its pages link to, at the same paths.

A hook of mkdocs (mkdocs.yml). On GitHub such links work as they stand; here `../examples/x.yaml` in docs/ becomes
`examples/x.yaml`, and the file a part of the site. A link to a folder leads to its README; that of the decisions is
made here, of their heads.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
DECISIONS = "decisions/README.md"
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds what is linked, and what the added pages link to."""
    files.append(File.generated(config, DECISIONS, content=decisions()))
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        path = ROOT / _in_repository(page)
        for target in _targets(path.read_text(encoding="utf-8") if path.is_file() else "", page):
            uri = _in_site(target)
            if files.get_file_from_path(uri) is None and (ROOT / target).is_file():
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / target)))
                waiting += [uri] if uri.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site needs them."""
    uri = page.file.src_uri
    here = posixpath.dirname(uri)

    def changed(match: re.Match[str]) -> str:
        target = _target(match[2], uri)
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(_in_site(target), here or '.')}{match[3] or ''}{match[4]}"

    parts, last = [], 0
    for code in CODE.finditer(markdown):  # what stands in code is no link
        parts += [LINK.sub(changed, markdown[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, LINK.sub(changed, markdown[last:])])


def decisions() -> str:
    """The page that lists the records, with their dates."""
    lines = [
        "# Decisions",
        "",
        "Where the first design was silent or wrong, and why.",
        "",
        "| decision | date |",
        "|---|---|",
    ]
    for file in sorted((ROOT / DOCS / "decisions").glob("[0-9]*.md")):
        title, _, rest = file.read_text(encoding="utf-8").partition("\n")
        date = rest.partition("Date: ")[2][:10]
        lines.append(f"| [{title.removeprefix('# ')}]({file.name}) | {date} |")
    return "\n".join(lines) + "\n"


def _targets(text: str, page: str) -> list[str]:
    found = [_target(match[2], page) for match in LINK.finditer(CODE.sub("", text))]
    return [target for target in found if target is not None]


def _target(link: str, page: str) -> str | None:
    """Where a link of the page leads in the repository; None: out of it."""
    if re.match(r"[a-z]+:", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(_in_repository(page)), link))
    return f"{target}/README.md" if (ROOT / target).is_dir() else target


def _in_repository(uri: str) -> str:
    """A page's path in the repository, by that in the site."""
    return DOCS + uri if (ROOT / DOCS / uri).is_file() else uri


def _in_site(path: str) -> str:
    return path.removeprefix(DOCS)
