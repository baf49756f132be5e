"""What people and their systems have a say in: webhooks that confirm, queries of Prometheus, and no traffic at all."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from trtmodel_contract.signing import HEADER_EXPIRES, HEADER_KEY_ID, HEADER_SIGNATURE, webhook_payload

from . import models
from .cluster import Json
from .install import Images
from .outside import Outside
from .sources import WIDTH
from .world import World, condition, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

NAME = "gated"
REPLICAS = 2
ROLLOUT_SECONDS = 120
NO = (403, "not on a Friday")
YES = (204, "")
STEPS = [{"workers": 1, "hold": "3s"}]
# Nobody sends requests here: what decides is what is asked outside.
ANALYSIS: Json = {"interval": "1s", "minRequests": 50, "noData": "Promote", "prometheus": [], "webhooks": []}


@dataclass
class Gated:
    """The tiny classifier on two workers, and what stands outside."""

    world: World
    outside: Outside
    rows: Iterator[int] = field(default_factory=lambda: itertools.count(9))

    def roll_out(self, **analysis: Json) -> None:
        """Another revision of the same model, judged so."""
        profile = {"min": [1, WIDTH], "opt": [4, WIDTH], "max": [next(self.rows), WIDTH]}
        rollout = {"steps": STEPS, "analysis": {**ANALYSIS, **analysis}, "progressDeadline": "2m"}
        self.world.patch(NAME, {"engine": {"profiles": [{"inputs": {"x": profile}}]}, "rollout": rollout})
        self.world.wait_observed(NAME)

    def webhook(self, stage: str, path: str) -> Json:
        return {"name": path.strip("/"), "stage": stage, "url": self.outside.address + path, "timeout": "2s"}

    def query(self, **bounds: float) -> Json:
        return {"name": "quality", "query": 'avg(quality{model="gated"})', "address": self.outside.address, **bounds}

    def stable(self) -> str:
        return revision(self.world.model(NAME), "stable")

    def wait_progressing(self, status: str, reason: str) -> Json:
        return self.world.wait_condition(NAME, "Progressing", status, reason, ROLLOUT_SECONDS)

    def wait_promoted(self, before: str) -> Json:
        found = self.world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
        assert revision(found, "stable") != before, self.world.describe(NAME)
        assert found["status"]["history"][0]["outcome"] == "Promoted"
        return found


@pytest.fixture(scope="module")
def gated(world_of: Callable[[str], World], images: Images, endpoint: str) -> Gated:
    world = world_of("e2e-gates")
    outside = Outside(world)
    outside.start(images.worker)
    model = models.tiny(NAME, endpoint)
    model["spec"]["serving"]["replicas"] = REPLICAS
    model["spec"]["rollout"] = {"steps": STEPS, "analysis": ANALYSIS, "progressDeadline": "2m"}
    world.apply(model)
    world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
    return Gated(world, outside)


@pytest.fixture
def settled(gated: Gated) -> Iterator[Gated]:
    """At rest before and after, whatever a test leaves behind."""
    gated.world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
    yield gated
    gated.outside.plans({"/begin": YES, "/promote": YES})
    if condition(gated.world.model(NAME), "Ready")["status"] != "True":
        gated.outside.gives(1.0)
        gated.roll_out()
        gated.world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)


def test_rollout_and_promotion_wait_for_webhooks_that_say_no_and_go_on_when_they_say_yes(settled: Gated) -> None:
    world, outside, before = settled.world, settled.outside, settled.stable()
    outside.plans({"/begin": NO, "/promote": NO})
    hooks = [settled.webhook("ConfirmRollout", "/begin"), settled.webhook("ConfirmPromotion", "/promote")]
    settled.roll_out(webhooks=hooks)

    found = settled.wait_progressing("False", "AwaitingConfirmation")
    until("the answer is told", 30, lambda: "not on a Friday" in condition(world.model(NAME), "Progressing")["message"])
    assert (revision(found, "candidate"), revision(found, "stable")) == ("", before)
    assert outside.asked("/promote") == []
    outside.plans({"/begin": YES})

    found = world.wait(NAME, "a candidate", lambda m: bool(revision(m, "candidate")), ROLLOUT_SECONDS)
    candidate = revision(found, "candidate")
    outside.wait_asked("/promote")
    found = settled.wait_progressing("False", "AwaitingConfirmation")
    assert (revision(found, "candidate"), revision(found, "stable")) == (candidate, before)
    assert found["status"]["targets"][0]["workers"]["onCandidate"] == 1
    assert condition(found, "Available")["status"] == "True"
    outside.plans({"/promote": YES})

    assert revision(settled.wait_promoted(before), "stable") == candidate
    told = [json.loads(a["body"]) for a in outside.asked("/promote")]
    assert {(t["stage"], t["namespace"], t["name"], t["revision"], t["stable"]) for t in told} == {
        ("ConfirmPromotion", world.namespace, NAME, candidate, before)
    }
    assert len({a["headers"]["idempotency-key"] for a in outside.asked("/promote")}) == 1


def test_calls_are_signed_with_the_key_that_the_workers_trust(settled: Gated) -> None:
    world, outside, before = settled.world, settled.outside, settled.stable()
    outside.plans({"/chat": YES})
    settled.roll_out(webhooks=[settled.webhook("Event", "/chat")])
    settled.wait_promoted(before)
    until("the promotion is told", 30, lambda: any(event(a)["reason"] == "Promoted" for a in outside.asked("/chat")))
    asked = outside.asked("/chat")[-1]
    maps = world.children("ConfigMap", NAME)
    keys = next(json.loads(m["data"]["keys.json"])["keys"] for m in maps if "keys.json" in m.get("data", {}))
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(keys[asked["headers"][HEADER_KEY_ID]]))
    payload = webhook_payload(outside.address + "/chat", asked["body"].encode(), int(asked["headers"][HEADER_EXPIRES]))
    public.verify(base64.b64decode(asked["headers"][HEADER_SIGNATURE]), payload)


def event(asked: Json) -> Json:
    found: Json = json.loads(asked["body"])["event"]
    return found


def test_a_query_within_its_bounds_lets_the_candidate_pass(settled: Gated) -> None:
    before = settled.stable()
    settled.outside.gives(0.95)
    settled.roll_out(prometheus=[settled.query(min=0.9)])
    found = settled.wait_promoted(before)
    assert settled.outside.asked("/api/v1/query")
    assert "analysis" not in found["status"]


def test_a_query_without_one_number_holds_the_candidate_with_the_cause_until_there_is_one(settled: Gated) -> None:
    before, outside = settled.stable(), settled.outside
    outside.gives()
    settled.roll_out(prometheus=[settled.query(min=0.9)])

    def told(model: Json) -> bool:
        checks = (model["status"].get("analysis") or {}).get("checks", [])
        return any(c["verdict"] == "Inconclusive" and "no series matches" in c["message"] for c in checks)

    found = settled.world.wait(NAME, "the cause", told, ROLLOUT_SECONDS)
    assert found["status"]["analysis"]["verdict"] == "Inconclusive"
    assert revision(found, "stable") == before
    outside.gives(0.5, 0.6)
    settled.world.wait(NAME, "two series", lambda m: "2 series" in json.dumps(m["status"].get("analysis")), 60)
    outside.gives(1.0)
    settled.wait_promoted(before)


def test_a_query_outside_its_bounds_takes_the_candidate_back(settled: Gated) -> None:
    world, before = settled.world, settled.stable()
    settled.outside.gives(0.5)
    settled.roll_out(prometheus=[settled.query(min=0.9)])
    found = world.wait_condition(NAME, "Stalled", "True", "MetricOutOfBounds", ROLLOUT_SECONDS)
    assert "quality is 0.5, min 0.9, in 2 answers in a row" in condition(found, "Ready")["message"]
    assert (revision(found, "stable"), revision(found, "candidate")) == (before, "")
    assert condition(found, "Available")["status"] == "True"


def test_an_address_that_the_administrator_did_not_list_is_never_called(settled: Gated) -> None:
    """The API server is within reach of the operator, and of no author of a TRTModel."""
    before = settled.stable()
    query = {**settled.query(min=0.9), "address": "https://kubernetes.default.svc"}
    settled.roll_out(prometheus=[query])

    def told(model: Json) -> bool:
        return "not on the operator's list" in json.dumps(model["status"].get("analysis"))

    found = settled.world.wait(NAME, "the refusal", told, ROLLOUT_SECONDS)
    assert (revision(found, "stable"), found["status"]["analysis"]["verdict"]) == (before, "Inconclusive")
    settled.world.command(NAME, f"abort@{revision(found, 'candidate')}#unlisted")
    settled.world.wait_condition(NAME, "Stalled", "True", "Aborted", 60)


def test_without_traffic_golden_samples_prove_a_candidate(settled: Gated) -> None:
    before = settled.stable()
    # Two busy cores: a ratio would say nothing about the engine.
    settled.roll_out(noData="Synthetic", maxErrorRateIncrease=0.2, maxLatencyRatio=50)
    found = settled.wait_promoted(before)
    assert "were golden samples" in found["status"]["history"][0]["reason"]


def test_without_traffic_and_policy_hold_the_candidate_waits(settled: Gated) -> None:
    before = settled.stable()
    settled.roll_out(noData="Hold")
    found = settled.wait_progressing("True", "NoTraffic")
    assert revision(found, "stable") == before
    settled.world.command(NAME, f"abort@{revision(found, 'candidate')}#no-traffic")
    settled.world.wait_condition(NAME, "Stalled", "True", "Aborted", 60)
