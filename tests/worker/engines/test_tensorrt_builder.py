"""The parts of the TensorRT builder that need no GPU. tests/gpu builds with the real one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_models as models
import pytest
from trt_builder_world import Device
from trtmodel_contract.identity import EngineSettings, KeepPrecision, Profile, ShapeRange
from trtmodel_contract.jobs import Reason
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.base import CannotLoad, OutOfMemory, Sticky
from trtmodel_worker.engines.building import CalibrationData, Rejected
from trtmodel_worker.engines.tensorrt import compat, messages, precision, shapes, summary, timing
from trtmodel_worker.engines.tensorrt.build import TensorRtBuilder
from trtmodel_worker.engines.tensorrt.feeding import Feed, Spool
from trtmodel_worker.engines.tensorrt.listening import Messages, Phases

FP32 = EngineSettings("TensorRT")
FP16 = EngineSettings("TensorRT", "FP16")
INT8 = EngineSettings("TensorRT", "INT8")


def capabilities(version: str, **more: bool) -> compat.Capabilities:
    flags = dict.fromkeys(
        (f for f in compat.Capabilities.__dataclass_fields__ if f not in ("version", "release")), False
    )
    return compat.Capabilities(version, compat.parse(version), **{**flags, **more})


V8 = capabilities("8.6.0", explicit_batch=True, weak_types=True, calibrators=True, profile_sharing_by_feature=True)
V10 = capabilities("10.16.1.11", strong_typing_by_flag=True, weak_types=True, calibrators=True)
V11 = capabilities("11.4.0.106")


# what TensorRT says


def test_every_error_of_the_parser_is_told_with_node_operator_and_code() -> None:
    problems = [
        messages.ParserProblem("UNSUPPORTED_NODE", "No importer registered for op: Det", "determinant", "Det"),
        messages.ParserProblem("INVALID_NODE", "axis   out\nof range", "squeeze it", "Squeeze"),
    ]
    refused = messages.parser_refuses(problems, "8.6.0")
    assert refused.reason is Reason.OPERATOR_UNSUPPORTED
    assert "node 'determinant' (Det): No importer registered for op: Det [UNSUPPORTED_NODE]" in refused.message
    assert "node 'squeeze it' (Squeeze): axis out of range [INVALID_NODE]" in refused.message
    assert "TensorRT 8.6.0" in refused.message


def test_a_file_that_is_broken_is_no_lack_of_support() -> None:
    problem = messages.ParserProblem("MODEL_DESERIALIZE_FAILED", "Failed to parse the ONNX model")
    assert messages.parser_refuses([problem], "10.16.1").reason is Reason.MODEL_INVALID


def test_many_errors_of_the_parser_are_counted_and_the_first_shown() -> None:
    problems = [messages.ParserProblem("UNSUPPORTED_NODE", "no", f"n{i}", "Foo") for i in range(40)]
    refused = messages.parser_refuses(problems, "8.6.0")
    assert "and 35 more" in refused.message
    assert len(refused.message) < 1000


@pytest.mark.parametrize(
    "text",
    [
        "1: [defaultAllocator.cpp::allocate::31] Error Code 1: Cuda Runtime (out of memory)",
        "2: [virtualMemoryBuffer.cpp::resizePhysical::145] Error Code 2: OutOfMemory (no further information)",
        "Requested amount of GPU memory (17920000000 bytes) could not be allocated.",
    ],
)
def test_lack_of_memory_in_a_build_is_told_apart_whatever_code_it_has(text: str) -> None:
    assert isinstance(messages.build_failed([text], "8.6.0"), OutOfMemory)


def test_a_device_that_fails_during_a_build_is_not_the_models_fault() -> None:
    text = "1: [convolutionRunner.cpp] Error Code 1: Cask (an illegal memory access was encountered)"
    assert isinstance(messages.build_failed([text], "8.6.0"), Sticky)


def test_kernels_that_were_skipped_while_timing_are_no_cause() -> None:
    skipped = "9: Skipping tactic 0x0000000000000000 due to exception Cuda Runtime (invalid argument)"
    failed = messages.build_failed([skipped, "4: [network.cpp::validate::3008] Error Code 4: Internal Error"], "10.3")
    assert isinstance(failed, Rejected)
    assert "Skipping tactic" not in failed.message
    assert failed.reason is Reason.BUILD_FAILED


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("10: [optimizer.cpp::computeCosts::4048] Error Code 10: Internal Error (Could not find any implementation for "
         "node {ForeignNode[/head/Atan]}.)", "{ForeignNode[/head/Atan]}"),
        ("/motion_head/Atan has no runners that implement it", "/motion_head/Atan"),
    ],
)  # fmt: skip
def test_a_node_without_a_kernel_is_named_with_the_way_out(text: str, node: str) -> None:
    failed = messages.build_failed([text], "8.6.0")
    assert isinstance(failed, Rejected)
    assert failed.reason is Reason.OPERATOR_UNSUPPORTED
    assert node in failed.message
    assert "keepPrecision" in failed.message


def test_shapes_that_no_profile_covers_are_a_mismatch_of_profiles() -> None:
    text = "4: [network.cpp::validate::2984] Error Code 4: Internal Error (Network has dynamic or shape inputs, but no "
    failed = messages.build_failed([text + "optimization profile has been defined.)"], "8.6.0")
    assert isinstance(failed, Rejected)
    assert failed.reason is Reason.PROFILE_MISMATCH


def test_the_last_errors_are_kept_and_warnings_are_not() -> None:
    said = Messages()
    for i in range(40):
        said.take("ERROR", f"error {i}")
    said.take("WARNING", "mind the gap")
    assert list(said.errors)[-1] == "error 39"
    assert len(said.errors) == 32


def test_phases_of_a_build_are_told_once_from_the_log_of_8_6() -> None:
    told: list[str] = []
    phases = Phases(told.append)
    for line in ("Graph optimization time: 0.02 seconds.", "Timing Runner: a", "Timing Runner: b", "something else"):
        phases.take(line)
    assert told == ["parsing done, optimising the graph", "timing kernels"]


# precision


@pytest.mark.parametrize(
    ("version", "settings", "method", "quantized", "said"),
    [
        ("8.6.0", EngineSettings("TensorRT", "FP8"), None, False, "FP8 is not built"),
        ("8.6.0", EngineSettings("TensorRT", "BF16"), None, False, "an image with TensorRT 10 or newer"),
        ("11.4.0", EngineSettings("TensorRT", "INT4"), None, False, "INT4 is not built"),
        ("11.4.0", INT8, None, False, "ranges are never guessed"),
        ("8.6.0", FP16, None, True, "set precision INT8"),
        ("8.6.0", INT8, "Percentile", False, "Entropy or MinMax"),
        ("8.6.0", EngineSettings("TensorRT", "FP16", KeepPrecision(("a",), "BF16")), None, False, "kept in FP32"),
    ],
)
def test_what_a_version_lacks_is_refused_with_the_way_out(
    version: str, settings: EngineSettings, method: str | None, quantized: bool, said: str
) -> None:
    with pytest.raises(Rejected, match=said) as refused:
        precision.require(version, settings, method, quantized=quantized)
    assert refused.value.reason is Reason.PRECISION_UNSUPPORTED


@pytest.mark.parametrize(("version", "wanted"), [("8.6.0", "FP16"), ("10.3.0", "BF16"), ("11.4.0", "BF16")])
def test_what_a_version_has_is_let_through(version: str, wanted: str) -> None:
    precision.require(version, EngineSettings("TensorRT", wanted), None, quantized=False)


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    return models.linear(tmp_path / "linear.onnx")


@pytest.mark.parametrize("caps", [V8, V10])
def test_half_precision_is_a_flag_where_there_is_one(caps: compat.Capabilities, linear: Path, tmp_path: Path) -> None:
    how = precision.plan(caps, linear, FP16, None, tmp_path)
    assert (how.path, how.source, how.flags, how.strongly_typed) == ("flags", linear, ("FP16",), False)


def test_half_precision_is_written_into_the_graph_where_there_is_no_flag(linear: Path, tmp_path: Path) -> None:
    how = precision.plan(V11, linear, FP16, None, tmp_path)
    assert (how.path, how.flags, how.strongly_typed) == ("graph", (), True)
    casts = [node for node in onnx.load(how.source).graph.node if node.op_type == "Cast"]
    assert casts


@pytest.mark.parametrize(("caps", "flags", "strong"), [(V8, ("INT8",), False), (V10, (), True), (V11, (), True)])
def test_int8_is_written_into_the_graph_in_every_version(
    caps: compat.Capabilities, flags: tuple[str, ...], strong: bool, linear: Path, tmp_path: Path
) -> None:
    how = precision.plan(caps, linear, INT8, calibration(linear), tmp_path)
    assert (how.path, how.flags, how.strongly_typed) == ("graph", flags, strong)
    graph = onnx.load(how.source).graph
    assert any(node.op_type == "QuantizeLinear" for node in graph.node)
    zeros = [w for w in graph.initializer if w.name.endswith("zero_point")]
    assert zeros
    assert {w.data_type for w in zeros} == {onnx.TensorProto.INT8}


def test_full_precision_leaves_the_file_alone(linear: Path, tmp_path: Path) -> None:
    how = precision.plan(V8, linear, FP32, None, tmp_path)
    assert (how.source, how.flags) == (linear, ())


def test_the_calibrator_is_given_what_is_kept(linear: Path) -> None:
    name = onnx.load(linear).graph.node[0].name
    how = precision.by_calibrator(linear, EngineSettings("TensorRT", "INT8", KeepPrecision((f"^{name}$",))))
    assert (how.calibrate, how.flags, how.keep) == (True, ("INT8",), {name})


FLOAT, HALF, INT32 = "FLOAT", "HALF", "INT32"
TRT: Any = SimpleNamespace(
    DataType=SimpleNamespace(FLOAT=FLOAT, HALF=HALF),
    LayerType=SimpleNamespace(CONSTANT="constant"),
    BuilderFlag=SimpleNamespace(OBEY_PRECISION_CONSTRAINTS="obey"),
)


class Layer:
    def __init__(self, name: str, dtype: str = FLOAT, kind: str = "convolution") -> None:
        self.name, self.type, self.num_outputs, self._dtype = name, kind, 1, dtype
        self.precision = ""
        self.outputs: dict[int, str] = {}

    def get_output(self, _index: int) -> Any:
        return SimpleNamespace(dtype=self._dtype)

    def set_output_type(self, index: int, dtype: str) -> None:
        self.outputs[index] = dtype


class Config:
    def __init__(self) -> None:
        self.flags: list[str] = []

    def set_flag(self, flag: str) -> None:
        self.flags.append(flag)


def network_of(*layers: Layer) -> Any:
    return SimpleNamespace(num_layers=len(layers), get_layer=lambda i: layers[i])


def test_all_layers_of_a_node_are_kept_and_no_others() -> None:
    first, second, other = Layer("/head/norm"), Layer("/head/norm_12"), Layer("/body/conv")
    shape, constant = Layer("/head/norm_3", INT32), Layer("/head/norm_4", kind="constant")
    config = Config()
    network = network_of(first, second, other, shape, constant)
    assert precision.keep_layers(TRT, V8, config, network, frozenset({"/head/norm"})) == 2
    assert [layer.precision for layer in (first, second, other, shape, constant)] == [FLOAT, FLOAT, "", "", ""]
    assert first.outputs == {0: FLOAT}
    assert config.flags == ["obey"]


def test_a_guard_for_what_the_parser_made_no_layer_of_is_refused() -> None:
    with pytest.raises(Rejected, match="made no layer"):
        precision.keep_layers(TRT, V8, Config(), network_of(Layer("/body/conv")), frozenset({"/head/identity"}))


# profiles


class ProfileBuilder:
    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []

    def create_optimization_profile(self) -> Any:
        shapes_of: dict[str, Any] = {}
        self.made.append(shapes_of)

        def set_shape(name: str, low: Any, best: Any, high: Any) -> None:
            if name == "unknown":
                raise RuntimeError("no such input")
            shapes_of[name] = (low, best, high)

        return SimpleNamespace(set_shape=set_shape)


def inputs(*tensors: tuple[str, tuple[int, ...], bool]) -> Any:
    listed = [SimpleNamespace(name=n, shape=s, is_shape_tensor=t) for n, s, t in tensors]
    return SimpleNamespace(num_inputs=len(listed), get_input=lambda i: listed[i])


RANGE = ShapeRange((1, 4), (8, 4), (32, 4))


def add(network: Any, *profiles: Profile, index: int = 0) -> list[dict[str, Any]]:
    builder = ProfileBuilder()
    config = SimpleNamespace(add_optimization_profile=lambda _profile: index)
    shapes.add_profiles(builder, config, network, profiles)
    return builder.made


def test_each_profile_is_given_to_tensorrt_as_it_is() -> None:
    assert add(inputs(("x", (-1, 4), False)), Profile({"x": RANGE})) == [{"x": ((1, 4), (8, 4), (32, 4))}]


def test_fixed_shapes_need_no_profile() -> None:
    assert add(inputs(("x", (2, 4), False))) == []


@pytest.mark.parametrize(
    ("network", "profiles", "index", "said"),
    [
        (inputs(("x", (-1, 4), False)), (), 0, "free dimensions and there is no profile"),
        (inputs(("size", (2,), True)), (), 0, "'size' decide shapes"),
        (inputs(("x", (-1, 4), False)), (Profile({"unknown": RANGE}),), 0, "profile 0: .*'unknown'"),
        (inputs(("x", (-1, 4), False)), (Profile({"x": RANGE}),), -1, "profile 0 does not fit"),
    ],
)
def test_profiles_that_cannot_be_are_refused(
    network: Any, profiles: tuple[Profile, ...], index: int, said: str
) -> None:
    with pytest.raises(Rejected, match=said) as refused:
        add(network, *profiles, index=index)
    assert refused.value.reason is Reason.PROFILE_MISMATCH


# calibration data


def calibration(source: Path) -> CalibrationData:
    names = [(i.name, [d.dim_value for d in i.type.tensor_type.shape.dim][1:]) for i in onnx.load(source).graph.input]
    generator = np.random.default_rng(0)
    batches = [{n: generator.standard_normal((4, *s)).astype(np.float32) for n, s in names} for _ in range(3)]
    return CalibrationData(batches, "MinMax", per_channel=True)


def test_batches_that_were_read_once_can_be_read_again(tmp_path: Path) -> None:
    def once() -> Iterator[Mapping[str, Any]]:
        for i in range(3):
            yield {"x": np.full((2, 2), i)}

    spool = Spool(once(), tmp_path)
    first = next(iter(spool))
    assert first["x"][0, 0] == 0
    assert [batch["x"][0, 0] for batch in spool] == [0, 1, 2]
    assert [batch["x"][0, 0] for batch in spool] == [0, 1, 2]


def floats(device: Device, address: int) -> list[float]:
    return list(np.frombuffer(device.memory[address], np.float32))


def batch(*values: float) -> dict[str, Any]:
    return {"x": np.array(values, np.float32).reshape(-1, 1)}


def test_a_last_batch_that_is_short_is_filled_up_with_its_own_rows() -> None:
    device: Any = Device()
    feed = Feed(device, [batch(1, 2, 3), batch(4)])
    seen = []
    while (places := feed.next(["x"])) is not None:
        seen.append(floats(device, places[0]))
    assert seen == [[1, 2, 3], [4, 4, 4]]
    assert (feed.rows, feed.given, feed.failure) == (3, 2, None)
    feed.release()
    assert device.memory == {}


def test_data_that_fails_half_way_ends_the_feed_and_is_not_lost() -> None:
    def broken() -> Iterator[Mapping[str, Any]]:
        yield batch(1)
        raise Rejected(Reason.DATASET_INVALID, "it cannot be read")

    feed = Feed(Device(), broken())  # type: ignore[arg-type]
    assert feed.next(["x"]) is not None
    assert feed.next(["x"]) is None
    assert str(feed.failure) == "it cannot be read"


def test_samples_of_another_size_are_refused() -> None:
    feed = Feed(Device(), [batch(1), {"x": np.zeros((1, 2), np.float32)}])  # type: ignore[arg-type]
    feed.next(["x"])
    assert feed.next(["x"]) is None
    assert "differ in shape" in str(feed.failure)


def test_no_data_is_no_calibration() -> None:
    with pytest.raises(Rejected, match="ranges are never guessed"):
        Feed(Device(), [])  # type: ignore[arg-type]


# timing caches


class Cache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if other.data == b"refused":
            return False
        self.data += other.data
        return other.data != b"in part"

    def serialize(self) -> bytes:
        return self.data


class TimedConfig:
    def __init__(self) -> None:
        self.cache: Cache | None = None

    def create_timing_cache(self, data: bytes) -> Cache:
        return Cache(data)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self.cache = cache
        return True

    def get_timing_cache(self) -> Cache | None:
        return self.cache


def test_timing_caches_of_this_device_are_merged_and_others_are_left_out(tmp_path: Path) -> None:
    for name, key, data in (("a", "here", b"one"), ("b", "there", b"two"), ("c", "here", b"three")):
        (tmp_path / f"{name}.cache").write_bytes(timing.pack(key, data))
    (tmp_path / "d.cache").write_bytes(b"torn")
    (tmp_path / "e.cache").write_bytes(timing.pack("here", b"refused"))
    config = TimedConfig()
    assert timing.attach(config, tmp_path, "here") == 2
    assert config.cache is not None
    assert config.cache.data == b"onethree"


def test_a_timing_cache_that_is_taken_in_part_counts_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As 8.6 does with a cache of a build that compiled nothing."""
    (tmp_path / "a.cache").write_bytes(timing.pack("here", b"in part"))
    config = TimedConfig()
    assert timing.attach(config, tmp_path, "here") == 1
    assert config.cache is not None
    assert config.cache.data == b"in part"
    assert "a.cache whole" in caplog.text


