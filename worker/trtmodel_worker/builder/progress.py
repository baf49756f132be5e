"""How far a Job is, served on a port of its pod.

A thread of its own answers while the Job computes. Nothing depends on it: a port that is taken or a client that hangs
costs a line in the log, never the Job.
"""

from __future__ import annotations

import contextlib
import http.server
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from trtmodel_contract.codec import dumps
from trtmodel_contract.progress import MESSAGE_LENGTH, PROGRESS_PATH, PROGRESS_PORT, STAGE_LENGTH, JobProgress

from trtmodel_worker.storage.uris import without_queries

CLIENT_SECONDS = 5.0  # for one request: a client that sends nothing, or a byte at a time, holds a thread no longer
MOST_CLIENTS = 32  # at once; each takes a thread and a descriptor from the Job
# The stages of a build in their order, with the percentage that is behind when one begins.
BUILD_STAGES = {"fetch": 0, "build": 10, "prove": 60, "reload": 90}

log = logging.getLogger("trtmodel.job")


class Board:
    """What is shown now. Written by the Job, read by the server's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown = JobProgress("start", "", time.time())

    def enter(self, stage: str) -> None:
        """The Job begins with this stage. One that comes again (the gate of another's engine) starts no new clock."""
        with self._lock:
            if self._shown.stage != stage:
                percent = BUILD_STAGES.get(stage)
                self._shown = JobProgress(stage[:STAGE_LENGTH], self._shown.message, time.time(), percent)

    def say(self, message: str) -> None:
        """A line for the log and for status."""
        message = without_queries(message)
        log.info("%s", message)
        with self._lock:
            shown = self._shown
            self._shown = JobProgress(shown.stage, message[:MESSAGE_LENGTH], shown.since, shown.percent)

    def document(self) -> bytes:
        with self._lock:
            return dumps(self._shown)


board = Board()  # a Job's process does one thing


@contextlib.contextmanager
def served(port: int = PROGRESS_PORT, shown: Board = board) -> Iterator[int]:
    """Serves what is shown until the block is left; gives the port that it listens on, 0 if it could not."""
    try:
        server = _Server(shown, port)
    except OSError as e:
        log.warning("progress is not served: port %d cannot be listened on: %s", port, e)
        yield 0
        return
    # Looks for the end often: each Job waits for that.
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="progress", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=CLIENT_SECONDS)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that hangs must not hold the Job's end

    def __init__(self, board: Board, port: int) -> None:
        self.board = board
        self._free = threading.Semaphore(MOST_CLIENTS)
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not HTTPServer's, which asks the resolver for this machine's name.
        super(http.server.HTTPServer, self).server_bind()
        self.server_name, self.server_port = "", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing, as in `log_message`: what strangers send is no news about the Job."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS
    server_version = "trtmodel-job"
    sys_version = ""

    def handle(self) -> None:
        timer = threading.Timer(CLIENT_SECONDS, self._cut)
        timer.daemon = True
        timer.start()
        try:
            super().handle()
        finally:
            timer.cancel()

    def _cut(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        if self.path != PROGRESS_PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.server.board.document()
        self.send_response(HTTPStatus.OK)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Nothing: a line for every look of the operator would bury the Job's own."""
