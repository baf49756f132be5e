"""Admission: what a request for an engine must look like, decided from the manifest before anything is queued."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from trtmodel_contract.identity import Profile
from trtmodel_contract.manifest import Manifest, TensorSpec

from trtmodel_worker.engines.base import DTYPES

Shape = tuple[int, ...]
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
        self.dtype = DTYPES[spec.datatype]
        self.itemsize = self.dtype.itemsize
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

    def from_json(self, shape: Shape, data: Any) -> memoryview:
        """Bytes of a JSON array, flat or nested as the shape. Raises Invalid."""
        if self.datatype in _BINARY_ONLY:
            raise Invalid(
                f"input {self.name!r} is {self.datatype}, which JSON cannot carry: send it as binary data "
                "(parameters.binary_data_size and the header Inference-Header-Content-Length)"
            )
        if type(data) is not list:
            raise Invalid(f"input {self.name!r}: data must be an array, not {short(data)}")
        try:
            found = np.array(data)
            if self.dtype.kind == "u" and found.dtype.kind in "fO":
                found = _exact(np.array(data, dtype=object), found)
        except (ValueError, OverflowError, TypeError, RecursionError) as e:
            raise Invalid(f"input {self.name!r}: data is ragged or holds something else than numbers") from e
        self._check_elements(shape, found)
        with np.errstate(all="ignore"):
            array = found.astype(self.dtype)
        if self.dtype.kind == "f" and not np.isfinite(array).all():
            raise Invalid(f"input {self.name!r}: data holds a value outside the range of {self.datatype}")
        if self.dtype.kind in "iu" and found.size and not _holds(self.dtype, found):
            raise Invalid(f"input {self.name!r}: data holds a value outside the range of {self.datatype}")
        return memoryview(np.ascontiguousarray(array).data).cast("B")

    def _check_elements(self, shape: Shape, found: np.ndarray[Any, Any]) -> None:
        kinds = {"b": "b", "f": "iuf"}.get(self.dtype.kind, "iu")
        if found.size and found.dtype.kind not in kinds:
            what = {"b": "true and false", "f": "numbers"}.get(self.dtype.kind, "whole numbers")
            raise Invalid(f"input {self.name!r} is {self.datatype}: its data must be {what} of its range only")
        if found.ndim != 1 and found.shape != shape:
            raise Invalid(f"input {self.name!r} has shape {list(shape)}, its data is nested as {list(found.shape)}")
        if found.size != math.prod(shape):
            raise Invalid(f"input {self.name!r} has shape {list(shape)}, which is {math.prod(shape)} values, "
                          f"but its data has {found.size}")  # fmt: skip


class Admission:
    """Everything that is checked of a request before it is queued."""

    def __init__(self, manifest: Manifest) -> None:
        self.rules = [InputRule(i, spec, manifest.profiles) for i, spec in enumerate(manifest.inputs)]
        self.by_name = {rule.name: rule for rule in self.rules}
        self.outputs = manifest.outputs
        self.output_index = {spec.name: i for i, spec in enumerate(manifest.outputs)}
        self.batched = bool(manifest.inputs) and all(s.shape[:1] == (-1,) for s in manifest.inputs)
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


def _exact(objects: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Whole numbers beside one above 2**63 - 1 became floats: take them as they are. `found` if they do not fit."""
    if all(type(v) is int and 0 <= v < 1 << 64 for v in objects.flat):
        return objects.astype(np.uint64)
    return found


def _holds(dtype: np.dtype[Any], found: np.ndarray[Any, Any]) -> bool:
    limits = np.iinfo(dtype)
    return int(found.min()) >= limits.min and int(found.max()) <= limits.max


def short(value: Any) -> str:
    """A value of a request, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
