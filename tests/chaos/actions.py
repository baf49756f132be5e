"""What each kind of a plan does. Each runs in a thread of its own, and says what it did.

Before anything is killed the ledger is told what must be forgiven for it. Nothing is done to a worker unless another
one of its model serves that was left alone lately: what happens without any worker is no question.
"""

from __future__ import annotations

import contextlib
import datetime
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from e2e.cluster import Cluster, Json, Refused
from e2e.world import is_ready

from chaos import plan
from chaos.ledger import BROKEN_SECONDS, GRACE_SECONDS, THAW_SECONDS, Ledger
from chaos.machine import Machine
from chaos.plan import Action
from chaos.subject import NAMESPACE, RELEASE, SYSTEM, Away, Subject, asked, patiently

CANARY_SECONDS = 60.0  # that an edit waits for a canary
JOB_SECONDS = 45.0  # that a kill waits for a Job to run
READY_SECONDS, ALONE_SECONDS = 20.0, 40.0  # ready and left alone for so long: a worker that others may lean on
AGAIN_SECONDS = 1.0  # from one look for new operators to the next
KNOWN_SECONDS = 5.0  # after kubelet or API server came back
HUNG_SECONDS = 65.0  # three probes of 10 s, each with 5 s, and 10 s for its end: after that the kubelet has ended it
RESTARTS = 2  # of a container; after more the kubelet would wait for minutes before it starts it again
FORCED: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": 0}
API_SERVER = "kube-apiserver"
API_SECONDS = 90.0  # until it is ready
HOST = "trtmodel_worker.host"


class Skipped(Exception):
    """There was nothing that it could be done to; the reason."""


@dataclass(frozen=True)
class Scene:
    cluster: Cluster
    machine: Machine
    ledger: Ledger
    subjects: Mapping[str, Subject]
    over: threading.Event


def perform(scene: Scene, action: Action) -> bool:
    """Whether it was done. What it did is told; raises only what is a fault of the test itself."""
    what, begin = f"{action.model}: " if action.model else "", time.time()
    try:
        told = KINDS[action.kind](scene, action)
    except (Skipped, Away) as e:
        scene.ledger.tell(f"({action.kind})", f"{what}skipped: {e}")
        return False
    scene.ledger.did(action.kind, action.model, begin)
    scene.ledger.tell(action.kind, what + told)
    return True


# ---------------------------------------------------------------------------------------------------------- people


def _good(scene: Scene, action: Action) -> str:
    return f"the spec has gain {scene.subjects[action.model].change(plan.GOOD, action.pick).gain}"


def _bad(scene: Scene, action: Action) -> str:
    scene.subjects[action.model].change(action.kind)
    return "the spec's FP16 overflows" if action.kind == plan.BAD_GATE else "the spec's source is a page of HTML"


def _edit(scene: Scene, action: Action) -> str:
    subject = scene.subjects[action.model]
    candidate = _canary(subject)
    return f"while {candidate} is on trial, the spec gets gain {subject.change(plan.GOOD, action.pick).gain}"


def _abort(scene: Scene, action: Action) -> str:
    subject = scene.subjects[action.model]
    return subject.command(f"abort@{_canary(subject)}")


def _canary(subject: Subject) -> str:
    if candidate := subject.wait_canary(CANARY_SECONDS):
        return candidate
    raise Skipped(f"no canary in {CANARY_SECONDS:g} s")


def _rollback(scene: Scene, action: Action) -> str:
    return scene.subjects[action.model].command("rollback")


def _scale(scene: Scene, action: Action) -> str:
    return f"{scene.subjects[action.model].scale(action.pick)} replicas"


# -------------------------------------------------------------------------------------------------- operator, Jobs


def _operator_pods(scene: Scene) -> list[Json]:
    selector = f"app.kubernetes.io/instance={RELEASE}"
    return _pods(scene, f"/api/v1/namespaces/{SYSTEM}/pods", selector)


def _operator(scene: Scene, action: Action) -> Json:
    """The leader in three of four cases, else another one."""
    pods = [p for p in _operator_pods(scene) if _container(p)]
    if not pods:
        raise Skipped("no operator runs")
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{SYSTEM}/leases/{RELEASE}"
    holder = str(asked(lambda: scene.cluster.request("GET", lease))["spec"].get("holderIdentity", ""))
    leading = [p for p in pods if holder.startswith(f"{p['metadata']['name']}_")]
    others = [p for p in pods if p not in leading]
    return ((leading or others) if action.pick < 0.75 else (others or leading))[0]


def _operator_kill(scene: Scene, action: Action) -> str:
    pod = _operator(scene, action)
    if _restarts(pod) >= RESTARTS:  # a new pod instead, which starts at once
        return _operator_pod(scene, action)
    return f"SIGKILL to {_name(pod)}, process {_signalled(scene, pod, signal.SIGKILL)}"


def _operator_pod(scene: Scene, action: Action) -> str:
    pod = _operator(scene, action)
    _delete(scene, pod)
    return f"{_name(pod)} is deleted without grace"


