"""A stage's process belongs to its Job: whenever the Job is asked to end, it is ended too."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from trtmodel_worker.builder import process


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
