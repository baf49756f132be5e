"""Workers that there is no engine of stable for: of a target that was added, or on another device. They answer nobody,
so they take no part in a trial and hold up none; and a target whose workers are gone is no such one.
"""

from __future__ import annotations

from dataclasses import replace

from decide_scene import (
    LOAD_KEY,
    A,
    B,
    Scene,
    asks_for,
    booted,
    busy,
    canary,
    decide,
    deployed,
    digest,
    edited,
    has_built,
    later,
    members,
    obey,
    of,
    run,
    serving,
    with_worker,
    without,
)
from trtmodel_operator.model import ObservedPointer, Signal, Stage

STRANGE = replace(LOAD_KEY, device="another")
TWO = [{"name": "default"}, {"name": "added"}]


def on_another_device(seen: Scene, uid: str) -> Scene:
    """This worker answers nobody: it has loaded nothing, and is not ready."""
    worker = next(w for w in seen.workers if w.uid == uid)
    assert worker.report is not None
    report = replace(worker.report, load_key=STRANGE, models={})
    return with_worker(seen, uid, report=report, ready=False)


def idle(uid: str, target: str) -> ObservedPointer:
    return ObservedPointer(f"p-{uid}-{target}", 1, "", deployed(A, target))


def to_the_end(seen: Scene, strange: str) -> Scene:
    """The rollout with one worker that stays on another device until something can be loaded there."""
    for _ in range(60):
        decision = decide(seen)
        if decision.rule == "promote":
            return obey(seen, decision, seconds=0)
        assert decision.memory.candidate is not None, decision.situation
        told = {s.uid for s in of(decision, Signal)}
        assert strange not in told
        seen = on_another_device(later(busy(obey(seen, decision, seconds=0)), 5), strange)
    raise AssertionError(decision.situation)


def test_a_worker_on_another_device_that_joins_in_mid_canary_holds_up_no_promotion() -> None:
    seen = canary(serving(A))
    strange = next(w.uid for w in seen.workers if w.uid not in members(seen))
    seen = to_the_end(on_another_device(seen, strange), strange)
    assert seen.memory.stable is not None
    assert seen.memory.stable.revision == B


def test_it_is_no_member_of_a_step_either() -> None:
    seen = asks_for(serving(A), B)
    first = next(s.uid for s in of(decide(seen), Signal) if any(e.revision == B for e in s.engines))
    seen = on_another_device(seen, first)
    chosen = {s.uid for s in of(decide(seen), Signal) if any(e.revision == B for e in s.engines)}
    assert len(chosen) == 1
    assert first not in chosen


def test_a_worker_that_says_nothing_is_held_for_and_no_outsider() -> None:
    seen = canary(serving(A), index=1)
    silent = next(w.uid for w in seen.workers if w.uid not in members(seen))
    seen = with_worker(seen, silent, report=None, silence="connection refused")
    for _ in range(12):
        decision = decide(seen)
        assert decision.rule != "promote"
        seen = with_worker(later(busy(obey(seen, decision, seconds=0)), 5), silent, report=None)
    assert decision.situation.stage is Stage.PREPARING
    assert "is unknown" in decision.situation.message


def test_the_workers_of_a_target_that_was_added_wait_for_the_promotion_and_get_it_then() -> None:
    seen = canary(has_built(edited(serving(A, replicas=2), targets=TWO), A))
    fresh = [booted(f"n{i}", idle(f"n{i}", "added"), "added") for i in range(2)]
    others = [replace(w, ready=False, report=replace(w.report, models={}) if w.report else None) for w in fresh]
    seen = replace(seen, workers=(*(w for w in seen.workers if w.target == "default"), *others))
    for _ in range(40):
        decision = decide(seen)
        if decision.rule == "promote":
            break
        assert all(not s.candidate for s in of(decision, Signal) if s.uid.startswith("n"))
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    assert decision.rule == "promote", decision.situation
    told = {s.uid: s.stable for s in of(decision, Signal)}
    assert told["n0"] == told["n1"] == digest(B, "added")


def test_a_target_whose_workers_are_all_gone_still_holds_the_trial() -> None:
    seen = canary(serving(A))
    for worker in seen.workers:
        seen = without(seen, worker.uid)
    decision = decide(later(seen, 5))
    assert decision.situation.stage is Stage.PREPARING
    assert "workers of target default are missing" in decision.situation.message


def test_where_no_worker_can_answer_with_stable_nothing_is_tried_and_the_way_out_is_told() -> None:
    seen = asks_for(edited(serving(A), targets=[{"name": "other"}]), B)
    seen, decision = run(seen, lambda _, d: d.rule == "prepare")
    assert (decision.situation.stage, decision.situation.reason) == (Stage.STALLED, "NoEngineForLoadKey")
    assert "Set the model back" in decision.situation.message
    assert not [s for s in of(decision, Signal) if s.candidate]
    late = decide(later(seen, 3600))
    assert late.memory.candidate is not None  # nothing was found out about it, so it is not taken back
    assert late.memory.stable is not None
    assert late.memory.stable.revision == A
