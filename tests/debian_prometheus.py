"""prometheus and promtool: those on PATH, else Debian's package, unpacked into the cache. It is not installed, so that
no service of it is started."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PROGRAMS = ("prometheus", "promtool")
DOWNLOAD_SECONDS = 300


class Missing(Exception):
    """The programs cannot be had. The text says what to do."""


def programs() -> dict[str, Path]:
    """Paths by name. Raises Missing."""
    on_path = {name: shutil.which(name) for name in PROGRAMS}
    if all(on_path.values()):
        return {name: Path(str(path)) for name, path in on_path.items()}
    cache = Path(os.environ.get("TRTMODEL_CACHE") or Path.home() / ".cache" / "trtmodel")
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / "prometheus-debian"
    with (cache / "prometheus-debian.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _unpack(cache, folder)
    return {name: folder / name for name in PROGRAMS}


def _unpack(cache: Path, folder: Path) -> None:
    if shutil.which("apt-get") is None:
        raise Missing("prometheus and promtool are needed on PATH: this machine has no apt-get to bring Debian's")
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        found = list(Path(tmp).glob("*.deb")) if _apt(tmp, "download", "prometheus") else []
        if not found:
            _apt(tmp, "update", "-qq")
            if not _apt(tmp, "download", "prometheus"):
                raise Missing(
                    "apt-get cannot download Debian's package prometheus: put prometheus and promtool on PATH"
                )
            found = list(Path(tmp).glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", found[0], f"{tmp}/x"], check=True, timeout=DOWNLOAD_SECONDS)
        (Path(tmp) / "x" / "usr" / "bin").rename(folder)


def _apt(cwd: str, *arguments: str) -> bool:
    done = subprocess.run(["apt-get", *arguments], cwd=cwd, capture_output=True, timeout=DOWNLOAD_SECONDS, check=False)
    return done.returncode == 0
