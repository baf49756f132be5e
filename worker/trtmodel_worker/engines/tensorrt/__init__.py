"""TensorRT on an NVIDIA GPU. A plan is a serialised engine, and loads only where its load key says: the same version,
the same kind of device.

    compat                      what differs between 8.6, 10 and 11; the only place with names of one version
    build, precision, ...       an ONNX file becomes a plan
    runtime, run, lane, ...     a plan serves
    errors                      what a failure is
"""
