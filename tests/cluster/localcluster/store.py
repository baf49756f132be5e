"""The image store in the cache: one OCI layout that all images share, so that a layer is kept and moved once.

Layers are kept as plain tar archives: pushing to an `oci:` target instead would compress every layer of an image
again for each change of its last one (5.7 against 1.7 seconds of processor time for the worker's image).
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_REF = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME = "io.containerd.image.name"
_KEPT_PER_NAME = 5
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


class Store:
    """An OCI image layout on disk. References are full names, such as localhost/trtmodel-worker:0123456789ab."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _index(self) -> dict[str, Any]:
        try:
            index: dict[str, Any] = json.loads((self.path / "index.json").read_text())
        except FileNotFoundError:
            return {"schemaVersion": 2, "manifests": []}
        return index

    def _write_index(self, index: dict[str, Any]) -> None:
        new = self.path / "index.json.new"
        new.write_text(json.dumps(index))
        new.replace(self.path / "index.json")

    def _entry(self, ref: str) -> dict[str, Any] | None:
        for entry in self._index()["manifests"]:
            if entry.get("annotations", {}).get(_REF) == ref:
                found: dict[str, Any] = entry
                return found
        return None

    def _blob(self, digest: str) -> Path:
        return self.path / "blobs" / digest.replace(":", "/")

    def digest(self, ref: str) -> str | None:
        """The manifest digest of a reference, or None if it is not here."""
        entry = self._entry(ref)
        return None if entry is None else str(entry["digest"])

    def _blobs(self, digest: str) -> Iterator[str]:
        manifest = json.loads(self._blob(digest).read_text())
        yield digest
        yield manifest["config"]["digest"]
        for layer in manifest["layers"]:
            yield layer["digest"]

    def add(self, ref: str, docker_archive: IO[bytes]) -> None:
        """Take an image from a docker archive, as `buildah push` streams it, under one reference.

        Raises tarfile.ReadError when the stream ends early.
        """
        blobs = self.path / "blobs" / "sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        names: dict[str, str] = {}  # member of the archive -> digest; the archive names each by it
        described: dict[str, Any] = {}
        with tarfile.open(fileobj=docker_archive, mode="r|") as archive:
            for member in archive:
                data = archive.extractfile(member) if member.isreg() else None
                if data is None:
                    continue
                hexadecimal = member.name.partition(".")[0]
                if member.name == "manifest.json":
                    described = json.load(data)[0]
                elif len(hexadecimal) == 64:
                    names[member.name] = f"sha256:{hexadecimal}"
                    if not (blobs / hexadecimal).exists():
                        partial = blobs / f"{hexadecimal}.partial"
                        with partial.open("wb") as out:
                            shutil.copyfileobj(data, out, 1 << 20)
                        partial.rename(blobs / hexadecimal)

        def descriptor(member: str, media_type: str) -> dict[str, Any]:
            digest = names[member]
            return {"mediaType": media_type, "digest": digest, "size": self._blob(digest).stat().st_size}

        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": descriptor(described["Config"], _CONFIG),
                "layers": [descriptor(layer, _LAYER) for layer in described["Layers"]],
            }
        ).encode()
        hexadecimal = hashlib.sha256(manifest).hexdigest()
        (blobs / hexadecimal).write_bytes(manifest)
        index = self._index()
        index["manifests"] = [e for e in index["manifests"] if e["annotations"].get(_REF) != ref]
        index["manifests"].append(
            {
                "mediaType": _MANIFEST,
                "digest": f"sha256:{hexadecimal}",
                "size": len(manifest),
                "annotations": {_REF: ref},
            }
        )
        (self.path / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
        self._write_index(index)

    def write_archive(self, ref: str, out: IO[bytes], present: set[str]) -> int:
        """Write an OCI archive of one image without the layers in `present`. Returns the bytes of its blobs."""
        entry = self._entry(ref)
        if entry is None:
            raise KeyError(ref)
        entry = {**entry, "annotations": {_REF: ref, _CONTAINERD_NAME: ref}}
        total = 0
        with tarfile.open(fileobj=out, mode="w|") as archive:
            _add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
            _add(archive, "index.json", json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode())
            manifest, config, *layers = self._blobs(str(entry["digest"]))
            for digest in dict.fromkeys([manifest, config, *(d for d in layers if d not in present)]):
                blob = self._blob(digest)
                archive.add(blob, arcname=f"blobs/{digest.replace(':', '/')}")
                total += blob.stat().st_size
        return total

    def prune(self, name: str) -> list[str]:
        """Keep the newest few references of one image name, and only the blobs that some reference needs.

        Returns the references that went.
        """
        index = self._index()
        mine = [e for e in index["manifests"] if e["annotations"].get(_REF, "").rpartition(":")[0] == name]
        dropped = [e["annotations"][_REF] for e in mine[:-_KEPT_PER_NAME]]
        if not dropped:
            return []
        index["manifests"] = [e for e in index["manifests"] if e["annotations"].get(_REF) not in dropped]
        self._write_index(index)
        needed = {d for e in index["manifests"] for d in self._blobs(e["digest"])}
        for blob in (self.path / "blobs" / "sha256").iterdir():
            if f"sha256:{blob.name}" not in needed:
                blob.unlink()
        return dropped


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
