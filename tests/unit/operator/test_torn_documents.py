"""What another hand wrote: a status that was edited, a worker or a Job that says what cannot be.

No pass raises for it, since one that raises is made again for ever and tells nobody: it is read as lost, as unknown or
as no answer. And whatever comes of it, status is one that the API server takes.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from decide_scene import (
    MODEL,
    A,
    B,
    Scene,
    build_result,
    busy,
    canary,
    decide,
    deployed,
    edited,
    finished,
    has_built,
    knows,
    new,
    obey,
    of,
    promoted,
    resolve_result,
    serving,
    with_worker,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trtmodel_contract.codec import DocumentError, canonical, dumps, encode, loads
from trtmodel_contract.control import OutputAgreement, Report, ShadowCounts
from trtmodel_contract.jobs import JobResult
from trtmodel_operator import conditions, manifests
from trtmodel_operator.adapters import signing
from trtmodel_operator.adapters.observe import memory_of
from trtmodel_operator.adapters.plausible import implausible
from trtmodel_operator.model import (
    ApplyPointer,
    ApplyWorkload,
    Check,
    CreateJob,
    Decision,
    Failure,
    JobKind,
    Memory,
    Rejected,
    Signal,
)

SIGNER = signing.Ed25519Signer(signing.Keys.made())
CRD = Path(__file__).resolve().parents[3] / "crds" / "trtmodel.yaml"
MANY = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)

odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.sampled_from(
        ["a" * 400, "room, after soon s of workers", "room, after 1e5 s of step 0", "Pass", "w1", "-1", "{"]
    ),
    st.just([]),
    st.just({}),
)


@functools.cache
def status_schema() -> Any:
    definition = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return jsonschema.Draft202012Validator(
        definition["properties"]["status"], format_checker=jsonschema.FormatChecker()
    )


def full() -> list[Scene]:
    """Scenes whose memories have as many fields as there are."""
    seen = canary(serving(A))
    assert seen.memory.step is not None
    step = replace(
        seen.memory.step,
        checks=(Check("quality", "Pass", "quality is 1", 1.0, 1.0, 0),),
        failed={"default": "TooSlow, it was"},
        counted={"default/x": 3},
        deaths={"w": 1},
        verdict="Pass",
        figures="3 req",
        sentence="as ever",
    )
    memory = replace(
        seen.memory,
        standby=deployed(B),
        step=step,
        failure=Failure("build-x", "OOMKilled", "too little"),
        rejected=(Rejected(B, "k", "TooSlow", "it was"),),
        waiting="step 0 of x",
        waited=3.0,
        paused="pause#1",
    )
    trial = obey(others := edited(serving(A), serving__pod={"annotations": {"team": "b"}}), decide(others))
    waits = "room, after 3.0 s of " + decide(trial).memory.waiting
    return [
        replace(seen, memory=memory), busy(seen), promoted(), has_built(new(), A), canary(serving(A, replicas=1)),
        trial, replace(trial, memory=replace(trial.memory, waiting=waits)), knows(new(), A),
    ]  # fmt: skip


SCENES = full()


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def torn(draw: st.DrawFn, document: Any) -> Any:
    """With one to three of its values replaced by others, or taken out."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(list(places(document)) or [()]))
        if not where:
            break
        node = functools.reduce(lambda d, key: d[key], where[:-1], document)
        if draw(st.integers(0, 5)) == 0:
            del node[where[-1]]
        else:
            node[where[-1]] = draw(odd)
    return document


def carried_out(seen: Scene, decision: Decision) -> None:
    """All that a pass does with a decision, but for the calls."""
    canonical(encode(decision.memory))
    found = conditions.status(seen, decision, {})
    json.dumps(found, allow_nan=False)
    if refused := next(status_schema().iter_errors(found), None):
        raise AssertionError(f"the API server refuses this status: {refused.message} at {list(refused.absolute_path)}")
    conditions.events({}, found, decision.notices)
    for signal in of(decision, Signal):
        dumps(signing.desired_request(SIGNER, seen.model, decision.memory.sequence, signal))
    for pointer in of(decision, ApplyPointer):
        signing.pointer_config_map(SIGNER, seen.model, pointer)
    assert seen.spec is not None
    for workload in of(decision, ApplyWorkload):
        canonical(manifests.worker_deployment(seen.model, seen.spec, workload))
    for job in of(decision, CreateJob):
        canonical(manifests.job(seen.model, seen.spec, job))


def passes(seen: Scene) -> None:
    for _ in range(2):
        decision = decide(seen)
        carried_out(seen, decision)
        seen = obey(seen, decision, seconds=10)


@MANY
@given(st.data())
def test_whatever_a_hand_made_of_status_passes_go_on(data: st.DataObject) -> None:
    seen = data.draw(st.sampled_from(SCENES))
    stored = data.draw(torn(encode(seen.memory)))
    raw = {"metadata": {"namespace": "ml", "name": "magika"}, "status": {"rollout": json.loads(json.dumps(stored))}}
    passes(replace(seen, memory=memory_of(raw)))


