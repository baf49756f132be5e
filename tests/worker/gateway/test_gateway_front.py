"""The gateway in front of a scripted front: every status, deadlines, cancellation, and a front that misbehaves."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_harness import (
    HEALTH,
    INFERENCE,
    Asked,
    ScriptedFront,
    gateway_before,
    http_answer,
    infer_request,
    tensor,
)
from trtmodel_worker.gateway import health_pb2
from trtmodel_worker.gateway import inference_pb2 as pb
from worker_harness import eventually

RAW = bytes(16)
CODES = {
    400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 405: "UNIMPLEMENTED", 408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED", 415: "INVALID_ARGUMENT", 500: "INTERNAL",
    503: "UNAVAILABLE", 418: "UNKNOWN",
}  # fmt: skip
ANSWER = {
    "model_name": "m", "model_version": "r1",
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}],
}  # fmt: skip


def live_or(answer: Any) -> Any:
    """For calls other than liveness, which the tests wait with."""

    def choose(asked: Asked) -> bytes | None:
        if asked.target == "/v2/health/live":
            return http_answer(200, {"live": True})
        return answer(asked) if callable(answer) else answer

    return choose


def inferences(front: ScriptedFront) -> list[Asked]:
    return [asked for asked in front.asked if asked.target.endswith("/infer")]


def test_every_status_of_the_front_has_its_code_with_the_front_s_words(front: ScriptedFront) -> None:
    status = 0
    front.answer = live_or(lambda _: http_answer(status, {"error": f"because {status}"}, x_trtmodel_revision="r1"))
    with gateway_before(front) as (caller, _):
        for status, code in CODES.items():
            error = caller.refused(infer_request(RAW))
            way_out = ": raise TRTMODEL_MAX_BODY_BYTES or send less at once" if status == 413 else ""
            assert (error.code().name, error.details()) == (code, f"because {status}{way_out}")
            assert dict(error.trailing_metadata())["x-trtmodel-revision"] == "r1"


def test_who_is_turned_away_for_now_learns_when_to_come_back(front: ScriptedFront) -> None:
    front.answer = live_or(http_answer(503, {"error": "full"}, retry_after="2"))
    with gateway_before(front) as (caller, _):
        trailing = dict(caller.refused(infer_request(RAW)).trailing_metadata())
    assert (trailing["retry-after"], trailing["grpc-retry-pushback-ms"]) == ("2", "2000")


def test_an_error_without_words_is_told_by_its_status(front: ScriptedFront) -> None:
    front.answer = live_or(http_answer(500, ["no object"]))
    with gateway_before(front) as (caller, _):
        assert caller.refused(infer_request(RAW)).details() == "the worker's front answered 500"


def test_a_request_reaches_the_front_as_binary_tensors_with_its_parameters_and_trace(front: ScriptedFront) -> None:
    front.answer = live_or(http_answer(200, ANSWER, RAW))
    request = infer_request(RAW, model="a b", model_version="r/1", id="7")
    request.parameters["flag"].bool_param = True
    request.parameters["count"].int64_param = 3
    request.parameters["big"].uint64_param = 1 << 63
    request.parameters["part"].double_param = 0.5
    request.parameters["word"].string_param = "é"
    request.parameters["binary_data_output"].bool_param = False
    request.inputs[0].parameters["binary_data_size"].int64_param = 3
    request.outputs.add(name="y").parameters["classification"].int64_param = 2
    request.outputs[0].parameters["binary_data"].bool_param = False
    trace = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("tracestate", "a=1"))
    with gateway_before(front) as (caller, _):
        answer, _ = caller.infer(request, metadata=(*trace, ("authorization", "secret")))
    assert answer.id == "7"
    (asked,) = inferences(front)
    assert (asked.method, asked.target) == ("POST", "/v2/models/a%20b/versions/r%2F1/infer")
    assert asked.tail == RAW
    assert {name: asked.headers.get(name) for name, _ in trace} == dict(trace)
    assert "authorization" not in asked.headers
    assert asked.json == {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}],
        "outputs": [{"name": "y", "parameters": {"classification": 2}}],
        "parameters": {
            "flag": True, "count": 3, "big": 1 << 63, "part": 0.5, "word": "é", "binary_data_output": True,
        },
    }  # fmt: skip


def test_an_answer_s_parameters_and_outputs_elsewhere_come_through(front: ScriptedFront) -> None:
    shared = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    document = {
        **ANSWER,
        "parameters": {"flag": True, "count": 3, "part": 0.5, "word": "w", "list": [1]},
        "outputs": [{"name": "z", "datatype": "FP32", "shape": [1, 4], "parameters": shared}, *ANSWER["outputs"]],
    }
    front.answer = live_or(http_answer(200, document, RAW))
    with gateway_before(front) as (caller, _):
        answer, _ = caller.infer(infer_request(RAW))
    assert {k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in answer.parameters.items()} == {
        "flag": True, "count": 3, "part": 0.5, "word": "w",
    }  # fmt: skip
    assert list(answer.raw_output_contents) == [b"", RAW]
    assert answer.outputs[0].parameters["shared_memory_region"].string_param == "r"


def test_inputs_in_shared_memory_need_no_bytes(front: ScriptedFront) -> None:
    front.answer = live_or(http_answer(200, ANSWER, RAW))
    request = infer_request(RAW)
    request.inputs.insert(0, tensor("s", "FP32", (1, 4)))
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 16
    with gateway_before(front) as (caller, _):
        caller.infer(request)
    (asked,) = inferences(front)
    assert [i["parameters"] for i in asked.json["inputs"]] == [
        {"shared_memory_region": "r", "shared_memory_byte_size": 16},
        {"binary_data_size": 16},
    ]
    assert asked.tail == RAW


def test_bytes_tensors_have_the_protocol_s_length_before_each_element(front: ScriptedFront) -> None:
    front.answer = live_or(http_answer(200, ANSWER, RAW))
    contents = pb.InferTensorContents(bytes_contents=[b"ab", b"", b"\xff"])
    request = pb.ModelInferRequest(model_name="m", inputs=[tensor("x", "BYTES", (3,), contents=contents)])
    with gateway_before(front) as (caller, _):
        caller.infer(request)
    assert inferences(front)[0].tail == b"\2\0\0\0ab" + b"\0\0\0\0" + b"\1\0\0\0\xff"


@pytest.mark.parametrize(("own", "deadline", "least", "most"), [
    (None, 100.0, None, None),          # beyond the model's own limit
    (None, 2.0, 1_000_000, 2_125_000),  # rounded up by a sixteenth at most
    (500_000, 2.0, 500_000, 500_000),
    (3_000_000, 2.0, 1_000_000, 2_125_000),
])  # fmt: skip
def test_a_deadline_becomes_the_request_s_time_limit(
    front: ScriptedFront, own: int | None, deadline: float, least: int | None, most: int | None
) -> None:
    front.answer = live_or(http_answer(200, ANSWER, RAW))
    request = infer_request(RAW)
    if own is not None:
        request.parameters["timeout"].int64_param = own
    with gateway_before(front) as (caller, _):
        caller.infer(request, timeout=deadline)
    limit = inferences(front)[0].json["parameters"].get("timeout")
    assert limit is None if least is None else least <= limit <= most


def test_a_deadline_that_passes_closes_the_connection_to_the_front(front: ScriptedFront) -> None:
    front.answer = live_or(b"")
    with gateway_before(front) as (caller, _):
        error = caller.refused(infer_request(RAW), timeout=0.3)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: front.left == 1, "the front sees its client leave")


def test_a_caller_that_gives_up_closes_the_connection_to_the_front(front: ScriptedFront) -> None:
    front.answer = live_or(b"")
    with gateway_before(front) as (caller, _):
        call = caller.unary("ModelInfer").future(infer_request(RAW), timeout=60)
        eventually(lambda: inferences(front), "the front was asked")
        call.cancel()
        eventually(lambda: front.left == 1, "the front sees its client leave")


def test_a_stream_that_is_given_up_closes_all_of_its_connections_to_the_front(front: ScriptedFront) -> None:
    front.answer = live_or(b"")
    with gateway_before(front) as (caller, _):
        stream = caller.stream(infer_request(RAW) for _ in range(5))
        eventually(lambda: len(inferences(front)) == 5, "the front was asked")
        stream.cancel()
        eventually(lambda: front.left == 5, "the front sees its client leave")


def test_connections_to_the_front_are_kept(front: ScriptedFront) -> None:
    front.answer = live_or(http_answer(200, ANSWER, RAW))
    with gateway_before(front) as (caller, _):
        made = front.connections
        for _ in range(20):
            caller.infer(infer_request(RAW))
        assert front.connections == made


def test_a_connection_that_the_front_closed_as_idle_fails_no_request(front: ScriptedFront) -> None:
    closed: list[Asked] = []

    def answer(asked: Asked) -> bytes | None:
        if len(inferences(front)) % 3 == 0 and not (closed and closed[-1] is inferences(front)[-2]):
            closed.append(asked)
            return None  # as if it had been closed while the request was on its way
        return http_answer(200, ANSWER, RAW)

    front.answer = live_or(answer)
    with gateway_before(front) as (caller, _):
        for _ in range(12):
            caller.infer(infer_request(RAW))
    assert closed


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\nconnection: close\r\n\r\nhalf of it",
    b"connection: close\r\n\r\n",
    b"\x00" * 100_000 + b"connection: close",
    b"HTTP/1.1 two OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
])  # fmt: skip
def test_a_front_that_breaks_off_or_speaks_nonsense_is_unavailable(front: ScriptedFront, answer: bytes) -> None:
    front.answer = live_or(answer)
    with gateway_before(front) as (caller, _):
        assert caller.refused(infer_request(RAW)).code() is grpc.StatusCode.UNAVAILABLE
        front.answer = live_or(http_answer(200, ANSWER, RAW))
        assert caller.infer(infer_request(RAW))[0].model_version == "r1"


def test_a_front_that_is_not_there_is_unavailable(front: ScriptedFront) -> None:
    with gateway_before(front) as (caller, _):
        front.answer = lambda _: None  # what was connected is closed
        front.close()
        Path(front.path).unlink()
        error = caller.refused(infer_request(RAW))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "cannot be reached" in error.details()


def test_an_answer_in_pieces_is_put_together(front: ScriptedFront) -> None:
    size = 3 << 20
    output = {"name": "y", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    tail = bytes(range(256)) * (size // 256)
    front.answer = live_or(http_answer(200, {**ANSWER, "outputs": [output]}, tail))
    with gateway_before(front) as (caller, _):
        assert list(caller.infer(infer_request(RAW))[0].raw_output_contents) == [tail]


def test_health_follows_readiness_and_is_not_serving_once_the_gateway_is_told_to_end(front: ScriptedFront) -> None:
    statuses = health_pb2.HealthCheckResponse
    ready = threading.Event()
    front.answer = live_or(lambda _: http_answer(200 if ready.is_set() else 503, {"ready": ready.is_set()}))
    with gateway_before(front) as (caller, pid):
        watch = caller.channel.unary_stream(
            f"/{HEALTH}/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=statuses.FromString,
        )
        seen = watch(health_pb2.HealthCheckRequest(service=INFERENCE), timeout=60)
        assert next(seen).status == statuses.NOT_SERVING
        assert not caller.call("ServerReady").ready
        assert not caller.call("ModelReady", name="m").ready
        ready.set()
        assert next(seen).status == statuses.SERVING
        assert caller.call("ServerReady").ready
        unknown = watch(health_pb2.HealthCheckRequest(service="another"), timeout=60)
        assert next(unknown).status == statuses.SERVICE_UNKNOWN
        terminate(pid)
        assert [answer.status for answer in seen] == [statuses.NOT_SERVING]


def test_told_to_end_it_answers_what_it_has_and_ends_streams(front: ScriptedFront) -> None:
    go_on = threading.Event()

    def answer(_: Asked) -> bytes:
        go_on.wait(30)
        return http_answer(200, ANSWER, RAW)

    front.answer = live_or(answer)
    with gateway_before(front, request_seconds=30.0, finish_seconds=40.0) as (caller, pid):
        more = threading.Event()

        def requests() -> Any:
            yield infer_request(RAW, id="1")
            more.wait(30)

        stream = caller.stream(requests())
        call = caller.unary("ModelInfer").future(infer_request(RAW), timeout=60)
        eventually(lambda: len(inferences(front)) == 2, "the front was asked")
        terminate(pid)
        eventually(lambda: refuses(caller.port), "nothing more is accepted")
        go_on.set()
        assert call.result(30).model_version == "r1"
        assert next(stream).infer_response.id == "1"
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        more.set()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "anew" in caught.value.details()


def terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=20).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.long
def test_connections_are_asked_to_leave_while_calls_are_accepted_so_that_none_fails(front: ScriptedFront) -> None:
    """The client calls without pause until its connection was asked to leave: then a Service would lead elsewhere."""
    front.answer = live_or(http_answer(200, ANSWER, RAW))

    def answered() -> bool:
        return bool(caller.infer(infer_request(RAW))[0].model_version == "r1")

    with gateway_before(front, finish_seconds=20.0) as (caller, pid):
        caller.call_until_asked_to_leave(answered, oldest=12.0)
        terminate(pid)
        caller.call_until_asked_to_leave(answered, oldest=12.0)
        eventually(lambda: refuses(caller.port), "it ends")


def test_the_model_s_description_statistics_and_index_are_taken_over(front: ScriptedFront) -> None:
    duration = {"count": 3, "ns": 4}
    documents = {
        "/v2/models/m/config": {
            "name": "m", "platform": "onnxruntime_onnx", "max_batch_size": 8, "something_new": [1],
            "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
            "output": [{"name": "y", "data_type": "TYPE_INT64", "dims": [-1]}],
        },
        "/v2/models/m/versions/r1/stats": {
            "model_stats": [{"name": "m", "version": "r1", "inference_count": 5, "execution_count": 2,
                             "inference_stats": {"success": duration, "queue": duration},
                             "batch_stats": [{"batch_size": 2, "compute_infer": duration}]}],
        },
        "/v2/models/stats": {"model_stats": []},
        "/v2/repository/index": [{"name": "m", "version": "r1", "state": "READY"}],
        "/v2/systemsharedmemory/status": [{"name": "r", "key": "/k", "offset": 1, "byte_size": 2}],
        "/v2/systemsharedmemory/region/a%2Fb/register": {},
        "/v2/systemsharedmemory/region/r/unregister": {},
        "/v2/systemsharedmemory/unregister": {},
    }  # fmt: skip
    front.answer = live_or(lambda asked: http_answer(200, documents[asked.target]))
    with gateway_before(front) as (caller, _):
        config = caller.call("ModelConfig", name="m").config
        assert (config.max_batch_size, config.input[0].data_type, list(config.output[0].dims)) == (8, 11, [-1])
        (statistics,) = caller.call("ModelStatistics", name="m", version="r1").model_stats
        assert (statistics.inference_count, statistics.inference_stats.queue.ns) == (5, 4)
        assert statistics.batch_stats[0].batch_size == 2
        assert list(caller.call("ModelStatistics").model_stats) == []
        assert caller.call("RepositoryIndex", ready=True).models[0].state == "READY"
        assert caller.call("SystemSharedMemoryStatus").regions["r"].byte_size == 2
        caller.call("SystemSharedMemoryRegister", name="a/b", key="/k", offset=4, byte_size=8)
        caller.call("SystemSharedMemoryUnregister", name="r")
        caller.call("SystemSharedMemoryUnregister")
        with pytest.raises(grpc.RpcError) as caught:
            caller.call("SystemSharedMemoryRegister", key="/k")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    sent = {asked.target: asked.json for asked in front.asked if asked.method == "POST"}
    assert sent["/v2/repository/index"] == {"ready": True}
    assert sent["/v2/systemsharedmemory/region/a%2Fb/register"] == {"key": "/k", "offset": 4, "byte_size": 8}
