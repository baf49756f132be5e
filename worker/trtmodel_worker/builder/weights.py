"""Weights, wherever they lie: do they have the size that their shape says, and are they numbers?

Every byte is read once, in pieces, so that a model of any size takes a few megabytes here. Files of external data are
opened by nobody else during a check: each weight's place is examined here, and the graph that native libraries get
afterwards refers to a file of holes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
from onnx import TensorProto, helper
from trtmodel_contract.jobs import Reason

from trtmodel_worker.builder import walk
from trtmodel_worker.builder.findings import error, listed, warning
from trtmodel_worker.builder.outline import INLINE_BYTES, Outline
from trtmodel_worker.engines.base import Array
from trtmodel_worker.engines.building import Finding

PIECE_BYTES = 4 << 20
HOLES = "weights"  # the file that large weights refer to afterwards
_MOST_HOLES = 1 << 40  # no tensor is larger, and file systems have limits
_MOST_PATH = 1024  # characters of a location
_EXPORT_AGAIN = "export it again"
_SAVE_AGAIN = "save the model again"
_BITS = {  # of an element, where it is no whole byte, or where onnx has said otherwise
    **dict.fromkeys(("INT2", "UINT2"), 2),
    **dict.fromkeys(("INT4", "UINT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"), 8),
    "BFLOAT16": 16,
}
# type: (as unsigned, the bits without the sign, those of infinity: what is greater is NaN)
_NUMBERS = {
    "FLOAT": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "DOUBLE": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
    "FLOAT16": (np.uint16, 0x7FFF, 0x7C00),
    "BFLOAT16": (np.uint16, 0x7FFF, 0x7F80),
    "FLOAT8E5M2": (np.uint8, 0x7F, 0x7C),
}


@dataclass(frozen=True)
class Place:
    """Where the data of a weight lies."""

    path: Path
    offset: int
    length: int


@dataclass
class _Found:
    problems: list[Finding] = field(default_factory=list)
    nan: list[str] = field(default_factory=list)
    infinite: list[str] = field(default_factory=list)
    missing: dict[str, list[str]] = field(default_factory=dict)  # files, with the weights that lie there
    total: int = 0


def check(outline: Outline, source: Path) -> tuple[list[Finding], int]:
    """(findings, bytes of all weights). Afterwards small external weights are in the graph, and large ones refer to
    `HOLES` (see `write_holes`). Raises OSError."""
    found = _Found()
    for number, tensor in enumerate(outline.model.graph.initializer):
        stored = outline.stored.get(number)
        if stored is None or tensor.data_location == TensorProto.EXTERNAL:
            _check(tensor, source, found)
        else:
            _check_data(tensor, Place(source, *stored), found)
    for tensor in walk.tensors(outline.model):
        _check(tensor, source, found)
    return [*found.problems, *_told(found)], found.total


def write_holes(outline: Outline, folder: Path) -> None:
    """The file that the graph refers to: as large as its largest weight, and without a block on the disk."""
    large = [byte_size(t) for t in outline.model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    large += [byte_size(t) for t in walk.tensors(outline.model) if t.data_location == TensorProto.EXTERNAL]
    if large:
        with (folder / HOLES).open("wb") as f:
            f.truncate(min(max(0, *large), _MOST_HOLES))


def byte_size(tensor: TensorProto) -> int:
    """What the shape says; -1 if it says nothing."""
    if any(size < 0 for size in tensor.dims) or not _is_number(tensor.data_type):
        return -1
    count: int = math.prod(tensor.dims)
    bits = _BITS.get(TensorProto.DataType.Name(tensor.data_type))
    if bits is not None:
        return -(-count * bits // 8)
    return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _is_number(data_type: int) -> bool:
    return data_type in TensorProto.DataType.values() and data_type not in (TensorProto.UNDEFINED, TensorProto.STRING)


def _check(tensor: TensorProto, source: Path, found: _Found) -> None:
    if tensor.data_location == TensorProto.EXTERNAL:
        place = _place(tensor, source.parent, found)
        if place is not None:
            _check_data(tensor, place, found)
        else:
            _refer_to_holes(tensor, max(0, byte_size(tensor)))
        return
    size, there = byte_size(tensor), _inline_size(tensor)
    if size < 0:
        if tensor.data_type != TensorProto.STRING or any(d < 0 for d in tensor.dims):
            kind = f"type {tensor.data_type} and shape {list(tensor.dims)}"
            found.problems.append(_invalid(f"weight {tensor.name!r} is of {kind}, which no tensor has", _EXPORT_AGAIN))
        return
    if there is not None and there != size:
        found.problems.append(_wrong_size(tensor, size, there))
        return
    found.total += size
    if tensor.HasField("raw_data"):
        _scan(tensor, [np.frombuffer(tensor.raw_data, np.uint8)], found)
    elif tensor.float_data:
        _scan(tensor, [np.array(tensor.float_data, np.float32).view(np.uint8)], found)
    elif tensor.double_data:
        _scan(tensor, [np.array(tensor.double_data, np.float64).view(np.uint8)], found)
    elif tensor.int32_data and tensor.data_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
        _scan(tensor, [np.array(tensor.int32_data, np.int64).astype(np.uint16).view(np.uint8)], found)


def _inline_size(tensor: TensorProto) -> int | None:
    """Bytes that are there; None where the fields hold something else than whole elements of one size."""
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data)
    if tensor.data_type not in (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32):
        return None
    values = {
        TensorProto.FLOAT: tensor.float_data,
        TensorProto.DOUBLE: tensor.double_data,
        TensorProto.INT64: tensor.int64_data,
        TensorProto.INT32: tensor.int32_data,
    }[tensor.data_type]
    return len(values) * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def _check_data(tensor: TensorProto, place: Place, found: _Found) -> None:
    size = byte_size(tensor)
    if place.length != size:
        found.problems.append(_wrong_size(tensor, size, place.length))
        _refer_to_holes(tensor, max(0, size))
        return
    found.total += size
    _scan(tensor, _pieces(place), found)
    if size < INLINE_BYTES:
        with place.path.open("rb") as f:
            data = os.pread(f.fileno(), size, place.offset)
        tensor.ClearField("external_data")
        tensor.data_location = TensorProto.DEFAULT
        tensor.raw_data = data
    else:
        _refer_to_holes(tensor, size)


def _refer_to_holes(tensor: TensorProto, size: int) -> None:
    tensor.ClearField("raw_data")
    tensor.ClearField("external_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", HOLES), ("offset", "0"), ("length", str(size))):
        tensor.external_data.add(key=key, value=value)


def _place(tensor: TensorProto, folder: Path, found: _Found) -> Place | None:
    """Where external data lies. None with a finding if that cannot be said."""
    said = {entry.key: entry.value for entry in tensor.external_data}
    location = said.get("location", "")
    path = _inside(location, folder)
    what = f"weight {tensor.name!r} lies in {location!r}"
    if path is None:
        text = f"{what}, which is outside of the model's directory" if location else f"{what}: no file is named"
        found.problems.append(_invalid(text, "save the model with its weights in files beside it"))
        return None
    if not path.is_file():
        found.missing.setdefault(location, []).append(tensor.name)
        return None
    numbers = {key: said.get(key, "") for key in ("offset", "length")}
    bad = [f"{key} {text!r}" for key, text in numbers.items() if text and not (text.isascii() and text.isdigit())]
    if bad:
        found.problems.append(_invalid(f"{what} at {', '.join(bad)}, which is no size", _SAVE_AGAIN))
        return None
    offset, there = int(numbers["offset"] or 0), path.stat().st_size
    length = int(numbers["length"]) if numbers["length"] else max(0, byte_size(tensor))
    if offset + length > there:
        text = f"{what}, bytes {offset:,} to {offset + length:,}, but the file has {there:,}"
        found.problems.append(_invalid(text, "it was cut off, or is of another model: upload it again"))
        return None
    return Place(path, offset, length)


def _inside(location: str, folder: Path) -> Path | None:
    """The file, if it is below `folder`, links followed as ONNX Runtime follows them."""
    parts = PurePosixPath(location.replace("\\", "/"))
    if not location or "\0" in location or parts.is_absolute() or ".." in parts.parts or len(location) > _MOST_PATH:
        return None
    path, root = (folder / parts).resolve(), folder.resolve()
    return path if root in path.parents else None


def _pieces(place: Place) -> Iterator[Array]:
    buffer = memoryview(bytearray(min(PIECE_BYTES, place.length)))
    with place.path.open("rb", buffering=0) as f:
        at, end = place.offset, place.offset + place.length
        while at < end:
            read = os.preadv(f.fileno(), [buffer[: end - at]], at)
            if not read:
                return  # it was cut off while it was read: the digest will tell
            # Whole elements: what is left over is read again.
            whole = read if read == end - at else read - read % 8
            yield np.frombuffer(buffer[: whole or read], np.uint8)
            at += whole or read


def _scan(tensor: TensorProto, pieces: Iterator[Array] | Sequence[Array], found: _Found) -> None:
    number = _NUMBERS.get(TensorProto.DataType.Name(tensor.data_type))
    if number is None:
        return
    unsigned, magnitude, infinity = number
    greatest = 0
    for piece in pieces:
        values = piece[: len(piece) - len(piece) % np.dtype(unsigned).itemsize].view(unsigned)
        if values.size:
            greatest = max(greatest, int((values & unsigned(magnitude)).max()))
    if greatest > infinity:
        found.nan.append(tensor.name)
    elif greatest == infinity and math.prod(tensor.dims) > 1:  # one number is where a greatest value is searched from
        found.infinite.append(tensor.name)


def _wrong_size(tensor: TensorProto, size: int, there: int) -> Finding:
    kind = TensorProto.DataType.Name(tensor.data_type) if _is_number(tensor.data_type) else f"type {tensor.data_type}"
    text = f"weight {tensor.name!r} is {kind}{list(tensor.dims)}, which takes {size:,} bytes, and has {there:,}"
    return _invalid(text if size >= 0 else f"weight {tensor.name!r} is {kind}{list(tensor.dims)}", _EXPORT_AGAIN)


def _told(found: _Found) -> Iterator[Finding]:
    for location, names in found.missing.items():
        text = f"{len(names)} weights, such as {names[0]!r}, are in another file, {location!r}, which is not there"
        yield _invalid(text, "give the directory with all files of the model, or save the model as one file")
    if found.nan:
        text = f"weight {found.nan[0]!r} holds NaN" if len(found.nan) == 1 else f"weights {listed(found.nan)} hold NaN"
        yield _invalid(text, "the training diverged or the export went wrong")
    if found.infinite:
        text = f"weights {listed(found.infinite)} hold infinite values"
        yield warning(Reason.MODEL_INVALID, text, "usual in masks; elsewhere the training diverged")


def _invalid(message: str, way_out: str) -> Finding:
    return error(Reason.MODEL_INVALID, message, way_out)
