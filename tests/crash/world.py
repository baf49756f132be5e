"""A small cluster in one process, for the real reconciler: objects, Jobs, pods and workers on a clock of ours.

Models: resourceVersion preconditions, a Deployment controller, garbage collection by owner, Jobs that take time and end
as the source that they read wants it, a bucket that may be away, images that may be missing, and the workers of
`machines`. Does not model: Services, probes, signatures' validity, the kubelet's delays.

Objects that lie in it are replaced and never changed, so `fork` is cheap: the state before each I/O of a run is kept,
and a crash there is a copy of that state with a new operator. What must hold at every moment (`promises`) is asserted
where it would break.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence

import promises
from machines import GRACE_SECONDS, IMAGES, UID, UNSCHEDULABLE, Source, Worker, load_key, read_pointer, text_of
from trtmodel_contract.codec import dumps, encode, loads, sha256_hex
from trtmodel_contract.control import POINTER_FILE, DesiredRequest, Report
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
from trtmodel_operator.manifests import LABEL_TARGET
from trtmodel_operator.model import Memory
from trtmodel_operator.ports import ClusterError, Conflict, Json, WorkerError

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
        promises.check_promotion(self, model, rollout)
        self._write_model({**model, "status": {**model.get("status", {}), "rollout": json.loads(json.dumps(rollout))}})
        promises.check_dose(self)
        return str(self._there()["metadata"]["resourceVersion"])

    def write_status(self, status: Json) -> None:
        model = self._there()
        kept = model.get("status", {}).get("rollout")
        self._write_model({**model, "status": {**status, **({"rollout": kept} if kept is not None else {})}})

    def apply(self, manifest: Json) -> None:
        promises.check_wanted(self)
        self._put(manifest["kind"], manifest["metadata"]["name"], manifest)

    def create_job(self, manifest: Json) -> None:
        promises.check_wanted(self)
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
        promises.check_dose(self)

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
        promises.check_dose(self)
        promises.check_promise(self)

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
