"""Models for the tests on a GPU, and plans of them, which are kept between runs on one machine."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from trtmodel_contract.identity import Profile, ShapeRange

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("TRTMODEL_GPU_CACHE", Path(tempfile.gettempdir()) / "trtmodel-gpu"))
LEVEL = int(os.environ.get("TRTMODEL_GPU_LEVEL", "3"))
BUILD_SECONDS = 240
MOST_ROWS = 32
MAGIKA_BYTES = 2048


@dataclasses.dataclass(frozen=True)
class Model:
    """`sample(rows)`: inputs by name."""

    name: str
    onnx: Path
    bounds: dict
    fp16: bool
    level: int
    build_seconds: float = 0.0
    plan: Path | None = None

    @property
    def profiles(self):
        return (Profile({n: ShapeRange(*map(tuple, b)) for n, b in self.bounds.items()}),)

    def sample(self, rows, seed=1):
        generator = np.random.default_rng(seed)
        name, (_, shape, _) = next(iter(self.bounds.items()))
        if self.name.startswith("magika"):
            return {name: generator.integers(0, 256, (rows, *shape[1:])).astype(np.int32)}
        return {name: generator.standard_normal((rows, *shape[1:])).astype(np.float32)}


def magika(fp16=True):
    import magika as package

    models = sorted((Path(package.__file__).parent / "models").glob("standard_v3_*/model.onnx"))
    row = (MAGIKA_BYTES,)
    bounds = {"bytes": [(1, *row), (8, *row), (MOST_ROWS, *row)]}
    return built(Model(f"magika-{'fp16' if fp16 else 'fp32'}", models[-1], bounds, fp16, LEVEL))


def resnet50(fp16=True):
    path = CACHE / "resnet50.onnx"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_resnet50())
    row = (3, 224, 224)
    bounds = {"image": [(1, *row), (8, *row), (MOST_ROWS, *row)]}
    return built(Model(f"resnet50-{'fp16' if fp16 else 'fp32'}", path, bounds, fp16, LEVEL))


def nonzero():
    """An output whose shape only the data tells."""
    from onnx import TensorProto, helper

    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / "nonzero.onnx"
    graph = helper.make_graph(
        [
            helper.make_node("NonZero", ["x"], ["where"]),
            helper.make_node("Cast", ["where"], ["y"], to=TensorProto.INT32),
        ],
        "nonzero",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 16])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [2, "found"])],
    )
    path.write_bytes(model_of(graph))
    return built(Model("nonzero", path, {"x": [(1, 16), (2, 16), (8, 16)]}, False, 1))


def sum_of_two():
    """Two inputs, each with a number of rows of its own, that have to fit each other."""
    from onnx import TensorProto, helper

    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / "sum.onnx"
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "z"], ["y"])],
        "sum",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 16]) for name, rows in (("x", "b"), ("z", "c"))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["d", 16])],
    )
    path.write_bytes(model_of(graph))
    row = (16,)
    bounds = {name: [(1, *row), (2, *row), (8, *row)] for name in ("x", "z")}
    return built(Model("sum", path, bounds, False, 1))


def built(model):
    CACHE.mkdir(parents=True, exist_ok=True)
    plan = CACHE / f"{model.name}-{model.level}.plan"
    took = 0.0
    if not plan.exists():
        request = CACHE / f"{model.name}.json"
        partial = plan.with_suffix(".part")
        request.write_text(json.dumps({
            "onnx": str(model.onnx), "plan": str(partial), "fp16": model.fp16, "level": model.level,
            "timings": str(CACHE / f"{model.name}-{model.level}.timings"),
            "profiles": [model.bounds],
        }))  # fmt: skip
        began = time.monotonic()
        subprocess.run([sys.executable, str(HERE / "gpu_build.py"), str(request)], check=True, timeout=BUILD_SECONDS)
        took = time.monotonic() - began
        partial.rename(plan)
    return dataclasses.replace(model, plan=plan, build_seconds=took)


def make_resnet50():
    """ResNet-50 with random weights: batch normalisation is folded into the convolutions, as an export does it."""
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(50)
    nodes, weights = [], []

    def weight(name, array):
        weights.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def conv(x, name, inside, outside, size, stride=1, gain=1.0, relu=True):
        scale = gain * np.sqrt(2.0 / (inside * size * size))
        w = weight(f"{name}.w", generator.standard_normal((outside, inside, size, size)) * scale)
        b = weight(f"{name}.b", generator.standard_normal(outside) * 0.01)
        pad = size // 2
        nodes.append(helper.make_node("Conv", [x, w, b], [name], name, kernel_shape=[size] * 2, strides=[stride] * 2,
                                      pads=[pad] * 4))  # fmt: skip
        if not relu:
            return name
        nodes.append(helper.make_node("Relu", [name], [f"{name}.relu"], f"{name}.relu"))
        return f"{name}.relu"

    x = conv("image", "stem", 3, 64, 7, 2)
    nodes.append(helper.make_node("MaxPool", [x], ["pool"], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4))
    x, inside = "pool", 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            name, stride = f"s{stage}b{block}", 2 if block == 0 and stage else 1
            y = conv(x, f"{name}.1", inside, width, 1)
            y = conv(y, f"{name}.2", width, width, 3, stride)
            y = conv(y, f"{name}.3", width, 4 * width, 1, gain=0.3, relu=False)
            short = conv(x, f"{name}.s", inside, 4 * width, 1, stride, gain=0.7, relu=False) if block == 0 else x
            nodes.append(helper.make_node("Add", [y, short], [f"{name}.add"], f"{name}.add"))
            nodes.append(helper.make_node("Relu", [f"{name}.add"], [name], name))
            x, inside = name, 4 * width
    nodes.append(helper.make_node("GlobalAveragePool", [x], ["mean"], "mean"))
    nodes.append(helper.make_node("Flatten", ["mean"], ["flat"], "flat"))
    w = weight("fc.w", generator.standard_normal((1000, 2048)) * 0.02)
    b = weight("fc.b", generator.standard_normal(1000) * 0.02)
    nodes.append(helper.make_node("Gemm", ["flat", w, b], ["logits"], "fc", transB=1))
    graph = helper.make_graph(
        nodes, "resnet50",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 224, 224])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1000])], weights,
    )  # fmt: skip
    return model_of(graph)


def model_of(graph):
    from onnx import helper

    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.ir_version = 8
    return model.SerializeToString()