def reporting(seen: Scene) -> Scene:
    """With figures of every kind."""
    seen = busy(seen, requests=400, failed=3)
    outputs = {"y": OutputAgreement(10, 10, 9, 9.5, 0.1, 0)}
    for worker in seen.workers:
        assert worker.report is not None
        models = {}
        for name, model in worker.report.models.items():
            windows = {
                window: {
                    digest: replace(c, shadow=ShadowCounts(5, 1, {"Error": 1}, {"1": {200: 5}}, outputs), synthetic=2)
                    for digest, c in counts.items()
                }
                for window, counts in model.windows.items()
            }
            models[name] = replace(model, windows=windows)
        seen = with_worker(seen, worker.uid, report=replace(worker.report, models=models))
    return seen


REPORTING = [reporting(canary(serving(A))), reporting(canary(serving(A), index=1)), reporting(promoted())]


@MANY
@given(st.data())
def test_whatever_workers_say_passes_go_on(data: st.DataObject) -> None:
    seen = data.draw(st.sampled_from(REPORTING))
    for worker in data.draw(st.lists(st.sampled_from(seen.workers), min_size=1, max_size=2)):
        said = json.dumps(data.draw(torn(json.loads(dumps(worker.report)))))
        try:
            report, why = loads(Report, said), ""
            why = implausible(report)
        except DocumentError as e:
            report, why = None, str(e)
        seen = with_worker(seen, worker.uid, report=None if why else report, silence=why)
    passes(replace(seen, now=seen.now + 5))


def with_answers() -> list[tuple[Scene, JobKind, JobResult]]:
    asked, known = obey(new(), decide(new())), knows(new(), A)
    building = obey(known, decide(known))
    found = has_built(new(), A).memory.built[0].artifact
    return [
        (asked, JobKind.RESOLVE, resolve_result(A, found)),
        (building, JobKind.BUILD, build_result(A)),
    ]


@MANY
@given(st.data())
def test_whatever_jobs_answer_passes_go_on(data: st.DataObject) -> None:
    seen, kind, answer = data.draw(st.sampled_from(with_answers()))
    said = json.dumps(data.draw(torn(json.loads(dumps(answer)))))
    try:
        result = loads(JobResult, said)
    except DocumentError:
        result = None
    passes(finished(seen, kind, result))


@pytest.mark.parametrize(
    "change",
    [{"sequence": 2**53 - 1}, {"sequence": -1}, {"step": {"index": -7}}, {"step": {"weight": 300}}],
    ids=["end of the numbers", "below zero", "no such step", "more than all"],
)
def test_a_memory_of_numbers_that_no_pass_wrote_counts_as_lost(change: dict[str, Any]) -> None:
    stored = encode(canary(serving(A)).memory)
    for name, value in change.items():
        stored[name] = {**stored[name], **value} if isinstance(value, dict) else value
    raw = {"metadata": {"namespace": "ml", "name": "magika"}, "status": {"rollout": stored}}
    assert memory_of(raw) == Memory()


def test_a_worker_cannot_drive_the_sequence_to_the_end_of_the_numbers() -> None:
    """With it, every later write of the memory would be refused by the definition's bound, and nothing would move."""
    seen = serving(A)
    report = seen.workers[0].report
    assert report is not None
    assert implausible(report) == ""
    lying = replace(report, fence=replace(report.fence, sequence=2**53 - 1))
    assert implausible(lying) == f"sequence is {2**53 - 1}"
    (pointer,) = of(decide(replace(seen, pointers=())), ApplyPointer)
    there = manifests.boot_pointer(MODEL, pointer, lambda _: SIGNER.sign(b""))
    assert manifests.read_pointer("p", "default", there.text().decode(), "").content
    beyond = dumps(replace(there, sequence=2**53 - 1)).decode()
    assert manifests.read_pointer("p", "default", beyond, "").content == ""


def test_figures_that_cannot_be_true_are_named() -> None:
    report = REPORTING[0].workers[0].report
    assert report is not None
    stored = json.loads(dumps(report))
    counts = next(
        c for w in stored["models"][MODEL.name]["windows"].values() for c in w.values() if "shadow" in c and c["ok"]
    )
    counts["failed"] = {"Error": 1}
    for path, value, why in (
        (("ok",), -1, "ok is -1"),
        (("failed", "Error"), -1000, "Error is -1000"),
        (("compute", "1"), {"426": 1}, "buckets of times from 426 to 426"),
        (("compute", "1"), {"200": -5}, "times that were counted from -5 to -5"),
        (("shadow", "outputs", "y", "rows"), -1, "rows is -1"),
        (("shadow", "outputs", "y", "relativeError"), 1e300, "sums of 1e+300 and 9.5 over 10 rows"),
    ):
        *parents, last = path
        node = functools.reduce(lambda d, key: d[key], parents, counts)
        before, node[last] = node[last], value
        assert implausible(loads(Report, json.dumps(stored))) == why
        node[last] = before
    assert implausible(loads(Report, json.dumps(stored))) == ""
