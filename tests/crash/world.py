"""A small cluster in one process, for the real reconciler: objects, Jobs, pods and workers on a clock of ours.

Models: resourceVersion preconditions, a Deployment controller, garbage collection by owner, Jobs that take time and end
as the source that they read wants it, a bucket that may be away, images that may be missing, and the workers of
`machines`. Does not model: Services, probes, signatures' validity, the kubelet's delays.

Objects that lie in it are replaced and never changed, so `fork` is cheap: the state before each I/O of a run is kept,
and a crash there is a copy of that state with a new operator. What must hold at every moment is asserted where it would
break: see `_check_promotion` and `_check_dose`.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from machines import GRACE_SECONDS, IMAGES, KEY, UID, UNSCHEDULABLE, Source, Worker, load_key, read_pointer, text_of
from trtmodel_contract.codec import dumps, encode, loads, sha256_hex
from trtmodel_contract.control import POINTER_FILE, DesiredRequest, EngineState, Report
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.gate import GateFigures, OutputFigures, Top1Figures, judge
from trtmodel_contract.gate import Verdict as GateVerdict
from trtmodel_contract.identity import Calibration, LoadKey, Recipe, revision
from trtmodel_contract.jobs import (
    TASK_ENV,
    BuildResult,
    BuildTask,
    FoundArtifact,
    JobResult,
    Reason,
    ResolveResult,
    ResolveTask,
)
from trtmodel_contract.signing import Signature
from trtmodel_operator.manifests import LABEL_PLATFORM, LABEL_TARGET
from trtmodel_operator.model import Answer, Decision, Lookup, Memory, Observed, Query, WebhookSpec
from trtmodel_operator.ports import ClusterError, Conflict, Json, Key, WorkerError

T = TypeVar("T")

JOB_SECONDS, JOB_TRIES = 6.0, 3
TRAFFIC = 20
START = 1_760_000_000.0
RETRIED = (Reason.STORAGE_UNAVAILABLE, Reason.INTERNAL)
EXITS = {Reason.DONE: 0, Reason.SOURCE_CHANGED: 43, Reason.GATE_INCONCLUSIVE: 44} | dict.fromkeys(RETRIED, 1)
NO_MEMORY: Json = encode(Memory())
PAST_KEPT = 6  # states of the API server that a stale read may show


class World:
    """What lies in the cluster and in the workers. Every change is one call of a method without `await`."""

    def __init__(self, spec: Json, sources: Mapping[str, Source]) -> None:
        self.time = START
        self.sources = dict(sources)
        self.model: Json | None = {
            "metadata": {"namespace": "ml", "name": "magika", "uid": UID, "generation": 1, "resourceVersion": "1"},
            "spec": copy.deepcopy(spec),
        }
        self.objects: dict[tuple[str, str], Json] = {}
        self.workers: dict[str, Worker] = {}
        self.due: dict[str, tuple[float, int]] = {}  # of running Jobs: when, and which try
        self.bucket: dict[str, tuple[FoundArtifact, ...]] = {}  # by revision
        self.by_digest: dict[str, Source] = {}
        self.storage_down = False
        self.image_missing = False
        self.no_node = False  # that a Job's pod fits on
        self.out_of_memory = False  # Jobs are killed for it
        self.traffic = TRAFFIC
        self.node = ""  # where new pods of workers go
        self.room: int | None = None  # for how many workers; None: for all
        self.default_image = "worker:1"  # of the operator
        self.promised = 0  # as many workers at least serve at each moment from now on
        self.narrow = False  # the memory of a worker holds one engine
        self.confirms: bool | None = True  # what webhooks answer, to those questions that were asked; None: nothing
        self.gives: float | None = 1.0  # what Prometheus answers; None: it is down
        self.asked: tuple[tuple[str, bool], ...] = ()  # keys, and whether Prometheus is asked
        self.jobs_created: tuple[str, ...] = ()
        self.jobs_deleted: tuple[str, ...] = ()
        self.caps: dict[tuple[str, str], int] = {}  # target, revision on trial -> workers that may answer with it
        self.weights: dict[tuple[str, str], int] = {}  # and with which share of their requests at most
        self.events: tuple[str, ...] = ()
        self.past: tuple[tuple[Json | None, dict[tuple[str, str], Json], list[Json]], ...] = ()
        self.changes = 0
        self.conflicts = 0
        self.alone = True  # one operator: what it observed in a pass is still so when it writes
        self.misled = False  # some operator acted on what was not so any more
        self.keeps_past = False
        self._pods_made = 0
        self._marks: dict[tuple[str, str], int] = {}
        self._memory_mark = 0

    def fork(self) -> World:
        """A copy that lives on by itself."""
        other = object.__new__(World)
        other.__dict__.update(self.__dict__)
        for name in ("sources", "objects", "due", "bucket", "by_digest", "caps", "weights", "_marks"):
            setattr(other, name, dict(getattr(self, name)))
        other.workers = {uid: copy.copy(worker) for uid, worker in self.workers.items()}
        return other

    def state(self) -> tuple[object, ...]:
        """All that the future depends on, with times as ages (-1 and -2 have one hash): worlds of one state have one
        future."""
        now, rollout, meta = self.time, self.rollout, (self.model or {}).get("metadata", {})
        step = rollout["step"] or {"beganAt": 0, "seenAt": 0, "baseline": ""}
        windows = {rollout["window"], step["baseline"]}
        times = (step["beganAt"], step["seenAt"], rollout["waitedAt"])
        return (
            self._memory_mark,
            tuple(at and now - at for at in times),
            (meta.get("generation"), "deletionTimestamp" in meta, str(meta.get("annotations"))),
            frozenset(self._marks.items()),
            tuple((name, max(0.0, at - now), tries) for name, (at, tries) in self.due.items()),
            tuple(worker.state(now, windows) for worker in self.workers.values()),
            frozenset(self.bucket),
            tuple(self.sources.values()),
            (self.storage_down, self.image_missing, self.no_node, self.out_of_memory, self.traffic, self.node),
            (self.confirms, self.gives, self.asked, self.room, self.default_image, self.promised, self.narrow),
            self._pods_made,
            frozenset(self.jobs_created),
            frozenset(self.jobs_deleted),
        )

    # ------------------------------------------------------------------------------------------------------------
    # What the operator reads
    # ------------------------------------------------------------------------------------------------------------

    @property
    def rollout(self) -> Json:
        return self._held_rollout() or NO_MEMORY

    def _held_rollout(self) -> Json | None:
        return (self.model or {}).get("status", {}).get("rollout")

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason; '' before the first visit."""
        conditions = (self.model or {}).get("status", {}).get("conditions", [])
        return next(((c["status"], c["reason"]) for c in conditions if c["type"] == kind), ("", ""))

    def children(self) -> dict[str, list[Json]]:
        return _by_kind(self.objects, [w.pod(self) for w in self.workers.values()])

    def earlier(self, back: int) -> tuple[Json | None, dict[str, list[Json]]]:
        """The TRTModel and its children as they were that many writes ago."""
        if not self.past:
            return self.model, self.children()
        model, objects, pods = self.past[max(0, len(self.past) - back)]
        return model, _by_kind(objects, pods)

    def report(self, uid: str) -> Report:
        return self._reach(uid).report(self)

    def _reach(self, uid: str) -> Worker:
        worker = self.workers.get(uid)
        if worker is None or not worker.reachable or not worker.started(self.time):
            raise WorkerError("connection refused")
        return worker

    # ------------------------------------------------------------------------------------------------------------
    # What the operator writes
    # ------------------------------------------------------------------------------------------------------------

    def write_memory(self, resource_version: str, rollout: Json) -> str:
        model = self._there()
        if resource_version != model["metadata"]["resourceVersion"]:
            self.conflicts += 1
            raise Conflict("modified")
        self._check_promotion(rollout)
        self._write_model({**model, "status": {**model.get("status", {}), "rollout": json.loads(json.dumps(rollout))}})
        self._check_dose()
        return str(self._there()["metadata"]["resourceVersion"])

    def write_status(self, status: Json) -> None:
        model = self._there()
        kept = model.get("status", {}).get("rollout")
        self._write_model({**model, "status": {**status, **({"rollout": kept} if kept is not None else {})}})

    def apply(self, manifest: Json) -> None:
        self._check_wanted()
        self._put(manifest["kind"], manifest["metadata"]["name"], manifest)

    def create_job(self, manifest: Json) -> None:
        self._check_wanted()
        name = manifest["metadata"]["name"]
        if ("Job", name) not in self.objects:
            self.jobs_created = (*self.jobs_created, name)
            meta = {**manifest["metadata"], "uid": f"job-{name}"}
            self._put("Job", name, {**manifest, "metadata": meta, "status": {"startTime": text_of(self.time)}}, name)
            self.due[name] = (self.time + JOB_SECONDS, 1)

    def delete_job(self, name: str) -> None:
        if self.objects.pop(("Job", name), None) is not None:
            self._touched()
            del self._marks["Job", name]
            self.jobs_deleted = (*self.jobs_deleted, name)
            self.due.pop(name, None)
            for key in [k for k in self.objects if k[0] == "Pod" and k[1].startswith(name)]:
                del self.objects[key], self._marks[key]

    def scale_workload(self, name: str, replicas: int) -> None:
        if (held := self.objects.get(("Deployment", name))) is None:
            raise Conflict("it is gone")
        self.apply({**held, "spec": {**held["spec"], "replicas": replicas}})

    def delete_workload(self, name: str) -> None:
        for key in (("Deployment", name), ("ConfigMap", name)):
            if self.objects.pop(key, None) is not None:
                self._touched()
                del self._marks[key]
        for worker in self.workers.values():
            if worker.name.startswith(f"{name}-") and worker.leaves_at is None:
                worker.leaves_at = self.time + GRACE_SECONDS

    def send(self, uid: str, request: DesiredRequest) -> None:
        worker = self._reach(uid)
        self._touched()
        worker.told(self, request)
        self._check_dose()

    def _there(self) -> Json:
        if self.model is None:
            raise ClusterError("PATCH", "trtmodels/magika", "not found", 404)
        return self.model

    def _put(self, kind: str, name: str, value: Json, mark: str = "") -> None:
        self._touched()
        self.objects[kind, name] = value
        self._marks[kind, name] = hash(mark or json.dumps(value, sort_keys=True))

    def _write_model(self, model: Json) -> None:
        self._touched()
        meta, rollout = model["metadata"], model.get("status", {}).get("rollout")
        if rollout is not self._held_rollout():
            self._memory_mark = _mark(rollout)
        self.model = {**model, "metadata": {**meta, "resourceVersion": str(int(meta["resourceVersion"]) + 1)}}

    def _touched(self) -> None:
        self.changes += 1
        if self.keeps_past:
            seen = (self.model, dict(self.objects), [w.pod(self) for w in self.workers.values()])
            self.past = (*self.past, seen)[-PAST_KEPT:]

    # ------------------------------------------------------------------------------------------------------------
    # What must hold at every moment
    # ------------------------------------------------------------------------------------------------------------

    def _check_wanted(self) -> None:
        deleted = self.model is None or "deletionTimestamp" in self.model["metadata"]
        assert not (deleted and self.alone), "something is made for a TRTModel that is being deleted"

    def _check_promotion(self, new: Json) -> None:
        """The fence never goes back; and who is promoted is held, by its own report, by every worker that is wanted."""
        old = self._there().get("status", {}).get("rollout")
        if old is None:
            return
        assert new["sequence"] >= old["sequence"], "the sequence went back"
        candidate = old["candidate"]
        self._check_platform(old, new)
        promoted = candidate is not None and new["stable"] == candidate and old["stable"] != candidate
        if not promoted or not self.alone:
            return
        spec = self._there()["spec"]
        for target in [t["name"] for t in spec.get("targets", [{"name": "default"}])]:
            mine = [w for w in self.workers.values() if w.target == target and w.leaves_at is None]
            assert len(mine) >= max(1, spec["serving"]["replicas"]), "promoted with workers missing"
            digests = {a["loadKey"]: a["manifestDigest"] for a in candidate["artifacts"] if a["target"] == target}
            for worker in mine:
                digest = digests[str(load_key(target, worker.node, worker.image))]
                assert worker.reachable, f"promoted although {worker.uid} is unknown"
                engines = worker.report(self).models[KEY[1]].engines
                ready = {e.manifest_digest for e in engines if e.state is EngineState.READY}
                assert digest in ready, f"promoted although {worker.uid} does not have it"

    def _check_platform(self, old: Json, new: Json) -> None:
        """Workers are of another platform for good only when all that are wanted serve as such."""
        before, now = old["platform"], new["platform"]
        if before is None or now is None or before["hash"] == now["hash"] or old["stable"] is None or not self.alone:
            return
        spec = self._there()["spec"]
        for target in [t["name"] for t in spec.get("targets", [{"name": "default"}])]:
            mine = [w for w in self.workers.values() if w.target == target and w.leaves_at is None]
            serving = [w for w in mine if w.labels[LABEL_PLATFORM] == now["hash"] and w.serves(self)]
            assert len(serving) >= max(1, spec["serving"]["replicas"]), "another platform with workers missing"

    def _check_promise(self) -> None:
        serving = sum(w.serves(self) for w in self.workers.values() if w.leaves_at is None)
        assert serving >= self.promised or self.misled, f"{serving} workers serve, {self.promised} are promised"

    def _check_dose(self) -> None:
        """Never do more workers answer with a candidate, or with more of their requests, than the steps that it reached
        allow; and with none that a person only goes back to."""
        rollout = self.rollout
        candidate, step = rollout["candidate"], rollout["step"]
        spec = (self.model or {}).get("spec", {})
        for target in {w.target for w in self.workers.values()}:
            mine = [w for w in self.workers.values() if w.target == target and w.leaves_at is None]
            if candidate is not None and step is not None and not step["back"]:
                steps, trial = spec["rollout"]["steps"], (target, candidate["revision"])
                reached = steps[min(step["index"], len(steps) - 1)]
                all_ = self.narrow and step["index"] >= len(steps)  # who holds it alone answers with it
                cap = len(mine) if all_ else _share(reached["workers"], len(mine))
                self.caps[trial] = max(self.caps.get(trial, 0), cap)
                self.weights[trial] = max(self.weights.get(trial, 0), reached.get("weight", 100))
            answering = Counter(w.engines[w.routes.candidate][0] for w in mine if w.routes.candidate)
            for revision_, on in answering.items():
                assert on <= self.caps.get((target, revision_), 0), f"{on} workers try it: its steps allow fewer"
            for w in mine:
                most = self.weights.get((target, w.engines[w.routes.candidate][0]), 0) if w.routes.candidate else 100
                assert w.routes.weight <= most, f"it answers {w.routes.weight} %: its steps allow {most}"

    # ------------------------------------------------------------------------------------------------------------
    # What people do
    # ------------------------------------------------------------------------------------------------------------

    def edit(self, **changes: object) -> None:
        """Changes fields of the spec by path: ``source__uri="..."``."""
        model = self._there()
        spec = copy.deepcopy(model["spec"])
        for path, value in changes.items():
            node = spec
            *parents, last = path.split("__")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        meta = {**model["metadata"], "generation": model["metadata"]["generation"] + 1}
        self._write_model({**model, "metadata": meta, "spec": spec})

    def command(self, text: str) -> None:
        model = self._there()
        meta = {**model["metadata"], "annotations": {"trtmodel.io/command": text}}
        self._write_model({**model, "metadata": meta})

    def lose_status(self, restored: Json | None = None) -> None:
        """As after a restore of the object alone; or with the memory of a backup."""
        model = {k: v for k, v in self._there().items() if k != "status"}
        self._write_model({**model, "status": {"rollout": restored}} if restored else model)

    def delete(self, *, foreground: bool) -> None:
        if foreground:
            model = self._there()
            self._write_model({**model, "metadata": {**model["metadata"], "deletionTimestamp": text_of(self.time)}})
        else:
            self._touched()
            self.model = None

    def kill_pod(self, uid: str) -> None:
        """As kubectl delete pod does: it has some seconds left, its successor is another pod."""
        self._touched()
        self.workers[uid].leaves_at = self.time + GRACE_SECONDS

    def kill_container(self, uid: str) -> None:
        """The same pod starts again from nothing."""
        self._touched()
        old = self.workers[uid]
        again, now = old.restarts + 1, self.time
        self.workers[uid] = Worker(
            old.name, uid, old.target, old.labels, now, restarts=again, restarted_at=now, node=old.node, image=old.image
        )

    # ------------------------------------------------------------------------------------------------------------
    # What the cluster does by itself
    # ------------------------------------------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        self.time += seconds
        self.changes += 1
        self._collect()
        self._run_jobs()
        self._run_deployments()
        pointers = {name: config for (kind, name), config in self.objects.items() if kind == "ConfigMap"}
        for worker in self.workers.values():
            config = pointers.get(worker.name.rpartition("-")[0])
            worker.boot(self, read_pointer(config["data"][POINTER_FILE]) if config else None)
            worker.settle(self)
            worker.serve(self, seconds)
        self._check_dose()
        self._check_promise()

    def on_candidate(self) -> int:
        return sum(bool(w.routes.candidate) for w in self.workers.values() if w.leaves_at is None)

    def _collect(self) -> None:
        """Garbage: what belongs to a deleted TRTModel. Foreground: the children first, then the object."""
        if self.model is not None and "deletionTimestamp" not in self.model["metadata"]:
            return
        if self.model is not None and not self.objects:
            self.model = None
        self.jobs_deleted = (*self.jobs_deleted, *(name for kind, name in self.objects if kind == "Job"))
        for held in (self.objects, self._marks, self.due, self.workers):
            held.clear()

    def _run_jobs(self) -> None:
        for name, (at, tries) in list(self.due.items()):
            if self.image_missing or self.no_node:
                self.due[name] = (self.time + JOB_SECONDS, tries)
                fits = {"type": "PodScheduled", "status": "True"} if self.image_missing else UNSCHEDULABLE
                waiting = {"reason": "ImagePullBackOff", "message": "not found"} if self.image_missing else {}
                self._put_pod(name, tries, {"phase": "Pending", "conditions": [fits]}, {"waiting": waiting})
            elif self.time >= at:
                self._end_try(name, tries)

    def _end_try(self, name: str, tries: int) -> None:
        job = self.objects["Job", name]
        reason, message = self._result(job)
        failed, code = reason is not Reason.DONE, EXITS.get(reason, int(JobExit.REJECTED))
        ending = (
            {"exitCode": 137, "reason": "OOMKilled"} if self.out_of_memory else {"exitCode": code, "message": message}
        )
        self._put_pod(name, tries, {"phase": "Failed" if failed else "Succeeded"}, {"terminated": ending})
        if reason in RETRIED and tries < JOB_TRIES:
            self.due[name] = (self.time + JOB_SECONDS, tries + 1)
            return
        del self.due[name]
        ended = [{"type": "Failed" if failed else "Complete", "status": "True"}]
        self._put("Job", name, {**job, "status": {**job["status"], "conditions": ended}}, f"{name} {ended}")

    def _result(self, job: Json) -> tuple[Reason, str]:
        if self.out_of_memory:
            return Reason.INTERNAL, ""
        container = job["spec"]["template"]["spec"]["containers"][0]
        task = next(e["value"] for e in container["env"] if e["name"] == TASK_ENV)
        if self.storage_down:
            result = JobResult(Reason.STORAGE_UNAVAILABLE, "the bucket does not answer")
        elif container["args"] == ["build"]:
            key = load_key(job["metadata"]["labels"][LABEL_TARGET], _node_of(job), container["image"])
            result = self._build(loads(BuildTask, task), key)
            if not IMAGES[container["image"]].builds:
                result = JobResult(Reason.BUILD_FAILED, "this runtime cannot build it")
        else:
            result = self._resolve(loads(ResolveTask, task))
        return result.reason, dumps(result).decode()

    def _put_pod(self, job: str, tries: int, status: Json, state: Json) -> None:
        owner = self.objects["Job", job]["metadata"]
        meta = {
            "name": f"{job}-{tries}",
            "uid": f"pod-{job}-{tries}",
            "creationTimestamp": text_of(self.time),
            "labels": owner["labels"],
            "ownerReferences": [{"uid": owner["uid"], "controller": True}],
        }
        self._put(
            "Pod",
            meta["name"],
            {"metadata": meta, "status": {**status, "containerStatuses": [{"state": state}]}},
            str(state),
        )

    def _resolve(self, task: ResolveTask) -> JobResult:
        source = self.sources.get(task.source_uri)
        if source is None:
            return JobResult(Reason.SOURCE_NOT_FOUND, f"there is nothing at {task.source_uri}")
        digest = sha256_hex(task.calibration.data.uri.encode()) if task.calibration else ""
        calibration = Calibration(digest, task.calibration.data.samples) if task.calibration else None
        name = revision(Recipe(source.sha256, task.engine, calibration))
        data, found = sha256_hex(task.dataset.uri.encode()), self.bucket.get(name, ())
        return JobResult(Reason.DONE, "", resolve=ResolveResult(source.sha256, 1, name, digest, data, (), (), found))

    def _build(self, task: BuildTask, key: LoadKey) -> JobResult:
        source = self.sources[task.source_uri]
        if source.sha256 != task.source_sha256:
            return JobResult(Reason.SOURCE_CHANGED, "the source changed")
        if source.build_fails is not None:
            return JobResult(source.build_fails, "it cannot be built")
        digest = sha256_hex(f"manifest of {task.revision} for {key}".encode())
        figures = GateFigures(
            digest,
            task.dataset.digest,
            task.verify_task,
            2000,
            False,
            {"out": OutputFigures(0.999, 0.99, 0.001, 0.01, 0, False)},
            Top1Figures(source.differs),
        )
        verdict = judge(figures, task.thresholds)
        if verdict.verdict is not GateVerdict.PASS:
            return JobResult(Reason.GATE_FAILED, verdict.sentence)
        artifact = FoundArtifact(key, digest, 1, "", figures)
        held = [a for a in self.bucket.get(task.revision, ()) if a.load_key != artifact.load_key]
        self.bucket[task.revision] = (*held, artifact)
        self.by_digest[digest] = source
        build = BuildResult(task.revision, artifact, False, 1, 1.0, 1.0, "2026-01-01T00:00:00Z")
        return JobResult(Reason.DONE, "", build=build)

    def _run_deployments(self) -> None:
        for uid in [w.uid for w in self.workers.values() if w.leaves_at is not None and self.time >= w.leaves_at]:
            del self.workers[uid]
        self._find_places()
        for (kind, name), deployment in self.objects.items():
            if kind != "Deployment":
                continue
            labels, wanted = deployment["spec"]["template"]["metadata"]["labels"], deployment["spec"]["replicas"]
            mine = [w for w in self.workers.values() if w.name.startswith(f"{name}-") and w.leaves_at is None]
            for worker in sorted(mine, key=lambda w: (not w.serves(self), w.born))[wanted:]:
                worker.leaves_at = self.time + GRACE_SECONDS
            for _ in range(wanted - len(mine)):
                self._pods_made += 1
                uid = f"u{self._pods_made}"
                image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
                placed = self.room is None
                self.workers[uid] = Worker(
                    f"{name}-{uid}", uid, labels[LABEL_TARGET], labels, self.time,
                    node=self.node, image=image, placed=placed,
                )  # fmt: skip
        self._find_places()

    def _find_places(self) -> None:
        """Where there is room for so many workers and no more; those that leave need it until they are gone."""
        for worker in self.workers.values():
            if not worker.placed and (self.room is None or sum(w.placed for w in self.workers.values()) < self.room):
                worker.placed, worker.born = True, self.time
            if not worker.placed and worker.leaves_at is not None:
                worker.leaves_at = min(worker.leaves_at, self.time)


