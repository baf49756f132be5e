"""The archive for krew is packed, unpacked elsewhere, and run as kubectl would, with nothing else installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml
from cli_scene import put
from decide_scene import A, serving
from fakes.api_server import FakeApiServer

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
SECONDS = 120


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    script = ROOT / "operator" / "krew" / "build.py"
    done = subprocess.run(
        [sys.executable, script, "--out", out], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def plugin(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The executable, in a directory on the PATH as krew links it."""
    (archive,) = packed.glob("*.tar.gz")
    home = tmp_path_factory.mktemp("krew")
    with tarfile.open(archive) as found:
        found.extractall(home / "store", filter="data")
    (home / "bin").mkdir()
    (home / "bin" / "kubectl-trtmodel").symlink_to(home / "store" / "kubectl-trtmodel")
    return home / "bin" / "kubectl-trtmodel"


def run(plugin: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In an environment that knows Python and nothing of this checkout."""
    base = {"PATH": os.environ["PATH"], "HOME": str(plugin.parent), "TRTMODEL_PYTHON": sys.base_prefix + "/bin/python3"}
    return subprocess.run(
        [plugin, *words], capture_output=True, text=True, timeout=SECONDS, check=False, env=base | environment, cwd="/"
    )


def test_the_manifest_names_the_archive_by_its_digest(packed: Path) -> None:
    manifest = yaml.safe_load((packed / "trtmodel.yaml").read_text())
    (archive,) = packed.glob("*.tar.gz")
    (one,) = manifest["spec"]["platforms"]
    assert one["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert one["uri"].endswith(f"/{archive.name}")
    assert one["bin"] == "kubectl-trtmodel"
    assert manifest["spec"]["version"] == "v0.1.0"


def test_it_lints_and_asks_a_cluster(plugin: Path, tmp_path: Path) -> None:
    assert run(plugin, "--version").stdout == "0.1.0\n"
    assert run(plugin, "--help").stdout.startswith("usage: kubectl trtmodel ")
    linted = run(plugin, "lint", str(ROOT / "examples" / "magika.yaml"))
    assert (linted.returncode, linted.stderr) == (0, "")
    with FakeApiServer() as server:
        put(server, serving(A))
        found = run(plugin, "get", "-n", "ml", KUBECONFIG=str(server.kubeconfig(tmp_path)))
    assert (found.returncode, found.stdout.splitlines()[1].split()[:2]) == (0, ["magika", "Serving"]), found.stderr


def test_what_it_does_not_bring_is_told(plugin: Path) -> None:
    found = run(plugin, "check", "model.onnx")
    assert (found.returncode, "pip install '.[builder]' in a clone" in found.stderr) == (2, True)


def test_without_its_python_it_says_which_one_it_needs(plugin: Path, tmp_path: Path) -> None:
    for tool in ("sh", "cat", "dirname", "readlink"):
        found = next(Path(p) / tool for p in ("/bin", "/usr/bin") if (Path(p) / tool).exists())
        (tmp_path / tool).symlink_to(found)
    found = run(plugin, "--version", TRTMODEL_PYTHON="", PATH=str(tmp_path))
    assert found.returncode == 2
    assert f"for Python {sys.version_info[0]}.{sys.version_info[1]}" in found.stderr
