"""Cases from the field (group E) where the operator decides: GPUs of several kinds, slices of them, runtime versions,
drivers, and builds that run out of memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decide_scene import (
    MODEL,
    RAW,
    A,
    B,
    Scene,
    asks_for,
    canary,
    changed_raw,
    decide,
    edited,
    finished,
    knows,
    obey,
    of,
    serving,
    with_engine,
    with_worker,
)
from trtmodel_contract.control import DEVICE_LOST, EngineState
from trtmodel_contract.exitcodes import FINAL_JOB_EXITS, JobExit
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_operator import manifests
from trtmodel_operator.fields import SpecError
from trtmodel_operator.model import CreateJob, JobKind, Signal, Stage
from trtmodel_operator.spec import parse

TENSORRT = {"engine": {"runtime": "TensorRT"}}
SLICE = "nvidia.com/mig-1g.10gb"
OTHER_GPU = LoadKey("ONNXRuntime", "1.20", "sm90")


def told(seen: Scene, uid: str) -> list[Signal]:
    return [s for s in of(decide(seen), Signal) if s.uid == uid]


def with_load_key(seen: Scene, uid: str, key: LoadKey) -> Scene:
    report = next(w.report for w in seen.workers if w.uid == uid)
    assert report is not None
    return with_worker(seen, uid, report=replace(report, load_key=key))


def member_that_loads(seen: Scene) -> str:
    """The worker that was told to load the candidate."""
    return next(w.uid for w in seen.workers if w.report and len(w.report.models[MODEL.name].engines) > 1)


def built(**changes: Any) -> dict[str, Any]:
    """The pod of the build Job."""
    asked = parse(changed_raw({**RAW, **TENSORRT}, **changes))
    seen = knows(replace(serving(A), spec=asked), B)
    (create,) = [c for c in of(decide(seen), CreateJob) if c.kind is JobKind.BUILD]
    pod: dict[str, Any] = manifests.job(MODEL, asked, create)["spec"]["template"]["spec"]  # type: ignore[index]
    return pod


# -- E-01, E-03


def test_E01_a_worker_on_another_gpu_is_never_told_to_load_an_engine_that_is_not_for_it() -> None:
    seen = with_load_key(asks_for(serving(A), B), "w0", OTHER_GPU)
    for _ in range(6):
        decision = decide(seen)
        assert [e.revision for s in of(decision, Signal) if s.uid == "w0" for e in s.engines] == []
        assert decision.memory.rejected == ()  # nor is the model judged by it
        seen = with_load_key(obey(seen, decision), "w0", OTHER_GPU)


def test_E01_builds_go_to_the_gpu_of_the_target() -> None:
    pod = built(targets=[{"name": "a10", "gpu": "NVIDIA-A10"}])
    assert pod["nodeSelector"]["nvidia.com/gpu.product"] == "NVIDIA-A10"


def test_E03_another_default_image_changes_neither_the_workers_nor_their_engines() -> None:
    seen = replace(serving(A), default_image="worker:2")
    decision = decide(seen)
    assert decision.actions == ()  # a pod that restarts meanwhile has the old image and the old pointer
    seen = asks_for(seen, B)
    seen = obey(seen, decide(seen))
    assert {w.image for w in seen.workloads} == {"worker:1"}
    build = decide(knows(edited(serving(A), source__uri="s3://models/n.onnx"), B))
    assert {c.image for c in of(build, CreateJob)} == {"worker:1"}  # built with what will load it


# -- E-12


def test_E12_running_out_of_memory_is_tried_again_as_often_as_the_spec_says_and_then_named() -> None:
    assert JobExit.RETRY not in FINAL_JOB_EXITS
    seen = knows(edited(serving(A), build__retries=4, source__uri="s3://models/n.onnx"), B)
    decision = decide(seen)
    (create,) = of(decision, CreateJob)
    assert seen.spec is not None
    assert manifests.job(MODEL, seen.spec, create)["spec"]["backoffLimit"] == 4  # type: ignore[index]
    words = "memory ran out in stage build: raise spec.build.resources.limits.memory"
    seen = finished(obey(seen, decision), JobKind.BUILD, JobResult(Reason.BUILD_FAILED, words))
    decision = decide(seen)
    assert decision.situation.stage is Stage.STALLED
    assert words in decision.situation.message
    assert not of(decide(obey(seen, decision)), CreateJob)  # no hot loop: it stays ended until somebody acts


# -- E-14


def test_E14_a_slice_is_asked_for_by_the_name_that_the_node_has_for_it() -> None:
    limits = {"limits": {SLICE: "1"}}
    targets = [{"name": "slice", "gpus": 0, "nodeSelector": {"zone": "b"}}]
    changes = {"serving__pod": {"resources": limits}, "targets": targets}
    asked = parse(changed_raw({**RAW, **TENSORRT}, **changes))
    assert asked.serving.pod["resources"] == limits
    pod = built(build__resources={"limits": {SLICE: 1}}, **changes)
    found = pod["containers"][0]["resources"]["limits"]
    assert str(found[SLICE]) == "1"
    assert "nvidia.com/gpu" not in found


@pytest.mark.parametrize("where", ["build__resources", "serving__pod"])
@pytest.mark.parametrize(
    ("gpus", "limits"), [(0, {SLICE: "2"}), (1, {SLICE: "1"}), (0, {SLICE: 1, "nvidia.com/mig-2g.20gb": 1})]
)
def test_E14_more_than_one_slice_is_refused(where: str, gpus: int, limits: dict[str, Any]) -> None:
    resources = {"limits": limits}
    changes = {where: resources if where == "build__resources" else {"resources": resources}}
    with pytest.raises(SpecError, match=r"nvidia.com/mig-1g.10gb.* use one device each: ask for one slice"):
        parse(changed_raw({**RAW, **TENSORRT}, targets=[{"name": "a", "gpus": gpus}], **changes))


def test_E14_an_engine_that_needs_more_than_the_serving_slice_has_is_found_before_it_is_promoted() -> None:
    seen = asks_for(serving(A), B)
    seen = obey(seen, decide(seen), loading=[B])
    text = "it needs 14.0 GiB of device memory, 9.5 GiB are free"
    uid = member_that_loads(seen)
    decision = decide(with_engine(seen, uid, B, state=EngineState.FAILED, reason="NoMemory", message=text))
    assert decision.memory.candidate is None
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
    assert text in decision.situation.message


# -- E-10, E-16


def test_E16_a_driver_that_loads_nothing_new_pauses_the_rollout_and_does_not_judge_the_model() -> None:
    seen = asks_for(serving(A), B)
    seen = obey(seen, decide(seen), loading=[B])
    uid, text = member_that_loads(seen), "driver/library version mismatch"
    seen = with_engine(seen, uid, B, state=EngineState.FAILED, reason=DEVICE_LOST, message=text)
    for _ in range(5):
        decision = decide(seen)
        assert (decision.rule, decision.memory.rejected) == ("prepare", ())
        assert text in decision.situation.message
        seen = obey(seen, decision, loading=[B])
    seen = with_engine(seen, uid, B, state=EngineState.READY, reason="", message="")
    decision = decide(seen)
    assert decision.situation.stage is Stage.CANARY  # the node came back with a driver that works


def test_E10_a_candidate_whose_device_is_lost_on_trial_goes_back_and_stable_serves() -> None:
    seen = canary(serving(A))
    uid = next(w.uid for w in seen.workers if w.report and w.report.models[MODEL.name].routes.candidate)
    decision = decide(with_engine(seen, uid, B, deaths=1, state=EngineState.DOWN))
    assert decision.memory.candidate is None
    assert decision.memory.stable is not None
    assert decision.memory.stable.revision == A
