"""A small cluster in one process, for the real reconciler: objects, Jobs, pods and workers on a clock of ours.

Models: resourceVersion preconditions, a Deployment controller, Jobs that take time and end as the source that they read
wants it, workers with the real fence rules, boot from the pointer, loading that takes time, routes, attempt counters by
window, a candidate's time to live, container restarts. Does not model: Services, probes, signatures' validity, the
kubelet's delays.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trtmodel_contract.codec import dumps, encode, loads, sha256_hex
from trtmodel_contract.control import (
    POINTER_FILE,
    AttemptCounts,
    BootPointer,
    DesiredEngine,
    DesiredModel,
    DesiredRequest,
    EngineReport,
    EngineState,
    Fence,
    ModelReport,
    Report,
    Role,
    Routes,
    WorkerState,
)
from trtmodel_contract.gate import GateFigures, OutputFigures, Top1Figures, judge
from trtmodel_contract.gate import Verdict as GateVerdict
from trtmodel_contract.histogram import bucket_index
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
from trtmodel_operator.model import Decision, Memory
from trtmodel_operator.ports import Conflict, Json, Key, WorkerError
from trtmodel_worker.front.fence import Conflict as FenceConflict
from trtmodel_worker.front.fence import Held, Ruling, judge_request, pointer_counts

KEY: Key = ("ml", "magika")
UID = "6b1e"
LOAD_KEY = LoadKey("ONNXRuntime", "1.20", "cpu")
JOB_SECONDS, LOAD_SECONDS, START_SECONDS = 6.0, 3.0, 4.0
REQUESTS_PER_SECOND = 20  # at every worker that serves
START = 1_760_000_000.0


class Crash(BaseException):
    """The operator's process ends here."""


@dataclass(frozen=True)
class Source:
    """What lies at an address, and how its engine turns out."""

    content: str
    differs: int = 0  # of 2,000 answers in the gate
    seconds: float = 0.008
    failing: float = 0.0
    loads: bool = True
    dies: bool = False
    build_fails: Reason | None = None

    @property
    def sha256(self) -> str:
        return sha256_hex(self.content.encode())


@dataclass
class Worker:
    """One pod. `engines`: digest -> (revision, role, when it is ready)."""

    name: str
    uid: str
    target: Mapping[str, str]
    born: float
    held: Held | None = None
    desired: DesiredModel | None = None
    engines: dict[str, tuple[str, Role, float]] = field(default_factory=dict)
    windows: dict[str, dict[str, AttemptCounts]] = field(default_factory=dict)
    routes: Routes = dataclasses.field(default_factory=lambda: Routes(""))
    candidate_until: float = 0.0
    version: int = 1
    pointer_sequence: int = 0
    restarts: int = 0
    restarted_at: float | None = None
    terminating: bool = False
    reachable: bool = True


