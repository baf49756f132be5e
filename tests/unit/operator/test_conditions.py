from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from decide_scene import (
    A,
    B,
    Scene,
    asks_for,
    busy,
    canary,
    decide,
    digest,
    edited,
    finished,
    has_built,
    knows,
    later,
    new,
    obey,
    reaches,
    run,
    serving,
    silent,
    with_engine,
    with_worker,
    without,
)
from trtmodel_contract.control import EngineState
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_operator import conditions
from trtmodel_operator.model import Failure, JobKind, Notice
from trtmodel_operator.spec import parse_command

TYPES = ["Available", "Ready", "Reconciling", "Stalled", "Built", "Verified", "Progressing", "Degraded"]


def status(seen: Scene, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    return dict(conditions.status(seen, decide(seen), previous or {}))


def states(seen: Scene) -> dict[str, str]:
    return {c["type"]: c["status"] for c in status(seen)["conditions"]}


def condition(seen: Scene, kind: str, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    return next(dict(c) for c in status(seen, previous)["conditions"] if c["type"] == kind)


def gate_failed() -> Scene:
    seen = has_built(edited(serving(A), source__uri="s3://models/b.onnx"), B, differs=100)
    return obey(seen, decide(seen))


def rolled_back() -> Scene:
    seen = replace(canary(serving(A)), command=parse_command("abort#1"))
    return obey(seen, decide(seen))


def building() -> Scene:
    seen = knows(edited(serving(A), source__uri="s3://models/b.onnx"), B)
    return obey(seen, decide(seen))


def job_failed() -> Scene:
    seen = edited(serving(A), source__uri="s3://models/gone.onnx")
    seen = finished(obey(seen, decide(seen)), JobKind.RESOLVE, JobResult(Reason.SOURCE_NOT_FOUND, "no such key"))
    return obey(seen, decide(seen))


def unschedulable() -> Scene:
    seen = building()
    return replace(seen, jobs=(replace(seen.jobs[-1], trouble="Unschedulable", message="0/3 nodes are available"),))


def deploying() -> Scene:
    seen = has_built(new(), A)
    seen = obey(seen, decide(seen))
    return with_worker(seen, "w0", ready=False)


T, F, U = "True", "False", "Unknown"
#                        Avail Ready Recon Stall Built Verif Progr Degra
SITUATIONS = {
    "new":              (new(),                                            (F, F, T, F, U, U, T, F)),
    "building the first": (knows(new(), A),                                (F, F, T, F, F, U, T, F)),
    "deploying":        (deploying(),                                      (T, F, T, F, T, T, T, T)),
    "serving":          (serving(A),                                       (T, T, F, F, T, T, F, F)),
    "building":         (building(),                                       (T, F, T, F, F, U, T, F)),
    "unschedulable":    (unschedulable(),                                  (T, F, T, F, F, U, F, F)),
    "preparing":        (obey(asks_for(serving(A), B), decide(asks_for(serving(A), B)), loading=[B]),
                                                                           (T, F, T, F, T, T, T, F)),
    "canary":           (canary(serving(A)),                               (T, F, T, F, T, T, T, F)),
    "paused":           (edited(canary(serving(A)), rollout__paused=True), (T, F, F, F, T, T, F, F)),
    "gate failed":      (gate_failed(),                                    (T, F, F, T, T, F, F, F)),
    "rolled back":      (rolled_back(),                                    (T, F, F, T, T, T, F, F)),
    "job failed":       (job_failed(),                                     (T, F, F, T, F, U, F, F)),
    "spec unreadable":  (replace(serving(A), spec=None, spec_error="spec: broken"),
                                                                           (T, F, F, T, F, U, F, F)),
    "scaled to zero":   (obey(edited(serving(A), serving__replicas=0), decide(edited(serving(A), serving__replicas=0))),
                                                                           (F, F, F, F, T, T, F, F)),
    "scaled out":       (edited(serving(A), serving__replicas=6),          (T, T, F, F, T, T, T, T)),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_situation_has_its_conditions(name: str) -> None:
    seen, expected = SITUATIONS[name]
    assert states(seen) == dict(zip(TYPES, expected, strict=True))


@pytest.mark.parametrize("name", SITUATIONS)
def test_all_conditions_are_there_in_one_order_as_metav1_has_them(name: str) -> None:
    seen = SITUATIONS[name][0]
    found = status(seen)["conditions"]
    assert [c["type"] for c in found] == TYPES
    for c in found:
        assert set(c) == {"type", "status", "observedGeneration", "lastTransitionTime", "reason", "message"}
        assert c["observedGeneration"] == seen.generation
        assert c["reason"]
        assert c["message"]


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_status_does_not_move_while_nothing_happens(name: str) -> None:
    seen = SITUATIONS[name][0]
    before = status(seen)
    assert status(later(seen, 0.5), before) == before


def test_a_wait_for_ready_ends_when_stalled_turns_true_and_not_before() -> None:
    """kstatus: Stalled=True is a failure, Reconciling=True is in progress; never both."""
    for seen, _ in SITUATIONS.values():
        found = states(seen)
        assert not (found["Stalled"] == T and found["Reconciling"] == T)
        assert not (found["Ready"] == T and found["Stalled"] == T)
    assert condition(rolled_back(), "Stalled")["reason"] == "Aborted"
    assert condition(gate_failed(), "Stalled")["reason"] == "GateFailed"


def test_the_time_of_a_condition_changes_only_with_its_status() -> None:
    seen = serving(A)
    before = status(seen)
    ready = condition(seen, "Ready")["lastTransitionTime"]
    after = obey(asks_for(later(seen, 100), B), decide(asks_for(later(seen, 100), B)))
    now = condition(after, "Ready", before)
    assert (now["status"], now["lastTransitionTime"] > ready) == ("False", True)
    assert condition(after, "Available", before)["lastTransitionTime"] == ready
    assert ready.endswith("Z")
    assert "." not in ready


def test_a_damaged_previous_status_does_no_harm() -> None:
    for damaged in (
        {"conditions": 7},
        {"conditions": [3, {"type": "Ready"}]},
        {"conditions": None},
        {"conditions": "x"},
    ):
        assert status(serving(A), damaged)["conditions"]


def test_available_stays_true_through_a_whole_rollout_and_a_roll_back() -> None:
    seen = asks_for(serving(A), B)
    for _ in range(60):
        decision = decide(seen)
        assert states(seen)["Available"] == T, decision.rule
        if decision.rule == "settle":
            break
        seen = later(busy(obey(seen, decision, seconds=0)), 3)
    assert seen.memory.stable is not None
    assert seen.memory.stable.revision == B
    assert states(rolled_back())["Available"] == T


def test_ready_is_false_as_soon_as_the_spec_asks_for_something_else() -> None:
    found = condition(edited(serving(A), source__uri="s3://models/b.onnx"), "Ready")
    assert (found["status"], found["reason"]) == (F, "Resolving")


def test_ready_needs_the_report_of_every_worker_after_a_promotion() -> None:
    seen = canary(serving(A), index=1)
    for _ in range(10):
        decision = decide(seen)
        if decision.rule == "promote":
            break
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    promoted = replace(seen, memory=decision.memory)
    assert condition(promoted, "Ready")["status"] == F
    assert condition(obey(seen, decision), "Ready")["status"] == T


def test_scaling_leaves_ready_true_until_the_deadline() -> None:
    seen = without(serving(A), "w3")
    assert condition(seen, "Ready")["status"] == T
    assert condition(seen, "Degraded")["reason"] == "WorkersMissing"
    for _ in range(60):
        seen = later(obey(seen, decide(seen)), 8)
    found = condition(seen, "Ready")
    assert (found["status"], found["reason"]) == (F, "ProgressDeadlineExceeded")


def test_ready_workers_that_cannot_be_asked_make_available_unknown_and_never_true() -> None:
    seen = serving(A)
    for worker in seen.workers:
        seen = silent(seen, worker.uid)
    found = condition(seen, "Available")
    assert (found["status"], found["reason"]) == (U, "WorkersUnknown")
    assert "connection refused" in found["message"]


def test_pods_that_are_not_ready_and_cannot_be_asked_serve_nothing() -> None:
    seen = serving(A)
    for worker in seen.workers:
        seen = with_worker(silent(seen, worker.uid), worker.uid, ready=False)
    found = condition(seen, "Available")
    assert (found["status"], found["reason"]) == (F, "NoWorkerServes")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda s: silent(s, "w1"), "WorkersUnknown"),
        (lambda s: with_worker(s, "w1", ready=False), "WorkersMissing"),
        (lambda s: with_engine(s, "w1", A, state=EngineState.DOWN, message="host died"), "EngineHostDown"),
        (lambda s: without(s, "w1"), "WorkersMissing"),
        (lambda s: without_quota(s), "FailedCreate"),
        (lambda s: without_quota(without(s, "w1")), "FailedCreate"),
    ],
)
def test_something_serves_but_not_as_asked(damage: Any, reason: str) -> None:
    found = condition(damage(serving(A)), "Degraded")
    assert (found["status"], found["reason"]) == (T, reason)
    assert status(damage(serving(A)))["phase"] != "Serving"


