"""The API server refuses an effect for good (an admission policy, a quota): a bad candidate goes back all the same."""

from __future__ import annotations

import pytest
from ports import Ports
from scenarios import LOOP, Run, begun
from trtmodel_operator.ports import ClusterError, Json
from world import TRAFFIC

TTL = 300.0  # seconds after which a worker returns to stable by itself


class Refusing(Ports):
    refused: tuple[str, ...] = ("create_job", "scale_workload")

    async def before(self, call: str) -> None:
        if call in self.refused:
            raise ClusterError("POST", call, "denied by a policy", 403)

    async def apply(self, manifest: Json) -> None:
        what = manifest["kind"], manifest["metadata"]["name"]
        if what[0] == "ConfigMap" and what not in self.world.objects:
            raise ClusterError("PATCH", what[1], "exceeded quota", 403)
        await super().apply(manifest)


def in_canary(name: str) -> Run:
    run = begun(name)
    while not run.world.on_candidate():
        run.step()
    assert not run.script
    return run


REFUSED: dict[str, dict[str, object]] = {
    "more workers": {"serving__replicas": 9},
    "another target": {"targets": [{"name": "default"}, {"name": "other"}]},
    "a Job": {"source__uri": "s3://m/c"},
}


def goes_back(run: Run, within: float) -> None:
    began = run.world.time
    while run.world.on_candidate():
        assert run.world.time - began < within, "no worker was told"
        run.rest(LOOP.run_until_complete(run.one_pass(Refusing(run.world))))
    (newest, *_) = run.world.rollout["history"]
    assert (newest["outcome"], newest["reason"]) == ("RolledBack", "ErrorRateTooHigh")


@pytest.mark.parametrize("refused", REFUSED)
def test_an_effect_that_is_refused_for_good_holds_up_no_way_back(refused: str) -> None:
    run = in_canary("failing update")
    run.world.edit(**REFUSED[refused])
    goes_back(run, TTL / 2)


@pytest.mark.parametrize("refused", REFUSED)
def test_after_many_refusals_the_looks_at_a_trial_are_as_close_together_as_ever(refused: str) -> None:
    run = in_canary("failing update")
    run.world.edit(rollout__progressDeadline="1h", **REFUSED[refused])
    run.world.traffic, began = 0, run.world.time
    while run.world.time < began + 600:
        run.rest(LOOP.run_until_complete(run.one_pass(Refusing(run.world))))
    assert run.world.on_candidate()
    run.world.traffic = TRAFFIC
    goes_back(run, 60)


def test_a_first_rollout_that_is_refused_is_tried_at_longer_and_longer_pauses() -> None:
    run = begun("first rollout")
    began = run.world.time
    while run.world.time < began + 600:
        ports = Refusing(run.world)
        ports.refused = ("apply",)
        run.rest(LOOP.run_until_complete(run.one_pass(ports)))
    assert run.world.rollout["candidate"] is not None
    assert 5 < run.failures < 15
