"""Case B-13 from the field: gRPC's 4 MiB, which neither our server nor an informed client is bound by."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from free_ports import free_port
from gateway_harness import INFERENCE, Caller, calling, infer_request
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.gateway import inference_pb2 as pb
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess

IMAGE = (3, 640, 640)
ROWS_OF_52_MB = 11


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Caller, int]]:
    """x:FP32[1..11, 3, 640, 640] -> y = 2 x, with the limits that a worker has by default; and the port."""
    directory = tmp_path_factory.mktemp("images")
    operator, bucket, port = Operator(), Bucket(directory / "bucket"), free_port()
    worker = WorkerProcess(
        directory / "worker", operator, bucket, TRTMODEL_GRPC_PORT=str(port), TRTMODEL_CONTEXTS="1",
        TRTMODEL_BATCH_BUCKETS="1", TRTMODEL_REQUEST_TIMEOUT_SECONDS="60",
    )  # fmt: skip
    digest, _ = bucket.publish(
        REVISION_1,
        {"factor": 2.0},
        inputs=[TensorSpec("x", "FP32", (-1, *IMAGE))],
        outputs=[TensorSpec("y", "FP32", (-1, *IMAGE))],
        max_rows=ROWS_OF_52_MB,
    )
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    try:
        worker.wait_ready()
        with calling(port) as caller:
            yield caller, port
    finally:
        assert worker.stop() == 0, worker.tail()


def batch(rows: int) -> np.ndarray:
    return np.arange(rows * np.prod(IMAGE), dtype=np.float32).reshape(rows, *IMAGE) % 4096


@pytest.mark.parametrize("rows", [2, ROWS_OF_52_MB])
def test_B13_ten_and_fifty_megabytes_pass_both_ways_without_any_setting_of_the_server(
    images: tuple[Caller, int], rows: int
) -> None:
    caller, _ = images
    x = batch(rows)
    answer, _ = caller.infer(infer_request(x.tobytes(), x.shape), timeout=60)
    assert answer.raw_output_contents[0] == (2 * x).tobytes()


def test_B13_a_client_that_was_told_nothing_refuses_the_answer_itself_and_the_next_call_works(
    images: tuple[Caller, int],
) -> None:
    _, port = images
    x = batch(2)
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        infer = channel.unary_unary(
            f"/{INFERENCE}/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            infer(infer_request(x.tobytes(), x.shape), timeout=60)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4194304" in caught.value.details()  # its own limit: see docs/grpc.md
        live = channel.unary_unary(
            f"/{INFERENCE}/ServerLive",
            request_serializer=pb.ServerLiveRequest.SerializeToString,
            response_deserializer=pb.ServerLiveResponse.FromString,
        )
        assert live(pb.ServerLiveRequest(), timeout=20).live


def test_B13_what_is_above_the_limit_is_refused_with_the_name_of_the_setting(images: tuple[Caller, int]) -> None:
    caller, _ = images
    error = caller.refused(infer_request(bytes((64 << 20) + 4), (1, *IMAGE)), timeout=60)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "TRTMODEL_MAX_BODY_BYTES" in error.details()
