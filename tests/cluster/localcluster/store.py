"""The image store in the cache: one OCI layout that all images share, so that a layer is kept and moved once.

Blobs are uncompressed: their digests are the layers' own, so both buildah and containerd see what they have.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_REF = "org.opencontainers.image.ref.name"
_CONTAINERD_NAME = "io.containerd.image.name"
_KEPT_PER_NAME = 5


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

    def prune(self, name: str) -> None:
        """Keep the newest few references of one image name, and only the blobs that some reference needs."""
        index = self._index()
        mine = [e for e in index["manifests"] if e["annotations"].get(_REF, "").rpartition(":")[0] == name]
        dropped = [e["annotations"][_REF] for e in mine[:-_KEPT_PER_NAME]]
        if not dropped:
            return
        index["manifests"] = [e for e in index["manifests"] if e["annotations"].get(_REF) not in dropped]
        new = self.path / "index.json.new"
        new.write_text(json.dumps(index))
        new.replace(self.path / "index.json")
        needed = {d for e in index["manifests"] for d in self._blobs(e["digest"])}
        for blob in (self.path / "blobs" / "sha256").iterdir():
            if f"sha256:{blob.name}" not in needed:
                blob.unlink()


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
