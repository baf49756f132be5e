"""A Job that gets no pod: Kubernetes tells why in events only, the operator tells it in status."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import B, decide, edited, knows, new, of
from fakes.api_server import FakeApiServer
from test_reconcile_observe import Signer, Workers, job, job_pod, model
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.observe import POD_SECONDS, observe
from trtmodel_operator.adapters.refusals import EventRefusals
from trtmodel_operator.model import CreateJob, JobKind, JobState, ObservedJob
from trtmodel_operator.ports import ClusterError, Json
from with_api import with_api

MADE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()  # the Job of `job()`
QUOTA = "a pod is forbidden: exceeded quota: gpus, requested: 1, used: 4, limited: 4"
NO_CLASS = 'a pod is forbidden: pod rejected: RuntimeClass "nvidia" not found'


class Refusals:
    def __init__(self, says: str | ClusterError) -> None:
        self.says = says
        self.asked: list[tuple[str, str]] = []

    async def why(self, namespace: str, uid: str) -> str:
        self.asked.append((namespace, uid))
        if isinstance(self.says, ClusterError):
            raise self.says
        return self.says


def look(refusals: Refusals, *pods: Json, age: float = 60.0, raw: Json | None = None) -> ObservedJob:
    children = {"Job": [raw or job()], "Pod": list(pods)}
    go = observe(
        model(),
        children,
        workers=Workers(),
        signer=Signer(),
        default_image="w",
        now=MADE + age,
        refusals=refusals,
    )
    (found,) = asyncio.run(go).jobs
    return found


def test_a_job_without_a_pod_is_in_trouble_with_the_words_of_who_refuses_it() -> None:
    refusals = Refusals(QUOTA)
    found = look(refusals)
    assert (found.state, found.trouble, found.message) == (JobState.RUNNING, "FailedCreate", QUOTA)
    assert refusals.asked == [("ml", "uid-of-build-1")]


def test_one_of_which_nothing_is_told_only_runs() -> None:
    for says in ("", ClusterError("GET", "events", "forbidden", 403)):
        found = look(Refusals(says))
        assert (found.state, found.trouble) == (JobState.RUNNING, "")


def test_nobody_asks_about_a_job_that_is_young_or_has_a_pod_or_waits_for_its_turn_or_has_ended() -> None:
    suspended = {**job(), "spec": {"suspend": True}}
    ended = job(conditions=[{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}])
    refusals = Refusals(QUOTA)
    look(refusals, age=POD_SECONDS - 0.1)
    look(refusals, job_pod("p"))
    look(refusals, raw=suspended)
    look(refusals, raw=ended)
    assert refusals.asked == []


def test_status_tells_it_with_a_way_out_and_for_how_long() -> None:
    asked = knows(edited(new()), B)
    (build,) = of(decide(asked), CreateJob)
    waits = ObservedJob(build.name, JobKind.BUILD, build.target.name, JobState.RUNNING, None, "FailedCreate", QUOTA)
    situation = decide(replace(asked, jobs=(waits,))).situation
    assert (situation.reason, situation.stuck) == ("FailedCreate", True)
    for words in (QUOTA, "Raise the quota", "3600 s at most"):
        assert words in situation.message


def event(number: int, note: str, at: str, uid: str = "uid-1", **more: Any) -> Json:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "ml", "name": f"build-1.{number}"},
        "reason": "FailedCreate",
        "note": note,
        "regarding": {"uid": uid},
        "deprecatedLastTimestamp": at,
        **more,
    }


def why(server: FakeApiServer) -> str:
    found: list[str] = []

    async def scene(api: Api) -> None:
        found.append(await EventRefusals(api).why("ml", "uid-1"))

    with_api(server, scene)
    return found[0]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ((), ""),
        (
            (
                ('Error creating: pods "build-1-x7k2p" is forbidden: exceeded quota: gpus, requested: 1, used: 4, '
                 "limited: 4", "2026-01-01T00:00:09Z"),
                ('Error creating: pods "build-1-9qqwd" is forbidden: error looking up service account ml/a',
                 "2026-01-01T00:00:03Z"),
            ),
            QUOTA,
        ),
        (
            (('Error creating: pods "build-1-x7k2p" is forbidden: pod rejected: RuntimeClass "nvidia" not found',
              "2026-01-01T00:00:09Z"),),
            NO_CLASS,
        ),
        ((("Error creating: Internal error occurred: no webhook", "2026-01-01T00:00:09Z"),),
         "Internal error occurred: no webhook"),
    ],
    ids=["nothing", "the last of two", "a RuntimeClass", "no refusal"],
)  # fmt: skip
def test_what_was_told_last_is_told_in_the_same_words_each_time(
    api_server: FakeApiServer, told: tuple[tuple[str, str], ...], expected: str
) -> None:
    for number, (note, at) in enumerate(told):
        api_server.put(event(number, note, at))
    assert why(api_server) == expected


def test_only_events_of_this_job_are_asked_for(api_server: FakeApiServer) -> None:
    why(api_server)
    (seen,) = [s for s in api_server.seen if s.path.endswith("/namespaces/ml/events")]
    assert seen.query["fieldSelector"] == "regarding.uid=uid-1,reason=FailedCreate"
