"""How far a Job is, on its port."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import urllib.error
import urllib.request

import pytest
from trtmodel_contract.codec import loads
from trtmodel_contract.progress import MESSAGE_LENGTH, PROGRESS_PATH, JobProgress
from trtmodel_worker.builder import progress

SECONDS = 20.0


def ask(port: int, path: str = PROGRESS_PATH) -> JobProgress:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=SECONDS) as answer:
        return loads(JobProgress, answer.read())


def test_what_was_said_last_is_shown_with_its_stage_and_what_is_behind() -> None:
    board = progress.Board()
    with progress.served(0, board) as port:
        assert (ask(port).stage, ask(port).percent) == ("start", None)
        board.enter("fetch")
        board.say("fetching source and data sets")
        shown = ask(port)
        assert (shown.stage, shown.message, shown.percent) == ("fetch", "fetching source and data sets", 0)
        board.enter("prove")
        assert (ask(port).stage, ask(port).message) == ("prove", "fetching source and data sets")
        assert ask(port).percent == 60


def test_a_stage_that_is_entered_again_goes_on() -> None:
    board = progress.Board()
    board.enter("prove")
    before = loads(JobProgress, board.document()).since
    board.enter("prove")
    assert loads(JobProgress, board.document()).since == before


def test_a_long_message_is_cut_and_the_log_has_all_of_it(caplog: pytest.LogCaptureFixture) -> None:
    board = progress.Board()
    with caplog.at_level(logging.INFO, logger="trtmodel.job"):
        board.say("x" * 2000)
    assert len(loads(JobProgress, board.document()).message) == MESSAGE_LENGTH
    assert "x" * 2000 in caplog.text


def test_nothing_else_is_served() -> None:
    with progress.served(0, progress.Board()) as port, pytest.raises(urllib.error.HTTPError, match="404"):
        ask(port, "/etc/passwd")


def test_a_port_that_is_taken_costs_a_line_in_the_log_and_not_the_job(caplog: pytest.LogCaptureFixture) -> None:
    with progress.served(0, progress.Board()) as port, progress.served(port, progress.Board()) as other:
        assert other == 0
    assert f"port {port} cannot be listened on" in caplog.text


def test_a_client_that_says_nothing_does_not_hold_the_jobs_end() -> None:
    with progress.served(0, progress.Board()) as port:
        client = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
        assert ask(port).stage == "start"  # nor anybody else
    client.close()


def test_strangers_that_say_nothing_or_never_end_take_a_few_threads_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "MOST_CLIENTS", 4)
    monkeypatch.setattr(progress, "CLIENT_SECONDS", 1.0)
    with progress.served(0, progress.Board()) as port:
        strangers = [socket.create_connection(("127.0.0.1", port), SECONDS) for _ in range(12)]
        assert sum(thread.name.startswith("Thread") for thread in threading.enumerate()) <= 2 * 4 + 2
        for stranger in strangers:
            with contextlib.suppress(OSError):
                for byte in b"GET / HTTP/1.1\r\nx: ":
                    stranger.sendall(bytes([byte]))
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # cut, long before the time-out of this side
            stranger.close()
        with socket.create_connection(("127.0.0.1", port), SECONDS) as garbage:
            garbage.sendall(bytes(range(256)) * 4 + b"\n\n")
        assert ask(port).stage == "start"
    assert "Traceback" not in capfd.readouterr().err
