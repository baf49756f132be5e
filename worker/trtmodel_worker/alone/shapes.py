"""Which shapes an engine takes, from the graph and what the user says: ``--shape NAME:1-32x3x224x224``.

A number is that size alone, a range is all sizes in it. The leading free dimension is the batch, and has a range of its
own accord; another free one is the user's to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected

USUAL_BATCH = 8  # what an engine is made for, where larger ones are allowed
_SIZE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")

Range = tuple[int, int]


class BadShape(ValueError):
    """A --shape cannot be read. The text says how it is written."""


def parse(text: str) -> tuple[str, tuple[Range, ...]]:
    """(input, least and greatest size of each dimension). Raises BadShape."""
    name, colon, sizes = text.rpartition(":")  # names may hold colons
    found = [_SIZE.fullmatch(size) for size in sizes.split("x")]
    ranges = [(int(m[1]), int(m[2] or m[1])) for m in found if m is not None]
    if not colon or not name or len(ranges) != len(found) or any(not 1 <= low <= high for low, high in ranges):
        raise BadShape(f"--shape {text!r} cannot be read: write NAME:1-32x3x224x224, a number or a range for each size")
    return name, tuple(ranges)


def profiles(graph: Graph, said: Sequence[str], max_batch: int) -> tuple[Profile, ...]:
    """One profile over all inputs with free dimensions; none if there are no such. Raises BadShape, and Rejected naming
    the input whose shape must be said."""
    given = dict(parse(text) for text in said)
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    for name, ranges in given.items():
        if name not in inputs:
            raise _mismatch(f"--shape {name}: the model has no such input, it has {', '.join(inputs)}")
        if len(ranges) != len(inputs[name].dims):
            text = f"input {name!r} is of shape {_shown(inputs[name])}: give {len(inputs[name].dims)} sizes"
            raise _mismatch(f"--shape {name}: {text}")
    named = {
        dim: allowed
        for name, ranges in given.items()
        for dim, allowed in zip(inputs[name].dims, ranges, strict=True)
        if isinstance(dim, str) and dim != "?"
    }
    free = [t for t in graph.inputs if t.name in given or not all(isinstance(d, int) for d in t.dims)]
    found = {t.name: _range(given.get(t.name) or _by_itself(t, named, max_batch)) for t in free}
    return (Profile(found),) if found else ()


def _by_itself(tensor: GraphTensor, named: Mapping[str, Range], max_batch: int) -> tuple[Range, ...]:
    """What can be known of an input of which nothing was said."""
    found: list[Range] = []
    for i, dim in enumerate(tensor.dims):
        if isinstance(dim, int):
            found.append((dim, dim))
        elif dim in named:
            found.append(named[dim])
        elif i == 0:
            found.append((1, max_batch))
        else:
            example = "x".join(str(d) if isinstance(d, int) else f"1-{max_batch}" if i == 0 else "N"
                               for i, d in enumerate(tensor.dims))  # fmt: skip
            text = f"input {tensor.name!r} is of shape {_shown(tensor)}, and dimension {i} ({dim}) may have any size"
            raise _mismatch(f"{text}: say which with --shape '{tensor.name}:{example}', N being a number or a range")
    return tuple(found)


def _range(sizes: Sequence[Range]) -> ShapeRange:
    low, high = tuple(s[0] for s in sizes), tuple(s[1] for s in sizes)
    best = (max(low[0], min(USUAL_BATCH, high[0])), *high[1:]) if sizes else ()
    return ShapeRange(low, best, high)


def _shown(tensor: GraphTensor) -> str:
    return "[" + ", ".join(str(d) for d in tensor.dims) + "]"


def _mismatch(text: str) -> Rejected:
    return Rejected(Reason.PROFILE_MISMATCH, text)
