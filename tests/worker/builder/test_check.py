"""What is refused before a build, and with which words."""

from __future__ import annotations

import dataclasses
import signal
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import large_models
import numpy as np
import odd_models
import onnx
import onnx_models as models
import pytest
from job_harness import make_jobs
from onnx import TensorProto
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings, Profile, ShapeRange
from trtmodel_contract.jobs import DataSet, Reason
from trtmodel_worker.builder import check
from trtmodel_worker.builder.examine import examine
from trtmodel_worker.builder.findings import Report, require
from trtmodel_worker.builder.process import Ended, StageDied
from trtmodel_worker.builder.wanted import Request, Wanted
from trtmodel_worker.engines.base import allocate_anew
from trtmodel_worker.engines.building import Graph, Rejected
from trtmodel_worker.engines.onnxruntime.build import OnnxBuilder
from trtmodel_worker.engines.registry import builder, runtime
from trtmodel_worker.storage import Source

FOUR = (Profile({"x": ShapeRange((1, 4), (2, 4), (8, 4))}),)
WHAT = "source s3://m/model.onnx (123 bytes, sha256 0123456789ab)"


def report(path: Path, wanted: Wanted | None = None) -> Report:
    """What the process of a check finds, in this one."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        return examine(Request(str(path), WHAT, "ONNXRuntime", folder, wanted))


def run(path: Path, profiles: tuple[Profile, ...] = FOUR, task: Task = Task.RAW, **settings: Any) -> Graph:
    found = report(path, Wanted(EngineSettings("ONNXRuntime", profiles=profiles, **settings), task))
    require(found.findings)
    assert found.graph is not None
    return found.graph


def warned(path: Path) -> str:
    """The words of the warnings about a model that is accepted."""
    found = report(path).findings
    require(found)
    return "\n".join(finding.text for finding in found)


def refused(path: Path, *arguments: Any, **options: Any) -> Rejected:
    with pytest.raises(Rejected) as e:
        run(path, *arguments, **options)
    return e.value


def test_a_good_model_passes_with_its_inputs_and_outputs(tmp_path: Path) -> None:
    found = run(models.relu(tmp_path / "m"))
    assert [t.spec().shape for t in (*found.inputs, *found.outputs)] == [(-1, 4), (-1, 4)]


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty (0 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
        (b"\n  <html lang=en>", "HTML page"),
        (b"<?xml version='1.0'?><Error/>", "XML"),
        (b'{"error": "not found"}', "JSON"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x80\x02ccollections", "pickle"),
        (b"ftrt" + b"\0" * 50, "TensorRT plan"),
        (b"\xff" * 100, "not ONNX"),
    ],
)
def test_A25_a_file_that_is_no_model_is_named_for_what_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "m").write_bytes(content)
    error = refused(tmp_path / "m")
    assert error.reason is Reason.MODEL_INVALID
    assert words in error.message
    assert WHAT in error.message


def test_A25_a_zip_archive_and_half_a_model_are_told_apart(tmp_path: Path) -> None:
    _zip(tmp_path / "zip")
    assert "zip archive" in refused(tmp_path / "zip").message
    whole = models.linear(tmp_path / "m", width=64, classes=64).read_bytes()
    (tmp_path / "half").write_bytes(whole[: len(whole) // 2])
    assert "cut off" in refused(tmp_path / "half").message


def test_A14_a_newer_ir_version_names_what_was_found_and_what_is_supported(tmp_path: Path) -> None:
    for version in (onnx.IR_VERSION + 1, 99):
        error = refused(models.relu(tmp_path / "m", ir=version))
        assert error.reason is Reason.MODEL_INVALID
        assert f"IR version is {version}" in error.message
        assert "reads up to" in error.message


def test_A14_a_newer_opset_names_what_was_found_and_what_is_supported(tmp_path: Path) -> None:
    error = refused(models.relu(tmp_path / "m", opset=99))
    assert error.reason is Reason.OPERATOR_UNSUPPORTED
    assert "opset 99" in error.message
    assert "supports up to" in error.message


def test_A16_a_custom_operator_is_named_with_its_domain(tmp_path: Path) -> None:
    shape = ("n", 4)
    nodes = [onnx.helper.make_node("FancyNorm", ["x"], ["y"], "fancy", domain="acme.ops")]
    values = [("x", models.FLOAT, shape)], [("y", models.FLOAT, shape)]
    error = refused(models.save(tmp_path / "m", nodes, *values, opsets=[("", 17), ("acme.ops", 1)]))
    assert error.reason is Reason.OPERATOR_UNSUPPORTED
    assert "acme.ops:FancyNorm" in error.message
    nodes = [onnx.helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")]
    assert run(models.save(tmp_path / "m", nodes, *values, opsets=[("", 17), ("com.microsoft", 1)]))


def test_A16_an_operator_that_does_not_exist_is_named_with_its_node(tmp_path: Path) -> None:
    shape = ("n", 4)
    path = models.save(
        tmp_path / "m",
        [models.node("Foo", ["x"], ["y"], "n7")],
        [("x", models.FLOAT, shape)],
        [("y", models.FLOAT, shape)],
    )
    error = refused(path)
    assert error.reason is Reason.OPERATOR_UNSUPPORTED
    assert "n7" in error.message
    assert "ai.onnx:Foo" in error.message


def test_A28_an_operator_without_a_kernel_for_its_types_is_refused_before_the_first_request(tmp_path: Path) -> None:
    shape = ("n", 4)
    path = models.save(
        tmp_path / "m",
        [models.node("Mul", ["x", "x"], ["y"], "product")],
        [("x", TensorProto.BFLOAT16, shape)],
        [("y", TensorProto.BFLOAT16, shape)],
    )
    error = refused(path)
    assert error.reason is Reason.OPERATOR_UNSUPPORTED
    assert "product" in error.message


def test_A17_two_nodes_of_one_name_are_refused_since_no_reference_can_be_computed(tmp_path: Path) -> None:
    shape = ("n", 4)
    nodes = [models.node("Relu", ["x"], ["z"], "n"), models.node("Abs", ["z"], ["y"], "n")]
    error = refused(models.save(tmp_path / "m", nodes, [("x", models.FLOAT, shape)], [("y", models.FLOAT, shape)]))
    assert error.reason is Reason.MODEL_INVALID
    assert "same node name (n)" in error.message


def test_A08_free_dimensions_without_a_profile_are_listed_by_name(tmp_path: Path) -> None:
    error = refused(models.relu(tmp_path / "m", dims=("batch", 3, "h", "w")), ())
    assert error.reason is Reason.PROFILE_MISMATCH
    for name in ("batch", "h", "w", "'x'"):
        assert name in error.message


def test_A24_a_profile_that_contradicts_a_fixed_batch_is_refused(tmp_path: Path) -> None:
    error = refused(models.relu(tmp_path / "m", dims=(1, 4)))
    assert error.reason is Reason.PROFILE_MISMATCH
    assert "'x'" in error.message
    assert "dimension 0" in error.message
    assert "fixed at 1" in error.message
    assert "1 to 8" in error.message


def test_a_fixed_shape_needs_no_profile(tmp_path: Path) -> None:
    assert run(models.relu(tmp_path / "m", dims=(1, 4)), ())


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"z": ShapeRange((1, 4), (1, 4), (1, 4))}, "no input 'z'"),
        ({"x": ShapeRange((1,), (1,), (1,))}, "rank 2"),
        ({"x": ShapeRange((1, 3), (1, 4), (1, 4))}, "fixed at 4"),
        ({}, "lacks inputs"),
    ],
)
def test_profiles_that_do_not_fit_the_graph_are_refused(tmp_path: Path, profile: Any, words: str) -> None:
    error = refused(models.relu(tmp_path / "m"), (Profile(profile),))
    assert error.reason is Reason.PROFILE_MISMATCH
    assert words in error.message


def test_one_named_dimension_cannot_range_differently_for_two_inputs(tmp_path: Path) -> None:
    inputs = [("a", models.FLOAT, ("n",)), ("b", models.FLOAT, ("n",))]
    path = models.save(tmp_path / "m", [models.node("Add", ["a", "b"], ["y"])], inputs, [("y", models.FLOAT, ("n",))])
    one, other = ShapeRange((1,), (2,), (4,)), ShapeRange((1,), (2,), (8,))
    assert "same dimension" in refused(path, (Profile({"a": one, "b": other}),)).message
    assert run(path, (Profile({"a": one, "b": one}),))


def test_A19_no_profile_is_demanded_for_a_weight_that_is_listed_as_an_input(tmp_path: Path) -> None:
    inputs = [("x", models.FLOAT, ("n", 4)), ("k", models.FLOAT, ("k", 4))]
    nodes = [models.node("Mul", ["x", "k"], ["y"])]
    weights = {"k": np.ones((1, 4), np.float32)}
    path = models.save(tmp_path / "m", nodes, inputs, [("y", models.FLOAT, ("n", 4))], weights, 3, [("", 8)])
    assert [t.name for t in run(path).inputs] == ["x"]


def test_a_weight_that_is_nan_is_named(tmp_path: Path) -> None:
    path = models.linear(tmp_path / "m", width=4)
    model = onnx.load(path)
    weights = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    weights[0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, "w"))
    onnx.save(model, path)
    error = refused(path)
    assert error.reason is Reason.MODEL_INVALID
    assert "'w' holds NaN" in error.message


def test_weights_in_other_files_are_read_there_and_their_absence_names_the_file(tmp_path: Path) -> None:
    model = onnx.load(models.linear(tmp_path / "m", width=64, classes=64))
    onnx.save_model(model, tmp_path / "m", save_as_external_data=True, location="weights", size_threshold=0)
    assert run(tmp_path / "m", (Profile({"x": ShapeRange((1, 64), (2, 64), (8, 64))}),))
    (tmp_path / "weights").write_bytes((tmp_path / "weights").read_bytes()[:9000])
    assert "but the file has 9,000" in refused(tmp_path / "m").message
    (tmp_path / "weights").unlink()
    error = refused(tmp_path / "m")
    assert error.reason is Reason.MODEL_INVALID
    assert "2 weights, such as 'w', are in another file, 'weights', which is not there" in error.message


@pytest.mark.parametrize("make", [large_models.external, large_models.inside])
def test_A13_memory_does_not_grow_with_the_weights_and_every_byte_of_them_is_read(tmp_path: Path, make: Any) -> None:
    path = make(tmp_path, 6)
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    found = check.examined(path, WHAT, tmp_path, "ONNXRuntime")
    assert not found.findings
    assert found.weight_bytes == 6 * large_models.WIDTH**2 * 4
    assert 0 < found.peak_bytes < size / 2
    large_models.put_nan(tmp_path / "weights" if make is large_models.external else path, size - 4)
    assert "'w5' holds NaN" in refused(path).message


def test_A13_a_model_that_no_plan_of_the_runtime_holds_is_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.linear(tmp_path / "m", width=4)
    assert run(path)
    monkeypatch.setattr(OnnxBuilder, "most_weight_bytes", lambda *_: 59)
    said = "the weights take 60 bytes, ONNXRuntime makes FP32 of at most 59: use FP32, a smaller model"
    assert said in refused(path).message


@pytest.mark.parametrize(
    ("precision", "calibrated", "limited"),
    [("FP32", False, False), ("FP16", False, True), ("INT8", True, True), ("INT8", False, False)],
)
def test_A13_only_a_precision_that_is_written_into_the_graph_has_a_limit(
    precision: str, calibrated: bool, limited: bool
) -> None:
    most = OnnxBuilder().most_weight_bytes(EngineSettings("ONNXRuntime", precision=precision), calibrated)
    assert (most < 2**31) is limited


def test_text_inputs_are_refused_by_type(tmp_path: Path) -> None:
    shape = ("n", 4)
    text = TensorProto.STRING
    path = models.save(
        tmp_path / "m", [models.node("Identity", ["x"], ["y"])], [("x", text, shape)], [("y", text, shape)]
    )
    message = refused(path).message
    assert "input 'x' holds strings" in message
    assert "outside of the graph" in message


def test_a_classifier_needs_scores(tmp_path: Path) -> None:
    shape = ("n", 4)
    values = [("x", models.FLOAT, shape)], [("y", TensorProto.INT64, ("n",))]
    nodes = [models.node("ArgMax", ["x"], ["y"], axis=1, keepdims=0)]
    path = models.save(tmp_path / "m", nodes, *values)
    assert "verify.task" in refused(path, task=Task.CLASSIFICATION).message
    assert run(path, task=Task.RAW)


def test_A01_an_image_of_bytes_is_an_ordinary_input(tmp_path: Path) -> None:
    nodes = [models.node("Cast", ["x"], ["f"], to=models.FLOAT), models.node("Mul", ["f", "s"], ["y"])]
    weights = {"s": np.array(1 / 255, np.float32)}
    path = models.save(
        tmp_path / "m", nodes, [("x", TensorProto.UINT8, ("n", 4))], [("y", models.FLOAT, ("n", 4))], weights
    )
    assert run(path).inputs[0].datatype == "UINT8"


@pytest.mark.parametrize(
    "weight",
    [
        TensorProto(name="w", data_type=1, dims=[4], raw_data=bytes(12)),
        TensorProto(name="w", data_type=1, dims=[1 << 40], raw_data=bytes(12)),
        TensorProto(name="w", data_type=1, dims=[4], float_data=[1.0]),
        TensorProto(name="w", data_type=1, dims=[4], raw_data=bytes(3)),
    ],
    ids=["shorter", "far shorter", "too few", "no whole number"],
)  # fmt: skip
def test_weights_of_another_size_than_their_shape_says_are_the_models_fault(
    tmp_path: Path, weight: TensorProto
) -> None:
    values = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "y")]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight]
    )
    (tmp_path / "m.onnx").write_bytes(onnx.helper.make_model(graph, ir_version=9).SerializeToString())
    assert refused(tmp_path / "m.onnx").reason is Reason.MODEL_INVALID


def test_names_that_are_no_text_are_the_models_fault(tmp_path: Path) -> None:
    values = [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("xqx", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["xqx"], ["y"])], "g", values[:1], values[1:])
    data = onnx.helper.make_model(graph, ir_version=9).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data.replace(b"xqx", b"x\xffx"))
    assert refused(tmp_path / "m.onnx").reason is Reason.MODEL_INVALID


def test_everything_that_is_wrong_is_told_at_once_and_the_most_important_first(tmp_path: Path) -> None:
    shape = ("n", 4)
    nodes = [models.node("Foo", ["x"], ["a"], "one"), models.node("Foo", ["a"], ["b"], "two")]
    nodes += [onnx.helper.make_node("Bar", ["b"], ["c"], "three", domain="acme"), models.node("Add", ["c", "w"], ["y"])]
    weights = {"w": np.array([1, np.nan, 1, 1], np.float32)}
    values = [("x", models.FLOAT, shape)], [("y", models.FLOAT, shape)]
    path = models.save(tmp_path / "m", nodes, *values, weights, opsets=[("", 99), ("acme", 1)])
    profile = Profile({"x": ShapeRange((1, 4), (1, 4), (2, 5)), "z": ShapeRange((1,), (1,), (1,))})
    error = refused(path, (profile,), precision="FP8")
    assert [finding.reason.value for finding in error.findings] == [
        "ModelInvalid",
        *["OperatorUnsupported"] * 3,
        *["ProfileMismatch"] * 2,
        "PrecisionUnsupported",
    ]
    assert "'w' holds NaN" in error.message
    assert "and 6 more errors" in error.message
    opset, foo, bar = error.findings[1:4]
    assert "opset 99" in opset.message
    assert "nodes 'one', 'two'" in foo.message
    assert (foo.node, foo.operator, foo.domain) == ("one", "Foo", "")
    assert (bar.node, bar.operator, bar.domain) == ("three", "Bar", "acme")
    assert "without custom operators" in bar.way_out


def test_every_operator_without_a_kernel_is_named_with_its_types(tmp_path: Path) -> None:
    shape = ("n", 4)
    casts = [models.node("Cast", ["x"], ["b"], to=TensorProto.BFLOAT16), models.node("Cast", ["e"], ["y"], to=1)]
    nodes = [casts[0], models.node("Mul", ["b", "b"], ["c"], "m1"), models.node("Mul", ["c", "b"], ["d"], "m2")]
    nodes += [models.node("Exp", ["d"], ["e"], "e1"), casts[1]]
    path = models.save(tmp_path / "m", nodes, [("x", models.FLOAT, shape)], [("y", models.FLOAT, shape)])
    messages = [finding.message for finding in refused(path).findings]
    assert any("Mul" in text and "BFLOAT16" in text and "'m1', 'm2'" in text for text in messages)
    assert any("Exp" in text and "BFLOAT16" in text and "'e1'" in text for text in messages)


def test_what_is_only_odd_is_a_warning_and_rejects_nothing(tmp_path: Path) -> None:
    shape = ("n", 4)
    inputs = [("x", models.FLOAT, shape), ("idle", models.FLOAT, shape)]
    nodes = [models.node("Add", ["x", "w"], ["z"]), onnx.helper.make_node("Gelu", ["z"], ["y"], domain="com.microsoft")]
    weights = {"w": np.array([1, -np.inf, 1, 1], np.float32), "u": np.ones(3, np.float32)}
    opsets = [("", 17), ("com.microsoft", 1)]
    words = warned(models.save(tmp_path / "m", nodes, inputs, [("y", models.FLOAT, shape)], weights, opsets=opsets))
    for expected in ("input 'idle' is used by no node", "'w' hold infinite", "'u'", "only ONNX Runtime has these"):
        assert expected in words


def test_a_classifier_of_scikit_learn_is_told_how_to_export_without_maps(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(odd_models.zipmap().SerializeToString())
    errors = [f for f in refused(tmp_path / "m").findings if f.severity.value == "error"]
    assert [(f.operator, f.way_out) for f in errors] == [
        ("ZipMap", "export with options={'zipmap': False}, which gives an array of scores")
    ]


@pytest.mark.parametrize("width", [3, 1])
def test_A21_branches_of_different_rank_are_served_with_the_shape_that_they_have(tmp_path: Path, width: int) -> None:
    branches = {
        "then_branch": onnx.helper.make_graph(
            [models.node("Squeeze", ["x"], ["a"])], "then", [], [onnx.ValueInfoProto(name="a")]
        ),
        "else_branch": onnx.helper.make_graph(
            [models.node("Identity", ["x"], ["b"])], "else", [], [onnx.ValueInfoProto(name="b")]
        ),
    }
    for branch in branches.values():
        branch.output[0].type.tensor_type.elem_type = models.FLOAT
    nodes = [models.node("ReduceMax", ["x"], ["m"], keepdims=0), models.node("Greater", ["m", "zero"], ["c"])]
    nodes.append(models.node("If", ["c"], ["y"], "choose", **branches))
    path = models.save(
        tmp_path / "m", nodes, [("x", models.FLOAT, (1, width))], [("y", models.FLOAT, ("?",))],
        {"zero": np.array(0, np.float32)},
    )  # fmt: skip
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    path.write_bytes(model.SerializeToString())
    assert run(path, ())
    plan = tmp_path / "plan"
    builder("ONNXRuntime").build(path, EngineSettings("ONNXRuntime"), None, plan)
    lane = runtime("ONNXRuntime").load(memoryview(plan.read_bytes()), (), 1).create_lane()
    for sign in (1, -1, 1):
        squeezed: tuple[int, ...] = (width,) if width > 1 else ()
        found = lane.run({"x": np.full((1, width), sign, np.float32)}, allocate_anew)
        assert found["y"].shape == (squeezed if sign > 0 else (1, width))


def test_a_check_runs_in_a_process_of_its_own_with_all_that_is_wanted(tmp_path: Path) -> None:
    engine = EngineSettings("ONNXRuntime", profiles=FOUR)
    path = models.relu(tmp_path / "m")
    source = Source(path, "0" * 64, path.stat().st_size, f"file://{path}")
    jobs = make_jobs(tmp_path, path, DataSet("file:///absent.npz", 9), engine=engine)
    graph = check.check(jobs.resolve_task(), source, tmp_path)
    assert graph.inputs[0].name == "x"
    with pytest.raises(Rejected) as e:
        check.check(dataclasses.replace(jobs, engine=EngineSettings("ONNXRuntime")).resolve_task(), source, tmp_path)
    assert e.value.reason is Reason.PROFILE_MISMATCH


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE])
def test_a_file_that_crashes_a_library_is_refused_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(check, "run_module", lambda *_: Ended(-number, ("Fatal Python error",)))
    found = check.examined(tmp_path / "m", WHAT, tmp_path, "ONNXRuntime")
    with pytest.raises(Rejected) as e:
        require(found.findings)
    assert e.value.reason is Reason.MODEL_INVALID
    assert number.name in e.value.message


@pytest.mark.parametrize("code", [1, -signal.SIGKILL])
def test_a_check_that_the_machine_ended_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(check, "run_module", lambda *_: Ended(code, ("No space left on device",)))
    with pytest.raises(StageDied):
        check.examined(tmp_path / "m", WHAT, tmp_path, "ONNXRuntime")