def without_quota(seen: Scene) -> Scene:
    """The Deployment cannot replace a worker, or make one of another kind."""
    (workload,) = seen.workloads
    return replace(seen, workloads=(replace(workload, trouble="FailedCreate", message="exceeded quota: gpus"),))


def test_workers_that_cannot_be_made_are_told_with_who_refuses_them_and_not_as_another_platforms() -> None:
    seen = without_quota(serving(A))
    message = condition(seen, "Degraded")["message"]
    assert (
        message
        == f"4 of 4 workers serve; no pod of Deployment {seen.workloads[0].name} can be made: exceeded quota: gpus"
    )
    other = replace(seen, workloads=(replace(seen.workloads[0], platform="another"),))
    assert condition(other, "Degraded")["reason"] != "FailedCreate"


def test_a_worker_that_does_not_obey_is_degraded_but_not_in_the_pass_that_tells_it() -> None:
    seen = canary(serving(A), index=1)
    for _ in range(10):
        decision = decide(seen)
        if decision.rule == "promote":
            break
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    assert {c["type"]: c["status"] for c in conditions.status(seen, decision, {})["conditions"]}["Degraded"] == F  # type: ignore[attr-defined]
    stubborn = obey(seen, decision)
    old = next(w for w in seen.workers if w.uid == "w0").report
    new_report = next(w for w in stubborn.workers if w.uid == "w0").report
    assert old is not None
    assert new_report is not None
    stubborn = with_worker(stubborn, "w0", report=replace(old, fence=new_report.fence))
    assert condition(stubborn, "Degraded")["reason"] == "OtherEngine"


