"""The least that a run can cost: one graph of copies and kernels, pinned buffers of its own, launch and wait."""

from __future__ import annotations

import math

from trtmodel_worker.engines.tensorrt.contexts import Context, Workplace


class BareLoop:
    def __init__(self, engine, shapes):
        loaded = engine._loaded
        self.cuda, cuda = loaded.cuda, loaded.cuda
        self.place = Workplace(loaded)
        profile = loaded.signature.profile(shapes)
        self.context = Context(loaded, self.place, profile)
        sizes = self.context.use(shapes)
        stream, kinds, self.host = self.place.stream, cuda.runtime.cudaMemcpyKind, []
        copies_in, copies_out, self.answer_bytes = [], [], 0
        for tensor, shape, address in zip(loaded.signature.inputs, shapes, self.place.inputs, strict=True):
            copies_in.append((address, self._pinned(tensor.bytes(shape)), tensor.bytes(shape)))
        for tensor in loaded.signature.outputs:
            size = tensor.dtype.itemsize * math.prod(sizes[tensor.name])
            copies_out.append((self._pinned(size), self.context.addresses[tensor.name], size))
            self.answer_bytes += size
        for _ in range(2):
            self.context.enqueue()
        stream.wait()
        mode = cuda.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        cuda.call("cudaStreamBeginCapture", stream.native, mode)
        for to, source, size in copies_in:
            cuda.call("cudaMemcpyAsync", to, source, size, kinds.cudaMemcpyHostToDevice, stream.native)
        self.context.enqueue()
        for to, source, size in copies_out:
            cuda.call("cudaMemcpyAsync", to, source, size, kinds.cudaMemcpyDeviceToHost, stream.native)
        graph = cuda.call("cudaStreamEndCapture", stream.native)
        self.graph = cuda.call("cudaGraphInstantiate", graph, 0)
        cuda.call("cudaGraphDestroy", graph)
        launch, wait, native, executable = (
            cuda.runtime.cudaGraphLaunch, cuda.runtime.cudaStreamSynchronize, stream.native, self.graph,
        )  # fmt: skip

        def run():
            launch(executable, native)
            wait(native)

        self.run = run

    def _pinned(self, size):
        self.host.append(self.cuda.call("cudaMallocHost", size))
        return self.host[-1]

    def free(self):
        self.cuda.call("cudaGraphExecDestroy", self.graph)
        self.context.free()
        self.place.free()
        for address in self.host:
            self.cuda.call("cudaFreeHost", address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()
