"""Another image of the worker: the one that was built here with one more layer, in the cluster under its own name."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from .cluster import Json
from .install import CLUSTER, ROOT

sys.path.insert(0, str(ROOT / "tests" / "cluster"))

from localcluster.settings import IMAGE_PYTHON, from_environment
from localcluster.store import Store

OTHER_RUNTIME = "1.31.1"  # of ONNX Runtime, and not what requirements/worker.txt names
LOAD_SECONDS = 300
_PYTHON = ".".join(map(str, IMAGE_PYTHON))
_PACKAGES = f"opt/venv/lib/python{_PYTHON}/site-packages"
_BYTE_CODE = f"cpython-{IMAGE_PYTHON[0]}{IMAGE_PYTHON[1]}.pyc"


def of_another_runtime(worker: str, folder: Path) -> str:
    """Its engines have another load key: those of before are of no use to it. Files are left in `folder`."""
    package = f"onnxruntime=={OTHER_RUNTIME}"
    platform = ["--python-version", _PYTHON, "--python-platform", "x86_64-manylinux_2_28"]
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps", "--target", folder / "packages"]
    done = subprocess.run([*command, *platform, package], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{package} cannot be had: {done.stderr}"
    files = {
        f"{_PACKAGES}/{path.relative_to(folder / 'packages')}": path.read_bytes()
        for name in ("onnxruntime", f"onnxruntime-{OTHER_RUNTIME}.dist-info")
        for path in (folder / "packages" / name).rglob("*")
        if path.is_file()
    }
    locked = (ROOT / "requirements" / "worker.txt").read_text()
    before = re.findall(r"^onnxruntime==(\S+)", locked, re.MULTILINE)
    hidden = {f"{_PACKAGES}/onnxruntime", *(f"{_PACKAGES}/onnxruntime-{version}.dist-info" for version in before)}
    return derived(worker, "other-runtime", files, hidden, folder)


def with_module(worker: str, name: str, module: str, source: str, folder: Path) -> str:
    """`module`, a path below worker/, has another source."""
    path = Path("app") / module
    compiled = path.parent / "__pycache__" / f"{path.stem}.{_BYTE_CODE}"  # which is used without a look at the source
    return derived(worker, name, {str(path): source.encode()}, hidden={str(compiled)}, folder=folder)


def derived(worker: str, name: str, files: Mapping[str, bytes], hidden: Collection[str], folder: Path) -> str:
    """The reference of `worker` with these files (path -> content) and without what is hidden: that goes first. Skips
    where the cluster's images were not built on this machine."""
    store = Store(from_environment().cache / "images")
    digest = store.digest(worker)
    if digest is None:
        pytest.skip(f"{worker} was not built on this machine: no other image can be made of it")

    def blob(digest: str) -> Json:
        found: Json = json.loads((store.path / "blobs" / digest.replace(":", "/")).read_text())
        return found

    manifest = blob(digest)
    config = blob(manifest["config"]["digest"])
    layer = _layer(files, hidden)
    config["rootfs"]["diff_ids"].append(_digest(layer))
    config.setdefault("history", []).append({"created_by": name})
    settings = json.dumps(config).encode()
    media = manifest["layers"][-1]["mediaType"]
    manifest["config"] = _described(manifest["config"]["mediaType"], settings)
    manifest["layers"] = [*manifest["layers"], _described(media, layer)]
    document = json.dumps(manifest).encode()
    ref = f"localhost/trtmodel-worker-{name}:{hashlib.sha256(document).hexdigest()[:12]}"
    named = {"org.opencontainers.image.ref.name": ref, "io.containerd.image.name": ref}
    index = {"schemaVersion": 2, "manifests": [{**_described(manifest["mediaType"], document), "annotations": named}]}
    archive = folder / f"{name}.tar"
    with tarfile.open(archive, "w") as out:  # without the other layers, which the cluster has
        _add(out, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(out, "index.json", json.dumps(index).encode())
        for content in (document, settings, layer):
            _add(out, f"blobs/{_digest(content).replace(':', '/')}", content)
    done = subprocess.run([CLUSTER, "load", archive], capture_output=True, text=True, timeout=LOAD_SECONDS, check=False)
    assert done.returncode == 0, f"{ref} cannot be loaded: {done.stderr[-2000:]}"
    return ref


def _layer(files: Mapping[str, bytes], hidden: Collection[str]) -> bytes:
    marks = {_mark(path, files) for path in hidden}
    folders = {str(parent) for path in (*files, *marks) for parent in Path(path).parents if parent != Path()}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for folder in sorted(folders):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for path, content in sorted({**dict.fromkeys(marks, b""), **files}.items()):
            _add(archive, path, content)
    return out.getvalue()


def _mark(path: str, files: Mapping[str, bytes]) -> str:
    """What hides `path` of the layers below. A folder into which this layer brings files has a mark inside: the other
    kind would hide them, too."""
    inside = any(file.startswith(f"{path}/") for file in files)
    return f"{path}/.wh..wh..opq" if inside else str(Path(path).parent / f".wh.{Path(path).name}")


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    archive.addfile(member, io.BytesIO(content))


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _described(media_type: str, content: bytes) -> Json:
    return {"mediaType": media_type, "digest": _digest(content), "size": len(content)}
