"""Other workers for what serves: which are wanted, how many of each there are, and what takes them back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from decide_scene import (
    A,
    B,
    Scene,
    asks_for,
    build_result,
    busy,
    decide,
    digest,
    edited,
    finished,
    has_built,
    later,
    new,
    obey,
    of,
    run,
    serving,
    with_engine,
    with_worker,
)
from trtmodel_contract.control import EngineState
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_operator import manifests
from trtmodel_operator.conditions import status
from trtmodel_operator.decide.platforms import wanted_platform
from trtmodel_operator.decide.turn import Turn
from trtmodel_operator.model import (
    ApplyPointer,
    ApplyWorkload,
    Command,
    CreateJob,
    Decision,
    DeleteWorkload,
    JobKind,
    Memory,
    ObservedWorker,
    Signal,
)

TEAM = {"annotations": {"team": "b"}}


def changed(replicas: int = 4, **rollout: Any) -> Scene:
    """Pods with other settings are asked for, beside a revision that serves."""
    return edited(serving(A, replicas=replicas, **rollout), serving__pod=TEAM)


def hash_of(seen: Scene) -> str:
    wanted = wanted_platform(Turn(seen, seen.memory))
    assert wanted is not None
    return wanted.hash


def replicas(seen: Scene) -> dict[str, int]:
    return {w.platform: w.replicas for w in seen.workloads}


def new_ones(seen: Scene) -> list[ObservedWorker]:
    return [w for w in seen.workers if w.platform == hash_of(seen)]


def on_trial(seen: Scene, index: int = 0) -> Scene:
    """Workers of the platform that is asked for answer in this step, just now."""

    def opened(now: Scene, decision: Decision) -> bool:
        step = now.memory.step
        return decision.rule == "watch" and step is not None and step.index == index and step.routed

    for _ in range(80):
        decision = decide(seen)
        if opened(seen, decision):
            return seen
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    raise AssertionError(decision)


def to_the_end(seen: Scene, passes: int = 120) -> tuple[Scene, list[dict[str, int]]]:
    """Until nothing is left to do; and how many there were of each platform on the way."""
    there: list[dict[str, int]] = []
    for _ in range(passes):
        decision = decide(seen)
        if decision.rule in ("settle", "platform_taken_back") and not decision.actions and not decision.requeue:
            return seen, there
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
        if there[-1:] != [replicas(seen)]:
            there.append(replicas(seen))
    raise AssertionError(f"{decision.rule}: {decision.situation}")


# ---------------------------------------------------------------------------------------------------------------
# platform_pinned
# ---------------------------------------------------------------------------------------------------------------


def test_an_operator_with_another_default_image_changes_no_worker() -> None:
    seen = replace(serving(A), default_image="worker:9")
    assert not decide(seen).actions
    assert decide(edited(seen, serving__replicas=5)).memory.platform == seen.memory.platform


def test_a_field_that_is_emptied_again_means_the_image_of_before() -> None:
    seen = edited(replace(serving(A), default_image="worker:9"), serving__image="worker:2")
    assert hash_of(seen) != hash_of(serving(A))
    assert hash_of(edited(seen, serving__image="")) == hash_of(serving(A))


def test_a_status_that_is_older_than_pinned_settings_takes_those_of_the_deployment() -> None:
    seen = serving(A, serving__pod=TEAM)
    assert seen.memory.platform is not None
    old = replace(seen.memory, platform=replace(seen.memory.platform, pod=""), default_image="")
    decision = decide(edited(replace(seen, memory=old), serving__pod={}))
    assert decision.memory.platform == seen.memory.platform
    assert decision.memory.candidate is not None


def test_where_nothing_was_ever_promoted_another_image_is_taken_at_once() -> None:
    seen, _ = run(has_built(new(), A), lambda s, d: d.rule == "first_rollout" and bool(s.workloads))
    seen = edited(seen, serving__image="worker:2")
    decision = decide(seen)
    assert decision.memory.platform is not None
    assert decision.memory.platform.image == "worker:2"
    assert decision.memory.stable is None


def test_workers_that_stay_are_made_of_what_they_were_made_of() -> None:
    seen = changed()
    assert seen.spec is not None
    assert seen.memory.platform is not None
    apply = ApplyWorkload("x", seen.spec.targets[0], seen.memory.platform, 4)
    template = manifests.worker_deployment(seen.model, seen.spec, apply)["spec"]["template"]
    assert "annotations" not in template["metadata"]


# ---------------------------------------------------------------------------------------------------------------
# change_platform
# ---------------------------------------------------------------------------------------------------------------


def test_other_pod_settings_begin_a_trial_with_one_worker_beside_all_the_old_ones() -> None:
    seen = changed()
    decision = decide(seen)
    assert decision.rule == "change_platform"
    assert decision.situation.reason == "PlatformChanges"
    assert decision.memory.candidate is not None
    assert decision.memory.candidate.revision == hash_of(seen)
    assert not of(decision, CreateJob)
    (pointer,) = of(decision, ApplyPointer)
    assert pointer.stable.revision == A
    assert {w.platform.hash: w.replicas for w in of(decision, ApplyWorkload)} == {hash_of(seen): 1}


def test_another_image_has_its_engines_built_by_it_before_a_worker_is_made() -> None:
    seen = edited(serving(A), serving__image="worker:2")
    decision = decide(seen)
    (job,) = of(decision, CreateJob)
    assert (job.kind, job.image) == (JobKind.BUILD, "worker:2")
    assert not of(decision, ApplyWorkload)
    assert decision.builds == {"default": (job.name,)}
    seen = finished(obey(seen, decision), JobKind.BUILD, build_result(A))
    seen, decision = run(seen, lambda _, d: d.rule == "change_platform" and d.memory.candidate is not None)
    assert decision.memory.stable == seen.memory.stable  # of the same runtime: it has the engine already


def test_an_image_whose_engines_cannot_be_built_is_taken_back_with_the_jobs_words() -> None:
    seen = edited(serving(A), serving__image="worker:2")
    seen = obey(seen, decide(seen))
    jobs = tuple(
        replace(j, state=type(j.state).FAILED, trouble="DeadlineExceeded", message="no such image") for j in seen.jobs
    )
    decision = decide(replace(seen, jobs=jobs))
    assert (decision.situation.reason, decision.memory.failure) == ("DeadlineExceeded", None)
    assert "no such image" in decision.situation.message
    assert decision.memory.history[0].outcome == "RolledBack"
    again = decide(replace(seen, jobs=jobs, memory=decision.memory))
    assert (again.rule, again.situation.stage.value, again.actions) == ("platform_taken_back", "RolledBack", ())


@pytest.mark.parametrize("why", ["a revision is in the making", "paused", "scaled to zero", "old ones still leave"])
def test_it_waits_while(why: str) -> None:
    seen = changed()
    if why == "a revision is in the making":
        seen = asks_for(seen, B)
    elif why == "paused":
        seen = edited(seen, rollout__paused=True)
    elif why == "scaled to zero":
        seen = edited(seen, serving__replicas=0)
    else:
        left = replace(seen.workloads[0], name="magika-default-left", platform="left", replicas=1, pod="{}")
        seen = replace(seen, workloads=(*seen.workloads, left))
    decision = decide(seen)
    assert decision.rule != "change_platform"
    assert decision.memory.candidate is None or decision.memory.candidate.revision == B


def test_what_was_rejected_for_itself_does_not_hold_up_workers_with_more_memory() -> None:
    seen = asks_for(serving(A), B)
    seen = edited(seen, serving__pod={"resources": {"limits": {"memory": "4Gi"}}})
    rejected = decide(
        replace(seen, command=Command("abort", "", "abort#1"))
    )  # B, which is asked for and being made, is given up
    seen = replace(seen, memory=rejected.memory, command=Command("abort", "", "abort#1"))
    decision = decide(seen)
    assert decision.memory.candidate is not None
    assert decision.memory.candidate.revision == hash_of(seen)


# ---------------------------------------------------------------------------------------------------------------
# how many of each
# ---------------------------------------------------------------------------------------------------------------


def test_they_come_one_by_one_and_an_old_one_leaves_when_a_new_one_serves() -> None:
    seen = changed()
    old = seen.workloads[0].platform
    seen, there = to_the_end(seen)
    steps = [(c.get(old, 0), c.get(hash_of(seen), 0)) for c in there]
    assert list(dict.fromkeys(steps)) == [(4, 1), (3, 1), (3, 2), (2, 2), (2, 3), (1, 4), (0, 4)]
    assert replicas(seen) == {hash_of(seen): 4}
    assert [p.name for p in seen.pointers] == [w.name for w in seen.workloads]
    assert (seen.memory.history[0].outcome, seen.memory.history[0].revision) == ("Promoted", hash_of(seen))
    assert seen.memory.stable is not None
    assert seen.memory.stable.revision == A


def test_of_a_fleet_of_one_both_answer_until_the_new_one_is_promoted() -> None:
    seen = changed(replicas=1)
    old = seen.workloads[0].platform
    _, there = to_the_end(seen)
    assert [c.get(old, 0) for c in there][:2] == [1, 0]


def test_what_is_taken_back_leaves_as_the_old_ones_are_ready_again() -> None:
    seen = on_trial(changed(), index=1)
    old = seen.memory.platform
    assert old is not None
    decision = decide(replace(seen, command=Command("abort", "", "abort#1")))
    assert decision.memory.candidate is None
    wanted = {w.platform.hash: w.replicas for w in of(decision, ApplyWorkload)}
    assert wanted == {old.hash: 4}
    seen, _ = to_the_end(replace(seen, command=Command("abort", "", "abort#1")))
    assert replicas(seen) == {old.hash: 4}


def two_leave(count: int, **changes: Any) -> Scene:
    """The workers of two platforms that nobody wants any more serve, as many of each as are promised, and main's do
    not yet."""
    seen = serving(A, replicas=count)
    for annotation in ("b", "c"):
        hash_ = hash_of(edited(seen, serving__pod={"annotations": {"team": annotation}}))
        name = manifests.workload_name(seen.model, "default", hash_)
        left = replace(seen.workloads[0], name=name, platform=hash_, pod='{"annotations":{}}')
        mine = [w for w in seen.workers if w.platform == seen.workloads[0].platform]
        theirs = [replace(w, uid=f"{annotation}{w.uid}", pod=f"{annotation}{w.pod}", platform=hash_) for w in mine]
        pointer = replace(seen.pointers[0], name=name)
        seen = replace(
            seen,
            workloads=(*seen.workloads, left),
            workers=(*seen.workers, *theirs),
            pointers=(*seen.pointers, pointer),
        )
    for worker in seen.workers[:count]:
        seen = with_worker(seen, worker.uid, ready=False, **changes)
    return seen


def left(seen: Scene) -> int:
    return sum(w.ready for w in seen.workers)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_of_two_platforms_that_leave_as_many_stay_as_main_lacks(count: int) -> None:
    seen = two_leave(count)
    first = seen.workers[0]
    for _ in range(4):
        seen = obey(seen, decide(seen))
        assert left(seen) == count
    seen = obey(with_worker(seen, first.uid, ready=True), decide(with_worker(seen, first.uid, ready=True)))
    assert left(seen) == count


def test_one_of_two_that_leave_makes_room_for_mains_and_the_last_ready_one_stays() -> None:
    nowhere = {"trouble": "Unschedulable", "report": None, "running": False}
    for count, stay in ((4, 3), (2, 1), (1, 1)):
        seen = two_leave(count, **nowhere)
        for _ in range(4):
            seen = obey(seen, decide(seen))
        assert left(seen) == stay
    (worker,) = [w for w in seen.workers if w.ready]
    alone = decide(edited(seen, rollout__allowDowntime=True, rollout__memoryPolicy="Resource"))
    assert {w.platform.hash: w.replicas for w in of(alone, ApplyWorkload)}[worker.platform] == 0


@pytest.mark.parametrize("count", [1, 4])
def test_a_deployment_that_tells_no_settings_leaves_like_any_other_and_its_pods_stay_what_they_are(count: int) -> None:
    seen = two_leave(count)
    unknown = {w.name for w in seen.workloads[1:]}
    seen = replace(seen, workloads=tuple(replace(w, pod="") if w.name in unknown else w for w in seen.workloads))
    for i in range(4 * count):
        decision = decide(seen)
        assert all(w.only_replicas for w in of(decision, ApplyWorkload) if w.name in unknown)
        seen = obey(seen, decision)
        assert left(seen) == count
        if i >= count:  # main's workers come into service, one by one
            seen = with_worker(seen, seen.workers[min(i, 2 * count - 1) - count].uid, ready=True)
    assert replicas(seen) == {seen.workloads[0].platform: count}
    assert not unknown & {w.name for w in seen.workloads}


def without_room(seen: Scene) -> Scene:
    """The new worker finds no node."""
    seen = obey(seen, decide(seen))
    (worker,) = new_ones(seen)
    return with_worker(
        seen, worker.uid, ready=False, report=None, running=False, trouble="Unschedulable", message="no GPU is free"
    )


@pytest.mark.parametrize("policy", ["Auto", "Resource"])
def test_without_room_for_one_more_an_old_one_leaves_first(policy: str) -> None:
    seen = without_room(changed(rollout__memoryPolicy=policy))
    old = seen.workloads[0].platform
    decision = decide(seen)
    assert decision.memory.step is not None
    assert decision.memory.step.tight
    assert {w.platform.hash: w.replicas for w in of(decision, ApplyWorkload)} == {old: 3}
    again = decide(obey(seen, decision))
    assert not of(again, ApplyWorkload)  # one at a time


@pytest.mark.parametrize(
    ("count", "policy"),
    [(4, {"rollout__memoryPolicy": "Availability"}), (1, {}), (1, {"rollout__memoryPolicy": "Resource"})],
)
def test_where_no_old_one_may_leave_first_it_holds_with_the_reason(count: int, policy: dict[str, Any]) -> None:
    seen = without_room(changed(replicas=count, **policy))
    decision = decide(seen)
    assert (decision.rule, decision.situation.reason, decision.situation.stuck) == ("prepare", "NoRoomForWorker", True)
    assert "no GPU is free" in decision.situation.message
    assert not of(decision, ApplyWorkload)
    late = replace(seen, memory=replace(decision.memory, waited=1e6))
    assert decide(late).memory.candidate is not None  # it is no fault of the platform
    assert decide(late).situation.stage.value == "Stalled"


@pytest.mark.parametrize("interval", ["5s", "30s"])
def test_room_that_comes_and_goes_takes_no_time_from_the_deadline_and_adds_none(interval: str) -> None:
    seen = without_room(changed(rollout__memoryPolicy="Availability", rollout__analysis__interval=interval))
    (worker,) = new_ones(seen)
    began, with_room = seen.now, 0.0
    for n in range(400):
        there = n % 8 >= 4  # 20 s without room, 20 s on a node, where it does not start
        trouble = ("ImagePullBackOff", "not found") if there else ("Unschedulable", "no GPU is free")
        seen = with_worker(seen, worker.uid, trouble=trouble[0], message=trouble[1])
        decision = decide(seen)
        if decision.memory.candidate is None:
            break
        seen, with_room = later(replace(seen, memory=decision.memory), 5), with_room + 5 * there
    assert decision.situation.reason == "ImagePullBackOff"
    assert decision.rule == "deadline_passed"
    assert 300 <= with_room + 5 * (n // 8 + 1) <= 400  # of each change one pass may count for either
    assert seen.now - began >= 500


def test_room_that_comes_after_the_deadline_leaves_the_time_of_the_step() -> None:
    seen = without_room(changed(rollout__memoryPolicy="Availability"))
    (worker,) = new_ones(seen)
    for _ in range(100):
        seen = later(replace(seen, memory=decide(seen).memory), 5)
    assert decide(seen).situation.stage.value == "Stalled"
    seen = with_worker(seen, worker.uid, trouble="", message="")
    for _ in range(50):
        decision = decide(seen)
        assert (decision.memory.candidate is not None, decision.situation.stage.value) == (True, "Preparing")
        seen = later(replace(seen, memory=decision.memory), 5)


def lost_its_place(seen: Scene) -> Scene:
    """A new worker that answered; the one that replaces it finds no node."""
    worker = new_ones(seen)[-1]
    nowhere = {"ready": False, "running": False, "trouble": "Unschedulable", "message": "no GPU is free"}
    again = replace(worker, uid=f"again-{worker.uid}", pod=f"again-{worker.pod}", report=None, **nowhere)
    return replace(seen, workers=tuple(again if w is worker else w for w in seen.workers))


def waits(seen: Scene, seconds: float) -> tuple[Scene, Decision]:
    """Nothing changes in the cluster for so long; the others answer."""
    for _ in range(int(seconds / 5)):
        seen = later(busy(obey(seen, decide(seen), seconds=0), requests=20), 5)
    return seen, decide(seen)


@pytest.mark.parametrize("policy", ["Availability", "Auto"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_place_that_is_lost_late_in_a_trial_holds_it_beyond_the_deadline_until_there_is_one(
    policy: str, index: int
) -> None:
    seen = on_trial(changed(rollout__memoryPolicy=policy, rollout__progressDeadline="1m"), index=index)
    assert seen.memory.step is not None
    if policy == "Auto":  # an old one had left for it
        seen = replace(seen, memory=replace(seen.memory, step=replace(seen.memory.step, tight=True)))
    seen, decision = waits(lost_its_place(seen), 150)
    assert decision.memory.candidate is not None
    assert (decision.situation.stage.value, decision.situation.reason) == ("Stalled", "NoRoomForWorker")
    assert "no GPU is free" in decision.situation.message
    assert ("memoryPolicy" in decision.situation.message) == (policy == "Availability")
    (nowhere,) = [w for w in seen.workers if w.trouble]
    report = next(w.report for w in seen.workers if w.ready)
    seen = with_worker(seen, nowhere.uid, ready=True, running=True, trouble="", message="", report=report)
    seen, _ = to_the_end(seen)
    assert (seen.memory.history[0].outcome, seen.memory.history[0].revision) == ("Promoted", hash_of(seen))


def test_while_a_place_is_lacking_the_others_are_judged_as_ever() -> None:
    seen = on_trial(changed(rollout__memoryPolicy="Availability", rollout__progressDeadline="1m"), index=1)
    seen, _ = waits(lost_its_place(seen), 100)
    uids = {w.uid for w in new_ones(seen)}
    decision = decide(later(busy(seen, requests=400, failed=80, failing=uids), 5))
    assert (decision.rule, decision.situation.reason) == ("analysis_says_no", "ErrorRateTooHigh")


def test_an_old_worker_that_left_for_one_that_fits_nowhere_comes_back_at_the_deadline() -> None:
    seen = without_room(changed(rollout__memoryPolicy="Auto", rollout__progressDeadline="1m"))
    seen, decision = waits(seen, 60)
    assert decision.memory.candidate is not None
    seen, decision = waits(seen, 10)
    assert (decision.memory.candidate, decision.situation.reason) == (None, "Unschedulable")
    assert seen.memory.platform is not None
    assert replicas(seen)[seen.memory.platform.hash] == 4


def test_the_last_ready_worker_never_leaves_first() -> None:
    seen = without_room(changed(replicas=2))
    for worker in seen.workers[:1]:
        seen = with_worker(seen, worker.uid, ready=False)
    assert all(w.replicas >= 1 for w in of(decide(seen), ApplyWorkload))
    after = obey(seen, decide(seen))
    ready = [w for w in after.workers if w.ready]
    assert ready


# ---------------------------------------------------------------------------------------------------------------
# what takes it back
# ---------------------------------------------------------------------------------------------------------------


def test_new_workers_are_compared_with_the_old_ones_in_the_same_window() -> None:
    seen = on_trial(changed())
    uids = {w.uid for w in new_ones(seen)}
    decision = decide(later(busy(seen, requests=400, failed=80, failing=uids), 5))
    assert decision.rule == "analysis_says_no"
    assert decision.situation.reason == "ErrorRateTooHigh"
    assert "the workers of before" in decision.situation.message


def test_an_engine_that_fails_on_an_old_worker_says_nothing_about_the_new_ones() -> None:
    seen = on_trial(changed())
    old = next(w for w in seen.workers if w.uid not in {n.uid for n in new_ones(seen)})
    assert decide(with_engine(seen, old.uid, A, state=EngineState.FAILED)).memory.candidate is not None
    (fresh,) = new_ones(seen)
    told = decide(with_engine(seen, fresh.uid, A, state=EngineState.FAILED, message="no memory"))
    assert (told.rule, told.situation.reason) == ("cannot_be_held", "EngineFailed")


def test_an_engine_that_cannot_be_built_for_an_old_worker_ends_no_trial() -> None:
    seen = on_trial(changed())
    old = next(w for w in seen.workers if w.uid not in {n.uid for n in new_ones(seen)})
    assert old.report is not None
    other = replace(old.report.load_key, device="gpu-NVIDIA-L4-cc8.9")
    seen = with_worker(seen, old.uid, ready=False, report=replace(old.report, load_key=other, models={}))
    decision = decide(seen)
    assert [job.load_key for job in of(decision, CreateJob)] == [str(other)]
    failed = finished(obey(seen, decision), JobKind.BUILD, JobResult(Reason.OPERATOR_UNSUPPORTED, "node 7"))
    for _ in range(3):
        failed = with_worker(failed, old.uid, ready=False, report=replace(old.report, load_key=other, models={}))
        decision = decide(failed)
        assert (decision.rule, decision.memory.candidate is not None) == ("watch", True)
        failed = obey(failed, decision)


def test_where_nothing_is_built_an_engine_that_an_old_worker_lacks_holds_up_no_trial() -> None:
    seen = on_trial(edited(changed(), build__tier="Production"))
    old = next(w for w in seen.workers if w.uid not in {n.uid for n in new_ones(seen)})
    assert old.report is not None
    strange = replace(old.report, load_key=replace(old.report.load_key, device="gpu-NVIDIA-L4-cc8.9"), models={})
    for _ in range(3):
        seen = with_worker(seen, old.uid, ready=False, report=strange)
        decision = decide(seen)
        assert (decision.rule, decision.memory.candidate is not None) == ("watch", True)
        seen = obey(seen, decision)


def test_where_nothing_is_built_new_workers_without_an_engine_are_told_and_taken_back_at_the_deadline() -> None:
    seen = edited(serving(A, build__tier="Production"), serving__image="worker:2")
    seen = obey(seen, decide(seen))
    (fresh,) = new_ones(seen)
    assert fresh.report is not None
    strange = replace(fresh.report, load_key=replace(fresh.report.load_key, version="1.21"), models={})
    seen = with_worker(seen, fresh.uid, ready=False, report=strange)
    decision = decide(seen)
    assert (decision.rule, decision.situation.reason) == ("extend", "NoStagedEngine")
    assert "1.21" in decision.situation.message
    waited = 0.0
    while decision.memory.candidate is not None:
        assert decision.requeue is not None
        assert waited < 1000
        seen = later(obey(seen, decision, seconds=0), decision.requeue)
        seen, waited = with_worker(seen, fresh.uid, ready=False, report=strange), waited + decision.requeue
        decision = decide(seen)
    assert decision.rule == "deadline_passed"
    assert "NoEngineForLoadKey" in decision.situation.message


def test_an_engine_that_stable_got_since_the_trial_began_fails_it_too() -> None:
    seen = on_trial(changed())
    assert seen.memory.candidate is not None
    seen = replace(seen, memory=replace(seen.memory, candidate=replace(seen.memory.candidate, artifacts=())))
    (fresh,) = new_ones(seen)
    told = decide(with_engine(seen, fresh.uid, A, state=EngineState.FAILED, message="no memory"))
    assert (told.rule, told.situation.reason) == ("cannot_be_held", "EngineFailed")


@pytest.mark.parametrize("trouble", ["CrashLoopBackOff", "InvalidImageName", "RunContainerError"])
def test_a_container_that_will_never_start_takes_it_back_at_once(trouble: str) -> None:
    seen = obey(changed(), decide(changed()))
    (worker,) = new_ones(seen)
    seen = with_worker(seen, worker.uid, ready=False, report=None, trouble=trouble, message="exit code 1")
    decision = decide(seen)
    assert (decision.rule, decision.situation.reason) == ("cannot_be_held", trouble)
    assert "exit code 1" in decision.memory.history[0].message


def test_an_image_that_cannot_be_pulled_is_waited_for_until_the_deadline_and_told_as_the_reason() -> None:
    seen = obey(changed(), decide(changed()))
    (worker,) = new_ones(seen)
    seen = with_worker(seen, worker.uid, ready=False, report=None, trouble="ImagePullBackOff", message="not found")
    decision = decide(seen)
    assert decision.memory.candidate is not None
    assert "not found" in decision.situation.message
    late = replace(seen, memory=replace(decision.memory, waited=1e6))
    assert decide(late).situation.reason == "ImagePullBackOff"


def test_a_revision_that_is_asked_for_in_the_middle_goes_first() -> None:
    seen = asks_for(on_trial(changed()), B)
    decision = decide(seen)
    assert decision.rule == "platform_superseded"
    assert decision.memory.history[0].outcome == "Superseded"
    assert B in decision.situation.message
    after = decide(obey(seen, decision))
    assert after.rule == "gate"


def test_a_spec_that_asks_for_the_old_workers_again_takes_the_new_ones_back() -> None:
    seen = edited(on_trial(changed()), serving__pod={})
    decision = decide(seen)
    assert decision.rule == "platform_superseded"
    seen, _ = to_the_end(seen)
    assert list(replicas(seen).values()) == [4]
    assert not seen.memory.rejected


@pytest.mark.parametrize("revision", ["", "its hash", A])
def test_a_person_may_try_it_again(revision: str) -> None:
    seen = on_trial(changed())
    seen, _ = to_the_end(replace(seen, command=Command("abort", "", "abort#1")))
    name = hash_of(seen) if revision == "its hash" else revision
    decision = decide(replace(seen, command=Command("retry", name, "retry#2")))
    assert decision.memory.rejected == ()


@pytest.mark.parametrize("named", ["its hash", A])
@pytest.mark.parametrize("when", ["pending", "on trial"])
def test_the_revision_that_serves_means_its_workers_while_others_are_pending_or_tried(when: str, named: str) -> None:
    seen = changed() if when == "pending" else on_trial(changed())
    name = hash_of(seen) if named == "its hash" else named
    aborted = decide(replace(seen, command=Command("abort", name, f"abort@{name}#1"))).memory
    assert (aborted.candidate, [r.revision for r in aborted.rejected]) == (None, [hash_of(seen)])
    paused = decide(replace(seen, command=Command("pause", name, f"pause@{name}#1"))).memory
    assert paused.paused == f"pause@{name}#1"
    resume = Command("resume", name, f"resume@{name}#2")
    assert decide(replace(seen, memory=paused, command=resume)).memory.paused == ""


@pytest.mark.parametrize("verb", ["pause", "resume", "abort"])
def test_at_rest_a_command_that_names_the_revision_that_serves_comes_too_late(verb: str) -> None:
    decision = decide(replace(serving(A), command=Command(verb, A, f"{verb}@{A}#1")))
    assert [n.reason for n in decision.notices] == ["CommandIgnored"]
    assert decision.memory.paused == ""


# ---------------------------------------------------------------------------------------------------------------
# what is told
# ---------------------------------------------------------------------------------------------------------------


def test_status_tells_the_platform_as_the_candidate_and_how_many_are_new() -> None:
    seen = on_trial(changed())
    decision = decide(seen)
    told = status(seen, decision, {})
    assert str(told["summary"]).startswith("step 1/2 1 of 4 workers are new")
    workers = told["targets"][0]["workers"]  # type: ignore[index]
    assert (workers["onCandidate"], workers["onStable"]) == (1, len(seen.workers) - 1)
    assert told["phase"] == "Canary"


def test_every_worker_of_either_platform_is_told_to_serve_stable() -> None:
    seen = on_trial(changed())
    for worker in seen.workers:
        fence = replace(worker.report.fence, sequence=1)  # type: ignore[union-attr]
        seen = with_worker(seen, worker.uid, report=replace(worker.report, fence=fence))  # type: ignore[type-var]
    signals = of(decide(seen), Signal)
    assert {s.uid for s in signals} == {w.uid for w in seen.workers}
    assert {(s.stable, s.candidate) for s in signals} == {(digest(A), "")}


def test_a_lost_status_takes_those_that_most_workers_are_of_and_tries_the_others_anew() -> None:
    seen = on_trial(changed())
    decision = decide(replace(seen, memory=Memory()))
    assert decision.rule == "adopt_what_runs"
    assert decision.memory.platform == seen.memory.platform
    after = decide(replace(seen, memory=decision.memory))
    assert not of(after, DeleteWorkload)
