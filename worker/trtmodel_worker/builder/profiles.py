"""Do the profiles fit the graph? Asked before any GPU is taken."""

from __future__ import annotations

from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected


def check(graph: Graph, profiles: tuple[Profile, ...]) -> None:
    """Raises Rejected (ProfileMismatch) naming input, dimension, and what is allowed."""
    inputs = {tensor.name: tensor for tensor in graph.inputs}
    free = [tensor for tensor in graph.inputs if not all(isinstance(d, int) for d in tensor.dims)]
    if free and not profiles:
        listed = "; ".join(_free(tensor) for tensor in free)
        raise _mismatch(f"the model has free dimensions and no profile: {listed}: give min, opt and max for each")
    for number, profile in enumerate(profiles):
        where = f"profile {number}"
        for name, allowed in profile.inputs.items():
            if name not in inputs:
                raise _mismatch(f"{where}: the model has no input {name!r}, it has {sorted(inputs)}")
            _fits(where, inputs[name], allowed)
        lacking = [tensor for tensor in free if tensor.name not in profile.inputs]
        if lacking:
            raise _mismatch(f"{where} lacks inputs with free dimensions: {'; '.join(_free(t) for t in lacking)}")
        _same_names_same_sizes(where, inputs, profile)


def _fits(where: str, tensor: GraphTensor, allowed: ShapeRange) -> None:
    if len(allowed.min) != len(tensor.dims):
        text = f"{where}, input {tensor.name!r}: the model's shape is {_shape(tensor)}, of rank {len(tensor.dims)}"
        raise _mismatch(f"{text}, the profile's is of rank {len(allowed.min)}")
    for i, (dim, low, high) in enumerate(zip(tensor.dims, allowed.min, allowed.max, strict=True)):
        if isinstance(dim, int) and not low == dim == high:
            text = f"{where}, input {tensor.name!r}, dimension {i}: fixed at {dim} in the model, {low} to {high} in the"
            hint = "export the model with a free batch dimension" if i == 0 else f"write {dim} in min, opt and max"
            raise _mismatch(f"{text} profile: {hint}")


def _same_names_same_sizes(where: str, inputs: dict[str, GraphTensor], profile: Profile) -> None:
    """Dimensions of one name are one number, so two inputs cannot range over it differently."""
    seen: dict[str, tuple[str, tuple[int, int, int]]] = {}
    for name, allowed in profile.inputs.items():
        for dim, *sizes in zip(inputs[name].dims, allowed.min, allowed.opt, allowed.max, strict=True):
            if not isinstance(dim, str) or dim == "?":
                continue
            low, best, high = sizes
            first, held = seen.setdefault(dim, (name, (low, best, high)))
            if held != (low, best, high):
                text = f"{where}: dimension {dim!r} is {list(held)} for input {first!r} and {sizes} for {name!r}"
                raise _mismatch(f"{text}: it is the same dimension in the model")


def _free(tensor: GraphTensor) -> str:
    names = ", ".join(f"{i} ({d})" for i, d in enumerate(tensor.dims) if isinstance(d, str))
    return f"input {tensor.name!r} {_shape(tensor)}, dimensions {names}"


def _shape(tensor: GraphTensor) -> str:
    return "[" + ", ".join(str(d) for d in tensor.dims) + "]"


def _mismatch(text: str) -> Rejected:
    return Rejected(Reason.PROFILE_MISMATCH, text)