class World:
    """Implements the ports Cluster, Workers, Signer, Clock and Metrics."""

    def __init__(self, spec: Json, sources: Mapping[str, Source]) -> None:
        self.time = START
        self.sources = dict(sources)
        self.model: Json = {
            "metadata": {"namespace": "ml", "name": "magika", "uid": UID, "generation": 1, "resourceVersion": "1"},
            "spec": copy.deepcopy(spec),
        }
        self.objects: dict[tuple[str, str], Json] = {}
        self.workers: dict[str, Worker] = {}
        self.bucket: dict[str, FoundArtifact] = {}  # revision -> artifact
        self.by_digest: dict[str, Source] = {}
        self.jobs_created: list[str] = []
        self.events: list[str] = []
        self.calls = 0
        self.done: list[str] = []
        self.crash_at: tuple[int, bool] | None = None  # call number, before (True) or after it was performed
        self.interleave: random.Random | None = None  # for two operators at once
        self.conflicts = 0
        self.most_on_candidate = 0
        self._pods_made = 0

    # ------------------------------------------------------------------------------------------------------------
    # Ports
    # ------------------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Lets another operator go first, a random number of times."""
        for _ in range(self.interleave.randrange(4) if self.interleave else 0):
            await asyncio.sleep(0)

    def _gate(self, what: str) -> bool:
        """Counts an effect. True if the process ends after it was performed. Of a pass's reads only the first counts:
        a process that ends at a later one leaves the same world."""
        self.calls += 1
        self.done.append(what)
        if self.crash_at is None or self.calls != self.crash_at[0]:
            return False
        before = self.crash_at[1]
        self.crash_at = None
        if before:
            raise Crash
        return True

    def _end(self, ends: bool) -> None:
        if ends:
            raise Crash

    async def get_model(self, key: Key) -> Json | None:
        await self._turn()
        ends = self._gate("get_model")
        self._end(ends)
        return copy.deepcopy(self.model)

    async def list_models(self) -> Mapping[Key, str]:
        return {KEY: str(self.model["metadata"]["resourceVersion"])}

    async def children(self, key: Key) -> Mapping[str, Sequence[Json]]:
        await self._turn()
        found: dict[str, list[Json]] = {}
        for (kind, _), manifest in self.objects.items():
            found.setdefault(kind, []).append(manifest)
        found["Pod"] = [*(self._pod(w) for w in self.workers.values()), *found.get("Pod", [])]
        return found

    async def write_memory(self, key: Key, resource_version: str, rollout: Json) -> str:
        await self._turn()
        ends = self._gate("write_memory")
        if resource_version != self.model["metadata"]["resourceVersion"]:
            self.conflicts += 1
            raise Conflict("modified")
        self.model.setdefault("status", {})["rollout"] = json.loads(json.dumps(rollout))
        self._written()
        self._end(ends)
        return str(self.model["metadata"]["resourceVersion"])

    async def write_status(self, key: Key, status: Json) -> None:
        await self._turn()
        ends = self._gate("write_status")
        kept = self.model.get("status", {}).get("rollout")
        self.model["status"] = json.loads(json.dumps(status)) | ({"rollout": kept} if kept is not None else {})
        self._written()
        self._end(ends)

    async def apply(self, manifest: Json) -> None:
        await self._turn()
        ends = self._gate("apply")
        self.objects[manifest["kind"], manifest["metadata"]["name"]] = copy.deepcopy(manifest)
        self._end(ends)

    async def create_job(self, manifest: Json) -> None:
        await self._turn()
        ends = self._gate("create_job")
        name = manifest["metadata"]["name"]
        if ("Job", name) not in self.objects:
            self.jobs_created.append(name)
            job = copy.deepcopy(manifest)
            job["metadata"]["uid"] = f"job-{name}"
            job["due"] = self.time + JOB_SECONDS
            job["status"] = {"startTime": _text(self.time)}
            self.objects["Job", name] = job
        self._end(ends)

    async def delete_job(self, key: Key, name: str) -> None:
        await self._turn()
        ends = self._gate("delete_job")
        self.objects.pop(("Job", name), None)
        self._end(ends)

    async def post_event(self, regarding: Json, reason: str, message: str, *, warning: bool) -> None:
        await self._turn()
        ends = self._gate("post_event")
        self.events.append(reason)
        self._end(ends)

    async def report(self, ip: str, uid: str) -> Report:
        await self._turn()
        worker = self._reach(uid)
        return self._report(worker)

    async def send(self, ip: str, uid: str, request: DesiredRequest) -> None:
        await self._turn()
        ends = self._gate("send")
        worker = self._reach(uid)
        try:
            ruling = judge_request(worker.held, UID, request.desired)
        except FenceConflict:
            ruling = None
        if ruling is Ruling.APPLY:
            worker.held = Held(request.desired.fence, request.desired.content_hash())
            self._want(worker, request.desired.models[KEY[1]])
        if ruling is not None:
            worker.candidate_until = self.time + request.candidate_ttl_seconds
        self._settle(worker)
        self._end(ends)

    def follow(self, key: Key, workers: Mapping[str, tuple[str, int]]) -> None:
        pass

    def sign(self, payload: bytes) -> Signature:
        return Signature("k1", sha256_hex(payload)[:16])

    def public_keys(self) -> Mapping[str, str]:
        return {"k1": "AA=="}

    def now(self) -> float:
        return self.time

    def persisted(self, key: Key, before: Memory, decision: Decision) -> None:
        pass

    def forget(self, key: Key) -> None:
        pass

    # ------------------------------------------------------------------------------------------------------------
    # What people do
    # ------------------------------------------------------------------------------------------------------------

    def edit(self, **changes: object) -> None:
        """Changes fields of the spec by path: ``source__uri="..."``."""
        for path, value in changes.items():
            node = self.model["spec"]
            *parents, last = path.split("__")
            for parent in parents:
                node = node.setdefault(parent, {})
            node[last] = value
        self.model["metadata"]["generation"] += 1
        self._written()

    def command(self, text: str) -> None:
        self.model["metadata"].setdefault("annotations", {})["trtmodel.io/command"] = text
        self._written()

    def kill_pod(self, uid: str) -> None:
        """As kubectl delete pod does: its successor is another pod."""
        del self.workers[uid]

    def kill_container(self, uid: str) -> None:
        """The same pod starts again from nothing."""
        old = self.workers[uid]
        fresh = Worker(old.name, old.uid, old.target, self.time, restarts=old.restarts + 1, restarted_at=self.time)
        self.workers[uid] = fresh

    def _written(self) -> None:
        meta = self.model["metadata"]
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)

    # ------------------------------------------------------------------------------------------------------------
    # What the cluster does by itself
    # ------------------------------------------------------------------------------------------------------------

    def tick(self, seconds: float) -> None:
        self.time += seconds
        self._run_jobs()
        self._run_deployments()
        for worker in self.workers.values():
            self._boot(worker)
            self._settle(worker)
            self._serve(worker, seconds)
        self.most_on_candidate = max(self.most_on_candidate, self.on_candidate())

    def on_candidate(self) -> int:
        return sum(bool(w.routes.candidate) for w in self.workers.values())

    def _run_jobs(self) -> None:
        for (kind, name), job in list(self.objects.items()):
            if kind == "Job" and job.get("due") is not None and self.time >= job["due"]:
                job["due"] = None
                self._finish(name, job)

    def _finish(self, name: str, job: Json) -> None:
        container = job["spec"]["template"]["spec"]["containers"][0]
        task = next(e["value"] for e in container["env"] if e["name"] == TASK_ENV)
        building = container["args"] == ["build"]
        result = self._build(loads(BuildTask, task)) if building else self._resolve(loads(ResolveTask, task))
        failed = result.reason is not Reason.DONE
        job["status"]["conditions"] = [{"type": "Failed" if failed else "Complete", "status": "True"}]
        self.objects["Pod", f"{name}-x"] = {
            "metadata": {
                "name": f"{name}-x",
                "uid": f"pod-{name}",
                "creationTimestamp": _text(self.time),
                "labels": job["metadata"]["labels"],
                "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
            },
            "status": {
                "phase": "Failed" if failed else "Succeeded",
                "containerStatuses": [
                    {"state": {"terminated": {"exitCode": 42 if failed else 0, "message": dumps(result).decode()}}}
                ],
            },
        }

    def _resolve(self, task: ResolveTask) -> JobResult:
        source = self.sources.get(task.source_uri)
        if source is None:
            return JobResult(Reason.SOURCE_NOT_FOUND, f"there is nothing at {task.source_uri}")
        digest = sha256_hex(task.calibration.data.uri.encode()) if task.calibration else ""
        calibration = Calibration(digest, task.calibration.data.samples) if task.calibration else None
        name = revision(Recipe(source.sha256, task.engine, calibration))
        found = (self.bucket[name],) if name in self.bucket else ()
        data = sha256_hex(task.dataset.uri.encode())
        return JobResult(Reason.DONE, "", resolve=ResolveResult(source.sha256, 1, name, digest, data, (), (), found))

    def _build(self, task: BuildTask) -> JobResult:
        source = self.sources[task.source_uri]
        if source.sha256 != task.source_sha256:
            return JobResult(Reason.SOURCE_CHANGED, "the source changed")
        if source.build_fails is not None:
            return JobResult(source.build_fails, "it cannot be built")
        digest = sha256_hex(f"manifest of {task.revision}".encode())
        output = OutputFigures(0.999, 0.99, 0.001, 0.01, 0, False)
        figures = GateFigures(
            digest,
            task.dataset.digest,
            task.verify_task,
            2000,
            False,
            {"out": output},
            Top1Figures(source.differs),
        )
        verdict = judge(figures, task.thresholds)
        if verdict.verdict is not GateVerdict.PASS:
            return JobResult(Reason.GATE_FAILED, verdict.sentence)
        artifact = FoundArtifact(LOAD_KEY, digest, 1, "", figures)
        self.bucket[task.revision] = artifact
        self.by_digest[digest] = source
        build = BuildResult(task.revision, artifact, False, 1, 1.0, 1.0, _text(self.time))
        return JobResult(Reason.DONE, "", build=build)

    def _run_deployments(self) -> None:
        for (kind, name), deployment in self.objects.items():
            if kind != "Deployment":
                continue
            labels = deployment["spec"]["template"]["metadata"]["labels"]
            mine = sorted((w for w in self.workers.values() if w.name.startswith(name)), key=lambda w: w.born)
            wanted = deployment["spec"]["replicas"]
            for worker in mine[wanted:]:
                del self.workers[worker.uid]
            for _ in range(wanted - len(mine)):
                self._pods_made += 1
                uid = f"u{self._pods_made}"
                self.workers[uid] = Worker(f"{name}-{uid}", uid, labels, self.time)

    # ------------------------------------------------------------------------------------------------------------
    # Workers
    # ------------------------------------------------------------------------------------------------------------

    def _reach(self, uid: str) -> Worker:
        worker = self.workers.get(uid)
        if worker is None or not worker.reachable or not self._started(worker):
            raise WorkerError("connection refused")
        return worker

    def _started(self, worker: Worker) -> bool:
        return self.time >= worker.born + START_SECONDS

    def _boot(self, worker: Worker) -> None:
        name = worker.name.rsplit("-", 1)[0]
        config = self.objects.get(("ConfigMap", name))
        if config is None or not self._started(worker):
            return
        pointer = loads(BootPointer, config["data"][POINTER_FILE])
        worker.pointer_sequence = pointer.sequence
        if not pointer_counts(worker.held, pointer.sequence):
            return
        worker.held = Held(Fence(UID, pointer.sequence))
        stable = pointer.stable.artifacts[str(LOAD_KEY)]
        engines = [DesiredEngine(Role.STABLE, stable)]
        if pointer.standby is not None:
            engines.append(DesiredEngine(Role.STANDBY, pointer.standby.artifacts[str(LOAD_KEY)]))
        window = worker.desired.window if worker.desired else ""
        self._want(worker, DesiredModel(tuple(engines), Routes(stable.manifest_digest), window))

    def _want(self, worker: Worker, desired: DesiredModel) -> None:
        worker.desired = desired
        worker.version += 1
        for engine in desired.engines:
            digest = engine.artifact.manifest_digest
            ready = worker.engines[digest][2] if digest in worker.engines else self.time + LOAD_SECONDS
            worker.engines[digest] = (engine.artifact.revision, engine.role, ready)
        if desired.window not in worker.windows:
            worker.windows[desired.window] = {}
            while len(worker.windows) > 4:
                del worker.windows[next(iter(worker.windows))]

    def _settle(self, worker: Worker) -> None:
        """Routes by what is ready and wanted; lets go of what is neither listed nor routed."""
        if worker.desired is None:
            return
        wanted = worker.desired.routes
        stable = wanted.stable if self._ready(worker, wanted.stable) else worker.routes.stable
        candidate = wanted.candidate if self._ready(worker, wanted.candidate) else ""
        if candidate and self.time >= worker.candidate_until:
            candidate = ""
        if stable:
            worker.routes = Routes(stable, candidate, wanted.weight if candidate else 0)
        listed = {e.artifact.manifest_digest for e in worker.desired.engines}
        for digest in set(worker.engines) - listed - {stable}:
            del worker.engines[digest]

    def _ready(self, worker: Worker, digest: str) -> bool:
        if digest not in worker.engines or not self.by_digest[digest].loads:
            return False
        return self.time >= worker.engines[digest][2]

    def _serve(self, worker: Worker, seconds: float) -> None:
        digest = worker.routes.candidate or worker.routes.stable
        if not digest or worker.desired is None or not self._serving(worker):
            return
        source, window = self.by_digest[digest], worker.windows[worker.desired.window]
        before = window.get(digest, AttemptCounts())
        n = round(REQUESTS_PER_SECOND * seconds)
        failed = round(n * source.failing)
        histogram = dict(before.compute.get("1", {}))
        for i in range(n - failed):  # a spread of 20 %, the same in each tick
            index = bucket_index(source.seconds * (0.9 + 0.2 * (i % 10) / 9))
            histogram[index] = histogram.get(index, 0) + 1
        window[digest] = AttemptCounts(
            ok=before.ok + n - failed,
            failed={"Error": before.failed.get("Error", 0) + failed} if failed or before.failed else {},
            compute={"1": histogram},
        )
        worker.version += 1

    def _serving(self, worker: Worker) -> bool:
        return self._started(worker) and bool(worker.routes.stable) and self._ready(worker, worker.routes.stable)

    def _report(self, worker: Worker) -> Report:
        engines = []
        for digest, (name, role, _) in worker.engines.items():
            source = self.by_digest[digest]
            state = EngineState.READY if self._ready(worker, digest) else EngineState.LOADING
            if not source.loads:
                state = EngineState.FAILED
            deaths = 1 if source.dies and worker.routes.candidate == digest else 0
            engines.append(EngineReport(name, digest, role, state, deaths=deaths))
        windows = {w: dict(counts) for w, counts in worker.windows.items()}
        return Report(
            version=worker.version,
            pod=worker.name,
            pod_uid=worker.uid,
            load_key=LOAD_KEY,
            driver="",
            state=WorkerState.SERVING if worker.routes.stable else WorkerState.STARTING,
            message="",
            fence=worker.held.fence if worker.held else Fence(UID, 0),
            pointer_sequence=worker.pointer_sequence,
            key_ids=("k1",),
            models={KEY[1]: ModelReport(tuple(engines), worker.routes, windows)},
        )

    def _pod(self, worker: Worker) -> Json:
        started = self._started(worker)
        container: Json = {"restartCount": worker.restarts, "state": {"running": {}} if started else {"waiting": {}}}
        if worker.restarted_at is not None:
            container["lastState"] = {"terminated": {"finishedAt": _text(worker.restarted_at), "exitCode": 137}}
        return {
            "metadata": {
                "name": worker.name,
                "uid": worker.uid,
                "creationTimestamp": _text(worker.born),
                "labels": dict(worker.target),
            },
            "spec": {"containers": [{"env": [{"name": "TRTMODEL_MODEL_UID", "value": UID}]}]},
            "status": {
                "phase": "Running",
                "podIP": f"10.0.0.{worker.uid[1:]}",
                "conditions": [{"type": "Ready", "status": "True" if self._serving(worker) else "False"}],
                "containerStatuses": [container],
            },
        }

    # ------------------------------------------------------------------------------------------------------------
    # How it ended
    # ------------------------------------------------------------------------------------------------------------

    @property
    def rollout(self) -> Json:
        return dict(self.model.get("status", {}).get("rollout") or encode(Memory()))

    def condition(self, kind: str) -> tuple[str, str]:
        conditions = self.model.get("status", {}).get("conditions", [])
        return next((c["status"], c["reason"]) for c in conditions if c["type"] == kind)


def _text(moment: float) -> str:
    return datetime.datetime.fromtimestamp(int(moment), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
