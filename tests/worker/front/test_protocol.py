"""The Open Inference Protocol v2 over REST, against a real worker: what is answered, and what is refused and how."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protocol_harness import INFER, serve
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.engines.base import DTYPES
from worker_harness import (
    REVISION_1,
    WorkerProcess,
    binary_fp32,
    binary_request,
    eventually,
    fp32,
)

NUMBERS = {name: dtype for name, dtype in DTYPES.items() if name != "BYTES"}


@pytest.fixture(scope="module")
def doubler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """x:FP32[1..8, 4] -> y = 2x, with small limits."""
    limits = {
        "TRTMODEL_MAX_BODY_BYTES": "1000000",
        "TRTMODEL_MAX_JSON_BYTES": "100000",
        "TRTMODEL_STAGING_BYTES": "1200000",
    }
    yield from serve(tmp_path_factory.mktemp("doubler"), {"factor": 2.0}, limits)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """One input and output of each data type, [1..8, 2]."""
    names = ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")
    inputs = [TensorSpec(f"x/{n}", n, (-1, 2)) for n in names]
    outputs = [TensorSpec(f"y:{n}", n, (-1, 2)) for n in names]
    yield from serve(tmp_path_factory.mktemp("everything"), {"factor": 1}, {}, inputs=inputs, outputs=outputs)


def still_answers(worker: WorkerProcess) -> None:
    answer = worker.infer_rows([[1, 2, 3, 4]])
    assert (answer.status, answer.json["outputs"][0]["data"]) == (200, [2, 4, 6, 8])


def test_the_server_says_what_it_is_and_that_it_lives(doubler: WorkerProcess) -> None:
    assert doubler.get("/v2").json["extensions"] == ["binary_tensor_data", "model_configuration"]
    assert doubler.get("/v2/health/live").json == {"live": True}
    assert doubler.get("/v2/health/ready").json == {"ready": True}


@pytest.mark.parametrize("path", ["/v2/models/m", f"/v2/models/m/versions/{REVISION_1}"])
def test_the_model_describes_itself(doubler: WorkerProcess, path: str) -> None:
    answer = doubler.get(path)
    assert answer.revision == REVISION_1
    assert answer.json["versions"] == [REVISION_1]
    assert answer.json["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert answer.json["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]
    assert doubler.get(path + "/ready").status == 200


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6, 7, 8.5], [[1, 2, 3, 4], [5, 6, 7, 8.5]]])
def test_json_in_and_out_flat_or_nested(doubler: WorkerProcess, data: Any) -> None:
    answer = doubler.infer(fp32(data, [2, 4], id="r-7"))
    assert answer.status == 200
    assert answer.revision == REVISION_1
    assert answer.json == {
        "model_name": "m",
        "model_version": REVISION_1,
        "id": "r-7",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 4], "data": [2, 4, 6, 8, 10, 12, 14, 17]}],
    }


def test_a_named_revision_is_asked_directly_and_an_unknown_one_is_not_found(doubler: WorkerProcess) -> None:
    assert doubler.infer_rows([[1] * 4], f"/v2/models/m/versions/{REVISION_1}/infer").status == 200
    answer = doubler.infer_rows([[1] * 4], "/v2/models/m/versions/9999999999/infer")
    assert answer.status == 404
    assert REVISION_1 in answer.json["error"]


def test_binary_in_and_out(doubler: WorkerProcess) -> None:
    body, headers = binary_fp32(
        [1, 2, 3, 4], [1, 4], id="b", outputs=[{"name": "y", "parameters": {"binary_data": True}}]
    )
    answer = doubler.post(INFER, body, **headers)
    assert answer.status == 200
    length = int(answer.headers["inference-header-content-length"])
    assert struct.unpack("<4f", answer.body[length:]) == (2, 4, 6, 8)
    assert json.loads(answer.body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert json.loads(answer.body[:length])["id"] == "b"


def test_binary_in_json_out_and_json_in_binary_out(doubler: WorkerProcess) -> None:
    body, headers = binary_fp32([1, 2, 3, 4], [1, 4])
    assert doubler.post(INFER, body, **headers).json["outputs"][0]["data"] == [2, 4, 6, 8]
    answer = doubler.infer(fp32([1, 2, 3, 4], [1, 4], parameters={"binary_data_output": True}))
    assert answer.body[int(answer.headers["inference-header-content-length"]) :] == struct.pack("<4f", 2, 4, 6, 8)


def test_every_data_type_passes_unchanged_both_ways(everything: WorkerProcess) -> None:
    tensors, blobs, expected = [], [], {}
    for name, dtype in NUMBERS.items():
        array = np.array([[0, 1]], dtype) if name == "BOOL" else np.array([[7, 100]], dtype)
        blobs.append(array.tobytes())
        expected[f"y:{name}"] = (~array if name == "BOOL" else array).tobytes()
        parameters = {"binary_data_size": len(blobs[-1])}
        tensors.append({"name": f"x/{name}", "datatype": name, "shape": [1, 2], "parameters": parameters})
    body, headers = binary_request({"inputs": tensors, "parameters": {"binary_data_output": True}}, *blobs)
    answer = everything.post(INFER, body, **headers)
    assert answer.status == 200, answer.body
    length = int(answer.headers["inference-header-content-length"])
    at = length
    for output in json.loads(answer.body[:length])["outputs"]:
        size = output["parameters"]["binary_data_size"]
        assert answer.body[at : at + size] == expected[output["name"]], output["name"]
        at += size
    assert at == len(answer.body)


def all_but_fp16(everything: WorkerProcess, **data: Any) -> Any:
    """A request in JSON, FP16 as binary data, with `data` by data type."""
    tensors = []
    for name in NUMBERS:
        tensor: dict[str, Any] = {"name": f"x/{name}", "datatype": name, "shape": [1, 2]}
        if name == "FP16" and "FP16" not in data:
            tensor["parameters"] = {"binary_data_size": 4}
        else:
            tensor["data"] = data.get(name, [False, True] if name == "BOOL" else [0, 1])
        tensors.append(tensor)
    body, headers = binary_request({"inputs": tensors, "id": "t"}, *([] if "FP16" in data else [b"\0\0\0\x3c"]))
    return everything.post(INFER, body, **headers)


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("UINT8", [256, 0]), ("UINT8", [-1, 0]), ("INT8", [-129, 0]), ("INT16", [40000, 0]), ("UINT64", [-1, 0]),
        ("UINT64", [2**64, 0]), ("INT64", [2**63, 0]), ("INT32", [1.0, 0]), ("INT32", [True, False]),
        ("INT32", ["1", "2"]), ("FP32", [None, 1]), ("FP32", ["1.5", "2"]), ("FP32", [1e39, 0]),
        ("FP64", [True, False]),
        ("FP32", [[1], [2]]), ("FP32", [[1, 2, 3], [4]]), ("FP32", {"0": 1}), ("FP32", 7), ("FP32", None),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_their_data_type_are_refused(
    everything: WorkerProcess, datatype: str, data: Any
) -> None:
    answer = all_but_fp16(everything, **{datatype: data})
    assert answer.status == 400, answer.body
    assert f"x/{datatype}" in answer.json["error"]
    assert answer.json["id"] == "t"


@pytest.mark.parametrize(
    ("datatype", "data"),
    [("UINT64", [2**64 - 1, 0]), ("INT64", [2**63 - 1, -(2**63)]), ("INT8", [-128, 127]), ("FP64", [1e300, -0.1])],
)
def test_extreme_values_pass_exactly(everything: WorkerProcess, datatype: str, data: Any) -> None:
    answer = all_but_fp16(everything, **{datatype: data})
    length = int(answer.headers["inference-header-content-length"])
    outputs = {o["name"]: o for o in json.loads(answer.body[:length])["outputs"]}
    assert outputs[f"y:{datatype}"]["data"] == data


def test_A03_bool_is_true_and_false_in_json_and_never_a_number(everything: WorkerProcess) -> None:
    answer = all_but_fp16(everything, BOOL=[True, False])
    length = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.body[:length])["outputs"][0]["data"] == [False, True]
    refused = all_but_fp16(everything, BOOL=[1, 0])
    assert (refused.status, "true and false" in refused.json["error"]) == (400, True)


def test_B01_infinity_and_nan_have_no_json_form_but_a_binary_one(tmp_path: Path) -> None:
    for worker in serve(tmp_path, {"mode": "inf"}, {}):
        answer = worker.infer_rows([[1, 2, 3, 4]])
        assert answer.status == 500
        assert "'y'" in answer.json["error"]
        assert "non-finite" in answer.json["error"]
        answer = worker.infer(fp32([1, 2, 3, 4], [1, 4], parameters={"binary_data_output": True}))
        assert struct.unpack("<4f", answer.body[-16:]) == (float("inf"),) * 4


X = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
BLOB = struct.pack("<4f", 1, 2, 3, 4)


@pytest.mark.parametrize("length", [None, "whole", "+1", "-5", "abc", "0", "1e2", "99999999999999999999"])
def test_B03_a_wrong_header_length_is_refused_with_a_hint_and_the_connection_lives(
    doubler: WorkerProcess, length: str | None
) -> None:
    import http.client

    head = json.dumps({"inputs": [{**X, "parameters": {"binary_data_size": 16}}]}).encode()
    body = head + BLOB
    value = {"whole": str(len(body)), "+1": str(len(body) + 1)}.get(length or "", length)
    headers = {} if value is None else {"Inference-Header-Content-Length": value}
    connection = http.client.HTTPConnection("127.0.0.1", doubler.port, timeout=10)
    connection.request("POST", INFER, body, headers)
    refused = connection.getresponse()
    error = json.loads(refused.read())["error"]
    assert refused.status == 400
    assert "Inference-Header-Content-Length" in error or "binary_data_size" in error
    connection.request("POST", INFER, body, {"Inference-Header-Content-Length": str(len(head))})
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["outputs"][0]["data"]) == (200, [2, 4, 6, 8])
    connection.close()


@pytest.mark.parametrize(
    "tensor",
    [
        {**X, "parameters": {"binary_data_size": 12}},
        {**X, "parameters": {"binary_data_size": 20}},
        {**X, "parameters": {"binary_data_size": "16"}},
        {**X, "parameters": {"binary_data_size": True}},
        {**X, "parameters": {"binary_data_size": 16}, "data": [1, 2, 3, 4]},
        {**X},
        {**X, "data": [1, 2, 3, 4]},  # and 16 bytes that nobody announced
    ],
)
def test_B03_binary_sizes_must_agree_with_shape_and_body(doubler: WorkerProcess, tensor: Any) -> None:
    body, headers = binary_request({"inputs": [tensor], "id": "q"}, BLOB)
    answer = doubler.post(INFER, body, **headers)
    assert (answer.status, answer.json["id"]) == (400, "q")
    assert "binary" in answer.json["error"]
    still_answers(doubler)


def test_B04_half_precision_is_binary_only_and_says_so(everything: WorkerProcess) -> None:
    answer = all_but_fp16(everything, FP16=[1.5, 2.5])
    assert answer.status == 400
    assert "binary" in answer.json["error"]


def test_B04_half_precision_outputs_are_binary_also_when_json_was_asked_for(everything: WorkerProcess) -> None:
    answer = all_but_fp16(everything)
    length = int(answer.headers["inference-header-content-length"])
    outputs = {o["name"]: o for o in json.loads(answer.body[:length])["outputs"]}
    assert outputs["y:FP16"]["parameters"] == {"binary_data_size": 4}
    assert outputs["y:FP32"]["data"] == [0, 1]
    assert answer.body[length:] == b"\0\0\0\x3c"


def test_B06_a_bomb_of_bytes_elements_is_refused(doubler: WorkerProcess) -> None:
    head = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 900_000}}]}
    body, headers = binary_request(head, bytes(900_000))
    answer = doubler.post(INFER, body, **headers)
    assert answer.status == 400
    assert "BYTES" in answer.json["error"]


def test_B07_a_shape_that_lies_never_reaches_a_neighbour(doubler: WorkerProcess) -> None:
    stop, wrong = threading.Event(), []

    def liar() -> None:
        while not stop.is_set():
            lies = ([1.0] * 7, [[1.0] * 7], [[1.0, 2.0], [3.0, 4.0]])
            wrong.extend(data for data in lies if doubler.infer(fp32(data, [1, 4])).status != 400)

    thread = threading.Thread(target=liar)
    thread.start()
    for i in range(300):
        values = [100.0 + i, 101.0, 102.0, 103.0]
        answer = doubler.infer(fp32(values, [1, 4]))
        assert answer.json["outputs"][0]["data"] == [2 * v for v in values]
    stop.set()
    thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("body", "request_id"),
    [
        (b'{"id":"i","inputs":[{"name":"x","datatype":"FP32","shape":"-1","data":[1,2,3,4]}]}', "i"),
        (b'{"id":"i","inputs":[{"name":"x","datatype":"STRING","shape":[1,4],"data":[1,2,3,4]}]}', "i"),
        (b'{"id":"i","inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[{"b64":"eA=="}]}]}', "i"),
        (b'{"id":"i","inputs":[{"name":"x","datatype":"FP32","shape":[1,4.0],"data":[1,2,3,4]}]}', "i"),
        (b'{"id":"i","inputs":[{"name":"x","datatype":"FP32","shape":[true,4],"data":[1,2,3,4]}]}', "i"),
        (b'{"id":"i","inputs":[{"name":["x"],"datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}', "i"),
        (b'{"id":"i","inputs":{"x":[1]}}', "i"),
        (b'{"id":"i","inputs":[]}', "i"),
        (b'{"id":"i","inputs":["x"]}', "i"),
        (b'{"id":"i","instances":[[1]]}', "i"),
        (b'{"id":"i","parameters":7,"inputs":[]}', "i"),
        (b'{"id":7,"inputs":[]}', None),
        (b"[]", None),
        (b"null", None),
        (b"[" * 90_000, None),
        (b'{"id":"a","id":"b","inputs":[]}', None),
        ('{"inputs":[]}'.encode("utf-16"), None),
        (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[NaN,1,2,3]}]}', None),
        (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1' + b"0" * 5000 + b",1,2,3]}]}", None),
        (b"", None),
    ],
)  # fmt: skip
def test_B09_json_of_the_wrong_kind_is_refused_and_names_the_request(
    doubler: WorkerProcess, body: bytes, request_id: str | None
) -> None:
    answer = doubler.post(INFER, body)
    assert answer.status == 400, answer.body
    assert answer.json["error"]
    assert answer.json.get("id") == request_id
    still_answers(doubler)


@pytest.mark.parametrize("rows", [9, 0, 1000])
def test_B10_a_batch_outside_the_profile_is_the_clients_error(doubler: WorkerProcess, rows: int) -> None:
    before = doubler.report().models["m"].windows
    answer = doubler.infer(fp32([1.0] * (4 * rows), [rows, 4]))
    assert answer.status == 400
    assert "'x'" in answer.json["error"]
    assert "1..8" in answer.json["error"]
    assert doubler.report().models["m"].windows == before, "a client's error is no attempt"


def test_B10_many_batches_of_three_at_once_all_succeed(doubler: WorkerProcess) -> None:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append((i, doubler.infer_rows([[i] * 4] * 3)))) for i in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(a.status == 200 and a.json["outputs"][0]["data"] == [2 * i] * 12 for i, a in answers)


def raw(worker: WorkerProcess, data: bytes, seconds: float = 10.0) -> bytes:
    """Everything that the server says to `data` until it closes or falls silent."""
    with socket.create_connection(("127.0.0.1", worker.port), timeout=seconds) as s:
        s.sendall(data)
        return s.recv(65536)


def test_B12_a_body_above_the_limit_is_refused_before_it_is_sent(doubler: WorkerProcess) -> None:
    said = raw(doubler, b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Length: 1000001\r\n"
                        b"Inference-Header-Content-Length: 10\r\n\r\n{")  # fmt: skip
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b"1,000,000" in said
    said = raw(doubler, b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Length: 1000001\r\n"
                        b"Expect: 100-continue\r\n\r\n")  # fmt: skip
    assert said.startswith(b"HTTP/1.1 413 ")


def test_B12_large_json_is_refused_with_the_way_out(doubler: WorkerProcess) -> None:
    answer = doubler.post(INFER, b" " * 200_000)
    assert answer.status == 413
    assert "binary" in answer.json["error"]


def test_B12_expect_100_continue_is_honoured(doubler: WorkerProcess) -> None:
    body = json.dumps(fp32([1, 2, 3, 4], [1, 4])).encode()
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(
        body
    )
    with socket.create_connection(("127.0.0.1", doubler.port), timeout=10) as s:
        s.sendall(head)
        assert s.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        s.sendall(body)
        assert s.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_B12_chunked_bodies_work_up_to_the_limit(doubler: WorkerProcess) -> None:
    body, headers = binary_fp32([1.0] * 32, [8, 4])
    lines = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in headers.items()).encode()
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nTransfer-Encoding: chunked\r\n" + lines + b"\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(body[i : i + 7]), body[i : i + 7]) for i in range(0, len(body), 7))
    assert raw(doubler, head + chunks + b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    too_much = b"".join(b"10000\r\n%b\r\n" % bytes(0x10000) for _ in range(16))
    assert raw(doubler, head + too_much).startswith(b"HTTP/1.1 413 ")
    still_answers(doubler)


def test_bodies_held_at_once_are_bounded_and_their_room_is_given_back(doubler: WorkerProcess) -> None:
    head = (
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Length: 900000\r\n"
        b"Inference-Header-Content-Length: 10\r\n\r\n"
    )
    for _ in range(3):  # one after the other they all have room
        assert raw(doubler, head + bytes(900_000)).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", doubler.port), timeout=10) as first:
        first.sendall(head + b"{")
        eventually(lambda: raw(doubler, head).startswith(b"HTTP/1.1 503 "), "there is no room for a second one")
        still_answers(doubler)
    eventually(lambda: raw(doubler, head + bytes(900_000)).startswith(b"HTTP/1.1 400 "), "the first one left")


@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        ({"timeout": 5_000_000}, 200),
        ({"priority": 1, "foo": 1}, 200),
        ({"timeout": "soon"}, 400),
        ({"timeout": 0}, 400),
    ],
)
def test_B15_parameters_are_honoured_ignored_or_refused_as_documented(
    doubler: WorkerProcess, parameters: Any, status: int
) -> None:
    assert doubler.infer(fp32([1, 2, 3, 4], [1, 4], parameters=parameters)).status == status


def test_B15_a_timeout_bounds_the_whole_request(tmp_path: Path) -> None:
    for worker in serve(tmp_path, {"slow": {"width": 4, "seconds": 0.5}}, {}):
        answer = worker.infer(fp32([5, 6, 7, 8], [1, 4], parameters={"timeout": 100_000}))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        counts = next(iter(worker.report().models["m"].windows[""].values()))
        assert counts.abandoned == 1


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/v1/models/m:predict", {}, 404),
        ("POST", "/v2/models/m/infer", {}, 400),
        ("GET", "/v2/models/m/infer", {}, 405),
        ("POST", "/v2/health/ready", {}, 405),
        ("POST", "/v2/models/m/infer", {"content-type": "text/xml"}, 415),
        ("POST", "/v2/models/m/infer", {"content-encoding": "br"}, 415),
        ("POST", "/v2/models/other/infer", {}, 404),
        ("POST", "/v2/models/%ff/infer", {}, 404),
        ("GET", "/", {}, 404),
        ("GET", "/v2/models", {}, 404),
        ("PUT", "/v2/repository/models/m/load", {}, 405),
    ],
)
def test_B19_another_protocol_is_told_in_one_line_which_one_is_spoken(
    doubler: WorkerProcess, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    from worker_harness import request

    answer = request(doubler.port, method, path, b'{"instances":[[1]]}' if method == "POST" else b"", headers)
    assert answer.status == status
    assert "\n" not in answer.json["error"]
    assert "Open Inference Protocol v2" in answer.json["error"] or status in (400, 404, 415)


def test_G04_no_series_comes_from_what_clients_send(doubler: WorkerProcess) -> None:
    doubler.get("/never-seen-before")
    doubler.infer(fp32([1], [1], id="x"), "/v2/models/unknown/infer")
    doubler.infer({"inputs": [{"name": "nope", "datatype": "FP32", "shape": [1], "data": [1]}]})
    before = [line.rpartition(" ")[0] for line in doubler.metrics().splitlines()]
    for i in range(200):
        doubler.get(f"/{i}")
        doubler.infer(fp32([1], [1], id=f"id-{i}"), f"/v2/models/{i}/infer")
        doubler.infer({"inputs": [{"name": f"wrong-{i}", "datatype": "FP32", "shape": [1], "data": [1]}]})
    after = [line.rpartition(" ")[0] for line in doubler.metrics().splitlines()]
    assert before == after


def wait_until_busy(worker: WorkerProcess) -> None:
    busy = f'trtmodel_lanes_busy{{revision="{REVISION_1}"}} 1.0'
    eventually(lambda: busy in worker.metrics(), "the lane is busy")


def test_G06_health_answers_while_all_lanes_are_busy(tmp_path: Path) -> None:
    environment = {"TRTMODEL_REQUEST_TIMEOUT_SECONDS": "30", "TRTMODEL_CONTEXTS": "1"}
    for worker in serve(tmp_path, {"slow": {"width": 4, "seconds": 2.0}}, environment):
        running = threading.Thread(target=worker.infer_rows, args=([[5.0] * 4],))
        running.start()
        wait_until_busy(worker)
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert worker.get(path).status == 200
        assert running.is_alive()
        running.join()


def test_a_pipeline_of_requests_is_answered_in_order(doubler: WorkerProcess) -> None:
    one = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Length: %d\r\n\r\n%b"
    bodies = [json.dumps(fp32([i] * 4, [1, 4], id=str(i))).encode() for i in range(100)]
    with socket.create_connection(("127.0.0.1", doubler.port), timeout=10) as s:
        s.sendall(b"".join(one % (len(b), b) for b in bodies))
        said = b""
        while said.count(b'"outputs"') < 100:
            more = s.recv(65536)
            assert more, said[-500:]
            said += more
    ids = [int(part.split(b'"')[0]) for part in said.split(b'"id":"')[1:]]
    assert ids == list(range(100))


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\r\n\r\nfoo bar baz\r\n\r\n",
    ],
)  # fmt: skip
def test_what_is_not_http_gets_400_and_harms_nobody(doubler: WorkerProcess, garbage: bytes) -> None:
    assert raw(doubler, garbage).startswith(b"HTTP/1.1 400 ")
    still_answers(doubler)


def test_an_endless_head_is_cut_off(doubler: WorkerProcess) -> None:
    assert raw(doubler, b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000).startswith(b"HTTP/1.1 431 ")
    still_answers(doubler)


def test_an_offered_upgrade_is_ignored(doubler: WorkerProcess) -> None:
    body = json.dumps(fp32([1, 2, 3, 4], [1, 4])).encode()
    head = (
        b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    with socket.create_connection(("127.0.0.1", doubler.port), timeout=10) as s:
        for _ in range(2):
            s.sendall(head + body)
            assert s.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_http_1_0_clients_get_the_connection_that_they_ask_for(doubler: WorkerProcess) -> None:
    said = raw(doubler, b"GET /v2/health/live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    assert b"connection: keep-alive" in said
    with socket.create_connection(("127.0.0.1", doubler.port), timeout=10) as s:
        s.sendall(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
        said = b""
        while more := s.recv(1000):
            said += more
    assert b"connection: close" in said


def test_only_the_outputs_asked_for_are_sent(everything: WorkerProcess) -> None:
    tensors = [
        {"name": f"x/{n}", "datatype": n, "shape": [1, 2], "parameters": {"binary_data_size": 2 * d.itemsize}}
        for n, d in NUMBERS.items()
    ]
    blobs = [bytes(2 * d.itemsize) for d in NUMBERS.values()]
    wanted = [{"name": "y:INT64"}, {"name": "y:FP32"}]
    body, headers = binary_request({"inputs": tensors, "outputs": wanted}, *blobs)
    answer = everything.post(INFER, body, **headers)
    assert [o["name"] for o in answer.json["outputs"]] == ["y:INT64", "y:FP32"]
    for bad in (
        [{"name": "z"}],
        [{"name": "y:FP32"}] * 2,
        [],
        "y",
        [{"name": "y:FP32", "parameters": {"classification": 3}}],
    ):
        body, headers = binary_request({"inputs": tensors, "outputs": bad}, *blobs)
        assert everything.post(INFER, body, **headers).status == 400


def test_A22_an_output_whose_shape_depends_on_the_data_has_its_real_shape_each_time(tmp_path: Path) -> None:
    inputs, outputs = [TensorSpec("x", "FP32", (1, 4))], [TensorSpec("y", "INT64", (2, -1))]
    for worker in serve(tmp_path, {"mode": "nonzero"}, {}, inputs=inputs, outputs=outputs):
        for data, shape, found in (
            ([1, 1, 0, 1], [2, 3], [0, 0, 0, 0, 1, 3]),
            ([0, 1, 0, 0], [2, 1], [0, 1]),
            ([0, 0, 0, 0], [2, 0], []),
        ):
            output = worker.infer(fp32(data, [1, 4])).json["outputs"][0]
            assert (output["shape"], output["data"]) == (shape, found)
        assert worker.get("/v2/models/m").json["outputs"][0]["shape"] == [2, -1]


@pytest.mark.parametrize("name", ["input:0", "onnx::Conv_1", "/a/b", "имя 名", 'a"b\\c'])
def test_A11_tensor_names_pass_byte_by_byte(tmp_path: Path, name: str) -> None:
    specs = {"inputs": [TensorSpec(name, "FP32", (-1, 4))], "outputs": [TensorSpec(name + "'", "FP32", (-1, 4))]}
    for worker in serve(tmp_path, {"factor": 3.0}, {}, **specs):
        assert worker.get("/v2/models/m").json["inputs"][0]["name"] == name
        answer = worker.infer({"inputs": [{"name": name, "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]})
        assert answer.json["outputs"] == [
            {"name": name + "'", "datatype": "FP32", "shape": [1, 4], "data": [3, 6, 9, 12]}
        ]
