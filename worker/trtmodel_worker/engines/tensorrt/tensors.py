"""Inputs, outputs and profiles of an engine, as the engine itself tells them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from trtmodel_contract.manifest import TensorSpec

from trtmodel_worker.engines.base import DTYPES, Array, CannotLoad, InvalidInput
from trtmodel_worker.engines.tensorrt.compat import ICudaEngine, Trt

DATATYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}
"""TensorRT's data types that can be served, and what the protocol calls them. NumPy has none for the others."""

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
"""Of all inputs, in the engine's order."""


@dataclass(frozen=True)
class Tensor:
    name: str
    datatype: str
    shape: Shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return DTYPES[self.datatype]

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.name, self.datatype, self.shape)

    def bytes(self, shape: Shape) -> int:
        return self.dtype.itemsize * math.prod(shape)


@dataclass(frozen=True)
class Bounds:
    """Least and greatest shape of every input in one profile, in the engine's order."""

    low: Shapes
    high: Shapes

    def allow(self, shapes: Shapes) -> bool:
        return all(
            len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
            for low, shape, high in zip(self.low, shapes, self.high, strict=True)
        )

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.high)


@dataclass(frozen=True)
class Signature:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    profiles: tuple[Bounds, ...]

    def shapes(self, inputs: Mapping[str, Array]) -> Shapes:
        """Of inputs that this engine takes. Raises InvalidInput for others: TensorRT reports what slips through as a
        failure of the engine."""
        names = {tensor.name for tensor in self.inputs}
        if names != inputs.keys():
            unknown, missing = sorted(inputs.keys() - names), sorted(names - inputs.keys())
            text = f"unknown inputs {unknown}" if unknown else f"missing inputs {missing}"
            raise InvalidInput(f"{text}: the model has {sorted(names)}")
        for tensor in self.inputs:
            array = inputs[tensor.name]
            if array.dtype != tensor.dtype:
                raise InvalidInput(f"input {tensor.name!r} is {array.dtype}, the model takes {tensor.dtype}")
            if not array.flags.c_contiguous:  # only its address is given on
                raise InvalidInput(f"input {tensor.name!r} is not C-contiguous")
        return tuple(inputs[tensor.name].shape for tensor in self.inputs)

    def profile(self, shapes: Shapes) -> int:
        """The tightest one that allows them. Raises InvalidInput."""
        allowing = [i for i, bounds in enumerate(self.profiles) if bounds.allow(shapes)]
        if not allowing:
            told = {tensor.name: list(shape) for tensor, shape in zip(self.inputs, shapes, strict=True)}
            raise InvalidInput(f"shapes {told} are outside of every profile")
        return min(allowing, key=lambda i: self.profiles[i].elements)

    def input_bytes(self, index: int) -> int:
        """The most that an input needs."""
        return max(self.inputs[index].bytes(bounds.high[index]) for bounds in self.profiles)


def read(trt: Trt, engine: ICudaEngine) -> Signature:
    """Raises CannotLoad for what cannot be served."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []
    for i in range(engine.num_io_tensors):
        name = engine.get_tensor_name(i)
        tensor = _tensor(trt, engine, name)
        (inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs).append(tensor)
    profiles = []
    for p in range(engine.num_optimization_profiles):
        ranges = [_range(engine, tensor, p) for tensor in inputs]
        profiles.append(Bounds(tuple(low for low, _ in ranges), tuple(high for _, high in ranges)))
    return Signature(tuple(inputs), tuple(outputs), tuple(profiles))


def _range(engine: ICudaEngine, tensor: Tensor, profile: int) -> tuple[Shape, Shape]:
    if -1 not in tensor.shape:
        return tensor.shape, tensor.shape
    low, _, high = engine.get_tensor_profile_shape(tensor.name, profile)
    return _shape(low), _shape(high)


def _tensor(trt: Trt, engine: ICudaEngine, name: str) -> Tensor:
    found = str(engine.get_tensor_dtype(name).name)
    if found not in DATATYPES:
        raise CannotLoad(f"tensor {name!r} is of {found}, which this worker does not serve: cast it in the model")
    if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE or engine.is_shape_inference_io(name):
        text = f"tensor {name!r} decides shapes by its values, which this worker does not serve"
        raise CannotLoad(f"{text}: make it a constant of the model")
    return Tensor(name, DATATYPES[found], _shape(engine.get_tensor_shape(name)))


def _shape(dims: object) -> Shape:
    return tuple(int(size) for size in dims)  # type: ignore[attr-defined]
