"""What the runner tells a server, by the environment: that works however a framework starts its processes.

BENCH_MODEL     the ONNX file
BENCH_PORT      where to listen, on 127.0.0.1
BENCH_PARALLEL  inferences at the same time: worker processes, replicas or threads, as the framework has them
BENCH_DEADLINE  seconds after which nobody waits for an answer; frameworks with such a setting get it
"""

import os

import onnxruntime

MODEL = os.environ["BENCH_MODEL"]
PORT = int(os.environ["BENCH_PORT"])
PARALLEL = int(os.environ.get("BENCH_PARALLEL", "1"))
DEADLINE_SECONDS = float(os.environ.get("BENCH_DEADLINE", "30"))
NAME = "m"
MAX_BATCH = 32


def session() -> onnxruntime.InferenceSession:
    """The model, one thread per inference, as every server here runs it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])


def numpy_type(node: onnxruntime.NodeArg) -> str:
    return {"tensor(float)": "float32", "tensor(int32)": "int32"}[node.type]
