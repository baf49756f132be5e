"""The models that every server runs, a request for each, and what is the right answer."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

COLUMNS = 2048
VERSION_2_FACTOR = 0.5  # what the second version answers, times the first: clients can tell which one it was


@dataclass(frozen=True)
class BenchModel:
    """`versions`: two ONNX files, the second one's answers are VERSION_2_FACTOR times the first one's. `sample`: one
    row; `expected`: its answer by version, from ONNX Runtime in this process."""

    name: str
    versions: tuple[Path, Path]
    input_name: str
    output_name: str
    datatype: str
    sample: np.ndarray
    expected: tuple[np.ndarray, np.ndarray]

    def version_of(self, answer: np.ndarray) -> int | None:
        """1 or 2; None for a wrong answer."""
        for number, expected in enumerate(self.expected, 1):
            if answer.shape == expected.shape and np.allclose(answer, expected, rtol=1e-3, atol=1e-5):
                return number
        return None


def make(name: str, folder: Path) -> BenchModel:
    """`null` (Identity, FP32) or `magika` (the file-type classifier that the PyPI package carries)."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    if name == "null":
        # Eighths: exact and short in JSON, so that no server is slower for how it prints digits.
        model, sample = _null(), (rng.integers(-32, 32, (1, COLUMNS)) / 8).astype(np.float32)
    else:
        model, sample = onnx.load(_magika()), rng.integers(0, 256, (1, COLUMNS)).astype(np.int32)
    paths = folder / f"{name}-1.onnx", folder / f"{name}-2.onnx"
    onnx.save(model, paths[0])
    onnx.save(_scaled(model), paths[1])
    session = onnxruntime.InferenceSession(str(paths[0]), providers=["CPUExecutionProvider"])
    (source,), (output,) = session.get_inputs(), session.get_outputs()
    answer = np.asarray(session.run(None, {source.name: sample})[0])
    datatype = {"float32": "FP32", "int32": "INT32"}[str(sample.dtype)]
    return BenchModel(
        name, paths, source.name, output.name, datatype, sample, (answer, answer * np.float32(VERSION_2_FACTOR))
    )


def bare_p50_ms(model: BenchModel, seconds: float) -> float:
    """The model alone, one thread, in this process."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model.versions[0]), options, providers=["CPUExecutionProvider"])
    times: list[float] = []
    feed, end = {model.input_name: model.sample}, time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        started = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - started)
    return 1e3 * sorted(times)[len(times) // 2]


def _null() -> onnx.ModelProto:
    shape = ("n", COLUMNS)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "null",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _scaled(model: onnx.ModelProto) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    output = graph.output[0].name
    last = next(node for node in graph.node if output in node.output)
    last.output[list(last.output).index(output)] = "scaled/in"
    graph.initializer.append(helper.make_tensor("scaled/by", TensorProto.FLOAT, (), [VERSION_2_FACTOR]))
    graph.node.append(helper.make_node("Mul", ["scaled/in", "scaled/by"], [output], "scaled"))
    return changed


def _magika() -> Path:
    spec = importlib.util.find_spec("magika")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package magika is not installed: make venv")
    return next(Path(spec.origin).parent.glob("models/*/model.onnx"))
