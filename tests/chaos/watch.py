"""What must hold all the time, and what must be so when chaos is over."""

from __future__ import annotations

import datetime
import threading
import time
import traceback
from collections.abc import Collection, Mapping

import urllib3
from e2e.cluster import Json
from e2e.world import CHILDREN, condition, is_ready, revision
from trtmodel_contract.codec import DocumentError, loads
from trtmodel_contract.control import POINTER_FILE, BootPointer

from chaos import plan
from chaos.ledger import SCALED_SECONDS, Ledger
from chaos.machine import Machine
from chaos.subject import NAMESPACE, SYSTEM, Away, Subject, applied, asked

LOOK_SECONDS = 1.0
LOGS_SECONDS = 3.0
NOT_READY = "a worker that was left alone is not ready"
LASTING_SECONDS = 6.0  # one look is no evidence: a probe may fail once on a busy machine
READY_SECONDS = 3.0  # until a worker has said whether it is ready
# How a good spec may end under chaos without being served, and which action is the cause: one that was done to this
# model, or to what all lean on, since the spec was applied first.
_JOBS = frozenset({plan.JOB_KILL, plan.KUBELET, plan.API_SERVER, plan.S3_POD, plan.S3_CUT})
_WORKERS = frozenset({plan.WORKER_KILL, plan.WORKER_POD, plan.WORKER_FREEZE, plan.HOST_KILL})
_OPERATORS = frozenset({plan.OPERATOR_KILL, plan.OPERATOR_POD, plan.OPERATOR_FREEZE, plan.WORKER_CUT})
CAUSES: Mapping[str, frozenset[str]] = {
    "Aborted": frozenset({plan.ABORT}), "RolledBackByCommand": frozenset({plan.ROLLBACK}),
    "EngineFailed": _WORKERS, "EngineDied": _WORKERS, "WorkerDied": _WORKERS, "ErrorRateTooHigh": _WORKERS,
    "TooSlow": _WORKERS,
    "ProgressDeadlineExceeded": _JOBS | _WORKERS | _OPERATORS,
    "JobFailed": _JOBS, "BackoffLimitExceeded": _JOBS, "DeadlineExceeded": _JOBS, "ResultMissing": _JOBS,
}  # fmt: skip


class Watch:
    """Looks at everything once a second, until it is stopped: at what the API tells of pods, and, while that may not be
    true, at what the workers say themselves."""

    def __init__(self, subjects: Mapping[str, Subject], machine: Machine, ledger: Ledger) -> None:
        self._subjects, self._machine, self._ledger = subjects, machine, ledger
        self._since: dict[tuple[str, str], float] = {}  # model, what is wrong -> when it was seen first
        self._told: set[tuple[str, str]] = set()
        self._served: dict[str, int] = {}  # uid of a worker that was ready -> how often it had been started again
        self._workers = urllib3.PoolManager(timeout=READY_SECONDS, retries=False)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.pointed: dict[tuple[str, str], float] = {}  # boot pointer, digest in it -> when it was seen first
        self.looks = self.looks_at_workers = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        logs = 0.0
        while not self._over.wait(LOOK_SECONDS):
            try:
                for subject in self._subjects.values():
                    self._visit(subject)
                if time.time() > logs + LOGS_SECONDS:
                    self._machine.keep_logs((SYSTEM, NAMESPACE))
                    logs = time.time()
            except Exception:
                self._ledger.violation("all can be looked at", traceback.format_exc())
        self._machine.keep_logs((SYSTEM, NAMESPACE))

    def _visit(self, subject: Subject) -> None:
        at = time.time()
        try:
            model = subject.model()
            workers = asked(lambda: subject.world.workers(subject.name))
            pointers = asked(lambda: subject.world.children("ConfigMap", subject.name))
        except Away:
            return
        self._note_pointers(pointers, at)
        self._look_at_restarts(subject.name, workers)
        if self._ledger.sees(at):
            self._look(subject, model, workers, at)
        else:
            for key in [k for k in self._since if k[0] == subject.name and k[1] != NOT_READY]:
                self._forget(key)
            self._look_at_workers(subject.name, workers, at)

    def _look(self, subject: Subject, model: Json, workers: list[Json], at: float) -> None:
        self.looks += 1
        missing = lacking(self._ledger.missing(subject.name, at), workers)
        least = subject.floor(at, SCALED_SECONDS) - missing
        ready = sum(map(is_ready, workers))
        text = f"{ready} workers are ready, at least {least} were promised ({missing} hit by chaos)"
        self._lasting(subject.name, "fewer ready workers than promised", ready < least, at, text)
        unavailable = any(
            c["type"] == "Available" and c["status"] == "False" for c in model.get("status", {}).get("conditions", ())
        )
        self._lasting(
            subject.name, "Available is False", unavailable and least > 0, at, str(model.get("status"))[:1000]
        )

    def _look_at_workers(self, model: str, workers: list[Json], at: float) -> None:
        """Those that were ready and left alone go on, whatever nobody can tell of them."""
        self.looks_at_workers += 1
        hit = self._ledger.missing(model, at)
        alone = [p for p in workers if is_ready(p) and p["metadata"]["uid"] not in hit]
        wrong = [f"{p['metadata']['name']} says {said}" for p in alone if (said := self._asked(p))]
        self._lasting(model, NOT_READY, bool(wrong), at, "; ".join(wrong))

    def _asked(self, pod: Json) -> str:
        """'' if it says that it is ready."""
        try:
            answer = self._workers.request("GET", f"http://{pod['status']['podIP']}:8080/v2/health/ready")
        except urllib3.exceptions.HTTPError as e:
            return type(e).__name__
        return "" if answer.status == 200 else f"{answer.status}: {answer.data[:200].decode(errors='replace')}"

    def _look_at_restarts(self, model: str, workers: list[Json]) -> None:
        """A worker that served falls over nothing but chaos."""
        for pod in workers:
            uid, name = pod["metadata"]["uid"], pod["metadata"]["name"]
            restarts = sum(s.get("restartCount", 0) for s in pod["status"].get("containerStatuses") or ())
            before = self._served.get(uid, restarts)
            if restarts > before and uid not in self._ledger.ever_hit(model):
                text = f"{model}: {name} was started again: {pod['status'].get('containerStatuses')}"
                self._ledger.violation("a worker that was left alone goes on", text[:1000])
            if is_ready(pod):
                self._served[uid] = restarts

    def _note_pointers(self, found: list[Json], at: float) -> None:
        for config_map in found:
            text = (config_map.get("data") or {}).get(POINTER_FILE)
            if not text:
                continue
            name = str(config_map["metadata"]["name"])
            try:
                pointer = loads(BootPointer, text)
            except DocumentError as e:
                self._ledger.violation("a boot pointer can be read", f"{name}: {e}")
                continue
            for entry in filter(None, (pointer.stable, pointer.standby)):
                for artifact in entry.artifacts.values():
                    self.pointed.setdefault((name, artifact.manifest_digest), at)

    def _lasting(self, model: str, what: str, wrong: bool, at: float, text: str) -> None:
        """Tells of it once, if it lasts."""
        if not wrong:
            self._forget((model, what))
            return
        since = self._since.setdefault((model, what), at)
        if at - since >= LASTING_SECONDS and (model, what) not in self._told:
            self._told.add((model, what))
            self._ledger.violation(what, f"{model}: {text}")

    def _forget(self, key: tuple[str, str]) -> None:
        self._since.pop(key, None)
        self._told.discard(key)


