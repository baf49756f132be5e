"""A simpler graph is built from only if it answers as the original does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_models as models
import pytest
from job_harness import make_jobs, profiles, save_npz
from trtmodel_contract.identity import EngineSettings, KeepPrecision
from trtmodel_contract.manifest import Manifest
from trtmodel_worker.builder import simplify
from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.builder.process import Ended
from trtmodel_worker.engines.registry import builder
from trtmodel_worker.storage import ArtifactStore

WIDTH = 8
PROFILES = profiles("x", WIDTH, batches=(1, 2, 4))


def shapely(path: Path) -> Path:
    """What exporters write for x.reshape(x.shape[0], 8) * (2 + 1): six nodes of which two are needed."""
    nodes = [
        models.node("Shape", ["x"], ["s"], "shape"),
        models.node("Gather", ["s", "zero"], ["n"], "batch"),
        models.node("Unsqueeze", ["n", "axes"], ["n1"], "unsqueeze"),
        models.node("Concat", ["n1", "width"], ["to"], "concat", axis=0),
        models.node("Reshape", ["x", "to"], ["r"], "reshape"),
        models.node("Add", ["two", "one"], ["three"], "constant"),
        models.node("Mul", ["r", "three"], ["m"], "scale"),
        models.node("Identity", ["m"], ["y"], "nothing"),
    ]
    weights = {"zero": np.array(0), "axes": np.array([0]), "width": np.array([WIDTH])}
    weights |= {"two": np.array(2, np.float32), "one": np.array(1, np.float32)}
    shape = ("n", WIDTH)
    return models.save(path, nodes, [("x", models.FLOAT, shape)], [("y", models.FLOAT, shape)], weights)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return shapely(tmp_path / "model.onnx")


def simplified(source: Path, engine: EngineSettings) -> tuple[Path, dict[str, str]]:
    folder = source.parent
    data = save_npz(folder / "rows.npz", x=np.random.default_rng(0).normal(size=(6, WIDTH)).astype(np.float32))
    graph = builder("ONNXRuntime").inspect(source)
    rows = DataSetFile(folder / "rows.npz", data.uri, graph.inputs, engine.profiles)
    return simplify.source(source, engine, graph, rows, folder)


def settings(**more: object) -> EngineSettings:
    return EngineSettings("ONNXRuntime", profiles=PROFILES, simplify=True, **more)  # type: ignore[arg-type]


def wrote(change: Callable[[onnx.ModelProto], object]) -> Callable[..., Ended]:
    """A library whose result is the original, changed."""

    def run(arguments: list[str], _seconds: float) -> Ended:
        model = onnx.load(arguments[1])
        change(model)
        onnx.save(model, arguments[2])
        return Ended(0, ())

    return run


@pytest.mark.long
def test_a_simplified_graph_has_fewer_nodes_and_the_manifest_says_so(tmp_path: Path) -> None:
    data = save_npz(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32))
    jobs = make_jobs(tmp_path, shapely(tmp_path / "model.onnx"), data, engine=settings())
    code, result = jobs.build()
    assert code == 0, result.message
    assert result.build is not None
    store = ArtifactStore(jobs.storage, "ml", None)
    manifest: Manifest = store.get_manifest(result.build.artifact.manifest_digest)
    assert manifest.build["simplified"].startswith("onnxslim ")
    after, _, before = manifest.build["simplifiedNodes"].partition(" of ")
    assert int(after) < int(before) == 8


def test_nothing_is_simplified_that_nobody_asked_for(source: Path) -> None:
    assert simplified(source, EngineSettings("ONNXRuntime", profiles=PROFILES)) == (source, {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.graph.initializer[3].CopyFrom(onnx.numpy_helper.from_array(np.array(2.01, np.float32), "two")),
         "it changes answers: output 'y' of 1 rows differs by"),
        (lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[1], "dim_param", "free"), "its inputs became"),
        (lambda m: m.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("r", 1, ["n", WIDTH])),
         "its outputs became"),
        (lambda m: setattr(m.graph.node[0], "op_type", "Foo"), "the simplified graph does not load"),
    ],
    ids=["answers", "inputs", "outputs", "operators"],
)  # fmt: skip
def test_a_result_that_is_another_model_is_not_used_and_the_reason_is_kept(
    source: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[onnx.ModelProto], object], words: str
) -> None:
    monkeypatch.setattr(simplify, "run_module", wrote(change))
    path, said = simplified(source, settings())
    assert path == source
    assert said["simplified"].startswith("no: ")
    assert words in said["simplified"]


@pytest.mark.parametrize("ended", [Ended(-11, ("boom",)), Ended(1, ("Traceback",)), Ended(0, ())], ids=str)
def test_a_library_that_fails_fails_no_build(source: Path, monkeypatch: pytest.MonkeyPatch, ended: Ended) -> None:
    monkeypatch.setattr(simplify, "run_module", lambda *_: ended)
    path, said = simplified(source, settings())
    assert path == source
    assert said["simplified"].startswith("no: onnxslim ")


def test_nodes_that_keep_their_precision_must_still_be_there(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simplify, "run_module", wrote(lambda m: m.graph.node[6].ClearField("name")))
    keep = KeepPrecision(("^scale$",))
    path, said = simplified(source, settings(precision="FP16", keep_precision=keep))
    assert path == source
    assert "'^scale$'" in said["simplified"]
