"""The hollow cluster with troubles: Jobs that fail or never end, by the name of their source, and workers that say what
a test has them say, or do not believe the operator. It runs in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from hollow.client import Json, Kube
from hollow.controllers import Controllers
from hollow.workers import Fleet
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.control import ControlError, EngineReport, ModelReport, Report
from trtmodel_contract.jobs import TASK_ENV, JobResult, Reason

ENDLESS = "never-ends"  # parts of a source's address
FAILING = {"is-invalid": Reason.MODEL_INVALID, "is-out-of-reach": Reason.STORAGE_UNAVAILABLE}
REJECTED = 42
START_SECONDS = 60


class TroubledFleet(Fleet):
    """`says`: by model, what becomes of a worker's report. `unbelieving`: models whose workers know
    another key."""

    def __init__(self) -> None:
        super().__init__()
        self.says: dict[str, Callable[[Report], Report]] = {}
        self.unbelieving: set[str] = set()

    async def answer(self, ip: str, method: str, target: str, body: bytes) -> tuple[int, bytes]:
        model = self.workers[ip].model
        if model in self.unbelieving:
            return 401, dumps(ControlError("Unauthorized", "the key is not known here"))
        status, text = await super().answer(ip, method, target, body)
        if status == 200 and model in self.says:
            text = dumps(self.says[model](loads(Report, text)))
        return status, text


class TroubledControllers(Controllers):
    async def _end_job(self, job: Json) -> None:
        container = job["spec"]["template"]["spec"]["containers"][0]
        task = next(e["value"] for e in container["env"] if e["name"] == TASK_ENV)
        if ENDLESS in task:
            return
        for part, reason in FAILING.items():
            if part in task:
                await self._fail(job, JobResult(reason, f"it {part}"))
                return
        await super()._end_job(job)

    async def _fail(self, job: Json, result: JobResult) -> None:
        meta, template = job["metadata"], job["spec"]["template"]
        name, path = f"{meta['name'][:50]}-{meta['uid'][:5]}", f"/api/v1/namespaces/{meta['namespace']}/pods"
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"], "controller": True}
        await self._pod(meta["namespace"], name, owner, template)
        ended = {"terminated": {"exitCode": REJECTED, "message": dumps(result).decode()}}
        said = {
            "name": template["spec"]["containers"][0]["name"],
            "image": "worker:1",
            "imageID": "",
            "restartCount": 0,
        }
        status = {"phase": "Failed", "containerStatuses": [said | {"ready": False, "state": ended}]}
        await self._kube.merge(f"{path}/{name}/status", {"status": status})


class TroubledCluster:
    """Use as a context manager. `first` is the first address of workers."""

    def __init__(self, kubeconfig: Path, first: str) -> None:
        self.fleet = TroubledFleet()
        self._kubeconfig, self._first = kubeconfig, first
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="troubled cluster")
        self._task: asyncio.Task[None] | None = None
        self._begun = threading.Event()

    def __enter__(self) -> TroubledCluster:
        self._thread.start()
        assert self._begun.wait(START_SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None) -> None:
        assert self._task is not None
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(START_SECONDS)

    def news(self, *models: str) -> None:
        """Has the workers of these models say that something changed."""

        def tell() -> None:
            for worker in self.fleet.workers.values():
                if worker.model in models:
                    worker._changed()

        self._loop.call_soon_threadsafe(tell)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._control())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.close()

    async def _control(self) -> None:
        self._begun.set()
        async with Kube(self._kubeconfig) as kube:
            controllers = TroubledControllers(kube, self.fleet, first=self._first, job_seconds=0.1, load_seconds=0.1)
            try:
                await controllers.run()
            finally:
                await self.fleet.close()


def engines(report: Report, change: Callable[[EngineReport], EngineReport]) -> Report:
    """With each engine of the report changed."""
    models: dict[str, ModelReport] = {
        name: replace(model, engines=tuple(map(change, model.engines))) for name, model in report.models.items()
    }
    return replace(report, models=models)
