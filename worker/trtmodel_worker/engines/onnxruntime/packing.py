"""Writes a plan from what ONNX Runtime saved: see `plans`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import onnx
from onnx import GraphProto, TensorProto, external_data_helper, helper

from trtmodel_worker.engines.onnxruntime import plans

_EVERY = 64  # bytes: a cache line, and what the widest instructions like


def pack(graph: Path, weights: Path, plan: Path) -> None:
    """Write `plan` from a graph whose large weights lie in `weights`, as ONNX Runtime saves them. They are
    read in pieces."""
    model = onnx.load(graph, load_external_data=False)
    for inner in _bodies(model.graph):  # cannot be given by name: they stay in the graph
        for tensor in inner.initializer:
            _embed(tensor, weights.parent)
    index, moves, at = [], [], 0
    for tensor in model.graph.initializer:
        said = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        if dtype.isbuiltin != 1:  # such as BF16: NumPy cannot say what it is
            _embed(tensor, weights.parent)
            continue
        offset, length = int(said["offset"]), int(said["length"])
        index.append([tensor.name, dtype.str, list(tensor.dims), at])
        moves.append((offset, length, at))
        del tensor.external_data[:]
        for key, value in (("location", plans.PLACE), ("offset", str(at)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        at += -(-length // _EVERY) * _EVERY
    _write(json.dumps(index).encode(), model.SerializeToString(), weights, moves, plan)


def _write(index: bytes, graph: bytes, weights: Path, moves: list[tuple[int, int, int]], plan: Path) -> None:
    with plan.open("wb") as out, weights.open("rb") as source:
        out.write(plans.HEAD.pack(plans.MAGIC, len(index), len(graph)) + index + graph)
        base = plans.start(len(index), len(graph))
        for offset, length, at in moves:
            source.seek(offset)
            out.seek(base + at)
            left = length
            while left:
                piece = source.read(min(left, 1 << 20))
                if not piece:
                    raise ValueError(f"{weights.name} ends {left:,} bytes too early")
                out.write(piece)
                left -= len(piece)
        out.truncate(max(out.tell(), base))


def _embed(tensor: TensorProto, folder: Path) -> None:
    if tensor.data_location == TensorProto.EXTERNAL:
        external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def _bodies(graph: GraphProto) -> Iterator[GraphProto]:
    """Graphs in the nodes of `graph`, and in theirs."""
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*((attribute.g,) if attribute.HasField("g") else ()), *attribute.graphs):
                yield inner
                yield from _bodies(inner)
