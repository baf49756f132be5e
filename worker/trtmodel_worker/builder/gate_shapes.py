"""Which shapes the gate runs: what workers may be asked for, whatever the data set's own shape is.

Batch sizes: the least, best and greatest of each profile, and the powers of two between, which buckets are by default.
Other dimensions: the least, best and greatest of each profile, also of one that the data set's samples do not fit.
Repeats over shapes add no samples: they would only pretend to be proof.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from trtmodel_contract.identity import Profile

from trtmodel_worker.engines.base import Array
from trtmodel_worker.engines.building import Graph

Shapes = dict[str, tuple[int, ...]]


def batch_sizes(graph: Graph, profiles: tuple[Profile, ...], most: int = 0) -> tuple[int, tuple[int, ...]]:
    """(batch size for the samples, all batch sizes that the engine must run). With `most`, the first is at most that
    where the graph and the profiles allow it."""
    leading = {t.name: t.dims[0] for t in graph.inputs if t.dims}
    fixed = [d for d in leading.values() if isinstance(d, int)]
    if fixed:
        return fixed[0], (fixed[0],)
    ranges = [allowed for profile in profiles for allowed in profile.inputs.values()]
    sizes: set[int] = set()
    for allowed in ranges:
        low, best, high = allowed.min[0], allowed.opt[0], allowed.max[0]
        sizes |= {low, best, high, *(1 << n for n in range(low.bit_length(), high.bit_length()) if 1 << n <= high)}
    first = ranges[0]
    return (max(first.min[0], min(first.opt[0], most)) if most else first.opt[0]), tuple(sorted(sizes))


def corners(profiles: tuple[Profile, ...], samples: Mapping[str, tuple[int, ...]]) -> list[Shapes]:
    """The shapes of the profiles' corners that differ from `samples` (the data set's arrays) in more than the number
    of samples. Every input has one."""
    found: list[Shapes] = []
    for profile in profiles:
        for corner in ("min", "opt", "max"):
            asked: Shapes = {name: tuple(getattr(allowed, corner)) for name, allowed in profile.inputs.items()}
            if not asked or all(shape[1:] == samples[name][1:] for name, shape in asked.items()):
                continue
            rows = next(iter(asked.values()))[0]
            whole: Shapes = {name: asked.get(name, (rows, *shape[1:])) for name, shape in samples.items()}
            if whole not in found:
                found.append(whole)
    return found


def fitted(inputs: Mapping[str, Array], shapes: Shapes) -> dict[str, Array]:
    """The same values in other shapes: cut off, or begun again where there are too few."""
    return {name: _fitted(inputs[name], shape) for name, shape in shapes.items()}


def said(shapes: Shapes) -> str:
    """As a report shows it."""
    return ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in shapes.items())


def _fitted(array: Array, shape: tuple[int, ...]) -> Array:
    for axis, (have, want) in enumerate(zip(array.shape, shape, strict=True)):
        if have != want:
            array = np.take(array, np.arange(want) % have, axis=axis)
    return np.ascontiguousarray(array)
