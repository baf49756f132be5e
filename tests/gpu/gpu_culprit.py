"""A process that stores to address 0 on the GPU: ``python gpu_culprit.py search-path ...``. Prints what CUDA said and
how long it took to say so."""

from __future__ import annotations

import sys
import time


def main():
    from cuda.bindings import runtime, utils
    from trtmodel_gpu_faults import store_to_nowhere

    runtime.cudaFree(0)
    error, stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    assert not error, error
    time.sleep(0.5)  # what the making of a context costs the others is not to be seen here
    began = time.perf_counter()
    store_to_nowhere(utils.get_cuda_native_handle(stream))
    (error,) = runtime.cudaStreamSynchronize(stream)
    print(f"{int(error)} after {1e3 * (time.perf_counter() - began):.1f} ms")


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    main()
