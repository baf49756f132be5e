"""The Jobs' steps and a worker on one machine, without a cluster: the same code behind a command.

    trtmodel check model.onnx      can it be built and served?
    trtmodel build model.onnx      build the engine into a store in a local directory
    trtmodel verify model.onnx     measure the engine against the original on a data set
    trtmodel serve model.onnx      build if need be, and serve

There is no operator, so nobody vouches for an engine: `serve` signs what it serves with a key that it makes for the run
and forgets. The worker checks that signature as any other, and it proves nothing.
"""

from trtmodel_worker.environment import without_blas_threads

without_blas_threads()  # here, since the modules of this package import NumPy
