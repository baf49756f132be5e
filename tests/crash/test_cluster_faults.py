"""The API server answers 409, 410, 429, 500 or nothing, is away for half a minute, shows what was a while ago; workers
do not answer; events are lost or come twice. The world ends as if nothing had been.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from ports import Ports
from scenarios import ALL, LOOP, MOST_WAIT, SOME, Ends, Run, begun, check_always, essence
from test_crash import ends_as
from trtmodel_operator.ports import ClusterError, Conflict, Json, Key, WorkerError
from world import World

pytestmark = pytest.mark.long

RESYNC = 300.0  # seconds
READS, TALK = ("get_model", "children"), ("report", "send")
WRITES = ("write_memory", "write_status", "apply", "create_job", "delete_job", "scale_workload", "delete_workload")
ERRORS: dict[str, Callable[[], Exception]] = {
    "409": lambda: Conflict("modified"),
    "410": lambda: ClusterError("GET", "x", "expired", 410),
    "429": lambda: ClusterError("PATCH", "x", "too many requests", 429, 5.0),
    "500": lambda: ClusterError("PATCH", "x", "internal error", 500),
    "done, then 500": lambda: ClusterError("PATCH", "x", "internal error", 500),
    "done, then silence": lambda: ClusterError("PATCH", "x", "no answer in time", 0),
    "no answer": lambda: WorkerError("no answer within 2 s"),
    "done, then no answer": lambda: WorkerError("no answer within 5 s"),
}
MISLEADING = ((True, True), (False, True), (True, False))  # model and children are old; only one of them is
OF_WRITES = ("409", "429", "500", "done, then 500", "done, then silence")
OF_READS = ("410", "500")
OF_TALK = ("no answer", "done, then no answer")


def error_of(name: str) -> Exception:
    return ERRORS[name]()


class Counted(Ports):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.calls: list[str] = []

    async def before(self, call: str) -> None:
        self.calls.append(call)


class Faulty(Counted):
    """One call fails, before or after it was made."""

    def __init__(self, world: World, at: int, error: str) -> None:
        super().__init__(world)
        self.at, self.error = at, error

    async def before(self, call: str) -> None:
        await super().before(call)
        if len(self.calls) == self.at + 1 and not self.error.startswith("done"):
            raise error_of(self.error)

    async def after(self, call: str) -> None:
        if self.error.startswith("done") and self.calls[self.at :] and self.calls[self.at] == call:
            error, self.error = self.error, ""
            raise error_of(error)


class Away(Counted):
    """The API server answers nothing until this moment."""

    def __init__(self, world: World, until: float) -> None:
        super().__init__(world)
        self.until = until

    async def before(self, call: str) -> None:
        await super().before(call)
        if call not in TALK and self.world.time < self.until:
            raise ClusterError("GET", "x", "connection refused")


class Stale(Ports):
    """Reads that show what was some writes ago."""

    def __init__(self, world: World, back: int, model: bool, children: bool) -> None:
        super().__init__(world)
        self.seen = world.earlier(back)
        self.model, self.old_children = model, children

    async def get_model(self, key: Key) -> Json | None:
        return self.seen[0] if self.model else self.world.model

    async def children(self, key: Key) -> dict[str, list[Json]]:
        return self.seen[1] if self.old_children else self.world.children()


@pytest.fixture(scope="module", params=SOME)
def name(request: pytest.FixtureRequest) -> str:
    """Of the module, so that all tests of one scenario follow one another and share what the next two remember."""
    return str(request.param)


@functools.lru_cache(maxsize=1)
def known_ends(name: str) -> dict[int, dict[str, Any]]:
    return {}


@functools.lru_cache(maxsize=1)
def passes_of(name: str) -> tuple[Run, list[tuple[Run, list[str]]]]:
    """The scenario at its end, and before each pass with the calls that the pass made."""
    run, passes = begun(name), []
    run.world.keeps_past = True
    while not run.over():
        run.people()
        before, ports = run.fork(), Counted(run.world)
        before.world.keeps_past = False
        one_pass(run, ports)
        passes.append((before, ports.calls))
    return run, passes


def one_pass(run: Run, ports: Ports) -> Run:
    run.rest(LOOP.run_until_complete(run.one_pass(ports)))
    return run


def test_an_error_at_any_call_changes_nothing_about_the_end(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """At every second write, and at every eighth of the other calls."""
    whole, passes = passes_of(name)
    ends, expected, n = Ends(essence, known_ends(name)), essence(whole.world), ALL.index(name)
    for i, (before, calls) in enumerate(passes):
        for at, call in enumerate(calls):
            n += 1
            if n % (2 if call in WRITES else 8):
                continue
            errors = OF_READS if call in READS else OF_TALK if call in TALK else OF_WRITES
            error = errors[n // 2 % len(errors)] if call in WRITES else errors[n // 8 % len(errors)]
            run = before.fork()
            run.idle = 0
            ends_as(name, ends, one_pass(run, Faulty(run.world, at, error)), expected, f"{error} at {call}, pass {i}")
    record_property("simulated rollouts", ends.runs)
    print(f"{name}: {ends.runs} runs with an error, {ends.passes} passes")


def test_half_a_minute_without_the_api_server_changes_nothing_and_makes_no_hot_loop(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    whole, passes = passes_of(name)
    ends, expected = Ends(essence, known_ends(name)), essence(whole.world)
    for i, (before, _) in list(enumerate(passes))[ALL.index(name) % 3 :: 3]:
        run = before.fork()
        run.idle, calls, until = 0, 0, run.world.time + 30.0
        while run.world.time < until:
            run.people()
            ports = Away(run.world, until)
            one_pass(run, ports)
            calls += len(ports.calls)
        assert calls < 8, "it asks too often"
        ends_as(name, ends, run, expected, f"away at pass {i}")
    record_property("simulated rollouts", ends.runs)


def test_stale_reads_change_nothing_about_the_end(name: str, record_property: Callable[[str, object], None]) -> None:
    whole, passes = passes_of(name)
    ends, expected = Ends(essence, known_ends(name)), essence(whole.world)
    for i, (before, _) in enumerate(passes):
        back, (model, children) = 1 + i % 5, MISLEADING[(ALL.index(name) + i) % len(MISLEADING)]
        run = before.fork()
        run.idle, run.world.alone, run.world.misled = 0, False, True
        one_pass(run, Stale(run.world, back, model, children))
        run.world.alone = True
        ends_as(name, ends, run, expected, f"{back} writes behind at pass {i}: model {model}, children {children}")
    record_property("simulated rollouts", ends.runs)


def test_events_that_are_lost_or_come_twice_change_nothing_about_the_end(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    """Without events there are the timers that the operator set itself, and a resync now and then."""
    expected, runs = essence(passes_of(name)[0].world), 0
    for seed in range(2):
        chance, run = random.Random(seed), begun(name)
        while not run.over():
            run.people()
            for _ in range(chance.choice((1, 1, 2))):
                wanted = LOOP.run_until_complete(run.one_pass(Ports(run.world)))
            run.idle = run.idle + 1 if wanted is None else 0
            wanted = RESYNC if wanted is None else wanted
            run.pass_time(wanted if chance.random() < 0.5 else min(wanted, chance.uniform(0.0, MOST_WAIT)))
        check_always(run.world)
        assert essence(run.world) == expected, seed
        runs += 1
    record_property("simulated rollouts", runs)