def _by_kind(objects: Mapping[tuple[str, str], Json], pods: Sequence[Json]) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for (kind, _), manifest in objects.items():
        found.setdefault(kind, []).append(manifest)
    found["Pod"] = [*pods, *found.get("Pod", [])]
    return found


def _mark(rollout: Json | None) -> int:
    """Hash of a memory but for its times."""
    if rollout is None:
        return 0
    step = rollout["step"] and {**rollout["step"], "beganAt": 0, "seenAt": 0}
    history = [(h["revision"], h["outcome"], h["reason"]) for h in rollout["history"]]
    return hash(json.dumps({**rollout, "step": step, "waitedAt": 0, "history": history}))


def _node_of(job: Json) -> str:
    """The first of the nodes that it may run on; '' if it may run anywhere."""
    affinity = job["spec"]["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    return next((str(field["values"][0]) for term in terms for field in term["matchFields"]), "")


def _share(workers: int | str, n: int) -> int:
    """Of n workers, as the design has it."""
    asked = -(-int(workers[:-1]) * n // 100) if isinstance(workers, str) else workers
    return max(1, min(n - 1, asked))


class Hooks:
    """The port Inquiries: people's own systems, which are asked beside the passes and answer before the next."""

    def __init__(self, world: World) -> None:
        self.world = world

    def answers(self, key: Key) -> tuple[Answer, ...]:
        world = self.world
        down = "it cannot be reached"
        numbers = [Answer(k, world.time, world.gives, error="" if world.gives else down) for k, q in world.asked if q]
        error = "" if world.confirms else down if world.confirms is None else "it says no"
        says = [Answer(k, world.time, yes=bool(world.confirms), error=error) for k, q in world.asked if not q]
        return (*numbers, *says)

    def follow(self, key: Key, lookups: Sequence[Lookup]) -> None:
        self.world.asked = tuple((lookup.key, isinstance(lookup, Query)) for lookup in lookups)

    def tell(self, hook: WebhookSpec, key: str, body: str) -> None:
        pass


class Ports:
    """What one operator process sees of the world: the ports Cluster, Workers, Signer, Clock and Metrics. Every call
    that leaves the process goes through `before` and `after`, which do nothing here."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def before(self, call: str) -> None:
        """The process may end or wait here, with the call not made."""

    async def after(self, call: str) -> None:
        """Or here, with the call made and its answer not seen, be it an error."""

    async def _call(self, call: str, act: Callable[[], T]) -> T:
        await self.before(call)
        try:
            return act()
        finally:
            await self.after(call)

    async def get_model(self, key: Key) -> Json | None:
        return await self._call("get_model", lambda: self.world.model)

    async def list_models(self) -> Mapping[Key, str]:
        return {KEY: str(self.world.model["metadata"]["resourceVersion"])} if self.world.model else {}

    async def children(self, key: Key) -> Mapping[str, Sequence[Json]]:
        return await self._call("children", self.world.children)

    async def write_memory(self, key: Key, resource_version: str, rollout: Json) -> str:
        return await self._call("write_memory", lambda: self.world.write_memory(resource_version, rollout))

    async def write_status(self, key: Key, status: Json) -> None:
        await self._call("write_status", lambda: self.world.write_status(status))

    async def apply(self, manifest: Json) -> None:
        await self._call("apply", lambda: self.world.apply(manifest))

    async def guard(self, key: Key, uid: str, *, on: bool) -> None:
        raise AssertionError("no scenario deletes artifacts")

    async def create_job(self, manifest: Json) -> None:
        await self._call("create_job", lambda: self.world.create_job(manifest))

    async def delete_job(self, key: Key, name: str) -> None:
        await self._call("delete_job", lambda: self.world.delete_job(name))

    async def scale_workload(self, key: Key, name: str, replicas: int) -> None:
        await self._call("scale_workload", lambda: self.world.scale_workload(name, replicas))

    async def delete_workload(self, key: Key, name: str) -> None:
        await self._call("delete_workload", lambda: self.world.delete_workload(name))

    async def post_event(self, regarding: Json, reason: str, message: str, *, warning: bool) -> None:
        self.world.events = (*self.world.events, reason)

    async def report(self, ip: str, uid: str) -> Report:
        return await self._call("report", lambda: self.world.report(uid))

    async def send(self, ip: str, uid: str, request: DesiredRequest) -> None:
        await self._call("send", lambda: self.world.send(uid, request))

    def follow(self, key: Key, workers: Mapping[str, tuple[str, int]], *, closely: bool = True) -> None:
        pass

    def sign(self, payload: bytes) -> Signature:
        return Signature("k1", sha256_hex(payload)[:16])

    def public_keys(self) -> Mapping[str, str]:
        return {"k1": "AA=="}

    def now(self) -> float:
        return self.world.time

    def persisted(self, key: Key, seen: Observed, decision: Decision, status: Mapping[str, object]) -> None:
        pass

    def forget(self, key: Key) -> None:
        pass