def test_todays_thresholds_decide_about_yesterdays_figures() -> None:
    seen = edited(serving(A), verify__thresholds={"top1Delta": 0.0001})
    found = condition(seen, "Verified")
    assert found["status"] == F
    assert "the limit of 0.01%" in found["message"]
    assert states(seen)["Available"] == T


def test_another_data_set_leaves_verified_unknown_with_what_was_accepted() -> None:
    seen = edited(serving(A), verify__dataset={"uri": "s3://data/new.npz"})
    seen = knows(seen, A)
    seen = replace(seen, memory=replace(seen.memory, built=()))
    found = condition(seen, "Verified")
    assert (found["status"], found["reason"]) == (U, "NotMeasured")


def test_an_odd_reason_of_the_cluster_does_not_break_the_schema() -> None:
    seen = building()
    seen = replace(seen, jobs=(replace(seen.jobs[-1], trouble="weird reason!", message="m" * 5000),))
    found = condition(seen, "Progressing")
    assert found["reason"] == "Other"
    assert len(found["message"]) <= 1024


# ---------------------------------------------------------------------------------------------------------------
# the rest of status
# ---------------------------------------------------------------------------------------------------------------


def test_the_canary_column_says_step_workers_and_figures() -> None:
    seen = later(busy(canary(serving(A))), 5)
    assert status(seen)["summary"] == "step 1/2 1 of 4 workers, 200 req, err +0.00%, p95 x1.00"
    assert status(seen)["phase"] == "Canary"
    assert status(serving(A))["summary"] == "4 of 4 workers"
    assert status(rolled_back())["summary"] == "Aborted"


def test_targets_say_engines_gate_job_and_who_serves_what() -> None:
    (target,) = status(canary(serving(A)))["targets"]
    assert target["name"] == "default"
    assert target["engines"] == [{"loadKey": "onnxruntime-1.20-cpu", "digest": digest(B)}]
    assert target["workers"] == {"desired": 4, "ready": 4, "onStable": 3, "onCandidate": 1, "withStandby": 0}
    assert (target["gate"]["verdict"], target["gate"]["samples"]) == ("Pass", 2000)
    assert target["gate"]["figures"]["top1Disagreements"] == 0
    assert "job" not in target


def test_a_job_that_runs_and_one_that_failed_are_shown() -> None:
    (target,) = status(unschedulable())["targets"]
    assert target["job"]["stage"] == "build"
    assert "0/3 nodes are available" in target["job"]["message"]
    (target,) = status(job_failed())["targets"]
    assert target["job"]["stage"] == "SourceNotFound"


def test_history_is_newest_first_and_tells_when_each_ended() -> None:
    history = status(rolled_back())["history"]
    assert [(h["revision"], h["outcome"]) for h in history] == [(B, "Aborted"), (A, "Promoted")]
    assert "promotedAt" not in history[0]
    assert history[0]["endedAt"].endswith("Z")
    assert history[1]["promotedAt"].endswith("Z")
    assert history[0]["reason"] == "a person aborted the rollout"


