"""The front's log: whoever does not read it keeps nobody waiting."""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

import pytest
from trtmodel_worker.front import logs
from trtmodel_worker.front.logs import Log

log = logging.getLogger("trtmodel_worker.front.some")


@pytest.fixture
def ends() -> Iterator[tuple[int, TextIO]]:
    """Of a small pipe: where it is read, and where the log is written to."""
    level = logging.getLogger().level
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
    os.close(reading)
    logging.getLogger().setLevel(level)


def read_to_end(fd: int) -> str:
    found = b""
    while data := os.read(fd, 65536):
        found += data
    return found.decode()


def test_lines_are_written_in_order_and_to_the_last_one(ends: tuple[int, TextIO]) -> None:
    reading, stream = ends
    lines = Log(stream)
    log.info("the first %s", "one")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    lines.close()
    stream.close()
    text = read_to_end(reading)
    assert (
        text.index("INFO front the first one\n") < text.index("ERROR front it failed\n") < text.index("ValueError: why")
    )


def test_a_log_that_nobody_reads_keeps_nobody_waiting_and_what_is_lost_is_counted(
    ends: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_LINES", 50)
    reading, stream = ends
    lines = Log(stream)
    for number in range(500):  # would not return if it wrote
        log.info("line %d %s", number, "x" * 400)
    text = b""
    while b"line 0 " not in text:  # its thread has begun to write, and there is room again soon
        text += os.read(reading, 65536)
    os.set_blocking(reading, False)
    number = 500
    while b"were not written in time" not in text:
        log.info("line %d %s", number, "x" * 400)
        number += 1
        try:
            text += os.read(reading, 65536)
        except BlockingIOError:
            continue
    os.set_blocking(reading, True)
    with ThreadPoolExecutor(1) as reader:  # the log's thread may be in the middle of a line, and holds the stream then
        rest = reader.submit(read_to_end, reading)
        lines.close()
        stream.close()
        rest.result()


DEFECT = """
import asyncio, threading
from trtmodel_worker.front import main

async def serve(settings):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)  # a storage that does not answer
    raise RuntimeError("why")

main.serve = serve
main.main()
"""


def test_a_defect_ends_the_process_although_a_thread_hangs_and_the_log_tells_of_it() -> None:
    names = ("POD_NAME", "POD_UID", "POD_NAMESPACE", "TRTMODEL_MODEL", "TRTMODEL_MODEL_UID", "TRTMODEL_RUNTIME")
    env = {**os.environ, **dict.fromkeys(names, "x"), "TRTMODEL_CONTEXTS": "1"}
    command = [sys.executable, "-c", DEFECT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    assert "CRITICAL front this worker ends by a defect" in done.stderr
    assert "RuntimeError: why" in done.stderr
