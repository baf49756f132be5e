"""The operator is killed before and after every I/O of every scenario, and the world ends as if it had not been.

A scenario is played once, undisturbed. The world is kept as it is before and after each call that leaves the
operator's process (reads, writes, and what it says to workers); a crash there is a copy of it with a new operator,
which is away for no time, or for a moment, or for longer than a gap, a time to live or a deadline allows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ends import ENDS, told
from ports import Ports
from scenarios import ALL, LOOP, Ends, Run, begun, check_always, essence, outcome

# Those that every test run plays; the others are the matrix.
QUICK = ("first rollout", "failing update", "deleted in mid-canary", "fleet of one, good update")
AWAY = (2.0, 20.0, 45.0, 3600.0)  # seconds; every third world is continued after one of them, and all after none


class Recorded(Ports):
    """Keeps the world before and after each call, where it differs from the last one that was kept."""

    def __init__(self, run: Run, kept: list[tuple[str, Run]]) -> None:
        super().__init__(run.world)
        self.run, self.kept, self.calls, self.changes = run, kept, 0, -1

    async def before(self, call: str) -> None:
        self.calls += 1
        self._keep(f"before {call}")

    async def after(self, call: str) -> None:
        self._keep(f"after {call}")

    def _keep(self, where: str) -> None:
        if self.world.changes != self.changes:
            self.changes = self.world.changes
            self.kept.append((f"{where}, pass {self.run.passes}", self.run.fork()))


def played(name: str) -> tuple[Run, list[tuple[str, Run]], int]:
    """The scenario at its end; the worlds on its way; and how many calls there were."""
    run, kept, calls = begun(name), [], 0
    while not run.over():
        ports = Recorded(run, kept)
        run.step(ports)
        calls += ports.calls
    check_always(run.world)
    return run, kept, calls


def ends_as(name: str, ends: Ends, run: Run, expected: dict[str, object], where: str) -> None:
    end = ends.of(run)
    check_always(run.world)
    differing = {k: (end.get(k), expected[k]) for k in expected if end.get(k) != expected[k]}
    assert not differing, f"{name}, {where}: {differing}"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in ALL])
def test_a_crash_before_or_after_any_call_changes_nothing_about_the_end(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    whole, kept, calls = played(name)
    assert told(whole.world) == ENDS[name]
    ends = Ends(outcome)
    for i, (where, run) in enumerate(kept):
        run.idle = 0
        ends_as(name, ends, run.fork(), outcome(whole.world), where)
        if i % 3:
            continue
        away, back = AWAY[i // 3 % len(AWAY)], run.fork()
        back.pass_time(away)
        ends_as(name, ends, back, essence(whole.world), f"{where}, away for {away:g} s")
    record_property("simulated rollouts", ends.runs)
    print(f"{name}: {calls} calls, {len(kept)} different worlds, {ends.runs} runs, {ends.passes} passes")
    assert ends.runs >= len(kept) > 0


def test_the_operator_changes_nothing_of_what_it_was_given() -> None:
    """Worlds share what lies in them: one that was changed in place would change the others."""
    run = begun("good update")
    while not run.over():
        state, model, children = repr(run.world.state()), repr(run.world.model), repr(run.world.children())
        quiet = run.fork()
        LOOP.run_until_complete(quiet.one_pass(Ports(quiet.world)))
        assert (repr(run.world.state()), repr(run.world.model), repr(run.world.children())) == (state, model, children)
        run.step()


def test_a_world_that_was_copied_goes_the_same_way() -> None:
    run = begun("source changed for good in mid-canary")
    while not run.over():
        twin = run.fork()
        run.step()
        twin.step()
        assert twin.state() == run.state()
