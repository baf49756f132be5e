"""`trtmodel serve`: a worker from a file, with no cluster."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import magika
import numpy as np
import onnx_models
import onnxruntime as ort
import pytest
from alone_harness import Served, runs, trtmodel
from worker_harness import eventually

pytestmark = pytest.mark.timeout(300)
MAGIKA = next((Path(magika.__file__).parent / "models").glob("*/model.onnx"))
ONE_ROW = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [-1, 2, -3, 4]}


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    return onnx_models.relu(tmp_path / "my relu.onnx")


def test_a_model_is_served_until_ctrl_c_and_leaves_nothing_behind(relu: Path, tmp_path: Path) -> None:
    with Served(relu, tmp_path / "cache", grpc=True) as served:
        assert "no signature of an operator is checked" in served.text
        assert "random inputs" in served.text
        status, headers, answer = served.infer("my-relu", [ONE_ROW])
        assert status == 200
        assert answer["outputs"][0]["data"] == [0, 2, 0, 4]
        assert headers["x-trtmodel-revision"] == answer["model_version"]
        assert served.infer("my-relu", [{**ONE_ROW, "shape": [33, 4], "data": [0] * 132}])[0] == 400  # 32 by default
        socket.create_connection(("127.0.0.1", served.grpc), 10).close()
        socket.create_connection(("127.0.0.1", served.metrics), 10).close()
        children = served.children()
        assert len(children) >= 2  # a front and an engine host
        assert served.interrupt() == 0
        assert [pid for pid in children if runs(pid)] == []
    assert list((tmp_path / "cache").glob("*-*")) == []


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_request_that_it_proposes_is_answered(relu: Path, tmp_path: Path) -> None:
    with Served(relu, tmp_path / "cache", "--name", "r") as served:
        done = subprocess.run(["sh", "-c", f"{served.curl} --silent"], capture_output=True, timeout=60, check=True)
        assert json.loads(done.stdout)["outputs"][0]["shape"] == [1, 4]


def test_the_second_start_builds_nothing(relu: Path, tmp_path: Path) -> None:
    built = trtmodel("build", relu, cache=tmp_path / "cache")
    assert built.returncode == 0, built.stderr
    with Served(relu, tmp_path / "cache") as served:
        assert "was built before" in served.text
        assert "building" not in served.text
        assert served.interrupt(signal.SIGTERM) == 0


def test_lanes_and_hosts_are_as_many_as_asked_for(relu: Path, tmp_path: Path) -> None:
    with Served(relu, tmp_path / "cache", "--hosts", "2", "--contexts", "2", "--max-batch", "4") as served:
        hosts = [p for p in served.children() if b"trtmodel_worker.host\0serve" in _command_line(p)]
        assert len(hosts) == 2
        assert served.infer("my-relu", [{**ONE_ROW, "shape": [5, 4], "data": [0] * 20}])[0] == 400
        assert served.interrupt() == 0


def test_magika_answers_as_the_original_does(tmp_path: Path) -> None:
    """The model of 3 MB that names the type of a file: 512 tokens of begin, middle and end, 256 for padding."""
    text = np.full((1, 2048), 256, np.int32)
    source = Path(__file__).read_bytes()[:1024]
    text[0, : len(source)] = list(source)
    session = ort.InferenceSession(str(MAGIKA), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"bytes": text})
    with Served(MAGIKA, tmp_path / "cache", "--name", "magika", "--max-batch", "2") as served:
        tensor = {"name": "bytes", "datatype": "INT32", "shape": [1, 2048], "data": text[0].tolist()}
        status, _, answer = served.infer("magika", [tensor])
        assert status == 200
        np.testing.assert_allclose(answer["outputs"][0]["data"], expected[0], atol=1e-4)
        assert served.curl == f"curl http://127.0.0.1:{served.http}/v2/models/magika"  # 2,048 numbers are no example
        assert served.interrupt() == 0


def test_what_serves_ends_with_the_command_that_is_killed(relu: Path, tmp_path: Path) -> None:
    with Served(relu, tmp_path / "cache") as served:
        children = served.children()
        assert children
        served.process.kill()
        eventually(lambda: not any(runs(pid) for pid in children), "front and hosts are gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminated"])
def test_an_interrupted_build_leaves_neither_process_nor_file(number: int, tmp_path: Path) -> None:
    served = Served(MAGIKA, tmp_path / "cache").start()
    try:
        eventually(lambda: "building revision" in served.text, "it builds", 60)
        children = served.children()
        assert served.interrupt(number) == 130
        eventually(lambda: not any(runs(pid) for pid in children), "builder and stage are gone")
        assert list((tmp_path / "cache").glob("*-*")) == []
    finally:
        served.__exit__()


@pytest.mark.long
def test_what_a_killed_command_left_goes_with_the_next_one(relu: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with Served(relu, cache) as served:
        assert len(list(cache.glob("run-*"))) == 1
        assert trtmodel("check", relu, cache=cache).returncode == 0
        assert len(list(cache.glob("run-*"))) == 1  # it is in use
        served.process.kill()
        served.process.wait()
        assert trtmodel("check", relu, cache=cache).returncode == 0
        assert list(cache.glob("run-*")) == []


def test_a_port_that_is_taken_is_named_before_anything_is_built(relu: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for option in ("--http", "--grpc", "--metrics"):
            done = trtmodel("serve", relu, option, port, cache=tmp_path / "cache")
            assert done.returncode == 2
            assert f"port {port} of 127.0.0.1 is taken: name another one with {option}" in done.stderr
    assert not list((tmp_path / "cache/store").rglob("manifest.json"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--http", "8082"), "--http and --metrics are both 8082: give each its own port"),
        (("--http", "0"), "'0' is not a number from 1 to 65535"),
        (("--host", "192.0.2.1"), "--host 192.0.2.1: it is no address of this machine"),
        (("--name", "a/b"), "'a/b' cannot name a model"),
        (("--contexts", "many"), "'many' is not a number from 1 to 64"),
        (("--hosts", "9"), "'9' is not a number from 1 to 8"),
    ],
)
def test_a_wrong_option_is_refused_with_the_way_out(
    arguments: tuple[str, ...], says: str, relu: Path, tmp_path: Path
) -> None:
    done = trtmodel("serve", relu, *arguments, cache=tmp_path / "cache")
    assert done.returncode == 2
    assert says in done.stderr


def test_a_model_that_cannot_be_built_ends_it_with_the_builders_words(tmp_path: Path) -> None:
    page = tmp_path / "model.onnx"
    page.write_text("<!DOCTYPE html><title>404</title>")
    done = trtmodel("serve", page, *_free("--http", "--grpc", "--metrics"), cache=tmp_path / "cache")
    assert done.returncode == 42
    assert "an HTML page, probably an error page" in done.stderr
    assert "Traceback" not in done.stderr


def _free(*options: str) -> list[str]:
    from free_ports import free_port

    return [text for option in options for text in (option, str(free_port()))]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
