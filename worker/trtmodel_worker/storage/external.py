"""Which files beside it does an ONNX file name (external data)?

Read from the wire format of protobuf, by skipping: a model with 2 GB of weights inside is answered by touching a few
pages of it, where parsing would take 2 GB of memory. Field numbers are those of onnx.proto, which never change.
"""

from __future__ import annotations

import mmap
import posixpath
from collections.abc import Iterator
from pathlib import Path

from trtmodel_contract.jobs import Reason

from trtmodel_worker.protobuf import BYTES, VARINT, Field, fields
from trtmodel_worker.storage.errors import StorageError

DEEPEST = 100  # messages in messages, where protobuf's own parser gives up: what a runtime reads is read here
MOST_FILES = 10_000

# message -> field -> message of that field; what is not listed is skipped
_MODEL = {7: "graph", 25: "function"}
_INSIDE = {
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
}
_NAME, _ENTRY, _LOCATION = 8, 13, 14
_EXTERNAL = 1


def external_files(model: Path, what: str) -> dict[str, str]:
    """Relative path -> name of a tensor that lies there. Raises StorageError if a path leads out of the model's folder,
    ValueError if the file is no ONNX (which is the checker's to explain)."""
    found: dict[str, str] = {}
    with model.open("rb") as f:
        if f.seek(0, 2) == 0:
            return {}
        with mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as data:
            for location, tensor in _walk(data, _MODEL, 0, len(data), 0):
                found.setdefault(inside(location, f"{what}: tensor {tensor[:200]!r}"), tensor)
                if len(found) > MOST_FILES:
                    text = f"{what} names more than {MOST_FILES:,} files of external data: save the weights in one file"
                    raise StorageError(Reason.MODEL_INVALID, text)
    found.pop(model.name, None)
    return found


def inside(location: str, what: str) -> str:
    """`location` as a plain relative path. Raises StorageError if it is none, or leads out of the folder."""
    parts = location.split("/")
    if not location or location.startswith("/") or ".." in parts or "\\" in location or "\0" in location:
        text = f"{what} lies in {location[:300]!r}, which is not below the model's own folder"
        raise StorageError(Reason.MODEL_INVALID, f"{text}: save the model again, with its data beside it")
    return posixpath.normpath(location)


def size_of_model(model: Path) -> int:
    """Bytes of a model with all its files, those that are there. Raises StorageError, ValueError as above."""
    files = (model.parent / name for name in external_files(model, model.name))
    return model.stat().st_size + sum(file.stat().st_size for file in files if file.exists())


def _walk(data: mmap.mmap, inner: dict[int, str], at: int, end: int, depth: int) -> Iterator[tuple[str, str]]:
    if depth > DEEPEST:
        raise ValueError("nested too deep")
    for field in fields(data, at, end):
        message = inner.get(field.number)
        if message is None or field.kind != BYTES:
            continue
        if message == "tensor":
            yield from _tensor(data, field.payload, field.end)
        else:
            yield from _walk(data, _INSIDE[message], field.payload, field.end, depth + 1)


def _tensor(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[str, str]]:
    name, location, external = "", "", False
    for field in fields(data, at, end):
        if field.number == _NAME and field.kind == BYTES:
            name = _text(data, field)
        elif field.number == _ENTRY and field.kind == BYTES:
            entry = {f.number: _text(data, f) for f in fields(data, field.payload, field.end) if f.kind == BYTES}
            if entry.get(1) == "location":
                location = entry.get(2, "")
        elif field.number == _LOCATION and field.kind == VARINT:
            external = field.value == _EXTERNAL
    if external:
        yield location, name


def _text(data: mmap.mmap, field: Field) -> str:
    # A UnicodeDecodeError is a ValueError.
    return data[field.payload : min(field.end, field.payload + 4096)].decode()
