"""Admission: what a request for an engine must look like, decided from the manifest before anything is queued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trtmodel_contract.identity import Profile
from trtmodel_contract.manifest import Manifest, TensorSpec

from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.front.calls import Shape
from trtmodel_worker.front.jsoncodec import BadJson, check_elements, short, values_to_bytes
from trtmodel_worker.host.arena import MAX_BYTES_TENSOR

BYTES = "BYTES"
_BINARY_ONLY = ("FP16",)


class Invalid(Exception):
    """The request does not fit the model: the client's fault, and the text says what would."""

    request_id: str | None = None


class InputRule:
    """One input of a model: bounds of each dimension, over all profiles."""

    def __init__(self, index: int, spec: TensorSpec, profiles: Sequence[Profile]) -> None:
        self.index = index
        self.name = spec.name
        self.datatype = spec.datatype
        self.itemsize = 0 if spec.datatype == BYTES else DTYPES[spec.datatype].itemsize
        self.rank = len(spec.shape)
        ranges = [p.inputs[spec.name] for p in profiles if spec.name in p.inputs]
        self.bounds: list[tuple[int, int]] = []
        for axis, dim in enumerate(spec.shape):
            low = dim if dim != -1 else min(r.min[axis] for r in ranges)
            high = dim if dim != -1 else max(r.max[axis] for r in ranges)
            self.bounds.append((low, high))

    def check(self, datatype: Any, shape: Any) -> Shape:
        """The shape, if it and the data type fit. Raises Invalid."""
        if datatype != self.datatype:
            raise Invalid(f"input {self.name!r} has datatype {short(datatype)}, the model takes {self.datatype}")
        if type(shape) is not list or len(shape) != self.rank:
            raise Invalid(f"input {self.name!r} has shape {short(shape)}, the model takes {self.describe()}")
        for dim, (low, high) in zip(shape, self.bounds, strict=True):
            if type(dim) is not int or not low <= dim <= high:
                raise Invalid(f"input {self.name!r} has shape {short(shape)}, the model takes {self.describe()}")
        return tuple(shape)

    def describe(self) -> str:
        """Allowed shapes: ``[1..32, 2048]``."""
        return "[" + ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in self.bounds) + "]"

    def from_json(self, shape: Shape, data: Any, booleans: bool = True) -> memoryview:
        """Bytes of a JSON array, flat or nested as the shape. `booleans`: there may be some in the data. Raises
        Invalid."""
        if self.datatype in _BINARY_ONLY:
            raise Invalid(
                f"input {self.name!r} is {self.datatype}, which JSON cannot carry: send it as binary data "
                "(parameters.binary_data_size and the header Inference-Header-Content-Length)"
            )
        try:
            found = values_to_bytes(self.datatype, shape, data, booleans)
        except BadJson as e:
            raise Invalid(f"input {self.name!r} {e}") from e
        if self.datatype == BYTES:
            self.check_size(shape, len(found))
        return found

    def check_size(self, shape: Shape, size: int) -> None:
        """May the tensor's bytes be so many? Raises Invalid."""
        if self.datatype == BYTES:
            if size > MAX_BYTES_TENSOR:
                raise Invalid(f"input {self.name!r} is {size:,} bytes: one of BYTES may have {MAX_BYTES_TENSOR:,}")
            return
        needed = self.itemsize * math.prod(shape)
        if size != needed:
            raise Invalid(f"input {self.name!r} of shape {list(shape)} and datatype {self.datatype} is {needed} bytes, "
                          f"binary_data_size or shared_memory_byte_size says {size}")  # fmt: skip

    def check_content(self, shape: Shape, view: memoryview) -> None:
        """Of binary data whose size was checked. Raises Invalid."""
        if self.datatype == BYTES:
            try:
                check_elements(view, math.prod(shape))
            except BadJson as e:
                raise Invalid(f"input {self.name!r}: its binary data {e}") from e


class Admission:
    """Everything that is checked of a request before it is queued. `batched`: requests are made of rows, at most
    `most_rows` (0 where they are not)."""

    def __init__(self, manifest: Manifest) -> None:
        self.rules = [InputRule(i, spec, manifest.profiles) for i, spec in enumerate(manifest.inputs)]
        self.by_name = {rule.name: rule for rule in self.rules}
        self.outputs = manifest.outputs
        self.output_index = {spec.name: i for i, spec in enumerate(manifest.outputs)}
        self.batched = bool(manifest.inputs) and all(s.shape[:1] == (-1,) for s in manifest.inputs)
        self.most_rows = min(rule.bounds[0][1] for rule in self.rules) if self.batched else 0
        self._profiles = manifest.profiles if len(manifest.profiles) > 1 else ()

    def check_together(self, shapes: Sequence[Shape]) -> None:
        """All inputs must fit into one profile. Raises Invalid."""
        if self.batched and len({shape[0] for shape in shapes}) > 1:
            rows = ", ".join(f"{rule.name!r} {shape[0]}" for rule, shape in zip(self.rules, shapes, strict=True))
            raise Invalid(f"all inputs must have the same number of rows, not {rows}")
        if not self._profiles or any(self._within(profile, shapes) for profile in self._profiles):
            return
        allowed = "; ".join(
            ", ".join(f"{name!r} {list(r.min)}..{list(r.max)}" for name, r in profile.inputs.items())
            for profile in self._profiles
        )
        raise Invalid(f"the shapes {[list(s) for s in shapes]} fit none of the profiles: {allowed}")

    def _within(self, profile: Profile, shapes: Sequence[Shape]) -> bool:
        for rule, shape in zip(self.rules, shapes, strict=True):
            bounds = profile.inputs.get(rule.name)
            if bounds is not None and not all(
                low <= dim <= high for low, dim, high in zip(bounds.min, shape, bounds.max, strict=True)
            ):
                return False
        return True


def binary_only(datatype: str) -> bool:
    """JSON has no form for it."""
    return datatype in _BINARY_ONLY
