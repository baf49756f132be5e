"""What happens to clients when something happens to the server. Magika, every answer compared.

swap      a second version, whose answers differ, takes over under the load of 4 clients
kill      the process that infers gets SIGKILL under the load of 4 clients
overload  four times the requests that it can answer, in an open loop; nobody waits longer than a second
"""

from __future__ import annotations

import asyncio
import collections
import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import protocols
from catalogue import US, Peer, Running, Setup
from clients import Clients, Outcome, offer
from load import wrk
from measure import Client, ServerError, started
from processes import command_line, cpu_seconds, end_descendants, pss_mib

CLIENTS = 4
STEADY_SECONDS = 3.0
GIVE_UP_SECONDS = 40.0
OVERLOAD = 4.0
OVERLOAD_SECONDS = 20.0
OVERLOAD_DEADLINE = 1.0
CAPACITY_SECONDS = 3
HOW = {
    "control": "beside the old one", "reload": "reload", "signal": "deployed again", "restart": "process restarted",
}  # fmt: skip


def swap(peer: Peer, setup: Setup, artifacts: Any) -> dict[str, Any]:
    if peer is US:
        artifacts.get(setup.model, 2)  # built beforehand, as in every rollout
    with started(peer, setup, artifacts) as (running, _), _clients(peer, setup, running) as clients:
        time.sleep(STEADY_SECONDS)
        begun = time.monotonic()
        running.new_version()
        took = time.monotonic() - begun
        new = clients.wait(lambda o: o.version == 2, GIVE_UP_SECONDS)
        time.sleep(STEADY_SECONDS)
        if new is None:
            raise ServerError(f"{peer.name}: the new version never answered\n{running.tail()}")
    outcomes = list(clients.outcomes)
    return {
        "how": HOW[peer.swap],
        "requests": len(outcomes),
        "failed": sum(not o.version for o in outcomes),
        "mostly": _reason(outcomes),
        **_latencies(outcomes, begun),
        "longest time without an answer, s": _gap(outcomes, begun),
        "until the first answer of the new version, s": round(new.ended - begun, 3),
        "new version's call took, s": round(took, 3),
    }


def kill(peer: Peer, setup: Setup, artifacts: Any) -> dict[str, Any]:
    standby = peer is US  # the previous version stays beside the one in force, as after any rollout
    with started(peer, setup, artifacts, standby) as (running, _), _clients(peer, setup, running) as clients:
        before = {pid: cpu_seconds([pid]) for pid in running.pids()}
        time.sleep(STEADY_SECONDS)
        victim = max(before, key=lambda pid: cpu_seconds([pid]) - before[pid])
        root, name = running.pids()[0], _short(command_line(victim))
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        supervisor = _Supervisor(running)
        back = clients.wait(lambda o: bool(o.version) and o.begun > killed, GIVE_UP_SECONDS)
        if back is not None:
            time.sleep(STEADY_SECONDS)
        supervisor.stop()
    outcomes = list(clients.outcomes)
    return {
        "killed": "the server itself" if victim == root else f"behind its front: {name}",
        "requests": len(outcomes),
        "failed": sum(not o.version for o in outcomes),
        "mostly": _reason(outcomes),
        **_latencies(outcomes, killed),
        "served again after, s": round(back.ended - killed, 3) if back else f"not within {GIVE_UP_SECONDS:g}",
        "restarted by": "us, as a supervisor" if supervisor.restarts else "itself" if back else "nobody",
    }


def overload(peer: Peer, setup: Setup, artifacts: Any) -> dict[str, Any]:
    setup = replace(setup, deadline_seconds=OVERLOAD_DEADLINE)
    kind, path = peer.formats[setup.body]
    request = protocols.build(kind, path, setup.model)

    def right(headers: Any, body: bytes) -> bool:
        try:
            return setup.model.version_of(protocols.read(kind, setup.model, headers, body)) == 1
        except (ValueError, KeyError, IndexError):
            return False

    with started(peer, setup, artifacts) as (running, _):
        capacity = wrk(running.port, request, 16, CAPACITY_SECONDS, setup.folder).requests_per_second
        memory = pss_mib(running.pids())
        rate = OVERLOAD * capacity
        found = asyncio.run(offer(running.port, request.bytes(), rate, OVERLOAD_SECONDS, OVERLOAD_DEADLINE, right))
        ended = time.monotonic()
        grown = pss_mib(running.pids()) - memory
        recovery = _recovery(peer, setup, running, ended)
    good = sorted(found["good"])
    return {
        "capacity, req/s": capacity,
        "offered, req/s": rate,
        "answered in time, req/s": len(good) / OVERLOAD_SECONDS,
        "of capacity, %": 100 * len(good) / OVERLOAD_SECONDS / capacity,
        "p50 ms": 1e3 * _percentile(good, 0.5),
        "p99 ms": 1e3 * _percentile(good, 0.99),
        "refused": len(found["refused"]),
        "late": len(found["late"]),
        "connection broken": len(found["broken"]),
        "wrong": len(found["wrong"]),
        "memory grown, MiB": grown,
        "well again after, s": recovery,
    }


ALL: dict[str, Callable[[Peer, Setup, Any], dict[str, Any]]] = {"swap": swap, "kill": kill, "overload": overload}


class _Supervisor:
    """Starts a server again that ended, as a kubelet would, without its back-off."""

    def __init__(self, running: Running) -> None:
        self._running, self._stopped, self.restarts = running, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            if not self._running.alive():
                self.restarts += 1
                end_descendants()  # a container's other processes end with its first one
                self._running.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()


def _clients(peer: Peer, setup: Setup, running: Running) -> Clients:
    return Clients(lambda: Client(peer, setup.model, setup.body, running.port), CLIENTS)


def _latencies(outcomes: Sequence[Outcome], event: float) -> dict[str, float]:
    """Of right answers, before the event and from it on."""
    before = sorted(o.ended - o.begun for o in outcomes if o.version and o.ended <= event)
    after = sorted(o.ended - o.begun for o in outcomes if o.version and o.ended > event)
    return {"p99 ms before": 1e3 * _percentile(before, 0.99), "worst ms after": 1e3 * (after[-1] if after else 0.0)}


def _reason(outcomes: Sequence[Outcome]) -> str:
    """Of the failures, the one seen most."""
    most = collections.Counter(o.why for o in outcomes if not o.version).most_common(1)
    return most[0][0][:100].replace("|", "/") if most else ""


def _short(command: str) -> str:
    """The words of a command line that say what it is."""
    words = [w.rsplit("/", 1)[-1] for w in command.split() if not w.startswith(("-B", "-E", "-I", "-s"))]
    return " ".join(words)[:40]


def _gap(outcomes: Sequence[Outcome], event: float) -> float:
    times = sorted(o.ended for o in outcomes if o.version and o.ended > event - 0.5)
    return round(max((b - a for a, b in pairwise(times)), default=0.0), 3)


def _percentile(values: Sequence[float], share: float) -> float:
    return values[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def _recovery(peer: Peer, setup: Setup, running: Running, since: float) -> float | str:
    """Seconds until a single request is answered right within a quarter of a second."""
    client = Client(peer, setup.model, setup.body, running.port, seconds=0.25)
    try:
        while time.monotonic() < since + GIVE_UP_SECONDS:
            try:
                client.ask()
            except (OSError, http.client.HTTPException, ServerError):
                time.sleep(0.01)
            else:
                return round(time.monotonic() - since, 3)
    finally:
        client.close()
    return f"not within {GIVE_UP_SECONDS:g}"
