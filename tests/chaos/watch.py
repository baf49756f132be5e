"""What must hold all the time, and what must be so when chaos is over."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Mapping

from e2e.cluster import Json
from e2e.s3 import ENGINES, Store
from e2e.world import CHILDREN, condition, is_ready, revision
from trtmodel_contract.codec import loads
from trtmodel_contract.gate import GateFigures, Thresholds, Verdict, judge

from chaos import sources
from chaos.ledger import SCALED_SECONDS, Ledger
from chaos.machine import Machine
from chaos.plan import GOOD
from chaos.subject import FOLDER, NAMESPACE, SYSTEM, Away, Subject, applied, asked
from chaos.traffic import Traffic

LOOK_SECONDS = 1.0
LOGS_SECONDS = 3.0
LASTING_SECONDS = 6.0  # one look is no evidence: a probe may fail once on a busy machine
CLOCKS_SECONDS = 2.0  # S3 tells times in whole seconds
BUGS = ("not foreseen", "Task exception was never retrieved")
# How a good spec may end under chaos without being served: by command, or since chaos hit just this engine or its Jobs.
EXCUSED_ENDS = {
    "Aborted", "RolledBackByCommand", "EngineFailed", "EngineDied", "WorkerDied", "ErrorRateTooHigh", "TooSlow",
    "ProgressDeadlineExceeded", "JobFailed", "BackoffLimitExceeded", "DeadlineExceeded", "ResultMissing",
}  # fmt: skip


class Watch:
    """Looks at everything once a second, until it is stopped."""

    def __init__(self, subjects: Mapping[str, Subject], machine: Machine, ledger: Ledger) -> None:
        self._subjects, self._machine, self._ledger = subjects, machine, ledger
        self._since: dict[tuple[str, str], float] = {}  # model, what is wrong -> when it was seen first
        self._told: set[tuple[str, str]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.looks = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(60)

    def _run(self) -> None:
        logs = 0.0
        while not self._over.wait(LOOK_SECONDS):
            for subject in self._subjects.values():
                at = time.time()
                try:
                    model = subject.model()
                    workers = asked(lambda subject=subject: subject.world.workers(subject.name))  # type: ignore[misc]
                except Away:
                    continue
                if self._ledger.sees(at):
                    self._look(subject, model, workers, at)
            if time.time() > logs + LOGS_SECONDS:
                self._machine.keep_logs((SYSTEM, NAMESPACE))
                logs = time.time()
        self._machine.keep_logs((SYSTEM, NAMESPACE))

    def _look(self, subject: Subject, model: Json, workers: list[Json], at: float) -> None:
        self.looks += 1
        missing = len(self._ledger.missing(subject.name, at))
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

    def _lasting(self, model: str, what: str, wrong: bool, at: float, text: str) -> None:
        """Tells of it once, if it lasts."""
        if not wrong:
            self._since.pop((model, what), None)
            self._told.discard((model, what))
            return
        since = self._since.setdefault((model, what), at)
        if at - since >= LASTING_SECONDS and (model, what) not in self._told:
            self._told.add((model, what))
            self._ledger.violation(what, f"{model}: {text}")


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
    if ready and stable != spec.gain:
        ledger.violation("Ready means that the spec serves", f"{subject.name}: {told}")
    if not ready and spec.kind == GOOD and reason not in EXCUSED_ENDS:
        text = f"{subject.name}: {told}: {condition(model, 'Ready')['message']}"
        ledger.violation("a good spec is not refused", text)
    return told


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


def check_verified(traffic: Traffic, store: Store, ledger: Ledger) -> int:
    """Every revision that answered had passed its gate before, as the bucket tells. Returns how many there were."""
    root = f"trtmodel/{NAMESPACE}"
    passed: dict[str, float] = {}  # manifest digest -> since when, in seconds since the epoch
    for key in store.keys(ENGINES, f"{root}/gates/"):
        data, written = store.get(ENGINES, key)
        verdict = judge(loads(GateFigures, data), Thresholds(top1_delta=0.05)).verdict
        if verdict is Verdict.PASS:
            digest = key.removeprefix(f"{root}/gates/").split("/")[0]
            passed[digest] = min(written, passed.get(digest, written))
    firsts = traffic.firsts()
    for (model, name), first in firsts.items():
        manifests = [k for k in store.keys(ENGINES, f"{root}/engines/{name}/") if k.endswith("/manifest.json")]
        digests = [hashlib.sha256(store.get(ENGINES, key)[0]).hexdigest() for key in manifests]
        times = [passed[d] for d in digests if d in passed]
        if not times:
            ledger.violation("an unverified engine answered", f"{model}: {name} has no gate that passed: {digests}")
        elif first.at < min(times) - CLOCKS_SECONDS:
            early = min(times) - first.at
            ledger.violation("an unverified engine answered", f"{model}: {name} answered {early:.1f} s before its gate")
        if first.gain == sources.BAD_GAIN:
            ledger.violation("an unverified engine answered", f"{model}: {name} is the model of {FOLDER} that fails")
    return len(firsts)


def check_logs(machine: Machine, ledger: Ledger) -> None:
    """No pass of an operator failed in a way that nobody foresaw."""
    for file in sorted(machine.kept_logs.glob(f"{SYSTEM}_*/*/*.log")):
        for line in file.read_text(errors="replace").splitlines():
            if any(words in line for words in BUGS):
                ledger.violation("no bug in the operator's log", f"{file.relative_to(machine.kept_logs)}: {line[:300]}")
