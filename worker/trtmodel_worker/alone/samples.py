"""Inputs where the user has none at hand: enough to see that an engine runs and answers as the original does, and no
statement about real data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.jobs import DataSet, Reason

from trtmodel_worker.engines.base import DTYPES, Array
from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected
from trtmodel_worker.storage.cache import digest_of

COUNT = 8
SEED = 0
MOST_BYTES = 2 << 30


def write(path: Path, graph: Graph, profiles: tuple[Profile, ...]) -> DataSet:
    """An npz of random inputs within the first profile: from 0 to 1, and 0 or 1 where whole numbers are wanted, which
    are often places in a table. Raises Rejected for inputs that are too large to be made up."""
    random = np.random.default_rng(SEED)
    allowed: Mapping[str, ShapeRange] = profiles[0].inputs if profiles else {}
    size = sum(_bytes(tensor, allowed.get(tensor.name)) for tensor in graph.inputs)
    if size > MOST_BYTES:
        text = f"{COUNT} samples of the model's inputs take {size:,} bytes, the most is {MOST_BYTES:,}"
        raise Rejected(Reason.DATASET_INVALID, f"{text}: give data of your own with trtmodel verify --dataset")
    arrays = {tensor.name: _random(random, tensor, allowed.get(tensor.name)) for tensor in graph.inputs}
    with path.open("wb") as f:
        np.savez(f, allow_pickle=False, **arrays)
    return DataSet(f"file://{path}", COUNT, digest_of(path)[0])


def _bytes(tensor: GraphTensor, allowed: ShapeRange | None) -> int:
    return math.prod(_shape(tensor, allowed)) * DTYPES[tensor.datatype].itemsize


def _shape(tensor: GraphTensor, allowed: ShapeRange | None) -> tuple[int, ...]:
    sizes = allowed.opt if allowed else tuple(d for d in tensor.dims if isinstance(d, int))
    return (COUNT, *sizes[1:])


def _random(random: np.random.Generator, tensor: GraphTensor, allowed: ShapeRange | None) -> Array:
    shape, dtype = _shape(tensor, allowed), DTYPES[tensor.datatype]
    if dtype.kind == "f":
        return random.random(shape, np.float32).astype(dtype, copy=False)
    return random.integers(0, 2, shape).astype(dtype)
