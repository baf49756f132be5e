"""Compressed bodies: taken, bounded, refused; answers compressed for those who ask."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from protocol_harness import INFER, parts, serve
from trtmodel_contract.manifest import TensorSpec
from trtmodel_worker.front.compression import BadCompression, Inflation, TooLarge, chosen
from worker_harness import WorkerProcess, binary_request, eventually, fp32

MIB = 1 << 20
WIDE = 40_000
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
UNPACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """x:FP32[1..8, 40000] -> y = 2x."""
    shape = (-1, WIDE)
    limits = {"TRTMODEL_MAX_BODY_BYTES": str(4 * MIB), "TRTMODEL_MAX_JSON_BYTES": str(MIB)}
    yield from serve(
        tmp_path_factory.mktemp("wide"), {"factor": 2.0}, limits,
        inputs=[TensorSpec("x", "FP32", shape)], outputs=[TensorSpec("y", "FP32", shape)],
    )  # fmt: skip


def binary(rows: int = 1, **more: Any) -> tuple[bytes, dict[str, str]]:
    values = np.arange(rows * WIDE, dtype=np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, WIDE], "parameters": {"binary_data_size": values.nbytes}}
    return binary_request({"inputs": [tensor], **more}, values.tobytes())


@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP", "x-gzip"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_compressed_request_is_answered_as_it_would_be_uncompressed(
    wide: WorkerProcess, coding: str, rows: int
) -> None:
    body, headers = binary(rows, parameters={"binary_data_output": True})
    packed = PACK["deflate" if coding == "deflate" else "gzip"](body)
    assert len(packed) < len(body)
    answer = wide.post(INFER, packed, **headers, Content_Encoding=coding)
    assert answer.status == 200, answer.body[:500]
    assert parts(answer)[1] == (2 * np.arange(rows * WIDE, dtype=np.float32)).tobytes()
    text = json.dumps(fp32([0.5] * WIDE, [1, WIDE])).encode()
    answer = wide.post(INFER, PACK["deflate" if coding == "deflate" else "gzip"](text), Content_Encoding=coding)
    assert answer.json["outputs"][0]["data"] == [1.0] * WIDE


def test_many_compressed_requests_at_once_get_their_own_answers(wide: WorkerProcess) -> None:
    wrong: list[Any] = []

    def client(number: int) -> None:
        for _ in range(5):
            body = gzip.compress(json.dumps(fp32([float(number)] * WIDE, [1, WIDE])).encode())
            answer = wide.post(INFER, body, Content_Encoding="gzip", Accept_Encoding="gzip")
            if json.loads(gzip.decompress(answer.body))["outputs"][0]["data"] != [2.0 * number] * WIDE:
                wrong.append(number)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(("header", "limit"), [({}, MIB), ({"Inference_Header_Content_Length": "9"}, 4 * MIB)])
def test_a_bomb_is_refused_without_being_unpacked(
    wide: WorkerProcess, coding: str, header: dict[str, str], limit: int
) -> None:
    stream = zlib.compressobj(9, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    bomb = b"".join([*(stream.compress(bytes(16 * MIB)) for _ in range(32)), stream.flush()])  # 512 MiB
    assert len(bomb) < limit
    status = Path(f"/proc/{wide.pid}/status")
    before = int(status.read_text().split("VmHWM:")[1].split()[0])
    answer = wide.post(INFER, bomb, Content_Encoding=coding, **header)
    assert answer.status == 413
    assert f"{limit:,}" in answer.json["error"]
    assert int(status.read_text().split("VmHWM:")[1].split()[0]) - before < 64 * 1024


NOTHING = gzip.compress(b"{}", mtime=0)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"no gzip at all", id="text"),
        pytest.param(b"", id="nothing"),
        pytest.param(NOTHING[:-1], id="cut off"),
        pytest.param(NOTHING[:-8] + bytes(8), id="wrong checksum"),
        pytest.param(NOTHING + b"more", id="something behind"),
        pytest.param(zlib.compress(b"{}"), id="deflate"),
        pytest.param(gzip.compress(bytes(200_000), mtime=0)[:-9], id="large and cut off"),
    ],
)
def test_a_body_that_is_not_compressed_as_it_says_is_refused(wide: WorkerProcess, body: bytes) -> None:
    answer = wide.post(INFER, body, Content_Encoding="gzip")
    assert answer.status == 400
    assert "compressed" in answer.json["error"]


@pytest.mark.parametrize("coding", ["br", "gzip, gzip", "zstd", "compress"])
def test_other_codings_are_refused_and_ours_named(wide: WorkerProcess, coding: str) -> None:
    answer = wide.post(INFER, b"x", Content_Encoding=coding)
    assert (answer.status, answer.headers["accept-encoding"]) == (415, "gzip, deflate")


def test_the_room_of_unpacked_bodies_is_given_back(wide: WorkerProcess) -> None:
    body, headers = binary(4)
    for _ in range(5):
        assert wide.post(INFER, gzip.compress(body), **headers, Content_Encoding="gzip").status == 200
    wide.post(INFER, gzip.compress(bytes(2 * MIB)), Content_Encoding="gzip", Inference_Header_Content_Length="9")
    eventually(lambda: "trtmodel_staged_bytes 0.0" in wide.metrics(), "nothing is held any more")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("rows", [1, 4])
def test_an_answer_is_compressed_for_a_client_that_asks(wide: WorkerProcess, coding: str, rows: int) -> None:
    body, headers = binary(rows, parameters={"binary_data_output": True})
    answer = wide.post(INFER, body, **headers, Accept_Encoding=coding)
    assert (answer.headers["content-encoding"], answer.headers["vary"]) == (coding, "accept-encoding")
    assert answer.revision is not None
    whole = UNPACK[coding](answer.body)
    expected = (2 * np.arange(rows * WIDE, dtype=np.float32)).tobytes()
    assert whole[int(answer.headers["inference-header-content-length"]) :] == expected


@pytest.mark.parametrize(
    ("accepted", "size", "is_json", "coding"),
    [
        (b"gzip", 2000, False, b"gzip"), (b"deflate", 2000, True, b"deflate"), (b"gzip", 500, True, None),
        (b"GZIP ", 2000, True, b"gzip"), (b"gzip;q=0.5", 2000, True, b"gzip"), (b"gzip;q=0", 2000, True, None),
        (b"gzip; q=0.000", 2000, True, None), (b"identity, gzip", 2000, True, b"gzip"), (b"br", 200_000, True, None),
        (b"gzip, deflate, br", 2000, True, None), (b"gzip, deflate, br", 200_000, True, b"gzip"),
        (b"br, deflate", 200_000, True, b"deflate"), (b"gzip, deflate", 200_000, False, None),
        (b"br;q=0, gzip", 2000, False, b"gzip"), (b"", 200_000, True, None), (b"*", 200_000, True, None),
        (b"identity", 200_000, True, None), (b",;,", 200_000, True, None),
    ],
)  # fmt: skip
def test_who_asks_for_a_coding_gets_it_and_who_merely_accepts_it_gets_it_where_it_pays(
    accepted: bytes, size: int, is_json: bool, coding: bytes | None
) -> None:
    assert chosen(accepted, size, is_json) == coding


@pytest.mark.parametrize("size", [0, 1, 99, 100])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_unpacking_in_steps_finds_the_same_as_at_once(size: int, coding: str) -> None:
    data = bytes(range(size))
    inflation = Inflation(coding.encode(), PACK[coding](data), 100)
    found = inflation.run(50)
    assert found == (data if size <= 50 else None)
    if found is None:
        assert inflation.run(100) == data


def test_unpacking_stops_at_its_limit() -> None:
    with pytest.raises(TooLarge):
        Inflation(b"gzip", gzip.compress(bytes(101)), 100).run(100)
    inflation = Inflation(b"gzip", gzip.compress(bytes(101)), 100)
    assert inflation.run(50) is None
    with pytest.raises(TooLarge):
        inflation.run(100)
    with pytest.raises(BadCompression):
        Inflation(b"gzip", gzip.compress(bytes(100))[:-1], 100).run(100)
