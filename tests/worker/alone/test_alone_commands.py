"""`trtmodel check | build | verify`: the Jobs' steps on one machine."""

from __future__ import annotations

import functools
import http.server
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_models
import pytest
from alone_harness import trtmodel

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def linear(tmp_path: Path) -> Path:
    return onnx_models.linear(tmp_path / "linear.onnx")


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A server of the files in tmp_path."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_a_model_is_described_and_its_engine_found_once_it_is_built(linear: Path, cache: Path) -> None:
    before = trtmodel("check", linear, cache=cache)
    assert before.returncode == 0, before.stderr
    assert "input  x FP32 ['n', 8]" in before.stdout
    assert "output y FP32 ['n', 3]" in before.stdout
    assert "served x from [1, 8] to [32, 8]" in before.stdout
    assert before.stdout.strip().endswith("not built yet")
    built = trtmodel("build", linear, cache=cache)
    assert built.returncode == 0, built.stderr
    digest = built.stdout.strip()
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert trtmodel("check", linear, cache=cache).stdout.strip().endswith(f"engine {digest}")
    again = trtmodel("build", linear, cache=cache)
    assert again.stdout.strip() == digest
    assert "was built before" in again.stderr
    other = trtmodel("check", linear, "--max-batch", 4, cache=cache)
    assert "not built yet" in other.stdout  # other shapes are another engine


def test_a_model_may_lie_behind_a_uri(linear: Path, cache: Path, web: str) -> None:
    for uri in (f"file://{linear}", f"{web}/{linear.name}"):
        done = trtmodel("check", uri, cache=cache)
        assert done.returncode == 0, done.stderr
    missing = trtmodel("check", f"{web}/other.onnx", cache=cache)
    assert missing.returncode == 1
    assert f"model: {web}/other.onnx: the server answers 404" in missing.stderr


def test_a_free_dimension_must_be_said_and_the_message_shows_how(tmp_path: Path, cache: Path) -> None:
    model = onnx_models.relu(tmp_path / "image.onnx", ("n", 3, "height", "height"))
    done = trtmodel("check", model, cache=cache)
    assert done.returncode == 42
    assert "input 'x' is of shape [n, 3, height, height], and dimension 2 (height) may have any size" in done.stdout
    proposed = re.search(r"--shape '(x:1-32x3xNxN)'", done.stdout)
    assert proposed
    done = trtmodel("check", model, "--shape", proposed[1].replace("N", "8"), cache=cache)
    assert "served x from [1, 3, 8, 8] to [32, 3, 8, 8]" in done.stdout


def test_everything_that_is_wrong_is_shown_at_once_for_people_and_for_programs(tmp_path: Path, cache: Path) -> None:
    shape = ("n", 4)
    nodes = [onnx_models.node("Foo", ["x"], ["a"], "first"), onnx_models.node("Add", ["a", "w"], ["y"], "second")]
    values = [("x", onnx_models.FLOAT, shape)], [("y", onnx_models.FLOAT, shape)]
    model = onnx_models.save(tmp_path / "m.onnx", nodes, *values, {"w": np.array([np.nan] * 4, np.float32)})
    shown = trtmodel("check", model, cache=cache)
    assert shown.returncode == 42
    assert "error   ModelInvalid: weight 'w' holds NaN\n        way out: the training diverged" in shown.stdout
    assert "error   OperatorUnsupported: node 'first': operator ai.onnx:Foo does not exist" in shown.stdout
    assert shown.stdout.count("weight 'w' holds NaN") == 1
    assert shown.stderr == ""
    done = trtmodel("check", model, "-o", "json", cache=cache)
    assert done.returncode == 42
    found = json.loads(done.stdout)
    assert found["accepted"] is False
    assert [(f["severity"], f["reason"], f["node"]) for f in found["findings"]] == [
        ("error", "ModelInvalid", ""),
        ("error", "OperatorUnsupported", "first"),
    ]


def test_a_warning_is_shown_and_rejects_nothing(tmp_path: Path, cache: Path) -> None:
    values = [(name, onnx_models.FLOAT, ("n", 4)) for name in ("x", "idle", "y")]
    model = onnx_models.save(tmp_path / "m.onnx", [onnx_models.node("Relu", ["x"], ["y"])], values[:2], values[2:])
    done = trtmodel("check", model, "-o", "json", cache=cache)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["accepted"] is True
    assert [f["message"] for f in found["findings"]] == ["input 'idle' is used by no node"]
    assert [t["name"] for t in found["inputs"]] == ["x", "idle"]
    assert (found["nodes"], found["engine"]) == (1, None)


