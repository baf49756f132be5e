"""Load a plan and serve it: lanes, graphs, a spare, and the memory that requests lie in."""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

from trtmodel_contract.identity import Profile

from trtmodel_worker.engines.base import (
    Array,
    CannotLoad,
    DeviceLost,
    OutOfMemory,
    Paced,
    Recoverable,
    Sticky,
    at_once,
)
from trtmodel_worker.engines.onnxruntime.machine import cpu_quota
from trtmodel_worker.engines.tensorrt import callbacks, compat
from trtmodel_worker.engines.tensorrt.compat import ICudaEngine, Runtime, Trt
from trtmodel_worker.engines.tensorrt.device import Cuda, CudaError
from trtmodel_worker.engines.tensorrt.errors import Evidence, classify
from trtmodel_worker.engines.tensorrt.graphs import Expected, pattern
from trtmodel_worker.engines.tensorrt.lane import TensorRtLane
from trtmodel_worker.engines.tensorrt.loaded import Judge, Loaded
from trtmodel_worker.engines.tensorrt.tensors import Shapes

log = logging.getLogger(__name__)


@functools.cache
def logger(trt: Trt) -> Any:
    """One for the process: TensorRT keeps the first that it is given. Its own class, in C++: one in Python would take
    the interpreter lock in TensorRT's threads, while 8.6 holds it to make a context."""
    return trt.Logger(trt.Logger.WARNING)


class TensorRtEngine:
    """A plan in this process. Raises CannotLoad, OutOfMemory, DeviceLost.

    Until `serve_from` every shape that is bound is captured. Then no shape is any more, and below version 9, where
    making a context stops every thread, a lane that failed is replaced by the spare one that was made before.
    """

    def __init__(self, plan: memoryview, profiles: tuple[Profile, ...], lanes: int, cuda: Cuda) -> None:
        trt = compat.load()
        if cpu_quota() <= lanes + 1:  # as many lanes may wait, and the front needs one, too
            cuda.wait_by_sleeping()
        recorder = callbacks.recorder(trt)
        self._runtime: Runtime = trt.Runtime(logger(trt))
        self._runtime.error_recorder = recorder
        engine: ICudaEngine = self._runtime.deserialize_cuda_engine(plan)
        if engine is None:
            what = f"TensorRT {trt.__version__} does not load the plan"
            raise Judge(cuda).failure(what, recorder, None, loading=True)
        self._caps = compat.capabilities(trt)
        self._loaded = Loaded(trt, cuda, engine)
        found = len(self._loaded.signature.profiles)
        if profiles and len(profiles) != found:
            raise CannotLoad(f"the engine has {found} profiles, the manifest says {len(profiles)}")
        self.inputs = tuple(tensor.spec for tensor in self._loaded.signature.inputs)
        self.outputs = tuple(tensor.spec for tensor in self._loaded.signature.outputs)
        self._lanes: weakref.WeakSet[TensorRtLane] = weakref.WeakSet()
        self._serving = False
        self._shapes: tuple[Shapes, ...] = ()
        self._spare: TensorRtLane | None = None

    def create_lane(self) -> TensorRtLane:
        """Raises EngineError."""
        if not self._serving:
            return self._make()
        if self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        if not self._caps.contexts_beside_serving:
            text = (
                f"TensorRT {self._caps.version} stops every thread while it makes a context, and the spare lane is used"
            )
            raise Recoverable(f"{text}: this host has to be replaced")
        lane = self._make()
        self._equip([lane], at_once)
        return lane

    def serve_from(self, memory: memoryview, paced: Paced = at_once) -> None:
        """See the ServingEngine protocol."""
        self._pin(memory)
        lanes = list(self._lanes)
        self._shapes = tuple(dict.fromkeys(shapes for lane in lanes for shapes in lane.captured))
        if not self._caps.contexts_beside_serving:
            try:
                self._spare = self._make()
                lanes.append(self._spare)
            except OutOfMemory as e:
                log.warning("there is no memory for a spare lane, so a lane that fails ends this host: %s", e)
        self._equip(lanes, paced)
        self._serving = True

    def pin(self, address: int, size: int) -> bool:
        """See the PinningEngine protocol. A device that is lost shows on the lanes."""
        cuda = self._loaded.cuda
        if cuda.poisoned:
            return False
        try:
            cuda.register(address, size, read_only=True)
        except CudaError as e:
            log.warning("a client's memory could not be pinned, so it is copied: %s", e)
            cuda.clear_error()
            return False
        return True

    def unpin(self, address: int) -> None:
        """See the PinningEngine protocol."""
        cuda = self._loaded.cuda
        if cuda.poisoned:
            return
        try:
            cuda.unregister(address)
        except CudaError as e:
            log.warning("a client's memory could not be released: %s", e)
            cuda.clear_error()

    def _make(self) -> TensorRtLane:
        lane = TensorRtLane(self._loaded)
        self._lanes.add(lane)
        return lane

    def _equip(self, lanes: Sequence[TensorRtLane], paced: Paced) -> None:
        """Give each the graphs that the others have, and prove all of them, with few runs: beside traffic each of them
        holds up requests."""
        for lane in lanes:
            for shapes in self._shapes:
                paced(functools.partial(lane.capture, shapes))
        for shapes in self._shapes:
            inputs = pattern(self._loaded.signature, shapes)  # the processor's work alone, so it is not paced
            expected: list[Expected] = []
            for lane in lanes:
                if shapes in lane.captured:
                    paced(functools.partial(_prove, lane, shapes, inputs, expected))
        for lane in lanes:
            lane.preparing = False

    def _pin(self, memory: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            self._loaded.cuda.register(address, memory.nbytes)
        except CudaError as e:
            failure = self._loaded.failure("shared memory could not be pinned", self._loaded.recorder, None, e)
            if isinstance(failure, (Sticky, DeviceLost)):
                raise failure from e
            log.warning("%s: requests are copied through the driver's buffers, which takes longer", failure)


def _prove(lane: TensorRtLane, shapes: Shapes, inputs: list[Array], expected: list[Expected]) -> None:
    """`expected` is empty before the first lane, and has one entry then."""
    if not expected:
        expected.append(lane.expect(shapes, inputs))
    lane.prove(shapes, expected[0])


def load(plan: memoryview, profiles: tuple[Profile, ...], lanes: int, cuda: Cuda) -> TensorRtEngine:
    """Raises EngineError."""
    try:
        return TensorRtEngine(plan, profiles, lanes, cuda)
    except CudaError as e:
        raise classify(Evidence("the device cannot be used", cuda=e.code, cuda_text=str(e), loading=True)) from e
    except compat.NotInstalled as e:
        raise CannotLoad(str(e)) from e