def test_an_extra_pod_of_a_replacement_is_not_counted_for_autoscalers() -> None:
    seen = serving(A)
    extra = replace(seen, workers=(*seen.workers, replace(seen.workers[0], uid="w9", pod="pod-w9")))
    assert status(extra)["replicas"] == 4
    assert status(new())["replicas"] == 0
    assert status(new())["selector"] == "trtmodel.io/model=magika,trtmodel.io/role=worker"


def misfits(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    """What the API server would prune or refuse."""
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float)}
    if not isinstance(value, kinds[schema["type"]]):
        return [f"{path}: {value!r} is no {schema['type']}"]
    found = []
    if isinstance(value, str):
        if len(value) > schema.get("maxLength", 10**9) or len(value) < schema.get("minLength", 0):
            found.append(f"{path}: length {len(value)}")
        if value not in schema.get("enum", [value]) or not re.search(schema.get("pattern", ""), value):
            found.append(f"{path}: {value!r} is not allowed")
    elif isinstance(value, list):
        found += [f"{path}: too many"] if len(value) > schema.get("maxItems", 10**9) else []
        for i, item in enumerate(value):
            found += misfits(item, schema["items"], f"{path}[{i}]")
    elif isinstance(value, dict):
        found += [f"{path}.{name} is missing" for name in schema.get("required", []) if name not in value]
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            found += misfits(item, inner, f"{path}.{name}") if inner else [f"{path}.{name} is unknown"]
    elif not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{path}: {value} is out of bounds")
    return found


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_status_is_one_that_the_crd_takes(name: str) -> None:
    crd = yaml.safe_load((Path(__file__).parents[3] / "crds" / "trtmodel.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    assert misfits(status(SITUATIONS[name][0]), schema, "status") == []


# ---------------------------------------------------------------------------------------------------------------
# events
# ---------------------------------------------------------------------------------------------------------------


def test_an_event_is_posted_for_each_new_reason_once() -> None:
    seen = serving(A)
    before = status(seen)
    assert conditions.events(before, before) == []
    after = status(gate_failed(), before)
    found = conditions.events(before, after)
    assert [(e.reason, e.warning) for e in found if e.reason == "GateFailed"] == [("GateFailed", True)]
    assert len({e.reason for e in found}) == len(found)


def test_what_a_person_commanded_is_told_also_when_status_stays_the_same() -> None:
    notice = Notice("CommandIgnored", "command x does nothing", warning=True)
    before = status(serving(A))
    assert conditions.events(before, before, [notice]) == [notice]


def test_a_first_visit_tells_only_what_begins() -> None:
    assert [(e.reason, e.warning) for e in conditions.events({}, status(new()))] == [("Resolving", False)]


def test_a_gate_that_passed_is_told_once_though_two_conditions_say_so_one_after_the_other() -> None:
    judged = status(serving(A))
    moved = [
        c | {"status": T, "reason": "GatePassed"} if c["type"] == "Progressing" else c for c in judged["conditions"]
    ]
    before = judged | {
        "conditions": [c | {"status": T} if c["type"] == "Progressing" else c for c in judged["conditions"]]
    }
    assert {c["type"]: c["reason"] for c in judged["conditions"]}["Verified"] == "GatePassed"
    assert conditions.events(before, judged | {"conditions": moved}) == []


def test_what_is_degraded_warns_and_what_is_well_again_is_told() -> None:
    well = status(serving(A))
    hurt = status(without(serving(A), "w1"), well)
    assert ("WorkersMissing", True) in [(e.reason, e.warning) for e in conditions.events(well, hurt)]
    assert ("AsAsked", False) in [(e.reason, e.warning) for e in conditions.events(hurt, status(serving(A), hurt))]


def test_a_failure_that_is_over_is_not_shown() -> None:
    seen = serving(A)
    seen = replace(seen, memory=replace(seen.memory, failure=Failure("old", "JobFailed", "x")))
    (target,) = status(seen)["targets"]
    assert "job" not in target
    assert decide(seen).memory.failure is None


def test_the_first_rollout_ends_ready() -> None:
    seen, decision = run(has_built(new(), A), reaches("settle"))
    assert dict(conditions.status(seen, decision, {}))["phase"] == "Serving"


def test_what_is_told_as_something_that_happened_is_not_told_by_a_condition_again() -> None:
    """Only the memory was lost, and the conditions of before stand there still."""
    seen = serving(A)
    lost = replace(seen, memory=type(seen.memory)())
    decision = decide(lost)
    told = conditions.events(status(canary(seen)), dict(conditions.status(lost, decision, {})), decision.notices)
    assert [n.reason for n in told].count("Adopted") == 1
    assert next(n for n in told if n.reason == "Adopted").warning
