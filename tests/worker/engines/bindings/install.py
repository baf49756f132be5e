"""The real bindings of a version of TensorRT on a machine without a GPU and without TensorRT.

10 and 11 have a wheel with nothing else in it. 8.6.0's holds 819 MB of libraries beside the 1 MB that is wanted here,
so only that part of it is read. The libraries that a binding links are made: of their functions only the addresses are
needed to import it. Everything is kept in the cache of these tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trtmodel"
SECONDS = 300
VERSIONS = ("8.6.0", "10.16.1.11", "11.4.0.106")
# 8.6.0 has nothing for a newer Python than 3.10.
_WHOLE_WHEEL = "8.6.0"
_MEMBERS = {
    "tensorrt/tensorrt.so": "9e58835ae62720946fd44353be901977188549434b664a7495deea8a4c9fd64e",
    "tensorrt/__init__.py": "f6bdd40055678300770ac0d2ae990daad58c4084e8227d2df08975742d2b0c04",
}
_READ_AHEAD = 256 * 1024


class Unavailable(Exception):
    """What is lacking, and the way out."""


@dataclass(frozen=True)
class Bindings:
    python: str
    folder: Path

    def environment(self, *paths: Path) -> dict[str, str]:
        """For a process that imports them."""
        libraries = os.pathsep.join(str(path.parent) for path in self.folder.glob("tensorrt*/tensorrt.so"))
        search = os.pathsep.join(str(path) for path in (self.folder, *paths))
        return {**os.environ, "PYTHONPATH": search, "LD_LIBRARY_PATH": libraries}


def bindings(version: str) -> Bindings:
    """Raises Unavailable."""
    python = _python310() if version == _WHOLE_WHEEL else sys.executable
    name = f"tensorrt-{version}-{'310' if version == _WHOLE_WHEEL else f'{sys.version_info[0]}{sys.version_info[1]}'}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes want it at once
        folder = CACHE / name
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            if version == _WHOLE_WHEEL:
                _take_members(_wheel_address(version, folder), folder)
            else:
                package = f"tensorrt-cu12-bindings=={version}"
                _run("-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), package)
            _make_libraries(next(folder.glob("tensorrt*/tensorrt.so")))
            (folder / ".ready").touch()
    return Bindings(python, folder)


def cuda_python(version: str) -> Bindings:
    """cuda-python's bindings, which import where there is no driver. Raises Unavailable."""
    name = f"cuda-bindings-{version}-{sys.version_info[0]}{sys.version_info[1]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = CACHE / name
        if not (folder / ".ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run("-m", "uv", "pip", "install", "--quiet", "--target", str(folder), f"cuda-bindings=={version}")
            (folder / ".ready").touch()
    return Bindings(sys.executable, folder)


def _python310() -> str:
    on_path = [Path(entry) / "python3.10" for entry in os.environ.get("PATH", "").split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (Path(sys.executable), *on_path, *sorted(pyenv.glob("versions/3.10.*/bin/python"))):
        if candidate.exists() and _is_310(str(candidate)):
            return str(candidate)
    try:
        _run("-m", "uv", "python", "install", "--quiet", "3.10")
        found = _run("-m", "uv", "python", "find", "--managed-python", "3.10").strip()
    except Unavailable as e:
        raise Unavailable(f"TensorRT 8.6.0 needs Python 3.10, and there is none: put python3.10 on PATH ({e})") from e
    return found


def _is_310(python: str) -> bool:
    code = "import sys; sys.exit(sys.version_info[:2] != (3, 10))"
    return subprocess.run([python, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def _wheel_address(version: str, folder: Path) -> str:
    """Asked of the registry by its ordinary client, which knows how it is configured."""
    wanted, locked = folder / "requirement.in", folder / "pylock.toml"
    wanted.write_text(f"tensorrt=={version}\n")
    options = ["--no-deps", "--python-version", "3.10", "--python-platform", "x86_64-manylinux_2_28"]
    _run("-m", "uv", "pip", "compile", "--quiet", *options, "--format", "pylock.toml", "-o", str(locked), str(wanted))
    address = re.search(r'url = "(https://[^"]+\.whl)"', locked.read_text())
    if address is None:
        raise Unavailable(f"the package registry has no wheel of tensorrt {version} for CPython 3.10 on x86-64")
    return address.group(1)


def _take_members(address: str, folder: Path) -> None:
    try:
        with zipfile.ZipFile(io.BufferedReader(_Ranges(address), _READ_AHEAD)) as wheel:
            for member, digest in _MEMBERS.items():
                content = wheel.read(member)
                found = hashlib.sha256(content).hexdigest()
                if found != digest:
                    raise Unavailable(f"{member} of the wheel has sha256 {found}, not {digest}: look what changed")
                (folder / member).parent.mkdir(exist_ok=True)
                (folder / member).write_bytes(content)
    except (OSError, zipfile.BadZipFile) as e:
        raise Unavailable(f"the wheel of 8.6.0 cannot be read from the package registry: {e}") from e


class _Ranges(io.RawIOBase):
    """A file on a server that answers range requests."""

    def __init__(self, address: str) -> None:
        self._address, self._position = address, 0
        _, self._size = self._read(-1, 0)

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        data, _ = self._read(self._position, self._position + wanted - 1)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read(self, first: int, last: int) -> tuple[bytes, int]:
        """(bytes, size of the whole). `first` -1: the last byte only."""
        asked = f"bytes={first}-{last}" if first >= 0 else "bytes=-1"
        request = urllib.request.Request(self._address, headers={"Range": asked})
        with urllib.request.urlopen(request, timeout=60) as response:
            if response.status != 206:
                raise OSError(f"it does not answer range requests (status {response.status}), and 819 MB is too much")
            return response.read(), int(response.headers["Content-Range"].rpartition("/")[2])


def _make_libraries(binding: Path) -> None:
    """Stand-ins for what it links, with the functions that it looks for there."""
    if shutil.which("gcc") is None or shutil.which("readelf") is None:
        raise Unavailable("gcc and readelf are needed to make stand-ins for TensorRT's libraries: install them")
    dynamic = _tool("readelf", "-W", "-d", str(binding))
    symbols = _tool("readelf", "-W", "--dyn-syms", str(binding))
    libraries = re.findall(r"Shared library: \[(libnv[^\]]+)\]", dynamic)
    functions = re.findall(r"UND (create\w+|get(?:Nv|Plugin|Builder)\w+|init\w+|_ZN\d+nv\w+)", symbols)
    for number, library in enumerate(libraries):
        source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in functions) if number == 0 else ""
        target = binding.parent / library
        command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(target), f"-Wl,-soname,{library}"]
        subprocess.run(command, input=source, text=True, timeout=SECONDS, check=True)


def _run(*arguments: str) -> str:
    return _tool(sys.executable, *arguments)


def _tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command[1:5])} failed, is the package registry reachable? {done.stderr[-600:]}")
    return done.stdout
