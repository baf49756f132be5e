"""Our worker as a server under measurement: real builds, a real boot pointer, and what the operator would send."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [str(ROOT / "worker"), str(ROOT / "contract")]
sys.path[:0] = PACKAGES
sys.path += map(str, (ROOT / "tests", ROOT / "tests" / "worker"))
# What an interpreter needs that has not these packages, or is found in an unusual place.
FOUND = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
FOUND["PYTHONPATH"] = os.pathsep.join([*PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])])

import numpy as np  # noqa: E402
from catalogue import Setup  # noqa: E402
from job_harness import Jobs, make_jobs, profiles, save_npz  # noqa: E402
from models import COLUMNS, BenchModel  # noqa: E402
from processes import free_port, tree  # noqa: E402
from trtmodel_contract.control import EngineState, ModelReport, SignedArtifact  # noqa: E402
from trtmodel_contract.gate import Task  # noqa: E402
from trtmodel_contract.identity import EngineSettings, LoadKey, Storage  # noqa: E402
from worker_harness import MODEL, Bucket, Operator, WorkerProcess  # noqa: E402

ROWS = 64  # of the data that the builds are judged by
BATCHES = (1, 8, 32)
PREPARE_SECONDS = 900.0
BUILD_SECONDS = 1800.0  # on a busy machine, too


@dataclass(frozen=True)
class Built:
    revision: str
    manifest_digest: str
    load_key: LoadKey


class Artifacts:
    """Both versions of the models, built as the Jobs build them, at most once a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs: dict[str, Jobs] = {}
        self._built: dict[tuple[str, int], Built] = {}

    def storage(self, model: BenchModel) -> Storage:
        return self._jobs_of(model).storage

    def get(self, model: BenchModel, version: int) -> Built:
        """Raises RuntimeError if the build fails."""
        key = model.name, version
        if key not in self._built:
            jobs = self._jobs_of(model)
            jobs.source = f"file://{model.versions[version - 1]}"
            code, result = jobs.build(**FOUND)
            if code or result.build is None:
                raise RuntimeError(f"{model.name}, version {version}, was not built: {result.message}")
            made = result.build.artifact
            self._built[key] = Built(result.build.revision, made.manifest_digest, made.load_key)
        return self._built[key]

    def _jobs_of(self, model: BenchModel) -> Jobs:
        if model.name not in self._jobs:
            folder = self._folder / model.name
            folder.mkdir(parents=True)
            rows = np.random.default_rng(2).permutation(np.tile(model.sample, (ROWS, 1)), axis=1)
            dataset = save_npz(folder / "eval.npz", **{model.input_name: rows})
            engine = EngineSettings("ONNXRuntime", profiles=profiles(model.input_name, COLUMNS, batches=BATCHES))
            self._jobs[model.name] = make_jobs(folder, model.versions[0], dataset, engine=engine, task=Task.RAW,
                                               seconds=BUILD_SECONDS)  # fmt: skip
        return self._jobs[model.name]


class OurServer:
    """A worker with every setting at its default but: `parallel` lanes in one host, gRPC open, the deadline. With
    `standby` it keeps the second version beside the first, as after any promotion."""

    def __init__(self, artifacts: Artifacts, setup: Setup, standby: bool = False) -> None:
        self._artifacts, self._model = artifacts, setup.model
        self._operator = Operator()
        bucket = Bucket(setup.folder / "unused")
        bucket.storage = artifacts.storage(setup.model)
        self._worker = WorkerProcess(
            setup.folder / "worker", self._operator, bucket,
            TRTMODEL_RUNTIME="ONNXRuntime", TRTMODEL_CONTEXTS=str(setup.parallel),
            TRTMODEL_GRPC_PORT=str(free_port()), TRTMODEL_REQUEST_TIMEOUT_SECONDS=f"{setup.deadline_seconds:g}",
            **FOUND,
        )  # fmt: skip
        self.port, self.metrics_port = self._worker.port, self._worker.metrics_port
        self._standby = self._signed(2) if standby else None
        built = artifacts.get(setup.model, 1)
        self._worker.point(self._signed(1), self._standby, load_key=built.load_key)

    def _signed(self, version: int) -> SignedArtifact:
        built = self._artifacts.get(self._model, version)
        return self._operator.artifact(built.revision, built.manifest_digest)

    def start(self) -> None:
        self._worker.start()
        if self._standby is not None:
            self._worker.wait_listening()
            self._wait_ready(self._standby)

    def wait_ready(self) -> None:
        self._worker.wait_ready()

    def alive(self) -> bool:
        return self._worker.process is not None and self._worker.process.poll() is None

    def pids(self) -> list[int]:
        return tree(self._worker.pid) if self.alive() else []

    def tail(self) -> str:
        return self._worker.tail() if self._worker.log.exists() else ""

    def new_version(self) -> None:
        self.change(1, 2)

    def change(self, former: int, to: int, keep: bool = True) -> None:
        """Version `former` serves; swap to the other one, and `keep` it as standby."""
        old, new = self._signed(former), self._signed(to)
        answer = self._worker.desire(old, new)
        if answer.status != 200:
            raise RuntimeError(f"the worker refused: {answer.status} {answer.body[:200]!r}")
        self._wait_ready(new)
        self._worker.desire(new, standby=old if keep else None)
        self._wait(lambda model: model.routes.stable == new.manifest_digest, f"{new.manifest_digest[:12]} is stable")

    def _wait_ready(self, artifact: SignedArtifact) -> None:
        """A preparation beside traffic is slow by intent: a tenth of the time at most is its own."""
        digest = artifact.manifest_digest
        self._wait(
            lambda model: any(e.manifest_digest == digest and e.state is EngineState.READY for e in model.engines),
            f"{digest[:12]} is ready",
        )

    def _wait(self, what: Callable[[ModelReport], bool], why: str) -> None:
        """By long poll, as the operator does: to ask again and again would take time from what is measured."""
        query, deadline = "", time.monotonic() + PREPARE_SECONDS
        while not what((report := self._worker.report(query)).models[MODEL.name]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {PREPARE_SECONDS:g} s: {why}\n{self.tail()}")
            query = f"?after={report.version}&wait=10s"

    def stop(self) -> None:
        if self._worker.process is not None:
            self._worker.stop()
