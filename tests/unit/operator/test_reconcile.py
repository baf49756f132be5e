from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from trtmodel_contract.codec import encode
from trtmodel_contract.control import DesiredRequest, Report, Role
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.jobs import DataSet, ResolveTask
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.model import (
    Action,
    Answer,
    ApplyPointer,
    ApplyService,
    ApplyWorkload,
    Artifact,
    CreateJob,
    Decision,
    DeleteJob,
    Deployed,
    Guard,
    HistoryEntry,
    JobKind,
    Lookup,
    Memory,
    Notice,
    Observed,
    PlannedEngine,
    Platform,
    Query,
    Signal,
    Situation,
    Stage,
    WebhookSpec,
)
from trtmodel_operator.ports import ClusterError, Conflict, Json, Key, WorkerError
from trtmodel_operator.reconcile import UNANSWERED, Reconciler
from trtmodel_operator.spec import parse

KEY: Key = ("ml", "magika")
MODEL = ModelRef("ml", "magika", "uid-1")
SPEC = {
    "source": {"uri": "s3://models/model.onnx"},
    "storage": {"bucket": "engines"},
    "engine": {"runtime": "ONNXRuntime"},
    "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz", "samples": 1000}},
    "serving": {"replicas": 1},
}
TARGET = parse(SPEC).targets[0]
STABLE = Deployed("r1", (Artifact(TARGET.name, "key", "a" * 64),))
MEMORY = Memory(sequence=4, stable=STABLE)


