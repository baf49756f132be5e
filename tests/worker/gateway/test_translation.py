"""Messages of gRPC as requests of the front: like ones are translated once, and each as it is."""

from __future__ import annotations

import json

import numpy as np
import pytest
from trtmodel_worker.gateway import inference_pb2 as pb
from trtmodel_worker.gateway.client import Answer
from trtmodel_worker.gateway.failure import Failure
from trtmodel_worker.gateway.translate import infer_body, infer_response


def message(*raw: bytes, name: str = "x", **more: object) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype="FP32", shape=[1, 4])
    return pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=raw, **more)


def test_like_messages_share_their_json_part_and_keep_their_ids_and_bytes() -> None:
    asked = [message(bytes([n]) * 16, id=f"r-{n}") for n in range(3)]
    heads, blobs = zip(*((body[0], body[1:]) for _, body in (infer_body(each, None) for each in asked)), strict=True)
    assert len({id(head) for head in heads}) == 1
    assert blobs == tuple([bytes([n]) * 16] for n in range(3))
    assert [each.id for each in asked] == ["r-0", "r-1", "r-2"]


def test_what_differs_in_anything_but_id_and_bytes_has_a_json_part_of_its_own() -> None:
    several = [
        infer_body(message(bytes(16)), None),
        infer_body(message(bytes(32)), None),
        infer_body(message(bytes(16), name="z"), None),
        infer_body(message(bytes(16)), 5.0),
        infer_body(message(bytes(16), parameters={"p": pb.InferParameter(int64_param=1)}), None),
        infer_body(message(bytes(16), outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="y")]), None),
    ]
    heads = [json.loads(body[0]) for _, body in several]
    assert len({json.dumps(head) for head in heads}) == len(several)
    assert [head["inputs"][0]["parameters"]["binary_data_size"] for head in heads] == [16, 32, 16, 16, 16, 16]
    assert [line for line, _ in several] == [b"inference-header-content-length: %d\r\n" % len(b[0]) for _, b in several]


def test_a_message_with_too_many_raw_contents_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(Failure, match="2 raw_input_contents for 1 inputs"):
            infer_body(message(bytes(16), bytes(16)), None)


@pytest.mark.parametrize("sizes", [(16,), (0, 200), (70_000, 4)])
def test_an_answer_is_the_message_that_protobuf_itself_would_write(sizes: tuple[int, ...]) -> None:
    blobs = [np.random.default_rng(n).bytes(size) for n, size in enumerate(sizes)]
    names = [f"y{n}" for n in range(len(sizes))]
    outputs = [
        {"name": name, "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
        for name, size in zip(names, sizes, strict=True)
    ]
    head = json.dumps({"model_name": "m", "model_version": "v", "outputs": outputs}).encode()
    answer = Answer(200, {b"inference-header-content-length": b"%d" % len(head)}, head + b"".join(blobs))
    expected = pb.ModelInferResponse(model_name="m", model_version="v", id="r-7", raw_output_contents=blobs)
    for name, size in zip(names, sizes, strict=True):
        expected.outputs.add(name=name, datatype="UINT8", shape=[size])
    for _ in range(2):
        assert pb.ModelInferResponse.FromString(infer_response(answer, "r-7")) == expected
