"""Optimisation profiles: the ranges of shapes that the engine is made for."""

from __future__ import annotations

from trtmodel_contract.identity import Profile
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.engines.tensorrt.compat import Builder, IBuilderConfig, INetworkDefinition, ITensor


def add_profiles(
    builder: Builder, config: IBuilderConfig, network: INetworkDefinition, profiles: tuple[Profile, ...]
) -> None:
    """Raises Rejected (ProfileMismatch). An engine of fixed shapes needs no profile."""
    inputs: list[ITensor] = [network.get_input(i) for i in range(network.num_inputs)]
    for tensor in inputs:
        if tensor.is_shape_tensor:
            text = (
                f"the values of input {tensor.name!r} decide shapes, and profiles have ranges of shapes, not of values"
            )
            raise _mismatch(f"{text}: make it a constant of the graph")
    dynamic = [tensor.name for tensor in inputs if any(size < 0 for size in tuple(tensor.shape))]
    if dynamic and not profiles:
        raise _mismatch(
            f"inputs {dynamic} have free dimensions and there is no profile: give min, opt and max for each"
        )
    for number, ranges in enumerate(profiles):
        profile = builder.create_optimization_profile()
        for name, allowed in ranges.inputs.items():
            try:
                profile.set_shape(name, tuple(allowed.min), tuple(allowed.opt), tuple(allowed.max))
            except (RuntimeError, ValueError) as e:
                raise _mismatch(f"profile {number}: TensorRT takes no such shapes for input {name!r}: {e}") from e
        if config.add_optimization_profile(profile) < 0:
            text = f"profile {number} does not fit the graph: TensorRT wants a range for each of {dynamic}"
            raise _mismatch(text)


def _mismatch(text: str) -> Rejected:
    return Rejected(Reason.PROFILE_MISMATCH, text)