def _operator_freeze(scene: Scene, action: Action) -> str:
    pod = _operator(scene, action)
    begin, pid = time.time(), _signalled(scene, pod, signal.SIGSTOP)
    scene.ledger.tell(action.kind, f"{_name(pod)}, process {pid} stands still for {action.seconds:g} s")
    scene.over.wait(action.seconds)
    if not scene.machine.thaw(pid):
        return f"{_name(pod)} was ended meanwhile"
    stood = time.time() - begin
    if stood > HUNG_SECONDS and scene.ledger.saw_since(begin):
        scene.ledger.violation("what hangs is started again", f"{_name(pod)} stood still for {stood:.0f} s")
    return f"{_name(pod)} goes on"


def _job_kill(scene: Scene, action: Action) -> str:
    deadline = time.monotonic() + JOB_SECONDS
    while time.monotonic() < deadline and not scene.over.wait(0.5):
        pods = _model_pods(scene, action.model, "job")
        running = [p for p in pods if p["status"].get("phase") == "Running" and _container(p)]
        if running:
            pod = running[int(action.pick * len(running))]
            return f"SIGKILL to {_name(pod)}, process {_signalled(scene, pod, signal.SIGKILL)}"
    raise Skipped(f"no Job runs in {JOB_SECONDS:g} s")


# -------------------------------------------------------------------------------------------------------- workers


def _worker(scene: Scene, action: Action) -> Json:
    """One of two or more that are ready, such that another was left alone lately."""
    at = time.time()
    ready = [p for p in _model_pods(scene, action.model, "worker") if is_ready(p) and _container(p)]
    hit = scene.ledger.hit_lately(action.model, at, ALONE_SECONDS)
    steady = [p for p in ready if _uid(p) not in hit and _ready_since(p) <= at - READY_SECONDS]
    if not ready or not scene.ledger.sees(at, KNOWN_SECONDS):
        raise Skipped("no worker is known to be ready")
    pod = ready[int(action.pick * len(ready))]
    if not [p for p in steady if p is not pod]:
        raise Skipped(f"all would depend on {_name(pod)}")
    return pod


def _worker_kill(scene: Scene, action: Action) -> str:
    pod = _worker(scene, action)
    if _restarts(pod) >= RESTARTS:
        return _worker_pod(scene, action)
    _forgive(scene, action, pod, BROKEN_SECONDS)
    return f"SIGKILL to {_name(pod)}, process {_signalled(scene, pod, signal.SIGKILL)}"


def _worker_pod(scene: Scene, action: Action) -> str:
    pod = _worker(scene, action)
    _forgive(scene, action, pod, BROKEN_SECONDS)
    _delete(scene, pod)
    return f"{_name(pod)} is deleted without grace"


def _worker_freeze(scene: Scene, action: Action) -> str:
    pod = _worker(scene, action)
    _forgive(scene, action, pod, action.seconds + THAW_SECONDS)
    pid = _signalled(scene, pod, signal.SIGSTOP)
    scene.ledger.tell(action.kind, f"{_name(pod)}, process {pid} stands still for {action.seconds:g} s")
    scene.over.wait(action.seconds)
    return f"{_name(pod)} goes on" if scene.machine.thaw(pid) else f"{_name(pod)} was ended meanwhile"


def _host_kill(scene: Scene, action: Action) -> str:
    pod = _worker(scene, action)
    _forgive(scene, action, pod, BROKEN_SECONDS)
    return f"SIGKILL to an engine host of {_name(pod)}, process {_signalled(scene, pod, signal.SIGKILL, HOST)}"


def _worker_cut(scene: Scene, action: Action) -> str:
    """The operators cannot reach it, those that come meanwhile neither; clients can."""
    workers = [p for p in _model_pods(scene, action.model, "worker") if _address(p)]
    if not workers:
        raise Skipped("no worker runs")
    pod = workers[int(action.pick * len(workers))]
    worker, cut = _address(pod), set[str]()
    scene.ledger.tell(action.kind, f"{_name(pod)} is cut off from all operators for {action.seconds:g} s")
    deadline = time.monotonic() + action.seconds
    while True:
        with contextlib.suppress(Away):
            for operator in {_address(p) for p in _operator_pods(scene)} - cut - {""}:
                scene.machine.cut(operator, worker)
                cut.add(operator)
        left = deadline - time.monotonic()
        if left <= 0 or scene.over.wait(min(left, AGAIN_SECONDS)):
            break
    lost = sum(scene.machine.mend(operator, worker) for operator in cut)
    return f"{_name(pod)} can be reached again by {len(cut)} operators, {_lost(scene, action, lost)}"


def _lost(scene: Scene, action: Action, packets: int) -> str:
    scene.ledger.lost(action.kind, packets)
    return f"{packets} packets were lost"


def _forgive(scene: Scene, action: Action, pod: Json, seconds: float) -> None:
    scene.ledger.excuse(action.model, seconds)
    scene.ledger.hit(action.model, _uid(pod), seconds + GRACE_SECONDS)


