"""The world of the kill matrix: a bucket and a cache at one place, put back before each run; what must hold in it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as models
from job_harness import Jobs, make_jobs, profiles, save_npz
from trtmodel_contract import storelayout as layout
from trtmodel_contract.codec import dumps, loads, sha256_hex
from trtmodel_contract.control import SignedArtifact
from trtmodel_contract.gate import GateFigures, judge
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import JobResult
from trtmodel_contract.manifest import Manifest
from trtmodel_worker.engines.registry import runtime
from trtmodel_worker.front.artifacts import Artifacts, Refused
from trtmodel_worker.host import proving
from trtmodel_worker.storage import ArtifactStore

NEVER = -1
RANDOM_NAME = re.compile(r"[0-9a-f]{32,64}|work-\w{8}|/tmp\w{8}")
VARYING = re.compile(rb"[0-9a-f]{64}|[0-9.]+")
RANDOM = np.random.default_rng(5)


class KillServer:
    """Forks Jobs; see kill_server.py."""

    def __init__(self, errors: Path) -> None:
        self._log = errors.open("wb")
        command = [sys.executable, str(Path(__file__).with_name("kill_server.py"))]
        # One thread each: many small Jobs are quicker so, and answers do not depend on how sums are cut.
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=variables
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server of Jobs ended"
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        self._process.communicate()
        self._log.close()


def visible(operations: Sequence[str]) -> list[int]:
    """Between the others nothing happens that another Job could see: a call of the storage is about to begin, a file is
    there but empty, or was just renamed or linked, after which its first name is removed."""
    return [at for at, name in enumerate(operations) if name.startswith(("before ", "opened ", "os.remove "))]


@dataclass(frozen=True)
class Ran:
    """How a Job ended. `status` is negative for a signal; `result` is what it left as its last word."""

    status: int
    operations: tuple[str, ...]
    result: JobResult | None


class World:
    """What lies in `folder`/run is what Jobs can change; the source and the data sets lie beside it."""

    def __init__(self, folder: Path, server: KillServer) -> None:
        self.folder, self.server = folder, server
        self.run = folder / "run"
        source = models.linear(folder / "model.onnx")
        data = save_npz(folder / "eval.npz", x=RANDOM.normal(size=(24, 8)).astype(np.float32))
        engine = EngineSettings("ONNXRuntime", profiles=profiles("x", 8, batches=(1, 2, 2)))
        self.jobs: Jobs = make_jobs(self.run, source, data, engine=engine)
        self.templates: dict[str, Path] = {}

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.jobs.storage, "ml", None)

    def path(self, key: str) -> Path:
        return self.run / "bucket/engines" / key

    def keep_as(self, name: str) -> None:
        """What is there now is where `put_back` goes."""
        self.templates[name] = self.folder / name
        shutil.copytree(self.run, self.folder / name)

    def put_back(self, name: str) -> None:
        shutil.rmtree(self.run)
        shutil.copytree(self.templates[name], self.run)

    def state(self) -> str:
        """A hash of what lies in the run's folder, random names, times and sizes of memory left out: what follows from
        one state need be shown only once."""
        found = []
        for path in self.run.rglob("*"):
            name = str(path.relative_to(self.run))
            if "/work-" in str(Path(name).parent):
                continue  # no other Job looks into it
            content = path.read_bytes() if path.is_file() else b""
            found.append(f"{RANDOM_NAME.sub('*', name)} {sha256_hex(VARYING.sub(b'*', content))}")
        return sha256_hex("\n".join(sorted(found)).encode())

    def job(self, kind: str, task: Any, at: int = NEVER, do: str = "run", pod: str = "pod") -> Ran:
        command = self._command(kind, task, at, pod)
        answer = self.server.ask(do=do, **command)
        return self._ran(answer, pod)

    def begin(self, kind: str, task: Any, at: int, pod: str) -> bool:
        """True: it waits at that operation. False: it ended before."""
        paused: bool = self.server.ask(do="begin", **self._command(kind, task, at, pod))["paused"]
        return paused

    def finish(self, pod: str) -> Ran:
        return self._ran(self.server.ask(do="finish"), pod)

    def _command(self, kind: str, task: Any, at: int, pod: str) -> dict[str, Any]:
        log = self.folder / f"last-word-{pod}"
        log.unlink(missing_ok=True)
        return {
            "kind": kind,
            "at": at,
            "watched": str(self.run),
            "stderr": str(self.folder / f"log-{pod}"),
            "environment": {
                "TRTMODEL_TASK": dumps(task).decode(),
                # One cache for all, as on a volume that a user mounts: what a killed Job left is found by the next.
                "TRTMODEL_CACHE_DIR": str(self.run / "cache"),
                "TRTMODEL_TERMINATION_LOG": str(log),
            },
        }

    def _ran(self, answer: dict[str, Any], pod: str) -> Ran:
        log = self.folder / f"last-word-{pod}"
        result = loads(JobResult, log.read_bytes()) if answer["status"] >= 0 and log.exists() else None
        return Ran(answer["status"], tuple(answer["operations"]), result)

    def committed(self) -> Iterator[tuple[layout.BuildKey, str, bool]]:
        """(build, digest of its manifest, whether it is revoked) of all that lie in the bucket."""
        keys = [layout.parse_build(self.store.root, key) for key in self.store.objects.list(f"{self.store.root}/")]
        markers = {dataclasses.replace(key, marker=False) for key in keys if key is not None and key.marker}
        for key in keys:
            if key is not None and not key.marker:
                path = layout.manifest_key(self.store.root, key.revision, key.load_key, key.number)
                yield key, sha256_hex(self.path(path).read_bytes()), key in markers

    def load(self, digest: str) -> Manifest:
        """As a worker does it, up to its self-test. Raises Refused."""
        artifacts = Artifacts(self.store, self.folder / "worker-cache")
        shutil.rmtree(self.folder / "worker-cache", ignore_errors=True)
        here = runtime("ONNXRuntime")
        revision = self.store.get_manifest(digest).revision
        signed = SignedArtifact(revision, digest, signature=None)  # type: ignore[arg-type]
        manifest = artifacts.manifest(signed, here.load_key())
        payload = artifacts.payload(manifest)
        try:
            plan, *goldens = (os.pread(fd, size, 0) for fd, size in (payload.plan, *payload.goldens))
        finally:
            payload.close()
        engine = here.load(memoryview(plan), manifest.profiles, 1)
        proving.self_test([engine.create_lane()], proving.read_samples(manifest, goldens), manifest.outputs)
        return manifest

    def require_sound(self, damaged: frozenset[str] = frozenset()) -> None:
        """Whatever was killed: one engine at most, and workers can load it. `damaged` ones are refused."""
        in_use = [digest for _, digest, revoked in self.committed() if not revoked]
        assert len(in_use) <= 1, in_use
        for _, digest, _ in self.committed():
            if digest in damaged:
                try:
                    self.load(digest)
                except Refused:
                    continue
                raise AssertionError("a worker loads a damaged engine")
            self.load(digest)

    def require_ended_well(self, ran: Ran, whole: Ran, damaged: frozenset[str] = frozenset()) -> None:
        """The same answer as of a Job that nobody killed, and one engine, which is the one that is named."""
        assert (ran.status, whole.status) == (0, 0), (self.folder / "log-pod").read_text()[-3000:]
        assert ran.result is not None
        assert whole.result is not None
        assert ran.result.reason is whole.result.reason
        assert ran.result.build is not None
        assert whole.result.build is not None
        artifact = ran.result.build.artifact
        assert [digest for _, digest, revoked in self.committed() if not revoked] == [artifact.manifest_digest]
        self.require_sound(damaged)
        found, expected = artifact.figures, whole.result.build.artifact.figures
        assert found is not None
        assert expected is not None
        assert found.manifest_digest == artifact.manifest_digest
        assert measured(found) == measured(expected)
        data = self.jobs.dataset
        digest = ran.result.build.artifact.figures.dataset_digest if artifact.figures else ""
        assert self.store.get_figures(artifact.manifest_digest, digest, self.jobs.task, data.samples) == found
        assert judge(found, self.jobs.thresholds) == judge(expected, self.jobs.thresholds)


def measured(figures: GateFigures) -> Any:
    """What does not depend on which build it was."""
    return figures.outputs, figures.samples, figures.top1, figures.shapes_checked, figures.dataset_digest
