"""A server is started, must answer right, is measured cell by cell, and ends with all that it started."""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import protocols
from catalogue import US, Peer, Running, Setup
from load import Found, wrk
from models import BenchModel
from peer import PeerServer
from processes import cpu_seconds, end_descendants, pss_mib
from protocols import Request
from us import Artifacts, OurServer

START_SECONDS = 60.0
ANSWER_SECONDS = 10.0  # longer than any deadline that servers get, so that it is they who give up
WARM_SECONDS = 0.5


class ServerError(RuntimeError):
    """A server did not start, or answered wrong. The text says which and ends with what it logged."""


@dataclass(frozen=True)
class Cell:
    """`body`: json or binary."""

    model: str
    body: str
    clients: int

    def __str__(self) -> str:
        return f"{self.model}/{self.body}/{self.clients}"


@dataclass(frozen=True)
class Sample:
    """One measurement of one cell. `cpu_us`: the server's processor time per request, all its processes."""

    found: Found
    cpu_us: float


@dataclass(frozen=True)
class Visit:
    """One start of one server. `start_seconds`: until the first right answer; `pss_mib`: after the last cell."""

    model: str
    start_seconds: float
    pss_mib: float
    samples: dict[Cell, Sample]


class Client:
    """One kept connection that checks each answer."""

    def __init__(self, peer: Peer, model: BenchModel, body: str, port: int, seconds: float = ANSWER_SECONDS) -> None:
        self._kind, path = peer.formats[body]
        self._model, self._port, self._seconds = model, port, seconds
        self.request: Request = protocols.build(self._kind, path, model)
        self._connection: http.client.HTTPConnection | None = None

    def ask(self) -> int:
        """The version that answered right. Raises OSError, http.client.HTTPException or ServerError."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=self._seconds)
        try:
            self._connection.request("POST", self.request.path, self.request.body, dict(self.request.headers))
            response = self._connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise ServerError(f"status {response.status}: {body[:200]!r}")
            headers = {key.lower(): value for key, value in response.getheaders()}
            try:
                version = self._model.version_of(protocols.read(self._kind, self._model, headers, body))
            except (ValueError, KeyError, IndexError) as e:
                raise ServerError(f"no answer that can be read ({e!r}): {body[:200]!r}") from None
            if version is None:
                raise ServerError(f"a wrong answer: {body[:200]!r}")
        except BaseException:
            self.close()
            raise
        if response.will_close:
            self.close()
        return version

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def server(peer: Peer, setup: Setup, artifacts: Artifacts, standby: bool = False) -> Running:
    setup.folder.mkdir(parents=True, exist_ok=True)
    return OurServer(artifacts, setup, standby) if peer is US else PeerServer(peer, setup)


@contextlib.contextmanager
def started(peer: Peer, setup: Setup, artifacts: Artifacts, standby: bool = False) -> Iterator[tuple[Running, float]]:
    """A server that answers right, and the seconds that took. Raises ServerError."""
    running = server(peer, setup, artifacts, standby)
    begun = time.monotonic()
    try:
        running.start()
        until_right(peer, setup, running)
        yield running, time.monotonic() - begun
    finally:
        running.stop()
        end_descendants()


def until_right(peer: Peer, setup: Setup, running: Running, seconds: float = START_SECONDS) -> None:
    """Raises ServerError if it ends before, or `seconds` pass."""
    client = Client(peer, setup.model, setup.body, running.port)
    deadline = time.monotonic() + seconds
    last = ""
    try:
        while True:
            try:
                client.ask()
            except (OSError, http.client.HTTPException, ServerError) as e:
                last = str(e)
            else:
                return
            if not running.alive():
                raise ServerError(f"{peer.name} ended: {running.tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{peer.name} gave no right answer within {seconds:g} s: {last}\n{running.tail()}")
            time.sleep(0.02)
    finally:
        client.close()


def visit(peer: Peer, setup: Setup, cells: Sequence[Cell], seconds: int, artifacts: Artifacts) -> Visit:
    """One server through its cells. Raises ServerError, LoadError."""
    samples: dict[Cell, Sample] = {}
    with started(peer, setup, artifacts) as (running, start_seconds):
        for cell in cells:
            client = Client(peer, setup.model, cell.body, running.port)
            end = time.monotonic() + WARM_SECONDS
            try:
                while time.monotonic() < end:
                    client.ask()
                samples[cell] = sample(running, client.request, cell.clients, seconds, setup.folder)
                client.ask()
            except (OSError, http.client.HTTPException) as e:
                raise ServerError(f"{peer.name}, {cell}: {e!r}\n{running.tail()}") from None
            finally:
                client.close()
        return Visit(setup.model.name, start_seconds, pss_mib(running.pids()), samples)


def sample(running: Running, request: Request, clients: int, seconds: int, folder: Path) -> Sample:
    before = cpu_seconds(running.pids())
    found = wrk(running.port, request, clients, seconds, folder)
    spent = cpu_seconds(running.pids()) - before
    return Sample(found, 1e6 * spent / max(found.requests, 1))
