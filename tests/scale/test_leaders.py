"""Two operators on a real API server: one leads, the other takes over, and nothing is done twice, undone or lost."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import pytest
from hollow.operators import NAMESPACE, OperatorProcess
from hollow.plane import ControlPlane

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

TEAM = "ml"
Json = dict[str, Any]
Start = Callable[..., OperatorProcess]

LEASE_SECONDS = 15
PLENTY = 240.0
KINDS = "trtmodels.trtmodel.io,jobs,configmaps,services,deployments"


def put(plane: ControlPlane, names: Collection[str], mark: str) -> None:
    """Makes the models, or gives them another source, all in one call."""
    documents = []
    for name in names:
        source = {"uri": f"s3://models/{name}/{mark}/model.onnx"}
        step = {"weight": 100, "hold": "1s"}
        spec = {
            "source": source,
            "storage": {"bucket": "engines"},
            "engine": {"runtime": "ONNXRuntime"},
            "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz", "samples": 2000}},
            "serving": {"replicas": 2},
            "rollout": {"steps": [{"workers": 1, **step}], "analysis": {"interval": "1s", "minRequests": 1000}},
        }
        meta = {"namespace": TEAM, "name": name}
        documents.append({"apiVersion": "trtmodel.io/v1alpha1", "kind": "TRTModel", "metadata": meta, "spec": spec})
    plane.kubectl("apply", "-f", "-", text=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))


def items(plane: ControlPlane, kinds: str = "trtmodels.trtmodel.io") -> list[Json]:
    return list(json.loads(plane.kubectl("get", kinds, "-n", TEAM, "-o", "json"))["items"])


def settled(plane: ControlPlane, names: Collection[str], mark: str) -> bool:
    """Each of them serves this source and says so."""
    done = 0
    for model in items(plane):
        conditions = {c["type"]: c["status"] for c in (model.get("status") or {}).get("conditions") or ()}
        current = (model.get("status") or {}).get("observedGeneration") == model["metadata"]["generation"]
        right = f"/{mark}/" in model["spec"]["source"]["uri"]
        done += model["metadata"]["name"] in names and current and right and conditions.get("Ready") == "True"
    return done == len(names)


def jobs_of(plane: ControlPlane, mark: str) -> Counter[tuple[str, str]]:
    """How many Jobs there are of each model and kind that read this source."""
    found: Counter[tuple[str, str]] = Counter()
    for job in items(plane, "jobs"):
        container = job["spec"]["template"]["spec"]["containers"][0]
        if any(f"/{mark}/" in e.get("value", "") for e in container["env"]):
            labels = job["metadata"]["labels"]
            found[labels["trtmodel.io/model"], labels["trtmodel.io/kind"]] += 1
    return found


def once_each(names: Collection[str]) -> Counter[tuple[str, str]]:
    return Counter((name, kind) for name in names for kind in ("resolve", "build"))


def versions(plane: ControlPlane) -> dict[tuple[str, str], str]:
    found = ((i["kind"], i["metadata"]["name"], i["metadata"]["resourceVersion"]) for i in items(plane, KINDS))
    return {(kind, name): version for kind, name, version in found}


def lease(plane: ControlPlane) -> Json:
    return dict(json.loads(plane.kubectl("get", "lease", "trtmodel-operator", "-n", NAMESPACE, "-o", "json"))["spec"])


def a_pair(start: Start) -> tuple[OperatorProcess, OperatorProcess]:
    """The leader, and one that stands by."""
    one = start("one")
    one.until(one.leads)
    two = start("two")
    two.until(lambda: two.probe("/readyz")[0] == 200)
    assert not two.leads()
    return one, two


def test_a_leader_that_is_told_to_end_hands_over_before_its_lease_would_have_expired(
    plane: ControlPlane, start: Start
) -> None:
    names = [f"told-{n}" for n in range(4)]
    one, two = a_pair(start)
    put(plane, names, "v1")
    one.until(lambda: sum(jobs_of(plane, "v1").values()) > 0)
    one.process.send_signal(signal.SIGTERM)
    took = two.until(two.leads, seconds=LEASE_SECONDS - 1)
    print(f"SIGTERM -> the other leads: {took:.1f} s")
    assert one.process.wait(30) == 0
    two.until(lambda: settled(plane, names, "v1"), PLENTY, every=0.5)
    assert jobs_of(plane, "v1") == once_each(names)


def test_after_a_kill_another_leads_when_the_lease_has_expired_and_no_change_is_lost(
    plane: ControlPlane, start: Start
) -> None:
    names = [f"killed-{n}" for n in range(4)]
    one, two = a_pair(start)
    put(plane, names, "k1")
    one.until(lambda: sum(jobs_of(plane, "k1").values()) > 1)
    one.process.kill()
    began = time.monotonic()
    put(plane, names[:2], "k2")  # while nobody leads
    two.until(two.leads, PLENTY)
    print(f"SIGKILL -> the other leads: {time.monotonic() - began:.1f} s")
    two.until(lambda: settled(plane, names[:2], "k2") and settled(plane, names[2:], "k1"), PLENTY, every=0.5)
    assert jobs_of(plane, "k2") == once_each(names[:2])
    assert max(jobs_of(plane, "k1").values()) == 1


def test_a_leader_that_stood_still_and_wakes_up_changes_nothing_and_ends(plane: ControlPlane, start: Start) -> None:
    names = [f"stopped-{n}" for n in range(8)]
    one, two = a_pair(start)
    put(plane, names, "s1")
    one.until(lambda: settled(plane, names, "s1"), PLENTY, every=0.5)
    put(plane, names, "s2")
    one.until(lambda: sum(jobs_of(plane, "s2").values()) > 0, every=0.02)  # amid its passes
    one.process.send_signal(signal.SIGSTOP)
    two.until(two.leads, PLENTY)
    two.until(lambda: settled(plane, names, "s2"), PLENTY, every=0.5)
    before = versions(plane)
    one.process.send_signal(signal.SIGCONT)
    assert one.process.wait(60) == 1
    assert "this process ends now" in one.log
    assert versions(plane) == before
    assert jobs_of(plane, "s2") == once_each(names)
    assert two.leads()
    assert lease(plane)["holderIdentity"].startswith("two_")


def test_a_leader_whose_lease_was_taken_ends_at_once_and_the_lease_is_left_to_the_other(
    plane: ControlPlane, start: Start
) -> None:
    one = start("one")
    one.until(one.leads)
    stolen = json.dumps({"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 1}})
    plane.kubectl("patch", "lease", "trtmodel-operator", "-n", NAMESPACE, "--type=merge", "-p", stolen)
    assert one.process.wait(60) == 1
    assert lease(plane)["holderIdentity"] == "thief"


def test_what_changes_while_the_api_server_is_gone_and_all_watches_break_is_found(
    plane: ControlPlane, start: Start
) -> None:
    one = start("one")
    one.until(one.leads)
    put(plane, ["away"], "a1")
    one.until(lambda: settled(plane, ["away"], "a1"), PLENTY, every=0.5)
    began = time.monotonic()
    plane.kill_server()
    plane.start_server()
    put(plane, ["away"], "a2")
    leader = one
    while not settled(plane, ["away"], "a2"):
        if leader.process.poll() is not None:  # a server that was away for longer than the lease ends it, as it should
            leader = start("again")
        assert time.monotonic() - began < PLENTY, leader.log[-4000:]
        time.sleep(0.5)
    leader.until(lambda: leader.probe("/livez")[0] == 200)