class World:
    """Cluster, workers, metrics and clock in one; `log` is what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.version = 1
        self.model: Json | None = {
            "metadata": {"namespace": "ml", "name": "magika", "uid": "uid-1", "generation": 1, "resourceVersion": "1"},
            "spec": SPEC,
        }
        self.events: list[tuple[str, str, bool]] = []
        self.applied: list[Json] = []
        self.sent: list[tuple[str, DesiredRequest]] = []
        self.followed: Mapping[str, tuple[str, int]] | None = None
        self.pods: list[Json] = []
        self.fails: dict[str, Exception] = {}
        self.silent: set[str] = set()
        self.persisted_calls = 0
        self.forgotten = False
        self.before_write: Callable[[], None] = lambda: None

    @property
    def status(self) -> Json:
        assert self.model is not None
        return dict(self.model.get("status") or {})

    async def get_model(self, key: Key) -> Json | None:
        return copy.deepcopy(self.model)

    async def list_models(self) -> Mapping[Key, str]:
        return {KEY: str(self.version)}

    async def children(self, key: Key) -> Mapping[str, Sequence[Json]]:
        return {"Pod": self.pods}

    async def write_memory(self, key: Key, resource_version: str, rollout: Json) -> str:
        self.before_write()
        assert self.model is not None
        if resource_version != self.model["metadata"]["resourceVersion"]:
            self.log.append("conflict")
            raise Conflict("modified")
        self._did("memory")
        self._set_status({**self.status, "rollout": rollout})
        return str(self.version)

    async def write_status(self, key: Key, status: Json) -> None:
        self._did("status")
        self._set_status({**status, **({"rollout": self.status["rollout"]} if "rollout" in self.status else {})})

    async def apply(self, manifest: Json) -> None:
        self._did(f"apply {manifest['kind']} {manifest['metadata']['name']}")
        self.applied.append(manifest)

    async def create_job(self, manifest: Json) -> None:
        self._did(f"job {manifest['metadata']['name']}")

    async def guard(self, key: Key, uid: str, *, on: bool) -> None:
        self._did(f"guard {uid} {on}")

    async def delete_job(self, key: Key, name: str) -> None:
        self._did(f"delete {name}")

    async def scale_workload(self, key: Key, name: str, replicas: int) -> None:
        self._did(f"scale {name} {replicas}")

    async def delete_workload(self, key: Key, name: str) -> None:
        self._did(f"delete workload {name}")

    async def post_event(self, regarding: Json, reason: str, message: str, *, warning: bool) -> None:
        self.log.append("event")
        self.events.append((reason, message, warning))

    async def report(self, ip: str, uid: str) -> Report:
        raise WorkerError("not in this scene")

    async def send(self, ip: str, uid: str, request: DesiredRequest) -> None:
        await asyncio.sleep(0)
        if uid in self.silent:
            raise WorkerError("no answer")
        self._did(f"signal {uid}")
        self.sent.append((uid, request))

    def follow(self, key: Key, workers: Mapping[str, tuple[str, int]], *, closely: bool = True) -> None:
        self.followed = workers

    def persisted(self, key: Key, seen: Observed, decision: Decision, status: Mapping[str, object]) -> None:
        self.log.append("metrics")
        self.persisted_calls += 1

    def forget(self, key: Key) -> None:
        self.forgotten = True

    def now(self) -> float:
        return 1000.0

    def edited(self) -> None:
        """As if a user had written the object."""
        assert self.model is not None
        self.version += 1
        self.model["metadata"]["resourceVersion"] = str(self.version)

    def _set_status(self, status: Json) -> None:
        assert self.model is not None
        self.model["status"] = status
        self.edited()

    def _did(self, what: str) -> None:
        for start, error in self.fails.items():
            if what.startswith(start):
                self.log.append(f"failed {what}")
                raise error
        self.log.append(what)


def decision(*actions: Action, memory: Memory = MEMORY, requeue: float | None = None, **situation: Any) -> Decision:
    values: dict[str, Any] = {
        "stage": Stage.PROMOTING,
        "reason": "Promoting",
        "message": "Workers are told.",
    } | situation
    return Decision("scripted", memory, actions, Situation(**values), requeue)


def passes(world: World, *decisions: Decision | Callable[[Observed], Decision]) -> float | None:
    """One pass for each decision; what the last one wanted."""
    wanted = None
    for each in decisions:
        decide = each if callable(each) else (lambda _, each=each: each)
        signer = Ed25519Signer(Keys.made())
        reconciler = Reconciler(world, world, signer, world, world, "worker:1", decide=decide)
        wanted = asyncio.run(reconciler.reconcile(KEY))
    return wanted


def signal(uid: str) -> Signal:
    return Signal(f"pod-{uid}", uid, "10.0.0.1", (PlannedEngine(Role.STABLE, "r1", "a" * 64),), "a" * 64, "", 0, "w")


POINTER = ApplyPointer("magika-default-p1", TARGET.name, 4, STABLE, None, parse(SPEC).storage)
WORKLOAD = ApplyWorkload("magika-default-p1", TARGET, Platform("worker:1", "p1"), 1)
TASK = ResolveTask(
    MODEL,
    "s3://models/model.onnx",
    "",
    parse(SPEC).storage,
    parse(SPEC).engine,
    None,
    DataSet("s3://d", 9),
    parse(SPEC).verify.task,
)
JOB = CreateJob("magika-resolve-1", JobKind.RESOLVE, TARGET, TASK, "worker:1")


def test_the_memory_is_written_before_any_effect_and_the_effects_come_in_order() -> None:
    world = World()
    passes(world, decision(POINTER, ApplyService(), WORKLOAD, signal("a"), DeleteJob("old"), JOB))
    assert world.log[:8] == [
        "memory",
        "apply ConfigMap magika-keys",
        "apply ConfigMap magika-default-p1",
        "apply Service magika",
        "apply Deployment magika-default-p1",
        "signal a",
        "delete old",
        "job magika-resolve-1",
    ]
    assert world.log[8] == "status"
    assert world.log[-1] == "metrics"
    assert world.status["rollout"] == encode(MEMORY)


def test_where_only_the_replicas_differ_nothing_else_of_the_deployment_is_written() -> None:
    world = World()
    assert world.model is not None
    world.model["spec"] = SPEC | {"serving": {"replicas": 3}}
    passes(world, decision(dataclasses.replace(WORKLOAD, replicas=3, only_replicas=True)))
    done = [entry for entry in world.log if entry.startswith(("apply", "scale"))]
    assert done == ["apply PodDisruptionBudget magika", "scale magika-default-p1 3"]


def test_a_memory_that_did_not_change_is_not_written() -> None:
    world = World()
    passes(world, decision(), decision())
    assert world.log.count("memory") == 1


def test_a_status_that_did_not_change_is_neither_written_nor_told() -> None:
    world = World()
    passes(world, decision())
    told = len(world.events)
    passes(world, decision(), decision())
    assert world.log.count("status") == 1
    assert len(world.events) == told > 0


def test_somebody_elses_write_leads_to_a_new_look_before_anything_is_done() -> None:
    world = World()
    edits = iter([world.edited])
    world.before_write = lambda: next(edits, lambda: None)()
    looks: list[Observed] = []

    def decide(seen: Observed) -> Decision:
        looks.append(seen)
        return decision(JOB)

    passes(world, decide)
    assert world.log[:3] == ["conflict", "memory", "job magika-resolve-1"]
    assert len(looks) == 2


def test_a_model_that_is_written_all_the_time_is_left_for_later_without_any_effect() -> None:
    world = World()
    world.before_write = world.edited
    with pytest.raises(Conflict):
        passes(world, decision(JOB))
    assert set(world.log) == {"conflict"}


def test_a_process_that_dies_after_the_memory_was_written_performs_the_effect_in_its_next_life() -> None:
    world = World()
    world.fails = {"job": RuntimeError("killed")}
    with pytest.raises(RuntimeError):
        passes(world, decision(JOB))
    assert world.status["rollout"] == encode(MEMORY)
    world.fails = {}

    def decide(seen: Observed) -> Decision:
        assert seen.memory == MEMORY
        return decision(JOB)

    passes(world, decide)
    assert "job magika-resolve-1" in world.log


def test_an_effect_that_failed_stops_those_after_it() -> None:
    world = World()
    world.fails = {"apply ConfigMap magika-default": ClusterError("PATCH", "configmap", "no answer in time")}
    with pytest.raises(ClusterError):
        passes(world, decision(POINTER, signal("a")))
    assert world.sent == []
    assert "status" not in world.log  # the API server is away: there is nobody to tell


def test_an_effect_that_the_api_server_refuses_becomes_a_condition_with_its_words() -> None:
    world = World()
    world.fails = {"apply Deployment": ClusterError("PATCH", "deployment", "Invalid value: 'cpu: x'", 422)}
    with pytest.raises(ClusterError):
        passes(world, decision(WORKLOAD))
    assert any("Invalid value: 'cpu: x'" in c["message"] for c in world.status["conditions"])
    assert any("Invalid value" in message for _, message, _ in world.events)


def test_a_model_is_let_go_last_since_there_may_be_nothing_to_report_on_afterwards() -> None:
    world = World()
    notice = Notice("ArtifactsRemoved", "5 objects")
    passes(world, dataclasses.replace(decision(Guard(on=False)), notices=(notice,)))
    assert world.log[-1] == "guard uid-1 False"
    assert ("ArtifactsRemoved", "5 objects", False) in world.events
    assert world.log.count("guard uid-1 False") == 1


def test_a_model_is_held_before_anything_is_made_for_it() -> None:
    world = World()
    passes(world, decision(Guard(on=True), JOB))
    assert world.log[:3] == ["memory", "guard uid-1 True", "job magika-resolve-1"]


def test_a_namespace_that_goes_is_not_held_up_by_a_model_whose_artifacts_should_have_gone() -> None:
    world = World()
    assert world.model is not None
    world.model["metadata"] |= {"finalizers": ["trtmodel.io/artifacts"], "deletionTimestamp": "2026-11-30T00:00:00Z"}
    refused = "unable to create new content in namespace ml because it is being terminated"
    world.fails = {"job": ClusterError("POST", "jobs", f'jobs.batch "x" is forbidden: {refused}', 403)}
    assert passes(world, decision(JOB)) is None
    assert world.log[-1] == "guard uid-1 False"


def test_a_quota_lets_no_model_go() -> None:
    world = World()
    assert world.model is not None
    world.model["metadata"] |= {"finalizers": ["trtmodel.io/artifacts"], "deletionTimestamp": "2026-11-30T00:00:00Z"}
    world.fails = {"job": ClusterError("POST", "jobs", "exceeded quota", 403)}
    with pytest.raises(ClusterError):
        passes(world, decision(JOB))
    assert not [line for line in world.log if line.startswith("guard")]


def test_signals_carry_the_fence_of_the_memory_that_was_written() -> None:
    world = World()
    passes(world, decision(signal("a"), signal("b"), memory=dataclasses.replace(MEMORY, sequence=9)))
    assert {uid for uid, _ in world.sent} == {"a", "b"}
    assert {(r.desired.fence.uid, r.desired.fence.sequence) for _, r in world.sent} == {("uid-1", 9)}


def test_a_worker_that_cannot_be_told_stops_no_other_and_is_told_again_soon() -> None:
    world = World()
    passes(world, decision())
    world.silent = {"a"}
    assert passes(world, decision(signal("a"), signal("b"), JOB, requeue=60)) == UNANSWERED
    assert [uid for uid, _ in world.sent] == ["b"]
    assert "job magika-resolve-1" in world.log
    assert passes(world, decision(signal("b"), requeue=60)) == 60
    assert passes(world, decision(signal("a"), requeue=1)) == 1
    assert passes(world, decision(signal("a"))) == UNANSWERED


def test_a_change_of_the_memory_is_followed_by_a_pass_at_once() -> None:
    world = World()
    assert passes(world, decision(requeue=60)) == 0.0
    assert passes(world, decision(requeue=60)) == 60


def test_a_model_that_is_gone_is_forgotten() -> None:
    world = World()
    world.model = None
    assert passes(world, decision(JOB)) is None
    assert world.forgotten
    assert world.followed == {}
    assert world.log == []


def test_workers_with_an_address_are_followed_until_they_are_deleted() -> None:
    world = World()

    def pod(name: str, **metadata: Any) -> Json:
        env = [{"name": "TRTMODEL_MODEL_UID", "value": "uid-1"}]
        return {
            "metadata": {
                "name": name,
                "uid": f"uid-of-{name}",
                "labels": {"trtmodel.io/role": "worker"},
                "creationTimestamp": "2026-01-01T00:00:00Z",
                **metadata,
            },
            "spec": {"containers": [{"env": env}]},
            "status": {"podIP": "10.0.0.7", "containerStatuses": [{"state": {"running": {}}}]},
        }

    world.pods = [pod("a"), pod("b", deletionTimestamp="2026-01-01T00:00:00Z")]
    passes(world, decision())
    assert world.followed == {"uid-of-a": ("10.0.0.7", 0)}


def test_notices_become_events_once() -> None:
    world = World()
    notice = Notice("CommandTaken", "abort was taken", warning=False)
    passes(world, dataclasses.replace(decision(), notices=(notice,)))
    assert world.events.count(("CommandTaken", "abort was taken", False)) == 1


def test_metrics_are_counted_after_the_end_of_a_rollout_was_persisted() -> None:
    world = World()
    entry = HistoryEntry("r1", "Promoted", "Promoted", "2026-01-01T00:00:00Z")
    world.fails = {"memory": ClusterError("PATCH", "status", "no answer in time")}
    with pytest.raises(ClusterError):
        passes(world, decision(memory=dataclasses.replace(MEMORY, history=(entry,))))
    assert world.persisted_calls == 0


def test_every_pass_reads_the_world_anew() -> None:
    world = World()
    generations: list[int] = []

    def decide(seen: Observed) -> Decision:
        generations.append(seen.generation)
        return decision()

    for generation in itertools.islice(itertools.count(1), 3):
        assert world.model is not None
        world.model["metadata"]["generation"] = generation
        passes(world, decide)
    assert generations == [1, 2, 3]


# ---------------------------------------------------------------------------------------------------------------
# what is looked up outside
# ---------------------------------------------------------------------------------------------------------------

CHAT = {"name": "chat", "stage": "Event", "url": "https://chat.example.com/"}
HOOK = {"name": "ok", "stage": "ConfirmRollout", "url": "https://hooks.example.com/"}
ASKED = Query("w1/quality/1", "", "avg(quality)", 10.0)


class Asking:
    """The port Inquiries."""

    def __init__(self, *answers: Answer) -> None:
        self.found = answers
        self.followed: list[Sequence[Lookup]] = []
        self.told: list[tuple[str, str]] = []

    def answers(self, key: Key) -> tuple[Answer, ...]:
        return self.found

    def follow(self, key: Key, lookups: Sequence[Lookup]) -> None:
        self.followed.append(lookups)

    def tell(self, hook: WebhookSpec, key: str, body: str) -> None:
        self.told.append((hook.name, json.loads(body)["event"]["reason"]))


def asks(world: World, asking: Asking, decide: Callable[[Observed], Decision]) -> None:
    signer = Ed25519Signer(Keys.made())
    reconciler = Reconciler(world, world, signer, world, world, "worker:1", decide=decide, inquiries=asking)
    asyncio.run(reconciler.reconcile(KEY))


def test_answers_are_facts_and_what_a_decision_asks_for_is_followed_after_its_memory_was_written() -> None:
    world, asking = World(), Asking(Answer(ASKED.key, 1.0, value=0.5))
    seen: list[Observed] = []

    def decide(observed: Observed) -> Decision:
        seen.append(observed)
        return dataclasses.replace(decision(), lookups=(ASKED,))

    asks(world, asking, decide)
    assert seen[0].answers == asking.found
    assert asking.followed == [(ASKED,)]
    world.fails = {"memory": Conflict("modified")}
    with pytest.raises(Conflict):
        asks(world, asking, lambda _: dataclasses.replace(decision(memory=Memory(sequence=9)), lookups=()))
    assert asking.followed == [(ASKED,)]


def test_nothing_is_followed_for_a_model_that_is_gone() -> None:
    world, asking = World(), Asking()
    world.model = None
    asks(world, asking, lambda _: decision())
    assert asking.followed == [()]


def test_every_event_is_told_to_the_webhooks_that_are_for_events_and_to_no_others() -> None:
    world, asking = World(), Asking()
    assert world.model is not None
    world.model["spec"] = {**SPEC, "rollout": {"analysis": {"webhooks": [CHAT, HOOK]}}}
    notice = Notice("CommandTaken", "it was taken")
    asks(world, asking, lambda _: dataclasses.replace(decision(), notices=(notice,)))
    assert asking.told
    assert asking.told == [("chat", reason) for reason, _, _ in world.events]
    assert ("chat", "CommandTaken") in asking.told