def test_an_engine_is_measured_on_the_users_data(linear: Path, tmp_path: Path, cache: Path) -> None:
    data = tmp_path / "eval.npz"
    np.savez(data, x=np.random.default_rng(0).normal(size=(700, 8)).astype(np.float32))
    verify = functools.partial(trtmodel, "verify", linear, "--dataset", data, "--task", "Classification", cache=cache)
    passed = verify("--report", tmp_path / "gate.html")
    assert passed.returncode == 0, passed.stderr
    assert passed.stdout.startswith("Done: top-1 differs in 0 of 700 samples")
    page = (tmp_path / "gate.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "top-1 differs in 0 of 700 samples" in page
    strict = verify("--top1-delta", 0.001, "--report", tmp_path / "gate.json")
    assert strict.returncode == 44
    report = json.loads((tmp_path / "gate.json").read_text())
    assert (report["verdict"], report["thresholds"]["top1Delta"]) == ("Inconclusive", 0.001)  # of today's thresholds
    few = verify("--samples", 10)
    assert few.returncode == 44
    assert few.stdout.startswith("GateInconclusive: ")
    assert "running the gate on this data set only" in few.stderr  # the engine was there


def test_a_report_that_cannot_be_written_is_said(linear: Path, tmp_path: Path, cache: Path) -> None:
    np.savez(tmp_path / "eval.npz", x=np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32))
    done = trtmodel(
        "verify", linear, "--dataset", tmp_path / "eval.npz", "--report", tmp_path / "no/gate.html", cache=cache
    )
    assert done.returncode == 2
    assert f"gate.html cannot be written: there is no directory {tmp_path / 'no'}" in done.stderr


@pytest.mark.long
def test_an_engine_that_differs_too_much_fails(tmp_path: Path, cache: Path) -> None:
    model, data = onnx_models.square(tmp_path / "square.onnx"), tmp_path / "large.npz"
    np.savez(data, x=np.full((20, 1), 300.0, np.float32) + np.arange(20, dtype=np.float32)[:, None])
    verify = functools.partial(trtmodel, "verify", model, "--dataset", data, "--precision", "FP16", cache=cache)
    done = verify()
    assert done.returncode == 42
    assert done.stdout.startswith("GateFailed: output y: 20 values are NaN or infinite")
    for keep in (("--keep", "^square$"), ("--keep-operator", "Mul")):
        kept = verify(*keep)
        assert kept.returncode == 0, kept.stderr


@pytest.mark.long
def test_int8_takes_its_ranges_from_data(linear: Path, tmp_path: Path, cache: Path) -> None:
    refused = trtmodel("build", linear, "--precision", "INT8", cache=cache)
    assert refused.returncode == 42
    assert "INT8 needs data to find ranges with: name an npz with --calibration" in refused.stderr
    np.savez(tmp_path / "calibration.npz", x=np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))
    built = trtmodel("build", linear, "--precision", "INT8", "--calibration", "calibration.npz", cache=cache)
    assert built.returncode == 0, built.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("nothing.onnx",), 1, "there is no file nothing.onnx (looked for "),
        ((".",), 1, "holds several models: linear.onnx, text.onnx: name one of them"),
        (("ftp://host/model.onnx",), 1, "it must start with s3://, https://"),
        (("text.onnx",), 42, "text.onnx (12 bytes) is not ONNX, or was cut off"),
        (("linear.onnx", "--shape", "x=1x8"), 2, "--shape 'x=1x8' cannot be read: write NAME:1-32x3x224x224"),
        (("linear.onnx", "--shape", "x:8-1x8"), 2, "cannot be read"),
        (("linear.onnx", "--shape", "z:1x8"), 42, "--shape z: the model has no such input, it has x"),
        (("linear.onnx", "--shape", "x:1"), 42, "input 'x' is of shape [n, 8]: give 2 sizes"),
        (("linear.onnx", "--shape", "x:1x9"), 42, "fixed at 8 in the model"),
        (("linear.onnx", "--precision", "FP8"), 42, "has no FP8: use FP32, FP16, INT8"),
        (("linear.onnx", "--runtime", "Torch"), 42, "runtime 'Torch' is not in this image"),
        (("linear.onnx", "--max-batch", "0"), 2, "'0' is not a number from 1 to 4096"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be_used_is_refused_in_words(
    arguments: tuple[str, ...], code: int, says: str, linear: Path, cache: Path
) -> None:
    (linear.parent / "text.onnx").write_text("not a model\n")
    done = trtmodel("check", *arguments, cache=cache)
    assert done.returncode == code, done.stderr
    assert says in (done.stdout if code == 42 else done.stderr)
    assert "Traceback" not in done.stderr


def test_a_cache_that_cannot_be_written_is_named(linear: Path) -> None:
    done = trtmodel("check", linear, cache=Path("/proc/self/cache"))
    assert done.returncode == 1
    assert "/proc/self/cache cannot be used" in done.stderr
    assert "--cache" in done.stderr
