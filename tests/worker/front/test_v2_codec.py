"""The codec of requests and answers: where each tensor's bytes come from and go to."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from trtmodel_contract.identity import LoadKey, Profile, ShapeRange
from trtmodel_contract.manifest import Blob, Manifest, MemoryNeed, TensorSpec
from trtmodel_worker.front.calls import Failed
from trtmodel_worker.front.models import Admission, Invalid
from trtmodel_worker.front.sharedmemory import Regions
from trtmodel_worker.front.v2 import HEADER_LENGTH, Codec
from trtmodel_worker.host.arena import MAX_BYTES_TENSOR

OFF = Regions("")


def codec(inputs: list[TensorSpec], outputs: list[TensorSpec], revision: str = "r1") -> Codec:
    def filled(spec: TensorSpec, rows: int) -> tuple[int, ...]:
        return tuple(rows if d == -1 else d for d in spec.shape)

    ranges = {s.name: ShapeRange(filled(s, 1), filled(s, 1), filled(s, 8)) for s in inputs}
    manifest = Manifest(
        revision, LoadKey("Test", "1", "cpu"), 1, "", {}, "0" * 64, Blob("0" * 64, 1), tuple(inputs), tuple(outputs),
        (Profile(ranges),), MemoryNeed(0, 0), (), {}, "",
    )  # fmt: skip
    return Codec("m", revision, Admission(manifest))


def ask(of: Codec, document: Any, tail: bytes = b"") -> tuple[Any, list[bytes]]:
    return ask_text(of, json.dumps(document).encode(), tail)


def ask_text(of: Codec, head: bytes, tail: bytes) -> tuple[Any, list[bytes]]:
    """((plan, id), bodies)"""
    plan, request_id, rest = of.plan({HEADER_LENGTH: str(len(head)).encode()}, head + tail)
    return (plan, request_id), [bytes(body) for body in plan.bodies(rest, OFF)]


def told(of: Codec, asked: Any, *outputs: tuple[tuple[int, ...], bytes]) -> tuple[Any, bytes]:
    headers, body = of.answer(*asked, [(shape, memoryview(data)) for shape, data in outputs], OFF)
    if HEADER_LENGTH not in headers:
        return json.loads(body), b""
    length = int(headers.split(HEADER_LENGTH + b": ")[1].split(b"\r\n")[0])
    return json.loads(body[:length]), body[length:]


def tensor(name: str, datatype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    size = more.pop("size", None)
    parameters = {} if size is None else {"parameters": {"binary_data_size": size}}
    return {"name": name, "datatype": datatype, "shape": shape, **parameters, **more}


TWO = [TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "INT32", (-1,))]
TEXTS = [TensorSpec("t", "BYTES", (-1, 2))]


@pytest.mark.parametrize("swapped", [False, True])
def test_binary_data_follows_in_the_order_of_the_request_not_of_the_model(swapped: bool) -> None:
    inputs = [tensor("a", "FP32", [1], size=4), tensor("b", "INT32", [1], size=4)]
    blobs = [struct.pack("<f", 1.5), struct.pack("<i", 7)]
    if swapped:
        inputs.reverse()
        blobs.reverse()
    _, bodies = ask(codec(TWO, TWO), {"inputs": inputs}, b"".join(blobs))
    assert bodies == [struct.pack("<f", 1.5), struct.pack("<i", 7)]


def test_json_and_binary_inputs_mix_and_so_do_outputs() -> None:
    of = codec(TWO, TWO)
    wanted = [{"name": "b", "parameters": {"binary_data": True}}, {"name": "a"}]
    inputs = [tensor("a", "FP32", [2], data=[0.5, 2]), tensor("b", "INT32", [2], size=8)]
    plan, bodies = ask(of, {"inputs": inputs, "outputs": wanted, "id": "é"}, struct.pack("<2i", 3, 4))
    assert bodies == [struct.pack("<2f", 0.5, 2), struct.pack("<2i", 3, 4)]
    document, tail = told(of, plan, ((2,), struct.pack("<2f", 0.1, 1)), ((2,), struct.pack("<2i", 5, 6)))
    assert document == {
        "model_name": "m", "model_version": "r1", "id": "é",
        "outputs": [tensor("b", "INT32", [2], size=8), tensor("a", "FP32", [2], data=[0.1, 1.0])],
    }  # fmt: skip
    assert tail == struct.pack("<2i", 5, 6)


def test_what_is_known_by_heart_is_forgotten_when_shapes_or_the_answering_revision_change() -> None:
    inputs, outputs = [TensorSpec("x", "FP32", (-1,))], [TensorSpec("y", "FP32", (-1,))]
    of, other = codec(inputs, outputs), codec(inputs, outputs, "r2")
    document = {"inputs": [tensor("x", "FP32", [1], size=4)], "parameters": {"binary_data_output": True}}
    plan, _ = ask(of, document, b"abcd")
    again, bodies = ask(of, document, b"efgh")
    assert plan[0] is again[0]
    assert bodies == [b"efgh"]
    for by, count in ((of, 1), (of, 1), (of, 3), (other, 3), (other, 3), (of, 1)):
        data = bytes(range(4 * count))
        head, tail = told(by, plan, ((count,), data))
        assert head["model_version"] == ("r1" if by is of else "r2")
        assert head["outputs"] == [tensor("y", "FP32", [count], size=4 * count)]
        assert tail == data


def test_requests_that_differ_in_their_id_only_get_their_own() -> None:
    of = codec(TWO[:1], TWO[:1])
    document = {"inputs": [tensor("a", "FP32", [1], size=4)], "parameters": {"binary_data_output": True}}
    for request_id in ("1", "2", "1", None, "", "3"):
        plan, _ = ask(of, document if request_id is None else {**document, "id": request_id}, b"abcd")
        head, _ = told(of, plan, ((1,), b"wxyz"))
        assert head.get("id") == request_id


@pytest.mark.parametrize(
    "text",
    [
        '{"id":"%s",%s}', '{ "id" : "%s" ,%s}', '{"parameters":{"id":"x"},"id":"%s",%s}',
        '{"parameters":{"id":7},"id":"%s",%s}', '{"\\u0069d":"%s",%s}', '{"foo":"id","id":"%s",%s}',
        '{"foo":["id"],"id":"%s",%s}', '{"foo":"\\"id\\":","id":"%s",%s}',
    ],
)  # fmt: skip
def test_the_id_is_the_requests_own_wherever_it_stands_and_however_often_the_word_comes(text: str) -> None:
    of = codec(TWO[:1], TWO[:1])
    rest = '"inputs":[{"name":"a","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]'
    for request_id in ("1", "2", "é", "1", "", 'q\\"', ":"):
        asked, bodies = ask_text(of, (text % (request_id, rest)).encode(), request_id.encode()[:4].ljust(4))
        assert bodies == [request_id.encode()[:4].ljust(4)]
        assert told(of, asked, ((1,), b"wxyz"))[0]["id"] == request_id.replace("\\", "")


@pytest.mark.parametrize("text", ['{"parameters":{"id":"%s"},%s}', '{"id":null,"parameters":{"id":"%s"},%s}'])
def test_an_id_of_something_else_is_none_of_the_request(text: str) -> None:
    of = codec(TWO[:1], TWO[:1])
    rest = '"inputs":[{"name":"a","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]'
    for value in ("1", "2", "1"):
        assert ask_text(of, (text % (value, rest)).encode(), b"abcd")[0][1] is None
        with pytest.raises(Invalid):
            ask_text(of, (text % (value, rest)).encode().replace(b"abcd", b""), b"abc")


def test_an_id_that_is_no_text_is_refused_also_where_the_rest_is_known() -> None:
    of = codec(TWO[:1], TWO[:1])
    rest = b'"inputs":[{"name":"a","datatype":"FP32","shape":[1],"parameters":{"binary_data_size":4}}]'
    ask_text(of, b'{"id":"1",' + rest + b"}", b"abcd")
    for bad in (b'"\xff"', b"7", b'"\\ud800"', b'"a\nb"', b'"1","id":"1"', b'"1', b'1"', b'"\x00"'):
        with pytest.raises(Invalid):
            ask_text(of, b'{"id":' + bad + b"," + rest + b"}", b"abcd")


def test_strings_come_and_go_as_json_and_as_binary_data() -> None:
    of = codec(TEXTS, TEXTS)
    binary = b"\2\0\0\0hi\0\0\0\0"
    plan, bodies = ask(of, {"inputs": [tensor("t", "BYTES", [1, 2], data=[["hi", ""]])]})
    assert bodies == [binary]
    assert told(of, plan, ((1, 2), binary))[0]["outputs"][0]["data"] == ["hi", ""]
    document = {"inputs": [tensor("t", "BYTES", [1, 2], size=10)], "parameters": {"binary_data_output": True}}
    plan, bodies = ask(of, document, binary)
    assert bodies == [binary]
    for data in (binary, b"\1\0\0\0x\0\0\0\0", b"\4\0\0\0long\0\0\0\0"):  # one shape, other sizes
        head, tail = told(of, plan, ((1, 2), data))
        assert head["outputs"] == [tensor("t", "BYTES", [1, 2], size=len(data))]
        assert tail == data


@pytest.mark.parametrize(
    ("size", "tail"),
    [(10, b"\2\0\0\0hi\1\0\0\0"), (6, b"\2\0\0\0hi"), (8, b"\0\0\0\0\4\0\0\0"), (12, b"\0\0\0\0" * 3),
     (MAX_BYTES_TENSOR + 1, b"\0\0\0\0" + struct.pack("<I", MAX_BYTES_TENSOR - 7) + bytes(MAX_BYTES_TENSOR - 7))],
)  # fmt: skip
def test_B06_strings_in_binary_form_are_counted_and_bounded(size: int, tail: bytes) -> None:
    assert len(tail) == size
    with pytest.raises(Invalid, match="'t'"):
        ask(codec(TEXTS, TEXTS), {"inputs": [tensor("t", "BYTES", [1, 2], size=size)], "id": "q"}, tail)


def test_strings_as_json_are_bounded_too() -> None:
    data = ["x" * MAX_BYTES_TENSOR, ""]
    with pytest.raises(Invalid, match="'t'"):
        ask(codec(TEXTS, TEXTS), {"inputs": [tensor("t", "BYTES", [1, 2], data=data)]})


def test_bytes_that_are_no_text_cannot_be_said_in_json() -> None:
    of = codec(TEXTS, TEXTS)
    plan, _ = ask(of, {"inputs": [tensor("t", "BYTES", [1, 2], data=["", ""])]})
    with pytest.raises(Failed, match="ask for it as binary data") as failed:
        told(of, plan, ((1, 2), b"\1\0\0\0\xff\0\0\0\0"))
    assert failed.value.status == 500


@pytest.mark.parametrize(
    "parameters",
    [
        {"shared_memory_region": "r", "shared_memory_byte_size": 4},
        {"shared_memory_region": 7, "shared_memory_byte_size": 4},
        {"shared_memory_region": "r"},
        {"shared_memory_region": "r", "shared_memory_byte_size": "4"},
        {"shared_memory_region": "r", "shared_memory_byte_size": -4},
        {"shared_memory_region": "r", "shared_memory_byte_size": 4, "shared_memory_offset": 0.5},
        {"shared_memory_region": "r", "shared_memory_byte_size": 4, "binary_data_size": 4},
    ],
)
def test_shared_memory_that_is_not_there_or_makes_no_sense_is_refused(parameters: dict[str, Any]) -> None:
    tail = b"abcd" if "binary_data_size" in parameters else b""
    with pytest.raises(Invalid):
        ask(codec(TWO[:1], TWO[:1]), {"inputs": [{**tensor("a", "FP32", [1]), "parameters": parameters}]}, tail)


@pytest.mark.parametrize(
    "more",
    [
        {"outputs": [{"name": "a", "parameters": {"binary_data": 1}}]},
        {"outputs": [{"name": "a", "parameters": {"classification": 3}}]},
        {"outputs": [{"name": "a", "parameters": [1]}]},
        {"parameters": {"binary_data_output": "yes"}},
        {"parameters": {"timeout": -1}},
        {"parameters": {"timeout": True}},
        {"parameters": {"timeout": 1.5}},
        {"inputs": [tensor("a", "FP32", [1], data=[1], parameters=[])]},
        {"inputs": [tensor("a", "FP32", [1], data=[1]), tensor("a", "FP32", [1], data=[1])]},
    ],
)
def test_what_makes_no_sense_is_the_clients_error_and_its_id_is_told(more: dict[str, Any]) -> None:
    document = {"inputs": [tensor("a", "FP32", [1], data=[1])], "id": "i", **more}
    with pytest.raises(Invalid) as refused:
        ask(codec(TWO[:1], TWO[:1]), document)
    assert refused.value.request_id == "i"


def test_parameters_that_are_not_known_are_ignored() -> None:
    document = {
        "inputs": [tensor("a", "FP32", [1], data=[1], parameters={"foo": 1, "classification": 0})],
        "outputs": [{"name": "a", "parameters": {"classification": 0, "bar": {}}}],
        "parameters": {"priority": 1, "sequence_id": 7, "foo": [1]},
    }
    assert ask(codec(TWO[:1], TWO[:1]), document)[1] == [struct.pack("<f", 1)]