def test_what_a_build_measured_is_there_for_the_next(tmp_path: Path) -> None:
    config = TimedConfig()
    timing.attach(config, tmp_path / "timing", "here")
    assert config.cache is not None
    config.cache.data = b"measured"
    assert timing.keep(config, tmp_path / "timing", "here") == 8
    assert [path.name for path in (tmp_path / "timing").iterdir()] == ["built.cache"]
    assert timing.attach(other := TimedConfig(), tmp_path / "timing", "here") == 1
    assert other.cache is not None
    assert other.cache.data == b"measured"


# what an engine consists of


def test_layers_are_counted_by_type_and_precision_in_the_words_of_8_and_of_11() -> None:
    old = """{"Layers": [
        {"LayerType": "CaskConvolution", "Inputs": [{"Format/Datatype": "Channel major FP16 where channel % 8"}]},
        {"LayerType": "CaskConvolution", "Inputs": [{"Format/Datatype": "Two wide channel vectorized row major Int8"}]},
        {"LayerType": "Reformat", "Inputs": [{"Format/Datatype": "Row major linear FP32"}]}], "Bindings": ["x"]}"""
    new = """{"Layers": [{"LayerType": "gemm", "Inputs": [{"Format": "Row major", "DataType": "Half"}]},
        {"LayerType": "shape", "Inputs": [{"Format": "Row major", "DataType": "Int64"}]}], "I/O Tensors": []}"""
    assert summary.summary(old) == {
        "layers": "3", "layersByType": "CaskConvolution 2, Reformat 1", "layersByPrecision": "FP16 1, INT8 1, FP32 1",
    }  # fmt: skip
    assert summary.summary(new)["layersByPrecision"] == "FP16 1, other 1"


