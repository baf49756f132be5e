"""The log of the front, whose loop never waits for it.

Whoever takes standard error may be slow: a disk that is busy, a container's log driver, a process of low priority that
holds the same file. Lines come when engines change or fail, and one that the loop writes itself keeps every request
waiting. So a thread writes, and what it cannot write in time is dropped and counted.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import queue
import sys
import threading
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)s front %(message)s"
MOST_LINES = 10_000  # that wait to be written
END_SECONDS = 2.0


class Log:
    """Takes over the root logger from now on, until `close`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._writer = logging.StreamHandler(stream or sys.stderr)
        self._writer.setFormatter(logging.Formatter(FORMAT))
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(MOST_LINES)
        self._handler = _Handler(self._lines)
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        root.addHandler(self._handler)

    def close(self) -> None:
        """Returns when everything is written, or after some seconds."""
        logging.getLogger().removeHandler(self._handler)
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=END_SECONDS)
        self._thread.join(END_SECONDS)

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            self._writer.handle(record)


class _Handler(logging.handlers.QueueHandler):
    """`lost`: lines since the last one for which there was room."""

    lost = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        if self.lost:
            record.msg = f"({self.lost:,} lines before this one were not written in time) {record.msg}"
        try:
            self.queue.put_nowait(record)
            self.lost = 0
        except queue.Full:
            self.lost += 1
