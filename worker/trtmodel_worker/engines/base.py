"""The Engine protocol: what an engine host asks of an inference runtime, and nothing that names one.

An engine lives in one process (its host) and is freed by that process's exit. Its lanes run side by side; one lane
runs one batch at a time. Errors are classified here once, because each class has another consequence.

    EngineError
    |-- InvalidInput      the request's fault: never retried, never counted against the engine
    |-- Recoverable       another lane, or a rebuilt one, can do it
    |-- OutOfMemory       less at once can do it
    |-- Sticky            this process is poisoned: exit 70, touch nothing of the device any more
    `-- DeviceLost        the device is gone: exit 71
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from trtmodel_contract.identity import LoadKey, Profile
from trtmodel_contract.manifest import TensorSpec

DTYPES: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}
"""Data types that can be served, by their Open Inference Protocol name. Arrays of BYTES hold `str`. BF16 is none of
them: NumPy has no such type, and ONNX Runtime few kernels for it on a CPU."""

Array = NDArray[Any]
Allocate = Callable[[str, "np.dtype[Any]", tuple[int, ...]], Array]
"""``allocate(output name, dtype, actual shape)`` -> C-contiguous writable array in the caller's memory.
Raises ValueError when the output does not fit: the engine must not write anywhere else."""


def allocate_anew(_name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The `Allocate` of a caller that wants its outputs nowhere in particular."""
    return np.empty(shape, dtype)


class EngineError(Exception):
    """An engine failed. The text names the cause as the runtime gave it."""


class InvalidInput(EngineError):
    pass


class Recoverable(EngineError):
    pass


class OutOfMemory(EngineError):
    pass


class Sticky(EngineError):
    pass


class DeviceLost(EngineError):
    pass


class CannotLoad(EngineError):
    """The plan's bytes are no engine for this machine, or there is not the memory for it."""


class Lane(Protocol):
    """Used by one thread at a time."""

    def run(self, inputs: Mapping[str, Array], allocate: Allocate) -> Mapping[str, Array]:
        """Run one batch. `inputs`: by name, C-contiguous, of the engine's dtypes and within a profile. Returns each
        output in the array that `allocate` gave for it. Raises EngineError."""
        ...


class Bound(Protocol):
    """A run at places that stay: only the contents of the inputs differ from one time to the next."""

    outputs: Mapping[str, Array]

    def run(self) -> bool:
        """Run it. False: the outputs have other shapes than was foreseen, so that nothing of them is to be used and
        only `Lane.run` can do it. Raises EngineError."""
        ...


@runtime_checkable
class WarmBound(Bound, Protocol):
    is_warm: bool
    """It was run once when it was bound."""


@runtime_checkable
class BindingLane(Lane, Protocol):
    """A lane that can do once what depends on places and shapes only: checks, bindings, addresses. That is most of
    what a run of a small batch costs."""

    def bind(self, inputs: Mapping[str, Array], allocate: Allocate) -> Bound | None:
        """As `Lane.run`, but to be run later and again. None if the outputs' shapes cannot be foreseen. The arrays
        live as long as what is returned. Raises EngineError."""
        ...


@runtime_checkable
class WakingLane(Lane, Protocol):
    """A lane of a device that is slower after a pause."""

    def wake(self) -> None:
        """A run comes soon: the device may wake up meanwhile. Returns at once; what is wrong shows with the run."""
        ...


class Elsewhere(NamedTuple):
    """Bytes of an input that do not lie at `place` in its array, but at `address`, in memory that was pinned. Both are
    addresses in this process."""

    place: int
    address: int
    size: int


class FetchingBound(Bound, Protocol):
    def run_from(self, elsewhere: Sequence[Elsewhere]) -> bool:
        """As `run`, with some bytes of the inputs taken from elsewhere."""
        ...


class Engine(Protocol):
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def create_lane(self) -> Lane: ...


Paced = Callable[[Callable[[], object]], object]
"""Runs a piece of work, and rests after it where requests are answered meanwhile."""


def at_once(work: Callable[[], object]) -> None:
    work()


@runtime_checkable
class ServingEngine(Protocol):
    """An engine that wants to know when its preparation is over, and where requests will lie."""

    def serve_from(self, memory: memoryview, paced: Paced = at_once) -> None:
        """Called once: every lane is made, warm and proved. Inputs and outputs will lie in `memory` from now on, which
        stays mapped until the process ends; a request must not pay for what could be made before. What computes runs
        `paced`. Raises EngineError."""
        ...


@runtime_checkable
class PinningEngine(Protocol):
    """An engine whose device copies inputs from wherever they lie, without a processor that looks at them. What its
    lanes bind are FetchingBounds. Used by one thread at a time, beside the lanes."""

    def pin(self, address: int, size: int) -> bool:
        """Whole pages that stay mapped until `unpin`; they may be read only. False if that cannot be done."""
        ...

    def unpin(self, address: int) -> None:
        """No run takes anything from there any more."""
        ...


class Runtime(Protocol):
    """One inference runtime on this machine."""

    def load_key(self) -> LoadKey: ...

    def driver(self) -> str:
        """Version of the device driver, '' where there is none."""
        ...

    def load(self, plan: memoryview, profiles: tuple[Profile, ...], lanes: int) -> Engine:
        """Load from memory: the very bytes whose digest was checked. Raises CannotLoad."""
        ...