def test_names_of_nodes_that_are_parted_by_a_control_character_are_read() -> None:
    text = '{"Layers": [{"LayerType": "gemm", "Metadata": "[ONNX Layer: a]\x1e[ONNX Layer: b]", "Inputs": []}]}'
    assert summary.summary(text)["layersByType"] == "gemm 1"


@pytest.mark.parametrize("text", ["", "[]", "no json", '{"Layers": []}'])
def test_an_inspector_that_says_nothing_is_no_error(text: str) -> None:
    assert summary.summary(text) == {}


def test_a_summary_is_short_whatever_the_engine() -> None:
    layers = ",".join(f'{{"LayerType": "kind of layer number {i}", "Inputs": []}}' for i in range(5000))
    assert len(summary.summary(f'{{"Layers": [{layers}]}}')["layersByType"]) < 600


# the builder on a machine that is not for it


def test_the_builder_says_what_a_machine_lacks(linear: Path, tmp_path: Path) -> None:
    assert isinstance(registry.builder("TensorRT"), TensorRtBuilder)
    with pytest.raises(CannotLoad, match=r"cuda-bindings|GPU"):
        TensorRtBuilder().build(linear, FP32, None, tmp_path / "plan")


@pytest.mark.parametrize(("version", "refused"), [("8.6.0", True), ("10.16.1.11", False)])
def test_numbers_of_64_bits_at_inputs_are_refused_where_tensorrt_makes_32_of_them(
    version: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["n", 4])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4])
    cast = onnx.helper.make_node("Cast", ["ids"], ["y"], to=onnx.TensorProto.FLOAT)
    source = tmp_path / "ids.onnx"
    model = onnx.helper.make_model(
        onnx.helper.make_graph([cast], "g", [x], [y]), opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8
    )
    onnx.save(model, source)
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    if refused:
        with pytest.raises(Rejected, match=r"input 'ids' is INT64.*TensorRT 10"):
            TensorRtBuilder().inspect(source)
    else:
        assert TensorRtBuilder().inspect(source).inputs[0].datatype == "INT64"


def test_an_image_without_tensorrt_is_told_before_anything_is_built(
    linear: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking() -> str:
        raise compat.NotInstalled("this image has no TensorRT")

    monkeypatch.setattr(compat, "installed_version", lacking)
    with pytest.raises(Rejected, match="this image has no TensorRT"):
        TensorRtBuilder().inspect(linear)
    with pytest.raises(Rejected, match="this image has no TensorRT"):
        TensorRtBuilder().require(FP32, None, quantized=False)
