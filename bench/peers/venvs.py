"""One virtual environment per peer, made once, outside the repository.

    python bench/peers/venvs.py [PEER ...]

The environments lie under ~/.cache/trtmodel/peers/NAME-HASH, HASH of the pinned requirements and the interpreter, so a
changed pin makes a new environment. `requirements/NAME.in` is what is asked for, `NAME.txt` what it was resolved to:

    uv pip compile --no-header --no-annotate --python-version 3.11 \\
        --python-platform x86_64-manylinux_2_36 NAME.in -o NAME.txt

MLServer with a worker process needs uvloop < 0.22: it calls `asyncio.get_event_loop` where newer ones refuse.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements"
CACHE = Path.home() / ".cache" / "trtmodel" / "peers"
INSTALL_SECONDS = 600.0
# PyTriton starts Triton's own Python, built as Debian builds it; a statically linked interpreter lacks its libpython.
DEBIAN_PYTHON = Path("/usr/bin/python3.11")
NEEDS_DEBIAN = frozenset({"pytriton"})


class PeerUnavailable(RuntimeError):
    """An environment cannot be made here. The text says why."""


def names() -> list[str]:
    """Every peer that has pinned requirements."""
    return sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))


def ensure(name: str) -> Path:
    """The interpreter of the peer's environment, which is made if it is missing. Raises PeerUnavailable."""
    pinned = REQUIREMENTS / f"{name}.txt"
    interpreter = DEBIAN_PYTHON if name in NEEDS_DEBIAN else Path(sys.executable).resolve()
    if not interpreter.exists():
        raise PeerUnavailable(f"{name} needs {interpreter} (apt-get install python3.11)")
    digest = hashlib.sha256(pinned.read_bytes() + str(interpreter).encode()).hexdigest()[:12]
    place = CACHE / f"{name}-{digest}"
    python = place / "bin" / "python"
    if (place / "complete").exists():
        return python
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    _uv("venv", "--quiet", "--python", str(interpreter), str(place))
    _uv("pip", "install", "--quiet", "--python", str(python), "--no-deps", "--requirements", str(pinned))
    (place / "complete").touch()
    return python


def versions(name: str) -> dict[str, str]:
    """Package -> version, as pinned."""
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    pairs = (line.split(";")[0].split("==") for line in lines if "==" in line)
    return {package.strip(): version.strip() for package, version in pairs}


def _uv(*arguments: str) -> None:
    beside = Path(sys.executable).parent / "uv"
    program = str(beside) if beside.exists() else shutil.which("uv")
    if program is None:
        raise PeerUnavailable("uv is not installed: make venv")
    try:
        done = subprocess.run(
            ["nice", program, *arguments], capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False,
            env={**os.environ, "UV_LINK_MODE": "copy"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PeerUnavailable(f"uv {arguments[0]} took more than {INSTALL_SECONDS:g} s") from None
    if done.returncode:
        raise PeerUnavailable(f"uv {' '.join(arguments[:2])} failed: {done.stderr.strip()[-400:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", default=names())
    for name in parser.parse_args().peers:
        started = time.monotonic()
        try:
            print(f"{name}: {ensure(name).parent.parent.name} ({time.monotonic() - started:.0f} s)", flush=True)
        except PeerUnavailable as e:
            print(f"{name}: {e}", flush=True)


if __name__ == "__main__":
    main()
