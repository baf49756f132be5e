"""What all lanes of an engine share: the deserialised engine, what it takes, and who judges failures."""

from __future__ import annotations

import threading

from trtmodel_worker.engines.base import DeviceLost, EngineError, InvalidInput, OutOfMemory, Sticky
from trtmodel_worker.engines.tensorrt import callbacks, errors, tensors
from trtmodel_worker.engines.tensorrt.compat import ICudaEngine, Trt
from trtmodel_worker.engines.tensorrt.device import Cuda, CudaError, Stream


class Loaded:
    """`lock` is held while contexts are made and freed: TensorRT's own servers do not trust that side by side."""

    def __init__(self, trt: Trt, cuda: Cuda, engine: ICudaEngine) -> None:
        self.trt: Trt = trt
        self.cuda = cuda
        self.engine: ICudaEngine = engine
        self.signature = tensors.read(trt, engine)
        self.lock = threading.RLock()
        self.recorder = callbacks.recorder(trt)
        engine.error_recorder = self.recorder
        self._judge = Judge(cuda, len(self.signature.inputs))

    def failure(
        self, what: str, recorder: callbacks.Recorder, stream: Stream | None, error: CudaError | None = None
    ) -> EngineError:
        """The exception for a failed call; it is to be raised."""
        return self._judge.failure(what, recorder, stream, error)


class Judge:
    """Collects what there is to know about a failure, and remembers what only a second one proves."""

    def __init__(self, cuda: Cuda, inputs: int = 1) -> None:
        self._cuda = cuda
        self._inputs = inputs
        self._internal = False
        self._probes_failed = 0

    def failure(
        self,
        what: str,
        recorder: callbacks.Recorder,
        stream: Stream | None,
        error: CudaError | None = None,
        *,
        loading: bool = False,
    ) -> EngineError:
        if stream is not None and error is None:
            try:
                stream.wait()  # what a kernel did wrong shows here, not where it was launched
            except CudaError as e:
                error = e
        code = error.code if error is not None else 0
        sure = code in errors.STICKY_CODES | errors.LOST_CODES  # then nothing is asked of the device any more
        probe = 0 if sure else self._cuda.probe()
        self._probes_failed = self._probes_failed + 1 if probe else 0
        seen = errors.Evidence(
            what=what,
            reported=recorder.reported(),
            cuda=code,
            cuda_text=str(error) if error is not None else "",
            probe=probe,
            probes_failed=self._probes_failed,
            repeated=self._internal,
            loading=loading,
            inputs=self._inputs,
        )
        failure = errors.classify(seen)
        recorder.clear()
        self._internal = self._internal or (seen.is_internal and not isinstance(failure, (OutOfMemory, InvalidInput)))
        if isinstance(failure, (Sticky, DeviceLost)):
            self._cuda.poisoned = True
        return failure