# -------------------------------------------------------------------------------------------------------- machine


def _component(scene: Scene, action: Action, name: str) -> str:
    with scene.machine.alone:
        scene.ledger.blind(action.seconds)
        pid = scene.machine.kill_component(name)
        scene.ledger.tell(action.kind, f"SIGKILL to {name}, process {pid}, for {action.seconds:g} s")
        scene.over.wait(action.seconds)
        scene.machine.start_components()
        if name == API_SERVER:
            _wait_api_server(scene)
            scene.machine.restart_followers()
        scene.ledger.blind(0.0)  # it may have been longer than was meant
    return f"{name} is back"


def _wait_api_server(scene: Scene) -> None:
    deadline = time.monotonic() + API_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(Away):
            asked(lambda: scene.cluster.text("/readyz"))
            return
        time.sleep(0.2)
    raise RuntimeError(f"the API server is not ready after {API_SECONDS:g} s")


def _kubelet(scene: Scene, action: Action) -> str:
    return _component(scene, action, "kubelet")


def _api_server(scene: Scene, action: Action) -> str:
    return _component(scene, action, API_SERVER)


def _s3(scene: Scene) -> Json:
    pods = [p for p in _pods(scene, "/api/v1/namespaces/s3/pods", "app=s3") if _address(p)]
    if not pods:
        raise Skipped("no S3 runs")
    return pods[0]


def _s3_pod(scene: Scene, _: Action) -> str:
    pod = _s3(scene)
    _delete(scene, pod)
    return f"{_name(pod)} is deleted without grace"


def _s3_cut(scene: Scene, action: Action) -> str:
    pod = _s3(scene)
    scene.machine.cut(_address(pod))
    scene.ledger.tell(action.kind, f"no pod reaches {_name(pod)} for {action.seconds:g} s")
    scene.over.wait(action.seconds)
    lost = scene.machine.mend(_address(pod))
    return f"{_name(pod)} can be reached again, {_lost(scene, action, lost)}"


KINDS: Mapping[str, Callable[[Scene, Action], str]] = {
    plan.GOOD: _good, plan.BAD_GATE: _bad, plan.BAD_FILE: _bad, plan.EDIT: _edit, plan.ABORT: _abort,
    plan.ROLLBACK: _rollback, plan.SCALE: _scale,
    plan.OPERATOR_KILL: _operator_kill, plan.OPERATOR_POD: _operator_pod, plan.OPERATOR_FREEZE: _operator_freeze,
    plan.JOB_KILL: _job_kill,
    plan.WORKER_KILL: _worker_kill, plan.WORKER_POD: _worker_pod, plan.WORKER_FREEZE: _worker_freeze,
    plan.HOST_KILL: _host_kill, plan.WORKER_CUT: _worker_cut,
    plan.KUBELET: _kubelet, plan.API_SERVER: _api_server,
    plan.S3_POD: _s3_pod, plan.S3_CUT: _s3_cut,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ what is there


def _pods(scene: Scene, path: str, selector: str) -> list[Json]:
    """That are not on their way out. Raises Away."""
    found = asked(lambda: scene.cluster.items(path, selector))
    return [p for p in found if "deletionTimestamp" not in p["metadata"]]


def _model_pods(scene: Scene, model: str, role: str) -> list[Json]:
    selector = f"trtmodel.io/model={model},trtmodel.io/role={role}"
    return _pods(scene, f"/api/v1/namespaces/{NAMESPACE}/pods", selector)


def _signalled(scene: Scene, pod: Json, number: int, words: str = "") -> int:
    if pid := scene.machine.signal_in(_container(pod), number, words):
        return pid
    raise Skipped(f"{_name(pod)} has no such process any more")


def _delete(scene: Scene, pod: Json) -> None:
    meta = pod["metadata"]
    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
    options = {**FORCED, "preconditions": {"uid": meta["uid"]}}
    try:
        patiently(lambda: scene.cluster.request("DELETE", path, options), scene.over)
    except Refused as e:  # it is gone, or another one
        raise Skipped(str(e)) from e


def _container(pod: Json) -> str:
    """The id of its container that runs; '' if it does not."""
    for status in pod["status"].get("containerStatuses") or ():
        if "running" in (status.get("state") or {}):
            return str(status.get("containerID", "")).rpartition("/")[2]
    return ""


def _restarts(pod: Json) -> int:
    return sum(s.get("restartCount", 0) for s in pod["status"].get("containerStatuses") or ())


def _ready_since(pod: Json) -> float:
    """Seconds since the epoch."""
    for c in pod["status"].get("conditions") or ():
        if c["type"] == "Ready" and c["status"] == "True":
            return datetime.datetime.fromisoformat(c["lastTransitionTime"]).timestamp()
    return time.time()


def _address(pod: Json) -> str:
    return str(pod["status"].get("podIP", ""))


def _name(pod: Json) -> str:
    return str(pod["metadata"]["name"])


def _uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])
