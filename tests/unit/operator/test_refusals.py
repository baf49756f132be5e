"""A Job that gets no pod: Kubernetes tells why in events only, the operator tells it in status."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import B, decide, edited, knows, new, of
from fakes.api_server import FakeApiServer, Seen, refusal
from test_reconcile_observe import Signer, Workers, job, job_pod, model
from trtmodel_operator.adapters import refusals
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.observe import POD_SECONDS, observe
from trtmodel_operator.adapters.refusals import EventRefusals
from trtmodel_operator.model import CreateJob, JobKind, JobState, ObservedJob
from trtmodel_operator.ports import Json
from with_api import with_api

MADE = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp()  # the Job of `job()`
QUOTA = "a pod is forbidden: exceeded quota: gpus, requested: 1, used: 4, limited: 4"
NO_CLASS = 'a pod is forbidden: pod rejected: RuntimeClass "nvidia" not found'


class Refusals:
    def __init__(self, says: str) -> None:
        self.says = says
        self.asked: list[tuple[str, str]] = []

    async def why(self, namespace: str, uid: str) -> str:
        self.asked.append((namespace, uid))
        return self.says


def look(asks: Refusals, *pods: Json, age: float = 60.0, raw: Json | None = None) -> ObservedJob:
    children = {"Job": [raw or job()], "Pod": list(pods)}
    go = observe(
        model(),
        children,
        workers=Workers(),
        signer=Signer(),
        default_image="w",
        now=MADE + age,
        refusals=asks,
    )
    (found,) = asyncio.run(go).jobs
    return found


def test_a_job_without_a_pod_is_in_trouble_with_the_words_of_who_refuses_it() -> None:
    asks = Refusals(QUOTA)
    found = look(asks)
    assert (found.state, found.trouble, found.message) == (JobState.RUNNING, "FailedCreate", QUOTA)
    assert asks.asked == [("ml", "uid-of-build-1")]


def test_one_of_which_nothing_is_told_only_runs() -> None:
    found = look(Refusals(""))
    assert (found.state, found.trouble) == (JobState.RUNNING, "")


def test_nobody_asks_about_a_job_that_is_young_or_has_a_pod_or_waits_for_its_turn_or_has_ended() -> None:
    suspended = {**job(), "spec": {"suspend": True}}
    ended = job(conditions=[{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}])
    asks = Refusals(QUOTA)
    look(asks, age=POD_SECONDS - 0.1)
    look(asks, job_pod("p"))
    look(asks, raw=suspended)
    look(asks, raw=ended)
    assert asks.asked == []


def test_status_tells_it_with_a_way_out_and_for_how_long() -> None:
    scene = knows(edited(new()), B)
    (build,) = of(decide(scene), CreateJob)
    waits = ObservedJob(build.name, JobKind.BUILD, build.target.name, JobState.RUNNING, None, "FailedCreate", QUOTA)
    situation = decide(replace(scene, jobs=(waits,))).situation
    assert (situation.reason, situation.stuck) == ("FailedCreate", True)
    for words in (QUOTA, "Raise the quota", "3600 s at most"):
        assert words in situation.message


def event(number: int, note: str, at: str, reason: str = "FailedCreate", **more: Any) -> Json:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "ml", "name": f"build-1.{number}"},
        "reason": reason,
        "note": note,
        "regarding": {"uid": "uid-1"},
        "deprecatedLastTimestamp": at,
        **more,
    }


def why(server: FakeApiServer, times: int = 1) -> list[str]:
    found: list[str] = []

    async def scene(api: Api) -> None:
        events = EventRefusals(api)
        found.extend([await events.why("ml", "uid-1") for _ in range(times)])

    with_api(server, scene)
    return found


def asked(server: FakeApiServer) -> list[Seen]:
    return [s for s in server.seen if s.path.endswith("/namespaces/ml/events")]


FORBIDDEN = 'Error creating: pods "build-1-{}" is forbidden: '
OVER = FORBIDDEN.format("x7k2p") + "exceeded quota: gpus, requested: 1, used: 4, limited: 4"
NOBODY = FORBIDDEN.format("9qqwd") + "error looking up service account ml/a"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], ""),
        ([event(1, OVER, "2026-01-01T00:00:09Z"), event(2, NOBODY, "2026-01-01T00:00:03Z")], QUOTA),
        ([event(1, NOBODY, "2026-01-01T00:00:03Z"), event(2, OVER, "", series={
            "count": 2, "lastObservedTime": "2026-01-01T00:00:05.123456Z"})], QUOTA),
        ([event(1, NOBODY, "", eventTime="2026-01-01T00:00:03.5Z"), event(2, OVER, "2026-01-01T00:00:04Z")], QUOTA),
        ([event(1, f"(combined from similar events): {OVER}", "2026-01-01T00:00:09Z")], QUOTA),
        ([event(1, f'{FORBIDDEN.format("a")}pod rejected: RuntimeClass "nvidia" not found', "2026-01-01T00:00:09Z")],
         NO_CLASS),
        ([event(1, "Error creating: Internal error occurred: no webhook", "2026-01-01T00:00:09Z")],
         "Internal error occurred: no webhook"),
        ([event(1, OVER, "2026-01-01T00:00:03Z"),
          event(2, "Created pod: build-1-x", "2026-01-01T00:00:03Z", "SuccessfulCreate")], ""),
        ([event(1, "Created pod: build-1-x", "2026-01-01T00:00:03Z", "SuccessfulCreate"),
          event(2, OVER, "2026-01-01T00:00:04Z")], QUOTA),
        ([event(1, "Job has reached the specified backoff limit", "2026-01-01T00:00:03Z", "BackoffLimitExceeded")], ""),
    ],
    ids=["nothing", "the last of two", "a series", "another clock's form", "the recorder's beginning", "a RuntimeClass",
         "no refusal", "one was made after all", "refused again", "something else"],
)  # fmt: skip
def test_what_was_told_last_is_told_in_the_same_words_each_time(
    api_server: FakeApiServer, told: list[Json], expected: str
) -> None:
    for one in told:
        api_server.put(one)
    assert why(api_server) == [expected]


def test_only_events_of_this_job_are_asked_for_and_not_again_at_once(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.put(event(1, OVER, "2026-01-01T00:00:09Z"))
    assert why(api_server, times=3) == [QUOTA] * 3
    (seen,) = asked(api_server)
    assert seen.query["fieldSelector"] == "regarding.uid=uid-1"
    monkeypatch.setattr(refusals, "HELD", 0.0)
    why(api_server, times=2)
    assert len(asked(api_server)) == 3


def test_without_the_right_nothing_is_known_and_nobody_asks_again_at_once(api_server: FakeApiServer) -> None:
    api_server.fault = lambda seen: refusal(403, "events is forbidden") if seen.path.endswith("/events") else None
    assert why(api_server, times=3) == [""] * 3
    assert len(asked(api_server)) == 1


def test_an_api_server_that_hangs_holds_nobody_up(api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "TIMEOUT", 0.0)
    assert why(api_server) == [""]


def test_no_more_answers_are_remembered_than_the_bound(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "REMEMBERED", 2)

    async def scene(api: Api) -> None:
        kept = EventRefusals(api)
        for number in range(5):
            await kept.why("ml", f"uid-{number}")
            assert len(kept._held) <= 2

    with_api(api_server, scene)
