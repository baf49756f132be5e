"""What Kubernetes and the Jobs would do: Jobs end at once with a result, Deployments get pods that are Ready. Only a
build of a source below `HELD` never ends.

Does not model: scheduling, rolling updates, scale-in order, garbage collection, failures.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import logging
from collections.abc import Awaitable, Callable, Coroutine

from trtmodel_contract.codec import dumps, loads, sha256_hex
from trtmodel_contract.control import KEYS_FILE, POINTER_FILE, BootPointer
from trtmodel_contract.gate import GateFigures, OutputFigures, Top1Figures
from trtmodel_contract.identity import Calibration, Recipe, revision
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
from trtmodel_contract.signing import KeySet

from hollow.client import Json, Kube, Refused
from hollow.workers import LOAD_KEY, Fleet, HollowWorker

AT_ONCE = 32
NODE = "hollow"
LABEL_MODEL = "trtmodel.io/model"
LABEL_ROLE = "trtmodel.io/role"
ENV_MODEL_UID = "TRTMODEL_MODEL_UID"
HELD = "/held/"

log = logging.getLogger("hollow")


class Controllers:
    """`first` is the first address of workers, within 127.0.0.0/8."""

    def __init__(self, kube: Kube, fleet: Fleet, *, first: str, job_seconds: float, load_seconds: float) -> None:
        self._kube, self._fleet = kube, fleet
        self._job_seconds, self._load_seconds = job_seconds, load_seconds
        self._numbers = itertools.count(_number(first))
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._pods: dict[str, list[HollowWorker]] = {}  # by namespace/name of the Deployment
        self._of: dict[str, list[HollowWorker]] = {}  # by uid of the model
        self._pointers: dict[str, BootPointer] = {}
        self._keys: dict[str, tuple[str, ...]] = {}  # by uid of the model
        self._ended: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._adopt_pods()
        await asyncio.gather(
            self._follow("/apis/batch/v1/jobs", self._job),
            self._follow("/apis/apps/v1/deployments", self._deployment),
            self._follow("/api/v1/configmaps", self._config_map),
        )

    async def _adopt_pods(self) -> None:
        """Workers of pods that are there go on, from their pointers."""
        pods, _ = await self._kube.list_all("/api/v1/pods", f"{LABEL_ROLE}=worker")
        for pod in pods:
            meta, variables = pod["metadata"], pod["spec"]["containers"][0]["env"]
            model, uid = meta["labels"][LABEL_MODEL], next(e["value"] for e in variables if e["name"] == ENV_MODEL_UID)
            worker = HollowWorker(meta["name"], meta["uid"], model, uid, self._load_seconds)
            workload = f"{meta['namespace']}/{meta['ownerReferences'][0]['name']}"
            self._pods.setdefault(workload, []).append(worker)
            self._of.setdefault(uid, []).append(worker)
            await self._fleet.add(pod["status"]["podIP"], worker)
        for config_map in (await self._kube.list_all("/api/v1/configmaps", LABEL_MODEL))[0]:
            await self._config_map(config_map)
        log.info("%d workers go on", len(pods))
        taken = max((_number(pod["status"]["podIP"]) for pod in pods), default=0)
        self._numbers = itertools.count(max(taken + 1, next(self._numbers)))

    async def _follow(self, path: str, handle: Callable[[Json], Awaitable[None]]) -> None:
        async for kind, item in self._kube.watch(path, LABEL_MODEL):
            if kind != "DELETED":
                await handle(item)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        async def safely() -> None:
            try:
                await work
            except Exception:
                log.exception("a hollow controller failed")

        task = asyncio.create_task(safely())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _config_map(self, item: Json) -> None:
        data = item.get("data") or {}
        owner = item["metadata"]["ownerReferences"][0]["uid"]
        if KEYS_FILE in data:
            self._keys[owner] = tuple(sorted(loads(KeySet, data[KEYS_FILE]).keys))
            for worker in self._of.get(owner, ()):
                worker.key_ids = self._keys[owner]
        elif POINTER_FILE in data:
            pointer, workload = loads(BootPointer, data[POINTER_FILE]), _key(item)
            self._pointers[workload] = pointer
            for worker in self._pods.get(workload, ()):
                worker.boot(pointer)

    async def _deployment(self, item: Json) -> None:
        pods = self._pods.setdefault(_key(item), [])
        for _ in range(item["spec"]["replicas"] - len(pods)):
            meta = item["metadata"]
            owner = meta["ownerReferences"][0]
            worker = HollowWorker("", "", owner["name"], owner["uid"], self._load_seconds)
            worker.key_ids = self._keys.get(owner["uid"], ())
            pods.append(worker)
            self._of.setdefault(owner["uid"], []).append(worker)
            self._begin(self._make_worker(item, worker, len(pods)))

    async def _make_worker(self, deployment: Json, worker: HollowWorker, number: int) -> None:
        meta, template = deployment["metadata"], deployment["spec"]["template"]
        owner = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        worker.pod = f"{meta['name']}-{number}"
        address = next(self._numbers)
        ip = ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))
        pod = await self._pod(meta["namespace"], worker.pod, owner, template)
        worker.uid = pod["metadata"]["uid"]
        await self._fleet.add(ip, worker)
        if pointer := self._pointers.get(_key(deployment)):
            worker.boot(pointer)
        running = {"running": {"startedAt": _now()}}
        status = _status(template, running, ready=True) | {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}]}
        await self._kube.merge(f"{_pod_path(meta['namespace'])}/{worker.pod}/status", {"status": status})

    async def _job(self, item: Json) -> None:
        uid = item["metadata"]["uid"]
        ended = (item.get("status") or {}).get("conditions")
        if uid not in self._ended and not ended and not item["spec"].get("suspend") and not _is_held(item):
            self._ended.add(uid)
            self._begin(self._end_job(item))

    async def _end_job(self, job: Json) -> None:
        await asyncio.sleep(self._job_seconds)
        meta, template = job["metadata"], job["spec"]["template"]
        began = _now()
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"], "controller": True}
        name = f"{meta['name'][:50]}-{meta['uid'][:5]}"
        try:
            await self._pod(meta["namespace"], name, owner, template)
            message = dumps(result_of(template["spec"]["containers"][0])).decode()
            ended = {"terminated": {"exitCode": 0, "message": message, "startedAt": began, "finishedAt": _now()}}
            status = _status(template, ended, ready=False) | {"phase": "Succeeded"}
            await self._kube.merge(f"{_pod_path(meta['namespace'])}/{name}/status", {"status": status})
            conditions = [
                {"type": kind, "status": "True", "reason": "CompletionsReached", "lastTransitionTime": _now()}
                for kind in ("SuccessCriteriaMet", "Complete")
            ]
            done: Json = {"startTime": began, "completionTime": _now(), "succeeded": 1, "conditions": conditions}
            path = f"/apis/batch/v1/namespaces/{meta['namespace']}/jobs/{meta['name']}/status"
            await self._kube.merge(path, {"status": done | {"uncountedTerminatedPods": {}}})
        except Refused as e:
            if e.status != 404:  # the Job was deleted meanwhile
                raise

    async def _pod(self, namespace: str, name: str, owner: Json, template: Json) -> Json:
        meta = {
            "name": name,
            "namespace": namespace,
            "labels": template["metadata"]["labels"],
            "ownerReferences": [owner],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"] | {"nodeName": NODE}}
        async with self._gate:
            return await self._kube.call("POST", _pod_path(namespace), pod)


def result_of(container: Json) -> JobResult:
    """What a Job with this container finds out. The content of a source is its address, and every engine is good."""
    text = next(e["value"] for e in container["env"] if e["name"] == TASK_ENV)
    if container["args"] == ["build"]:
        return _built(loads(BuildTask, text))
    task = loads(ResolveTask, text)
    content, data = sha256_hex(task.source_uri.encode()), sha256_hex(task.dataset.uri.encode())
    digest = sha256_hex(task.calibration.data.uri.encode()) if task.calibration else ""
    calibration = Calibration(digest, task.calibration.data.samples) if task.calibration else None
    name = revision(Recipe(content, task.engine, calibration))
    return JobResult(Reason.DONE, "", resolve=ResolveResult(content, 1, name, digest, data, (), ()))


def _is_held(job: Json) -> bool:
    container = job["spec"]["template"]["spec"]["containers"][0]
    return container["args"] == ["build"] and any(HELD in e.get("value", "") for e in container["env"])


def _built(task: BuildTask) -> JobResult:
    digest = sha256_hex(f"{task.model.uid} {task.revision}".encode())
    outputs = {"out": OutputFigures(0.999, 0.99, 0.001, 0.01, 0, False)}
    figures = GateFigures(digest, task.dataset.digest, task.verify_task, 2000, False, outputs, Top1Figures(0))
    artifact = FoundArtifact(LOAD_KEY, digest, 1, "", figures)
    build = BuildResult(task.revision, artifact, False, 1, 1.0, 1.0, "2026-01-01T00:00:00Z")
    return JobResult(Reason.DONE, "", build=build)


def _status(template: Json, state: Json, *, ready: bool) -> Json:
    container = template["spec"]["containers"][0]
    said = {"name": container["name"], "image": container["image"], "imageID": "hollow", "restartCount": 0}
    kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    text = "True" if ready else "False"
    conditions = [{"type": k, "status": text if "Ready" in k else "True", "lastTransitionTime": _now()} for k in kinds]
    return {"conditions": conditions, "containerStatuses": [said | {"ready": ready, "started": ready, "state": state}]}


def _pod_path(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}/pods"


def _key(item: Json) -> str:
    return f"{item['metadata']['namespace']}/{item['metadata']['name']}"


def _number(ip: str) -> int:
    a, b, c, d = map(int, ip.split("."))
    return (a << 24) + (b << 16) + (c << 8) + d


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
