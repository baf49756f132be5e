"""Clocks that jump, and workers that hold another engine than they were told: a good update loses nothing by the one,
and a candidate gains nothing by the other.
"""

from __future__ import annotations

import dataclasses

import pytest
from acts import B, stable
from ports import Ports
from scenarios import Run, begun, check_always, essence
from trtmodel_contract.control import Report
from world import World

HOLDS = 15 + 10  # seconds that the steps of SPEC take at least
JUMPS = (-86_400.0, -3600.0, 3600.0, 86_400.0)


class Off(Ports):
    """The operator's clock is off by so many seconds; those of the cluster and its workers are not."""

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world)
        self.seconds = seconds

    def now(self) -> float:
        return self.world.time + self.seconds


class Mistaken(Ports):
    """Workers report the candidate under another digest than the one that they were told."""

    async def report(self, ip: str, uid: str) -> Report:
        found = await super().report(ip, uid)
        candidate = self.world.rollout["candidate"]
        on_trial = candidate is not None and self.world.rollout["stable"] is not None
        told = {a["manifestDigest"] for a in candidate["artifacts"]} if on_trial else set()
        models = {
            name: dataclasses.replace(
                model,
                engines=tuple(
                    dataclasses.replace(e, manifest_digest="e" * 64) if e.manifest_digest in told else e
                    for e in model.engines
                ),
            )
            for name, model in found.models.items()
        }
        return dataclasses.replace(found, models=models)


def passes_of_a_good_update() -> list[Run]:
    """The run before each pass, once the update was applied."""
    run, runs = begun("good update"), []
    while not run.over():
        run.people()
        if not run.script:
            runs.append(run.fork())
        run.step()
    return runs


@pytest.mark.parametrize("jump", JUMPS)
def test_a_clock_that_jumps_at_any_pass_neither_shortens_a_hold_nor_ends_a_rollout(jump: float) -> None:
    expected, tried = None, 0
    for before in passes_of_a_good_update()[::3]:
        run, answered = before.fork(), None
        run.idle = 0
        early = before.world.on_candidate() > 0 or stable(B)(before.world)
        while not run.over():
            was = stable(B)(run.world)
            if answered is None and run.world.on_candidate():
                answered = run.world.time
            run.step(Off(run.world, jump))
            if not was and stable(B)(run.world) and not early:
                assert answered is not None
                assert run.world.time - answered >= HOLDS
        check_always(run.world)
        end = essence(run.world)
        expected = expected or end
        assert end == expected
        tried += 1
    assert tried > 5
    assert expected is not None
    assert ("Ready", "True", "Serving") in expected["conditions"]


def test_a_candidate_that_no_worker_reports_by_its_digest_is_never_routed_and_goes_back_at_the_deadline() -> None:
    run = begun("good update")
    while not run.over():
        run.step(Mistaken(run.world))
        assert run.world.on_candidate() == 0
    assert not stable(B)(run.world)
    assert [r["reason"] for r in run.world.rollout["rejected"]] == ["ProgressDeadlineExceeded"]
