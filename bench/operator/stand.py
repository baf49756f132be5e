"""What is measured: a control plane, a hollow cluster, TRTModels, and one or two operators."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from hollow.client import Kube, Refused  # noqa: E402
from hollow.operators import NAMESPACE, OperatorProcess, total  # noqa: E402
from hollow.plane import ControlPlane  # noqa: E402
from localcluster.settings import KUBERNETES_VERSION as KUBERNETES_VERSION  # noqa: E402
from seed import SECRET, TEMPLATE, Etcd, Template  # noqa: E402

Json = dict[str, Any]

PER_NAMESPACE = 250
JOB_SECONDS = "1"  # no pod of a real one ends sooner
MODELS = "/apis/trtmodel.io/v1alpha1/trtmodels"  # of all namespaces
TICKS = os.sysconf("SC_CLK_TCK")
AT_ONCE = 64


@dataclass(frozen=True)
class Usage:
    """Of one process: CPU seconds so far, resident MiB now and at most."""

    cpu: float
    resident: float
    peak: float


def usage(pid: int) -> Usage:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident, peak = (int(status.get(name, "0").split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))  # none if it ended
    return Usage((int(fields[11]) + int(fields[12])) / TICKS, resident, peak)


AUDIT_POLICY = """
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  verbs: [create, update, patch]
  resources:
  - {group: trtmodel.io, resources: [trtmodels, trtmodels/status]}
  - {group: batch, resources: [jobs]}
- level: None
"""


class Audit:
    """When the API server was asked to write what, by its own clock: neither the time that it takes itself for a write
    nor this process's is in what lies between two of these."""

    def __init__(self, file: Path) -> None:
        self._file, self._policy = file, file.with_suffix(".yaml")
        self._policy.write_text(AUDIT_POLICY)

    def options(self) -> tuple[str, ...]:
        return "--audit-policy-file", str(self._policy), "--audit-log-path", str(self._file)

    def reactions(self, since: float) -> dict[tuple[str, str], float]:
        """Of each TRTModel whose spec was written since: seconds from the answer to that to the operator's first
        request to write its status or a Job of it."""
        written: dict[tuple[str, str], float] = {}
        found: dict[tuple[str, str], float] = {}
        for event in sorted(self._events(), key=lambda e: str(e["requestReceivedTimestamp"])):
            about, who = event["objectRef"], event["user"]["username"]
            key = about["namespace"], str(about.get("name", "")).partition("-resolve-")[0]
            if who != "operator" and (about["resource"], about.get("subresource")) == ("trtmodels", None):
                at = _seconds(event["stageTimestamp"])
                if at >= since:
                    written[key] = at
                    found.pop(key, None)
            elif who == "operator" and key in written:
                found.setdefault(key, max(0.0, _seconds(event["requestReceivedTimestamp"]) - written[key]))
        return found

    def _events(self) -> list[Json]:
        return [json.loads(line) for line in self._file.read_text().splitlines() if line.endswith("}")]


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text).timestamp()


