"""A stage's process belongs to its Job: whenever the Job is asked to end, it is ended too."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_worker.builder import main as job
from trtmodel_worker.builder import process
from trtmodel_worker.storage import StorageError


def test_a_job_that_is_asked_to_end_while_a_stage_starts_leaves_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when the stage's process exists, but Popen has not told yet which it is. Another thread is there
    that may take it, as in a Job that talks to its store."""
    started: list[subprocess.Popen[str]] = []

    def popen(*_: object, **options: Any) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(["sleep", "60"], **options))
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while signal.SIGTERM in signal.sigpending() and time.monotonic() < deadline:
            time.sleep(0.001)  # until a thread took it
        return started[0]

    def stop(*_: object) -> None:
        raise SystemExit(143)

    fake = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    monkeypatch.setattr(process, "subprocess", fake)
    former = signal.signal(signal.SIGTERM, stop)
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        with pytest.raises(SystemExit):
            process.run_module(["trtmodel_worker.builder.stages"])
    finally:
        signal.signal(signal.SIGTERM, former)
        over.set()
        other.join()
    assert [each.poll() for each in started] == [-signal.SIGKILL]


_FILLS_THE_DISK = """
from pathlib import Path
from trtmodel_worker.builder.process import telling_no_space
with telling_no_space():
    Path("/dev/full").write_bytes(b"plan")
"""


def test_a_full_disk_of_a_stage_is_told_as_such_and_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fills_the_disk.py").write_text(_FILLS_THE_DISK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(StorageError, match=r"fills_the_disk: the local disk is full or read-only: .*No space") as e:
        process.run_module(["fills_the_disk"])
    assert e.value.reason is Reason.NO_SPACE


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_of_the_job_is_no_defect_and_is_tried_again(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> JobResult:
        raise OSError(number, os.strerror(number), "/var/cache/trtmodel/work-1")

    monkeypatch.setattr(job, "_resolve", fails)
    result, code = job._run("resolve")
    assert (result.reason, code) == (Reason.NO_SPACE, JobExit.RETRY)
    assert "defect" not in result.message
