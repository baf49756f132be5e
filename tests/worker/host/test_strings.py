"""Tensors of strings: their form in the arena, and engines that take and give them."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as models
import pytest
from host_harness import HostProcess
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from trtmodel_contract.codec import dumps
from trtmodel_contract.exitcodes import HostExit
from trtmodel_contract.identity import Profile, ShapeRange
from trtmodel_contract.manifest import Golden, Manifest, MemoryNeed, TensorSpec
from trtmodel_worker.engines.base import InvalidInput
from trtmodel_worker.engines.registry import runtime
from trtmodel_worker.host import strings
from trtmodel_worker.host.arena import MAX_BYTES_TENSOR, plan_layout
from trtmodel_worker.host.wire import FailureClass, run_message
from worker_harness import REVISION_1, Bucket, Operator

STRING = TensorProto.STRING
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def array(*values: str) -> np.ndarray:
    return np.array(values, np.object_)


@given(st.lists(texts, max_size=12))
def test_strings_are_read_as_they_were_written(values: list[str]) -> None:
    found = strings.decode(memoryview(strings.encode(array(*values))), (len(values),))
    assert found.dtype == np.object_
    assert found.tolist() == values


def test_the_form_is_the_protocols() -> None:
    assert strings.encode(array("ab", "", "é")) == b"\x02\0\0\0ab\0\0\0\0\x02\0\0\0\xc3\xa9"
    assert strings.encode(np.array([["a"], ["b"]], np.object_)) == b"\x01\0\0\0a\x01\0\0\0b"
    assert strings.decode(memoryview(b"\x01\0\0\0a\x01\0\0\0b and more"), (2, 1)).tolist() == [["a"], ["b"]]


@pytest.mark.parametrize(
    ("data", "shape", "words"),
    [
        (b"\x02\0\0\0a", (1,), "beyond the tensor's bytes"),
        (b"\xff\xff\xff\xffa", (1,), "beyond the tensor's bytes"),
        (b"\x01\0\0\0a\x01\0", (2,), "longer than 7 bytes"),
        (b"", (1,), "longer than 0 bytes"),
        (b"", (1 << 40, 1 << 40), "longer than 0 bytes"),
        (b"\x01\0\0\0\xff", (1,), "no UTF-8"),
        (b"\x03\0\0\0\xed\xa0\x80", (1,), "no UTF-8"),  # half of a surrogate pair
    ],
)
def test_bytes_that_are_no_strings_are_the_requests_fault(data: bytes, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        strings.decode(memoryview(data), shape)


@given(st.binary(max_size=64), st.integers(0, 20))
def test_no_bytes_make_the_reader_fail_in_another_way(data: bytes, count: int) -> None:
    try:
        found = strings.decode(memoryview(data), (count,))
    except InvalidInput:
        return
    assert found.shape == (count,)


def test_an_input_that_the_front_lets_through_has_room_in_its_region() -> None:
    spec = TensorSpec("s", "BYTES", (-1,))
    profile = Profile({"s": ShapeRange((1,), (1,), (4,))})
    layout = plan_layout((spec, spec), (TensorSpec("t", "BYTES", (-1,)),), (profile,), 2, 12_345)
    assert layout.input_offsets[1] >= MAX_BYTES_TENSOR
    assert layout.input_bytes >= 2 * MAX_BYTES_TENSOR
    assert layout.output_bytes >= 12_345


def echo(bucket: Bucket, path: Path) -> Manifest:
    """An engine that gives its strings back, and how long a number is beside them."""
    models.save(
        path,
        [models.node("Identity", ["s"], ["t"]), models.node("Relu", ["x"], ["y"])],
        [("s", STRING, ("n", 2)), ("x", models.FLOAT, ("n",))],
        [("t", STRING, ("n", 2)), ("y", models.FLOAT, ("n",))],
    )
    profile = Profile({"s": ShapeRange((1, 2), (1, 2), (8, 2)), "x": ShapeRange((1,), (1,), (8,))})
    engine = runtime("ONNXRuntime").load(memoryview(path.read_bytes()), (profile,), 1)
    words, numbers = np.array([["a", ""], ["ü", "longer"]]), np.array([1, -1], np.float32)
    buffer = io.BytesIO()
    np.savez(buffer, i0=words, i1=numbers, o0=words, o1=np.array([1, 0], np.float32))
    golden = Golden(bucket.store.put_bytes(buffer.getvalue()), 2, {"y": 0.0})
    return Manifest(
        REVISION_1, runtime("ONNXRuntime").load_key(), 1, "", {}, "0" * 64,
        bucket.store.put_bytes(path.read_bytes()), engine.inputs, engine.outputs, (profile,), MemoryNeed(0, 0),
        (golden,), {}, "2026-01-01T00:00:00Z",
    )  # fmt: skip


class Front:
    """Sends strings to a host."""

    def __init__(self, process: HostProcess) -> None:
        self.process = process

    def ask(self, data: bytes, numbers: list[float], rows: int) -> Any:
        layout, view = self.process.layout, self.process.arena.view
        places = [layout.input_region(0) + offset for offset in layout.input_offsets]
        view[places[0] : places[0] + len(data)] = data
        self.process.arena.array(places[1], np.dtype(np.float32), (rows,))[...] = numbers
        self.process.lanes[0].send(
            run_message(9, layout.output_region(0), layout.output_bytes, places, [(rows, 2), (rows,)])
        )
        return self.process.receive()

    def strings(self, answer: Any) -> list[list[str]]:
        (offset, shape), _ = answer.outputs
        end = self.process.layout.output_region(0) + self.process.layout.output_bytes
        found: list[list[str]] = strings.decode(self.process.arena.view[offset:end], shape).tolist()
        return found


def test_an_engine_of_strings_is_proved_and_serves_them(bucket: Bucket, tmp_path: Path) -> None:
    with HostProcess(bucket, echo(bucket, tmp_path / "m"), runtime="ONNXRuntime", buckets=(1, 8)) as process:
        ready = process.ready()
        assert (ready.batchable, ready.why) == (False, "input 's' holds strings, which are not run together")
        assert set(ready.bucket_seconds) == {"1", "8"}
        front = Front(process)
        for words in ([["x", "yy"]], [["", "ß" * 500], ["three", "4"]], [["x", "yy"]]):
            answer = front.ask(strings.encode(np.array(words, np.object_)), [5.0] * len(words), len(words))
            assert answer.failure is None, answer.text
            assert front.strings(answer) == words
            offset, shape = answer.outputs[1]
            assert process.arena.array(offset, np.dtype(np.float32), shape).tolist() == [5.0] * len(words)
        process.probe()
        assert process.receive(outputs=0).failure is None


def test_strings_that_are_none_fail_that_request_alone(bucket: Bucket, tmp_path: Path) -> None:
    with HostProcess(bucket, echo(bucket, tmp_path / "m"), runtime="ONNXRuntime") as process:
        process.ready()
        front = Front(process)
        for data in (b"\x01\0\0\0\xff\0\0\0\0", b"\0\0\0\0\xff\xff\xff\xff"):
            assert front.ask(data, [1.0], 1).failure is FailureClass.INVALID_INPUT
        answer = front.ask(strings.encode(array("a", "b")), [1.0], 1)
        assert front.strings(answer) == [["a", "b"]]


def test_strings_that_do_not_fit_into_the_region_fail_that_request_alone(bucket: Bucket, tmp_path: Path) -> None:
    with HostProcess(bucket, echo(bucket, tmp_path / "m"), runtime="ONNXRuntime") as process:
        process.ready()
        front = Front(process)
        long = strings.encode(array("a" * 9000, "b"))
        answer = front.ask(long, [1.0], 1)
        assert answer.failure is FailureClass.OUTPUT_TOO_LARGE
        assert "TRTMODEL_MAX_OUTPUT_BYTES" in answer.text
        assert front.strings(front.ask(strings.encode(array("a", "b")), [1.0], 1)) == [["a", "b"]]


def test_a_host_whose_strings_differ_from_those_of_the_build_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    manifest = echo(bucket, tmp_path / "m")
    buffer = io.BytesIO()
    words = np.array([["a", ""]])
    one = np.array([1], np.float32)
    np.savez(buffer, i0=words, i1=one, o0=np.array([["b", ""]]), o1=one)
    wrong = dataclasses.replace(manifest, golden=(Golden(bucket.store.put_bytes(buffer.getvalue()), 1, {}),))
    with HostProcess(bucket, wrong, runtime="ONNXRuntime") as process:
        refused = process.refused()
        assert refused.reason == "SelfTestFailed"
        assert "output 't' at [0, 0] is a, it was b when built" in refused.message
        assert process.exit_code() == HostExit.CANNOT_LOAD


def test_a_client_gets_the_strings_that_it_sent(
    start_worker: Any, bucket: Bucket, operator: Operator, tmp_path: Path
) -> None:
    manifest = echo(bucket, tmp_path / "m")
    digest = bucket.store.put_bytes(dumps(manifest)).digest
    worker = start_worker(TRTMODEL_RUNTIME="ONNXRuntime")
    worker.point(operator.artifact(REVISION_1, digest), load_key=manifest.load_key)
    worker.start()
    worker.wait_ready()
    for words in (["a", "ü"], ["", "x" * 3000], ["a", "ü"]):
        document = {
            "inputs": [
                {"name": "s", "datatype": "BYTES", "shape": [1, 2], "data": words},
                {"name": "x", "datatype": "FP32", "shape": [1], "data": [3.0]},
            ]
        }
        answer = worker.infer(document)
        assert answer.status == 200, answer.body
        assert [output["data"] for output in answer.json["outputs"]] == [words, [3.0]]