class Stand:
    """Use as an async context manager. `workers` is the number of workers of each TRTModel. `seeded`: all of them serve
    when it begins."""

    def __init__(
        self, folder: Path, models: int, workers: int, environment: Mapping[str, str], *, seeded: bool
    ) -> None:
        self.folder, self.count, self.workers, self._seeded = folder, models, workers, seeded
        self.audit = Audit(folder / "audit.log")
        self.plane = ControlPlane(folder / "plane", *self.audit.options())
        self._environment = dict(environment)
        self._stack = contextlib.ExitStack()
        self.operators: list[OperatorProcess] = []

    async def __aenter__(self) -> Stand:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.plane)
            self.plane.install_crd(NAMESPACE, *sorted({namespace for namespace, _ in self.keys(self.count)}))
            if self._seeded:
                await self._seed()
            self._start_hollow(stack)
            while "workers go on" not in (self.folder / "hollow.log").read_text():
                if self.hollow.poll() is not None:
                    raise RuntimeError(f"the hollow cluster ended: see {self.folder / 'hollow.log'} (run with --keep)")
                await asyncio.sleep(0.2)
            self.kube = Kube(self.plane.kubeconfig("hollow"))
            await self.kube.__aenter__()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kube.__aexit__(None, None, None)
        self._stack.close()

    async def _seed(self) -> None:
        # etcd's values are JSON while the one is made that is copied; later the API server writes as it always does.
        plane, etcd = self.plane, Etcd(self.plane.etcd)
        plane.options, usual = (*plane.options, "--storage-media-type", "application/json"), plane.options
        plane.kill_server()
        plane.start_server()
        plane.kubectl("create", "namespace", TEMPLATE[0])
        with contextlib.ExitStack() as stack:
            self._start_hollow(stack)
            async with Kube(plane.kubeconfig("hollow")) as self.kube:
                operator = self.start_operator()
                operator.until(operator.leads)
                await self._create(TEMPLATE, "seed")
                while not settled(await self.kube.call("GET", model_path(TEMPLATE))):  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
                await asyncio.sleep(1.0)  # what it writes when all is done
                self.end(operator)
        template = Template.of(etcd, SECRET, "worker:1")
        plane.kill_server()
        etcd.delete(template.pairs)
        await asyncio.to_thread(etcd.put, template.copies(self.keys(self.count)))
        plane.options = usual
        plane.start_server()

    def _start_hollow(self, stack: contextlib.ExitStack) -> None:
        environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "hollow", str(self.plane.kubeconfig("hollow")), "--job-seconds", JOB_SECONDS]
        with (self.folder / "hollow.log").open("w") as log:
            self.hollow = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        stack.callback(self.hollow.wait)
        stack.callback(self.hollow.kill)

    def start_operator(self) -> OperatorProcess:
        name = f"operator-{len(self.operators) + 1}"
        config = self.plane.kubeconfig("operator")
        operator = OperatorProcess(config, self.folder, name, **self._environment)
        self._stack.enter_context(operator)
        self.operators.append(operator)
        return operator

    def end(self, operator: OperatorProcess, how: signal.Signals = signal.SIGTERM) -> None:
        operator.process.send_signal(how)
        operator.process.wait(30)

    def keys(self, count: int) -> Iterable[tuple[str, str]]:
        """Namespace and name of the first `count` models."""
        return ((f"team-{i // PER_NAMESPACE}", f"model-{i}") for i in range(count))

    async def create_models(self) -> None:
        await self._each(self.keys(self.count), self._create)

    async def change(self, keys: Iterable[tuple[str, str]], mark: str) -> dict[tuple[str, str], float]:
        """Each of them gets another source, and so another revision -> when the API server had taken it."""
        written: dict[tuple[str, str], float] = {}

        async def one(key: tuple[str, str]) -> None:
            await self.kube.merge(
                model_path(key), {"spec": {"source": {"uri": f"s3://models/{key[1]}/{mark}/model.onnx"}}}
            )
            written[key] = time.time()

        await self._each(keys, one)
        return written

    async def _create(self, key: tuple[str, str], source: str = "") -> None:
        body = {
            "apiVersion": "trtmodel.io/v1alpha1",
            "kind": "TRTModel",
            "metadata": {"namespace": key[0], "name": key[1]},
            "spec": spec(source or key[1], self.workers),
        }
        try:
            await self.kube.call("POST", model_path(key).rpartition("/")[0], body)
        except Refused as e:
            if e.status != 409:
                raise

    async def _each(self, keys: Iterable[tuple[str, str]], act: Any) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(key: tuple[str, str]) -> None:
            async with gate:
                await act(key)

        await asyncio.gather(*map(one, keys))


def spec(name: str, workers: int) -> Json:
    """Short holds, since what is measured is the operator and not the waiting."""
    step = {"weight": 100, "hold": "1s"}
    return {
        "source": {"uri": f"s3://models/{name}/v1/model.onnx"},
        "storage": {"bucket": "engines"},
        "engine": {"runtime": "ONNXRuntime"},
        "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz", "samples": 2000}},
        "serving": {"replicas": workers},
        "rollout": {
            "steps": [{"workers": 1, **step}, {"workers": "50%", **step}],
            "analysis": {"interval": "1s", "minRequests": 1000},
        },
    }


def model_path(key: tuple[str, str]) -> str:
    return f"/apis/trtmodel.io/v1alpha1/namespaces/{key[0]}/trtmodels/{key[1]}"


def settled(model: Json, mark: str = "") -> bool:
    """Ready, and with the source `mark` promoted."""
    conditions = {c["type"]: c["status"] for c in (model.get("status") or {}).get("conditions") or ()}
    current = (model.get("status") or {}).get("observedGeneration") == model["metadata"]["generation"]
    return conditions.get("Ready") == "True" and current and (not mark or f"/{mark}/" in model["spec"]["source"]["uri"])


def serving(operator: OperatorProcess) -> float:
    """Series of thousands of models cost the operator more than all else at rest: seldom asked for."""
    return total(operator.metrics(), "trtmodel_operator_model_stage", 'stage="Serving"')


def promoted(operator: OperatorProcess) -> float:
    name = "trtmodel_operator_swaps_total"
    return total(operator.metrics(name), name, 'result="Promoted"')


def passes(operator: OperatorProcess) -> float:
    name = "trtmodel_operator_reconcile_total"
    return total(operator.metrics(name), name, 'result="done"')


def api_requests(operator: OperatorProcess) -> float:
    name = "trtmodel_operator_api_requests_total"
    return total(operator.metrics(name), name)
