"""A bucket in a directory, and Jobs as the operator starts them: environment in, termination message out."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.identity import EngineSettings, ModelRef, Profile, ShapeRange, Storage
from trtmodel_contract.jobs import BuildTask, CalibrationRequest, DataSet, JobResult, ResolveResult, ResolveTask

MODEL = ModelRef("ml", "test", "uid-1")


@dataclass
class Jobs:
    """One model's Jobs. Change the fields between runs as a user changes the manifest."""

    folder: Path
    source: str
    engine: EngineSettings
    dataset: DataSet
    task: Task = Task.RAW
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)
    calibration: CalibrationRequest | None = None
    pin: str = ""
    endpoint: str = ""
    runs: int = 0
    seconds: float = 100.0  # for one Job

    @property
    def storage(self) -> Storage:
        return Storage("engines", endpoint=self.endpoint or f"file://{self.folder / 'bucket'}")

    @property
    def bucket(self) -> Path:
        return self.folder / "bucket/engines/trtmodel/ml"

    def resolve(self, **environment: str) -> tuple[int, JobResult]:
        return self.run("resolve", self.resolve_task(), **environment)

    def resolve_task(self, **changes: Any) -> ResolveTask:
        return ResolveTask(
            MODEL,
            self.source,
            self.pin,
            self.storage,
            self.engine,
            self.calibration,
            self.dataset,
            self.task,
            **changes,
        )

    def build_task(self, resolved: ResolveResult) -> BuildTask:
        calibration = self.calibration
        if calibration is not None:
            data = dataclasses.replace(calibration.data, digest=resolved.calibration_digest)
            calibration = dataclasses.replace(calibration, data=data)
        return BuildTask(
            MODEL,
            self.source,
            resolved.source_sha256,
            resolved.revision,
            self.storage,
            self.engine,
            calibration,
            dataclasses.replace(self.dataset, digest=resolved.dataset_digest),
            self.task,
            self.thresholds,
        )

    def build(self, resolved: ResolveResult | None = None, **environment: str) -> tuple[int, JobResult]:
        if resolved is None:
            code, result = self.resolve(**environment)
            assert code == 0, result.message
            assert result.resolve is not None
            resolved = result.resolve
        return self.run("build", self.build_task(resolved), **environment)

    def run(self, kind: str, task: Any, **environment: str) -> tuple[int, JobResult]:
        self.runs += 1
        log = self.folder / f"termination-{self.runs}"
        variables = {
            **os.environ,
            "TRTMODEL_TASK": task if isinstance(task, str) else dumps(task).decode(),
            "TRTMODEL_CACHE_DIR": str(self.folder / f"cache-{self.runs}"),
            "TRTMODEL_TERMINATION_LOG": str(log),
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-m", "trtmodel_worker", kind], env=variables, timeout=self.seconds, check=False
        )
        return done.returncode, loads(JobResult, log.read_bytes())

    def objects(self) -> list[str]:
        return sorted(str(p.relative_to(self.bucket)) for p in self.bucket.rglob("*") if p.is_file())


def save_npz(path: Path, **arrays: np.ndarray) -> DataSet:
    np.savez(path, **arrays)
    return DataSet(f"file://{path}", 1000)


def profiles(name: str, *rest: int, batches: tuple[int, int, int] = (1, 4, 8)) -> tuple[Profile, ...]:
    low, best, high = ((size, *rest) for size in batches)
    return (Profile({name: ShapeRange(low, best, high)}),)


def make_jobs(folder: Path, source: Path, dataset: DataSet, **changes: Any) -> Jobs:
    (folder / "bucket/engines").mkdir(parents=True, exist_ok=True)
    engine = changes.pop("engine")
    return Jobs(folder, f"file://{source}", engine, dataset, **changes)