# ------------------------------------------------------------------------------------------------ when chaos is over


def settled(model: Json) -> bool:
    """Nothing more happens by itself."""
    ended = "True" in (condition(model, "Ready")["status"], condition(model, "Stalled")["status"])
    return ended and condition(model, "Reconciling")["status"] == "False"


def judge_end(subject: Subject, model: Json, gains: Mapping[str, int], ledger: Ledger) -> str:
    """How the last spec ended, in a few words. `gains` of the revisions that answered so far."""
    spec, reason = applied(model["spec"]), condition(model, "Ready")["reason"]
    ready = condition(model, "Ready")["status"] == "True"
    stable = gains.get(revision(model, "stable"), 0)
    told = f"{spec.kind} (gain {spec.gain}): {'Ready' if ready else reason}, gain {stable} serves"
    if condition(model, "Available")["status"] != "True":
        ledger.violation("available at the end", f"{subject.name}: {condition(model, 'Available')}")
    if ready and (spec.kind != plan.GOOD or stable != spec.gain):
        ledger.violation("Ready means that the spec serves", f"{subject.name}: {told}")
    if not ready and spec.kind == plan.GOOD:
        causes = CAUSES.get(reason, frozenset())
        if not ledger.done_since(causes, subject.name, subject.trusted[spec.gain]):
            text = f"{subject.name}: {told}: {condition(model, 'Ready')['message']}"
            ledger.violation("a good spec is not refused", f"{text} (nothing of {sorted(causes)} was done)")
    return told


def lacking(hit: Mapping[str, float], workers: Collection[Json]) -> int:
    """How many workers may be missing: those that chaos hit (and since when), that are not ready now, and whose place
    nobody has taken."""
    there = {w["metadata"]["uid"] for w in workers}
    ready = {w["metadata"]["uid"]: w for w in workers if is_ready(w)}
    away = {uid: since for uid, since in hit.items() if uid not in ready}
    gone = [since for uid, since in away.items() if uid not in there]
    came = [w for w in ready.values() if gone and _made(w) > min(gone) + 1]  # times of pods are whole seconds
    return len(away) - min(len(gone), len(came))


def _made(pod: Json) -> float:
    """Seconds since the epoch."""
    return datetime.datetime.fromisoformat(pod["metadata"]["creationTimestamp"]).timestamp()


def children(subject: Subject) -> dict[str, list[Json]]:
    """Raises Away."""
    return {kind: asked(lambda kind=kind: subject.world.children(kind, subject.name)) for kind in CHILDREN}  # type: ignore[misc]


def orphans(subject: Subject, found: Mapping[str, list[Json]], replicas: int) -> list[str]:
    """What is there and should not be, or is not there and should."""
    wrong = []
    running = [
        j["metadata"]["name"]
        for j in found["Job"]
        if not any(c["type"] in ("Complete", "Failed") for c in j["status"].get("conditions") or ())
    ]
    if running:
        wrong.append(f"Jobs still run: {', '.join(running)}")
    workers = [p for p in found["Pod"] if p["metadata"]["labels"].get("trtmodel.io/role") == "worker"]
    ready = sum(map(is_ready, workers))
    if (len(workers), ready) != (replicas, replicas):
        wrong.append(f"{len(workers)} worker pods, {ready} ready, {replicas} wanted")
    job_pods = [p for p in found["Pod"] if p not in workers and p["status"].get("phase") in ("Pending", "Running")]
    if job_pods:
        wrong.append(f"pods of Jobs still run: {', '.join(p['metadata']['name'] for p in job_pods)}")
    for kind, most in (("Deployment", 1), ("ConfigMap", 2), ("Service", 1), ("PodDisruptionBudget", 1)):
        if len(found[kind]) > most:
            names = ", ".join(c["metadata"]["name"] for c in found[kind])
            wrong.append(f"{len(found[kind])} of kind {kind}, at most {most} are used: {names}")
    return wrong
