"""Packs `kubectl trtmodel` with its libraries, as the lock names them, for krew, and writes the archive's manifest.

    python operator/krew/build.py [--out dist] [--homepage https://...]

The libraries hold compiled code, so an archive is for the kind of machine and the version of Python that packed it. The
same sources give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import platform
import shutil
import string
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
INSTALL_SECONDS = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--homepage", default="https://example.com/trtmodel", help="where releases are published")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in build(options.out, options.homepage):
        print(path)
    return 0


def build(out: Path, homepage: str) -> tuple[Path, Path]:
    """(archive, manifest). Raises CalledProcessError."""
    version, python = importlib.metadata.version("trtmodel"), f"{sys.version_info[0]}.{sys.version_info[1]}"
    os_name, arch = platform.system().lower(), ARCHITECTURES.get(platform.machine(), platform.machine())
    archive = out / f"kubectl-trtmodel-{version}-{os_name}-{arch}.tar.gz"
    with tempfile.TemporaryDirectory(prefix="krew-") as work:
        folder = Path(work) / "plugin"
        folder.mkdir()
        _install(folder / "lib", Path(work))
        shutil.copy(HERE / "kubectl-trtmodel", folder)
        shutil.copy(ROOT / "LICENSE", folder)
        (folder / "PYTHON").write_text(f"{python}\n")
        _pack(folder, archive)
    values = {"version": version, "homepage": homepage.rstrip("/"), "python": python, "os": os_name, "arch": arch}
    values |= {"archive": archive.name, "sha256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    manifest = out / "trtmodel.yaml"
    manifest.write_text(string.Template((HERE / "trtmodel.yaml").read_text()).substitute(values))
    return archive, manifest


def _install(lib: Path, work: Path) -> None:
    requirements = work / "requirements.txt"
    uv = [sys.executable, "-m", "uv"]
    export = [*uv, "export", "-q", "--frozen", "--no-emit-project", "--extra", "cli", "-o", requirements]
    install = [*uv, "pip", "install", "-q", "--python", sys.executable, "--target", lib, "--link-mode", "copy"]
    for command in (export, [*install, "--require-hashes", "-r", requirements], [*install, "--no-deps", ROOT]):
        subprocess.run(command, check=True, timeout=INSTALL_SECONDS, cwd=ROOT)
    shutil.rmtree(lib / "bin", ignore_errors=True)


def _pack(folder: Path, archive: Path) -> None:
    """Without times, owners and byte code."""
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", mtime=0, fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for path in sorted(folder.rglob("*")):
            if path.is_dir() or path.suffix == ".pyc" or path.name in ("RECORD", "direct_url.json", "uv_cache.json"):
                continue
            info = tarfile.TarInfo(str(path.relative_to(folder)))
            data = path.read_bytes()
            info.size, info.mode = len(data), 0o755 if path.name == "kubectl-trtmodel" else 0o644
            out.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    sys.exit(main())
