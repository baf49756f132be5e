"""`trtmodel` with what a hostile or unlucky user gives it: it says what is wrong, hangs nowhere, shows no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_models
import pytest
from trtmodel_worker.alone import samples
from trtmodel_worker.alone.home import Home
from trtmodel_worker.alone.main import main
from trtmodel_worker.alone.report import Unwritable, require_writable
from trtmodel_worker.alone.say import name, plain
from trtmodel_worker.engines.building import Graph, GraphTensor, Rejected
from trtmodel_worker.storage import StorageError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    former = signal.getsignal(signal.SIGTERM)  # the command in this process sets its own
    yield
    signal.signal(signal.SIGTERM, former)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "cache")
    found.files.mkdir(parents=True)
    return found


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--cosine", value) for value in ("nan", "inf", "-0.1", "1.1", "x")),
        *(("--rmse-increase", value) for value in ("nan", "-1", "inf")),
        *(("--top1-delta", value) for value in ("nan", "0", "2")),
        ("--dataset", ""),
    ],
)
def test_a_limit_that_could_not_be_judged_is_refused_before_anything_runs(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", "m.onnx", "--dataset", "d.npz", f"{option}={value}"])
    assert ended.value.code == 2
    assert f"argument {option}" in capsys.readouterr().err


def test_what_never_ends_is_no_model(tmp_path: Path, home: Home) -> None:
    os.mkfifo(tmp_path / "pipe.onnx")
    for what in (str(tmp_path / "pipe.onnx"), "/dev/zero"):
        with pytest.raises(StorageError, match="a pipe, a socket or a device"):
            home.source("model", what)


def test_names_that_no_disk_can_hold_are_files_that_are_not_there(home: Home) -> None:
    for named in ("a" * 5000, "~nobody-has-this-name/m.onnx"):
        with pytest.raises(StorageError, match="there is no file"):
            home.source("model", named)


def test_a_cache_in_an_unknown_home_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "m.onnx", "--cache", "~nobody-has-this-name/c"]) == 2
    assert "name a directory with --cache" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    require_writable(tmp_path / "report.html")
    for target in (tmp_path, tmp_path / "none" / "report.html"):
        with pytest.raises(Unwritable, match="cannot be written"):
            require_writable(target)


def test_a_terminal_obeys_no_name_of_a_model() -> None:
    assert plain("x\x1b[2J\x07\n\ty\x9b") == "x\\x1b[2J\\x07\n\ty\\x9b"
    assert name("y\nerror fake") == "y\\nerror fake"
    assert plain("b\udcff\u202e") == "b\\udcff\\u202e"


def test_a_model_with_hostile_names_forges_no_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = onnx.load(onnx_models.linear(tmp_path / "m.onnx"))
    hostile = "y\x1b[2J\nrevision forged"
    model.graph.output[0].name = model.graph.node[-1].output[0] = hostile
    onnx.save(model, tmp_path / "m.onnx")
    assert main(["check", str(tmp_path / "m.onnx"), "--cache", str(tmp_path / "cache")]) == 0
    said = capfd.readouterr().out
    assert "\x1b" not in said
    assert sum(line.startswith("revision") for line in said.splitlines()) == 1


def test_nobody_reads_the_output_or_it_cannot_be_written(tmp_path: Path) -> None:
    model = onnx_models.linear(tmp_path / "m.onnx")
    command = [sys.executable, "-m", "trtmodel_worker.alone.main", "check", str(model), "--cache", str(tmp_path / "c")]
    reader, writer = os.pipe()
    os.close(reader)
    with Path("/dev/full").open("wb") as full:
        for out, words in ((writer, ""), (full.fileno(), "No space left on device")):
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
            assert done.returncode == 1
            assert words in done.stderr
            assert "Traceback" not in done.stderr
    os.close(writer)


@pytest.mark.parametrize("task", ["Raw", "Classification"])
def test_data_that_the_original_answers_with_nan_proves_nothing(
    task: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = onnx_models.linear(tmp_path / "m.onnx")
    np.savez(tmp_path / "nan.npz", x=np.full((50, 8), np.nan, np.float32))
    arguments = ["--dataset", str(tmp_path / "nan.npz"), "--task", task, "--cache", str(tmp_path / "cache")]
    assert main(["verify", str(model), *arguments]) == 42
    assert "NaN" in "".join(capfd.readouterr())


def test_inputs_that_no_memory_holds_are_not_made_up(tmp_path: Path) -> None:
    graph = Graph((GraphTensor("x", "FP32", (1, 20_000_000_000)),), ())
    with pytest.raises(Rejected, match="640,000,000,000 bytes"):
        samples.write(tmp_path / "x.npz", graph, ())
