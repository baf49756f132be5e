"""Clients of other makers against a real worker: tritonclient, KServe's, perf_analyzer, and plain curl."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.gateway import inference_pb2
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess

pytestmark = pytest.mark.timeout(1200)  # the first run makes the clients' environments

BOTH = ["infer", "compressed", "at_once", "describe", "shared_memory", "refused"]


@pytest.mark.parametrize("what", [*BOTH, "json_both_ways"])
def test_tritonclient_over_http(triton: Any, served: Any, what: str) -> None:
    triton.program("triton_calls.py", "http", served.http, what)


@pytest.mark.parametrize("what", [*BOTH, "stream"])
def test_tritonclient_over_grpc(triton: Any, served: Any, what: str) -> None:
    triton.program("triton_calls.py", "grpc", served.grpc, what)


def test_our_messages_have_the_official_names_numbers_and_types(triton: Any) -> None:
    official = json.loads(triton.program("triton_calls.py", "grpc", "nowhere", "fields"))
    ours = inference_pb2.DESCRIPTOR
    seen = 0

    def compare(described: Any) -> None:
        nonlocal seen
        for field in described.fields:
            seen += 1
            oneof = field.containing_oneof.name if field.containing_oneof else ""
            found = [field.number, field.type, field.is_repeated, oneof]
            there = official["messages"][described.full_name][field.name]
            if described.name != "ModelConfig":  # our one kind of scheduling needs no oneof: it is not on the wire
                assert found == there, field.full_name
            assert found[:3] == there[:3], field.full_name
        for nested in described.nested_types:
            compare(nested)

    for described in ours.message_types_by_name.values():
        compare(described)
    assert seen > 100
    (service,) = ours.services_by_name.values()
    assert service.full_name == official["service"]
    for method in service.methods:
        assert [method.input_type.full_name, method.output_type.full_name] == official["methods"][method.name]
    assert {v.name: v.number for v in ours.enum_types_by_name["DataType"].values} == official["types"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_kserve_s_client(kserve: Any, served: Any, protocol: str) -> None:
    kserve.program("kserve_calls.py", protocol, served.http if protocol == "http" else served.grpc)


@pytest.mark.parametrize("how", [
    ["-i", "http"], ["-i", "grpc"], ["-i", "grpc", "--streaming"], ["-i", "http", "--async"],
    ["-i", "http", "--shared-memory", "system", "--output-shared-memory-size", "16"],
    ["-i", "grpc", "--shared-memory", "system", "--output-shared-memory-size", "16"],
])  # fmt: skip
def test_perf_analyzer_measures_us(perf_analyzer: Callable[..., str], served: Any, how: list[str]) -> None:
    address = served.grpc if "grpc" in how else served.http
    said = perf_analyzer("-m", "m", "-u", address, *how, "--concurrency-range", "2", "--request-count", "200")
    assert re.search(r"Request count: 200\b", said), said


# -- curl


def curl(*arguments: str, body: bytes | None = None) -> tuple[bytes, str]:
    """(body of the answer, what curl says of the exchange)."""
    done = subprocess.run(
        ["curl", "--silent", "--verbose", "--fail-with-body", "--max-time", "60", *arguments],
        input=body, capture_output=True, timeout=90, check=False,
    )  # fmt: skip
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 0, f"{done.stdout!r}\n{said}"
    return done.stdout, said


def test_curl_sends_json_without_any_header(served: Any) -> None:
    document = '{"inputs": [{"name": "tx", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
    answer, _ = curl("--data", document, f"http://{served.http}/v2/models/m/infer")
    assert json.loads(answer)["outputs"][0]["data"] == [2, 4, 6, 8]


def test_curl_sends_and_gets_binary(served: Any) -> None:
    rows = np.array([[1, 2, 3, 4]], np.float32)
    tensor = {"name": "tx", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    answer, said = curl(
        "--data-binary", "@-", "--header", "Content-Type: application/octet-stream",
        "--header", f"Inference-Header-Content-Length: {len(head)}", f"http://{served.http}/v2/models/m/infer",
        body=head + rows.tobytes(),
    )  # fmt: skip
    length = re.search(r"< inference-header-content-length: (\d+)", said, re.IGNORECASE)
    assert length is not None
    assert answer[int(length[1]) :] == (2 * rows).tobytes()


def test_curl_gets_a_compressed_answer(served: Any) -> None:
    document = {"inputs": [{"name": "tx", "shape": [8, 4], "datatype": "FP32", "data": [1.0] * 32}]}
    answer, said = curl("--compressed", "--data", json.dumps(document), f"http://{served.http}/v2/models/m/infer")
    assert json.loads(answer)["outputs"][0]["data"] == [2.0] * 32
    assert "accept-encoding:" in said.lower()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """tx:FP32[1, 1 M] -> ty = 2 tx: 4 MiB a row."""
    directory = tmp_path_factory.mktemp("wide")
    operator, bucket = Operator(), Bucket(directory / "bucket")
    worker = WorkerProcess(directory / "worker", operator, bucket, TRTMODEL_CONTEXTS="1")
    digest, _ = bucket.publish(
        REVISION_1,
        {"factor": 2.0},
        inputs=[TensorSpec("tx", "FP32", (-1, 1 << 20))],
        outputs=[TensorSpec("ty", "FP32", (-1, 1 << 20))],
        max_rows=2,
    )
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    try:
        worker.wait_ready()
        yield worker
    finally:
        assert worker.stop() == 0, worker.tail()


def test_curl_waits_for_the_go_ahead_before_it_sends_a_large_body(wide: WorkerProcess, tmp_path: Path) -> None:
    rows = np.arange(1 << 20, dtype=np.float32)
    tensor = {
        "name": "tx", "shape": [1, 1 << 20], "datatype": "FP32", "parameters": {"binary_data_size": rows.nbytes},
    }  # fmt: skip
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = tmp_path / "body"
    body.write_bytes(head + rows.tobytes())
    answer, said = curl(
        "--data-binary", f"@{body}", "--header", "Expect: 100-continue", "--expect100-timeout", "50",
        "--header", f"Inference-Header-Content-Length: {len(head)}",
        f"http://127.0.0.1:{wide.port}/v2/models/m/infer",
    )  # fmt: skip
    assert "100 Continue" in said
    assert answer.endswith((2 * rows).tobytes())
