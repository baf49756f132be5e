"""Do the profiles fit the graph? Asked before any GPU is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.jobs import Reason

from trtmodel_worker.builder.findings import error
from trtmodel_worker.engines.building import Finding, Graph, GraphTensor


def check(graph: Graph, profiles: tuple[Profile, ...]) -> list[Finding]:
    """Errors (ProfileMismatch) that name input, dimension, and what is allowed."""
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    free = [tensor for tensor in graph.inputs if not all(isinstance(d, int) for d in tensor.dims)]
    if free and not profiles:
        text = f"the model has free dimensions and no profile: {'; '.join(_free(tensor) for tensor in free)}"
        return [_mismatch(text, "give min, opt and max for each")]
    found: list[Finding] = []
    for number, profile in enumerate(profiles):
        found += _check(f"profile {number}", profile, inputs, free)
    return found


def _check(
    where: str, profile: Profile, inputs: dict[str, GraphTensor], free: Sequence[GraphTensor]
) -> Iterator[Finding]:
    fitting: dict[str, ShapeRange] = {}
    for name, allowed in profile.inputs.items():
        if name not in inputs:
            yield _mismatch(f"{where}: the model has no input {name!r}", f"it has {sorted(inputs)}")
        elif len(allowed.min) != len(inputs[name].dims):
            text = f"{where}, input {name!r}: the model's shape is {_shape(inputs[name])}"
            yield _mismatch(f"{text}, of rank {len(inputs[name].dims)}", f"the profile's is of rank {len(allowed.min)}")
        else:
            fitting[name] = allowed
            yield from _fits(where, inputs[name], allowed)
    lacking = [tensor for tensor in free if tensor.name not in profile.inputs]
    if lacking:
        text = f"{where} lacks inputs with free dimensions"
        yield _mismatch(text, "; ".join(_free(t) for t in lacking))
    yield from _same_names_same_sizes(where, inputs, fitting)


def _fits(where: str, tensor: GraphTensor, allowed: ShapeRange) -> Iterator[Finding]:
    for i, (dim, low, high) in enumerate(zip(tensor.dims, allowed.min, allowed.max, strict=True)):
        if isinstance(dim, int) and not low == dim == high:
            text = f"{where}, input {tensor.name!r}, dimension {i}: fixed at {dim} in the model, {low} to {high} in the"
            hint = "export the model with a free batch dimension" if i == 0 else f"write {dim} in min, opt and max"
            yield _mismatch(f"{text} profile", hint)


def _same_names_same_sizes(
    where: str, inputs: dict[str, GraphTensor], fitting: dict[str, ShapeRange]
) -> Iterator[Finding]:
    """Dimensions of one name are one number, so two inputs cannot range over it differently."""
    seen: dict[str, tuple[str, tuple[int, int, int]]] = {}
    for name, allowed in fitting.items():
        for dim, *sizes in zip(inputs[name].dims, allowed.min, allowed.opt, allowed.max, strict=True):
            if not isinstance(dim, str) or dim == "?":
                continue
            low, best, high = sizes
            first, held = seen.setdefault(dim, (name, (low, best, high)))
            if held != (low, best, high):
                text = f"{where}: dimension {dim!r} is {list(held)} for input {first!r} and {sizes} for {name!r}"
                yield _mismatch(text, "it is the same dimension in the model")


def _free(tensor: GraphTensor) -> str:
    names = ", ".join(f"{i} ({d})" for i, d in enumerate(tensor.dims) if isinstance(d, str))
    return f"input {tensor.name!r} {_shape(tensor)}, dimensions {names}"


def _shape(tensor: GraphTensor) -> str:
    return "[" + ", ".join(str(d) for d in tensor.dims) + "]"


def _mismatch(message: str, way_out: str) -> Finding:
    return error(Reason.PROFILE_MISMATCH, message, way_out)
