"""Models and data sets to upload: a tiny classifier that is built in a second, and Magika with its variants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

EXAMPLE = Path(__file__).parents[2] / "examples" / "magika"
WIDTH, HIDDEN, CLASSES = 16, 32, 4
SAMPLES = 200
MAGIKA_SAMPLES = 300
WRITE_SECONDS = 120
Rows = NDArray[np.float32]


def _weights() -> tuple[Rows, Rows]:
    random = np.random.default_rng(7)
    first = random.standard_normal((WIDTH, HIDDEN)).astype(np.float32)
    return first, random.standard_normal((HIDDEN, CLASSES)).astype(np.float32)


def tiny(version: str, *, gain: float = 1.0) -> onnx.ModelProto:
    """MatMul, Relu, MatMul: input `x` [N, 16], output `scores` [N, 4]. Another version is another source with the same
    answers; another gain multiplies the scores, so that an answer tells which model gave it."""
    first, second = _weights()
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["a"], "first"),
            helper.make_node("Relu", ["a"], ["b"], "relu"),
            helper.make_node("MatMul", ["b", "second"], ["scores"], "second"),
        ],
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES])],
        [numpy_helper.from_array(first, "first"), numpy_helper.from_array(second * np.float32(gain), "second")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {"version": version})
    return model


def plain() -> onnx.ModelProto:
    """Input and output of the tiny model, without an operator that INT8 is for."""
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["x", "first"], ["a"], "gather", axis=1),
            helper.make_node("Mul", ["a", "gain"], ["scores"], "mul"),
        ],
        "plain",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES])],
        [
            numpy_helper.from_array(np.arange(CLASSES, dtype=np.int64), "first"),
            numpy_helper.from_array(np.array(2, np.float32), "gain"),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def scores(x: Rows) -> Rows:
    """What the tiny model answers."""
    first, second = _weights()
    found: Rows = np.maximum(x @ first, 0) @ second
    return found


def samples(count: int = SAMPLES) -> Rows:
    return np.random.default_rng(8).standard_normal((count, WIDTH)).astype(np.float32)


def write_tiny(out: Path) -> None:
    """a.onnx, b.onnx, c.onnx, plain.onnx, page.onnx (which is none), eval.npz, empty.npz, narrow.npz (other width)."""
    onnx.save(tiny("a"), out / "a.onnx")
    onnx.save(tiny("b", gain=2.0), out / "b.onnx")
    onnx.save(tiny("c", gain=3.0), out / "c.onnx")
    onnx.save(plain(), out / "plain.onnx")
    (out / "page.onnx").write_text("<html><body>502 Bad Gateway</body></html>")
    x = samples()
    labels = scores(x).argmax(axis=1)
    np.savez(out / "eval.npz", x=x, labels=labels)
    np.savez(out / "empty.npz", x=x[:0], labels=labels[:0])
    np.savez(out / "narrow.npz", x=x[:, :-1], labels=labels)


def write_magika(out: Path) -> None:
    """As the demo has it: model.onnx, damaged.onnx, slow.onnx, tagged.onnx, eval.npz, calib.npz, requests.npz."""
    for program, *arguments in (
        ("data.py", out, "--samples", MAGIKA_SAMPLES),
        ("variants.py", out / "model.onnx", out),
    ):
        command = [sys.executable, EXAMPLE / program, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WRITE_SECONDS, check=False)
        assert done.returncode == 0, f"{program}: {done.stderr[-2000:]}"
