"""The Open Inference Protocol v2 over gRPC, against a real worker: what is answered, and what is refused and how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from free_ports import free_port
from gateway_harness import HEALTH, INFERENCE, Caller, calling, infer_request, tensor
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.gateway import health_pb2
from trtmodel_worker.gateway import inference_pb2 as pb
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess

ROW = np.array([[1, 2, 3, 4]], np.float32)
BODY_BYTES = 1_000_000
WIDE = 2 << 20
TYPED = {
    "BOOL": "bool_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents",
}  # fmt: skip


def serve(tmp: Path, behaviour: dict[str, Any], environment: dict[str, str], **publish: Any) -> Iterator[Caller]:
    operator, bucket, port = Operator(), Bucket(tmp / "bucket"), free_port()
    worker = WorkerProcess(tmp / "worker", operator, bucket, TRTMODEL_GRPC_PORT=str(port), **environment)
    digest, _ = bucket.publish(REVISION_1, behaviour, **publish)
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    try:
        worker.wait_ready()
        with calling(port, worker) as caller:
            yield caller
    finally:
        assert worker.stop() == 0, worker.tail()


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """x:FP32[1..8, 4] -> y = 2x; a first value of -1 is an error of the engine."""
    behaviour = {"factor": 2.0, "fault": {"when": -1.0, "do": "crash"}}
    yield from serve(tmp_path_factory.mktemp("doubler"), behaviour, {"TRTMODEL_MAX_BODY_BYTES": str(BODY_BYTES)})


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    """One input and output of each data type, [1..8, 2]."""
    inputs = [TensorSpec(f"x/{n}", n, (-1, 2)) for n in (*TYPED, "FP16")]
    outputs = [TensorSpec(f"y/{n}", n, (-1, 2)) for n in (*TYPED, "FP16")]
    yield from serve(tmp_path_factory.mktemp("everything"), {"factor": 1}, {}, inputs=inputs, outputs=outputs)


def test_server_and_model_say_what_they_are_and_that_they_are_ready(doubler: Caller) -> None:
    assert doubler.call("ServerLive").live
    assert doubler.call("ServerReady").ready
    assert doubler.call("ModelReady", name="m").ready
    assert doubler.call("ModelReady", name="m", version=REVISION_1).ready
    assert not doubler.call("ModelReady", name="m", version="9999999999").ready
    assert not doubler.call("ModelReady", name="n").ready
    assert doubler.call("ServerMetadata").name == "trtmodel"
    described = doubler.call("ModelMetadata", name="m")
    assert (described.name, list(described.versions)) == ("m", [REVISION_1])
    assert [(t.name, t.datatype, list(t.shape)) for t in described.inputs] == [("x", "FP32", [-1, 4])]
    assert [(t.name, t.datatype, list(t.shape)) for t in described.outputs] == [("y", "FP32", [-1, 4])]


def test_raw_in_raw_out_with_id_and_the_revision_that_answered(doubler: Caller) -> None:
    answer, trailing = doubler.infer(infer_request(ROW.tobytes(), id="r-7"))
    assert (answer.model_name, answer.model_version, answer.id) == ("m", REVISION_1, "r-7")
    assert [(t.name, t.datatype, list(t.shape)) for t in answer.outputs] == [("y", "FP32", [1, 4])]
    assert list(answer.raw_output_contents) == [(2 * ROW).tobytes()]
    assert trailing["x-trtmodel-revision"] == REVISION_1


def test_every_data_type_passes_unchanged(everything: Caller) -> None:
    arrays = {n: np.array([[0, 1]] if n == "BOOL" else [[7, 100]], dtype) for n, dtype in DTYPES.items()}
    arrays = {n: arrays[n] for n in (*TYPED, "FP16")}
    expected = [(~a if n == "BOOL" else a).tobytes() for n, a in arrays.items()]
    shapes = {n: tensor(f"x/{n}", n, a.shape) for n, a in arrays.items()}
    raw = pb.ModelInferRequest(
        model_name="m", inputs=shapes.values(), raw_input_contents=[a.tobytes() for a in arrays.values()]
    )
    assert list(everything.infer(raw)[0].raw_output_contents) == expected


@pytest.mark.parametrize("datatype", TYPED)
def test_typed_contents_mean_what_raw_ones_do(datatype: str, typed_worker: Caller) -> None:
    array = np.array([[0, 1]] if datatype == "BOOL" else [[7, 100]], DTYPES[datatype])
    contents = pb.InferTensorContents(**{TYPED[datatype]: array.flatten().tolist()})
    request = pb.ModelInferRequest(
        model_name="m",
        inputs=[tensor(f"x/{n}", n, (1, 2), contents=contents if n == datatype else zeros(n)) for n in TYPED],
    )
    answer, _ = typed_worker.infer(request)
    found = dict(zip([t.name for t in answer.outputs], answer.raw_output_contents, strict=True))
    assert found[f"y/{datatype}"] == (~array if datatype == "BOOL" else array).tobytes()


def zeros(datatype: str) -> pb.InferTensorContents:
    return pb.InferTensorContents(**{TYPED[datatype]: [0, 0]})


@pytest.fixture(scope="module")
def typed_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    inputs = [TensorSpec(f"x/{n}", n, (-1, 2)) for n in TYPED]
    outputs = [TensorSpec(f"y/{n}", n, (-1, 2)) for n in TYPED]
    yield from serve(tmp_path_factory.mktemp("typed"), {"factor": 1}, {}, inputs=inputs, outputs=outputs)


def test_outputs_are_selected_in_the_order_that_is_asked_for(everything: Caller) -> None:
    names = (*TYPED, "FP16")
    request = pb.ModelInferRequest(
        model_name="m",
        inputs=[tensor(f"x/{n}", n, (1, 2)) for n in names],
        raw_input_contents=[np.array([[1, 0]], DTYPES[n]).tobytes() for n in names],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name=n) for n in ("y/INT64", "y/FP16")],
    )
    answer, _ = everything.infer(request)
    assert [t.name for t in answer.outputs] == ["y/INT64", "y/FP16"]
    assert [len(raw) for raw in answer.raw_output_contents] == [16, 4]


def test_a_named_revision_is_asked_directly(doubler: Caller) -> None:
    assert doubler.infer(infer_request(ROW.tobytes(), model_version=REVISION_1))[0].model_version == REVISION_1


def _with(**fields: Any) -> Any:
    request = infer_request(ROW.tobytes())
    for name, value in fields.items():
        request.ClearField(name)
        field = getattr(request, name)
        if isinstance(value, list):
            field.extend(value)
        else:
            setattr(request, name, value)
    return request


FOUR = pb.InferTensorContents(fp32_contents=[1, 2, 3, 4])
REFUSED = {
    "an unknown model": (_with(model_name="n"), "NOT_FOUND", "serves 'm'"),
    "a name that is a path": (_with(model_name="../m"), "NOT_FOUND", "no such model"),
    "no model": (_with(model_name=""), "INVALID_ARGUMENT", "names no model"),
    "a name without end": (_with(model_name="m" * 100_000), "NOT_FOUND", "no name of a model"),
    "an unknown revision": (_with(model_version="9999999999"), "NOT_FOUND", REVISION_1),
    "raw bytes that are too few": (_with(raw_input_contents=[b"1234"]), "INVALID_ARGUMENT", "is 16 bytes"),
    "raw bytes that are too many": (_with(raw_input_contents=[b"1" * 20]), "INVALID_ARGUMENT", "is 16 bytes"),
    "one raw too many": (_with(raw_input_contents=[ROW.tobytes()] * 2), "INVALID_ARGUMENT", "2 raw_input_contents"),
    "one raw too few": (
        _with(inputs=[tensor("x", "FP32", (1, 4)), tensor("z", "FP32", (1, 4))]), "INVALID_ARGUMENT", "too few"),
    "raw and typed": (
        _with(inputs=[tensor("x", "FP32", (1, 4), contents=FOUR)]), "INVALID_ARGUMENT", "although"),
    "no data at all": (_with(raw_input_contents=[]), "INVALID_ARGUMENT", "is 16 bytes"),
    "no inputs": (_with(inputs=[], raw_input_contents=[]), "INVALID_ARGUMENT", "inputs"),
    "an unknown input": (_with(inputs=[tensor("z", "FP32", (1, 4))]), "INVALID_ARGUMENT", "no input 'z'"),
    "another datatype": (_with(inputs=[tensor("x", "FP64", (1, 2))]), "INVALID_ARGUMENT", "takes FP32"),
    "too many rows": (_with(inputs=[tensor("x", "FP32", (9, 4))]), "INVALID_ARGUMENT", "[1..8, 4]"),
    "a negative shape": (_with(inputs=[tensor("x", "FP32", (-1, 4))]), "INVALID_ARGUMENT", "[1..8, 4]"),
    "typed contents without a form": (
        _with(inputs=[tensor("x", "FP16", (1, 4), contents=FOUR)], raw_input_contents=[]),
        "INVALID_ARGUMENT", "raw_input_contents"),
    "a value outside its type": (
        _with(inputs=[tensor("x", "INT8", (1, 1), contents=pb.InferTensorContents(int_contents=[300]))],
              raw_input_contents=[]),
        "INVALID_ARGUMENT", "outside the range of INT8"),
    "an unknown output": (
        _with(outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="z")]), "INVALID_ARGUMENT", "output 'z'"),
    "a body above the model's limit": (
        _with(raw_input_contents=[bytes(BODY_BYTES + 1)]), "RESOURCE_EXHAUSTED", "1,000,000 bytes"),
    "a message above every limit": (_with(raw_input_contents=[bytes(3 << 20)]), "RESOURCE_EXHAUSTED", "than max"),
    "an engine that fails": (
        _with(raw_input_contents=[np.array([[-1, 0, 0, 0]], np.float32).tobytes()]), "INTERNAL", "failed"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_sense_is_refused_with_the_code_and_the_reason(doubler: Caller, what: str) -> None:
    request, code, text = REFUSED[what]
    error = doubler.refused(request)
    assert error.code().name == code, error.details()
    assert text in error.details()
    answer, _ = doubler.infer(infer_request(ROW.tobytes()))
    assert list(answer.raw_output_contents) == [(2 * ROW).tobytes()]


def test_bytes_that_are_no_message_are_refused(doubler: Caller) -> None:
    for method in ("ModelInfer", "ModelMetadata"):
        with pytest.raises(grpc.RpcError) as caught:
            doubler.channel.unary_unary(f"/{INFERENCE}/{method}")(b"\xff\xff\xff", timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_the_worker_does_not_do_is_unimplemented(doubler: Caller) -> None:
    for method in ("CudaSharedMemoryStatus", "TraceSetting", "Nonsense"):
        with pytest.raises(grpc.RpcError) as caught:
            doubler.channel.unary_unary(f"/{INFERENCE}/{method}")(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_models_are_not_loaded_by_requests(doubler: Caller) -> None:
    for method in ("RepositoryModelLoad", "RepositoryModelUnload"):
        with pytest.raises(grpc.RpcError) as caught:
            doubler.call(method, model_name="m")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "TRTModel" in caught.value.details()


def test_a_stream_answers_each_request_in_order_and_outlives_those_that_fail(doubler: Caller) -> None:
    requests = [infer_request((ROW * i).tobytes(), id=str(i)) for i in range(200)]
    requests[100].model_name = "n"
    requests[199].parameters["triton_enable_empty_final_response"].bool_param = True
    answers = list(doubler.stream(iter(requests)))
    assert [a.infer_response.id for a in answers] == [str(i) for i in range(200)]
    assert "no such model" in answers[100].error_message
    for i, answer in enumerate(answers):
        assert list(answer.infer_response.raw_output_contents) == ([(2 * i * ROW).tobytes()] if i != 100 else [])
    assert answers[199].infer_response.parameters["triton_final_response"].bool_param


def test_health_is_told_for_the_server_and_the_service_and_for_nothing_else(doubler: Caller) -> None:
    for service in ("", INFERENCE):
        assert check(doubler, service).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        check(doubler, "another")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def check(caller: Caller, service: str) -> Any:
    return caller.unary("Check", HEALTH)(health_pb2.HealthCheckRequest(service=service), timeout=20)


def test_large_messages_pass_both_ways(tmp_path: Path) -> None:
    """8 MiB: twice what gRPC takes by default."""
    spec = {"inputs": [TensorSpec("x", "FP32", (-1, WIDE))], "outputs": [TensorSpec("y", "FP32", (-1, WIDE))]}
    for caller in serve(tmp_path, {"factor": 2.0}, {"TRTMODEL_CONTEXTS": "1"}, max_rows=2, **spec):
        array = np.arange(WIDE, dtype=np.float32)
        answer, _ = caller.infer(infer_request(array.tobytes(), (1, WIDE)))
        assert answer.raw_output_contents[0] == (2 * array).tobytes()
