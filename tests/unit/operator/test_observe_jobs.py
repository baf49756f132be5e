"""What a Job says of itself while it runs, and what the operator's settings make of Jobs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import B, decide, edited, knows, new, of
from test_reconcile_observe import Signer, Workers, child, job, job_pod, message, model, terminated
from trtmodel_contract.jobs import Reason
from trtmodel_contract.progress import PROGRESS_PORT, JobProgress
from trtmodel_operator import manifests
from trtmodel_operator.adapters.observe import observe
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.model import CreateJob, JobState, Observed, ObservedJob
from trtmodel_operator.ports import Json, WorkerError
from trtmodel_operator.reconcile import PROGRESS, Reconciler

SAID = JobProgress("prove", "500 of 2,000 samples", 5.0, 60)
RUNS = {"podIP": "10.0.0.7", "containerStatuses": [{"name": "build", "state": {"running": {}}}]}


class Progress:
    """Answers by address. `most_at_once`: how many were asked at the same time."""

    def __init__(self, **answers: JobProgress) -> None:
        self.answers = {ip.replace("_", "."): said for ip, said in answers.items()}
        self.asked: list[str] = []

    async def ask(self, ip: str) -> JobProgress:
        self.asked.append(ip)
        await asyncio.sleep(0)
        if ip not in self.answers:
            raise WorkerError(f"no answer from {ip}")
        return self.answers[ip]


def seen(progress: Progress | None, *pods: Json, the_job: Json | None = None) -> Observed:
    children = {"Job": [the_job or job()], "Pod": list(pods)}
    go = observe(model(), children, workers=Workers(), signer=Signer(), default_image="w", now=1.0, progress=progress)
    return asyncio.run(go)


def the_job(progress: Progress | None, *pods: Json) -> ObservedJob:
    (found,) = seen(progress, *pods).jobs
    return found


def test_a_job_that_runs_is_asked_how_far_it_is() -> None:
    assert the_job(Progress(**{"10_0_0_7": SAID}), job_pod("p", **RUNS)).progress == SAID


def test_one_that_cannot_be_asked_runs_all_the_same() -> None:
    found = the_job(Progress(), job_pod("p", **RUNS))
    assert (found.state, found.progress, found.trouble) == (JobState.RUNNING, None, "")


@pytest.mark.parametrize(
    "pod",
    [
        {"podIP": "10.0.0.7", "containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
        {"containerStatuses": [{"state": {"running": {}}}]},
        {"podIP": "10.0.0.7", **terminated(0, message=message(Reason.DONE))},
    ],
    ids=["waits", "no address", "ended"],
)
def test_one_that_does_not_run_is_not_asked(pod: dict[str, Any]) -> None:
    progress = Progress(**{"10_0_0_7": SAID})
    the_job(progress, job_pod("p", **pod))
    assert progress.asked == []


def test_only_the_newest_pod_is_asked() -> None:
    progress = Progress(**{"10_0_0_8": SAID})
    newer = {**RUNS, "podIP": "10.0.0.8"}
    older = job_pod("old", **RUNS)
    assert the_job(progress, older, job_pod("new", "2026-01-02T00:00:00Z", **newer)).progress == SAID
    assert progress.asked == ["10.0.0.8"]


def test_without_somebody_who_asks_nothing_is_known() -> None:
    assert the_job(None, job_pod("p", **RUNS)).progress is None


def test_a_suspended_job_and_one_for_a_load_key_are_seen_as_such() -> None:
    raw = job()
    raw["spec"] = {"suspend": True}
    raw["metadata"]["annotations"] = {manifests.ANNOTATION_LOAD_KEY: "key-1"}
    (found,) = seen(None, the_job=raw).jobs
    assert (found.suspended, found.load_key) == (True, "key-1")
    raw["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    (found,) = seen(None, the_job=raw).jobs
    assert (found.state, found.suspended) == (JobState.COMPLETE, False)


def test_a_model_whose_job_says_how_far_it_is_is_looked_at_every_few_seconds() -> None:
    from test_reconcile import World, decision

    def wanted(progress: Progress, requeue: float | None) -> float | None:
        world = World()
        world.pods = []

        async def children(key: Any) -> Any:
            return {"Job": [job()], "Pod": [job_pod("p", **RUNS)]}

        world.children = children  # type: ignore[method-assign]
        fixed = decision(requeue=requeue)
        reconciler = Reconciler(
            world,
            world,
            Ed25519Signer(Keys.made()),
            world,
            world,
            "worker:1",
            decide=lambda observed: replace(fixed, memory=observed.memory),
            progress=progress,
        )
        return asyncio.run(reconciler.reconcile(("ml", "magika")))

    assert wanted(Progress(**{"10_0_0_7": SAID}), 15.0) == PROGRESS
    assert wanted(Progress(**{"10_0_0_7": SAID}), None) == PROGRESS
    assert wanted(Progress(**{"10_0_0_7": SAID}), 1.0) == 1.0
    assert wanted(Progress(), 15.0) == 15.0


def test_a_job_opens_the_port_on_which_it_is_asked_and_takes_the_operators_settings() -> None:
    asked = knows(edited(new()), B)
    (build,), (resolve,) = of(decide(asked), CreateJob), of(decide(new()), CreateJob)
    assert asked.spec is not None
    policy = manifests.JobPolicy(queued=True, priority_class="builds")
    made = manifests.job(asked.model, asked.spec, build, policy)
    pod = made["spec"]["template"]["spec"]
    assert pod["containers"][0]["ports"] == [{"name": "progress", "containerPort": PROGRESS_PORT, "protocol": "TCP"}]
    assert (made["spec"]["suspend"], pod["priorityClassName"]) == (True, "builds")
    light = manifests.job(asked.model, asked.spec, resolve, policy)  # takes no GPU, and its answer may save one
    assert "suspend" not in light["spec"]
    usual = manifests.job(asked.model, asked.spec, build)
    assert "suspend" not in usual["spec"]
    assert "priorityClassName" not in usual["spec"]["template"]["spec"]


def test_a_job_of_two_owners_is_the_second_ones_too() -> None:
    shared = child("Job", "build-1", "uid-of-another", metadata={"labels": {manifests.LABEL_KIND: "build"}}, status={})
    shared["metadata"]["ownerReferences"].append({"kind": "TRTModel", "name": "magika", "uid": "uid-1"})
    assert [j.name for j in seen(None, the_job=shared).jobs] == ["build-1"]
