"""Clients of other makers, each in a virtual environment of its own that is made once and kept."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from free_ports import free_port
from trtmodel_contract.manifest import TensorSpec
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "trtmodel"
PROGRAMS = Path(__file__).parent / "programs"
MAKE_SECONDS = 900
RUN_SECONDS = 100  # KServe's client alone imports for 15 s on a busy machine


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and where programs of it find libraries that it lacks."""

    directory: Path

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    def run(self, command: Sequence[str], environment: dict[str, str] | None = None) -> str:
        """What it printed. AssertionError with everything that it said unless it ended with 0."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def program(self, name: str, *arguments: str) -> str:
        return self.run([self.python, str(PROGRAMS / name), *arguments])


def environment(packages: Sequence[str], more: Callable[[Path], None] = lambda _: None) -> Environment:
    """Made from the package registry unless it is there; `more` adds to it. Fails where a package has nothing for
    this platform."""
    key = hashlib.sha256(repr((sorted(packages), sys.version_info[:2])).encode()).hexdigest()[:16]
    directory = CACHE / f"clients-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"clients-{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test processes want it at once
        if not (directory / ".ready").exists():
            _tool("uv", "venv", "--quiet", "--clear", "--python", sys.executable, str(directory))
            _tool("uv", "pip", "install", "--quiet", "--python", str(directory / "bin" / "python"), *packages)
            more(directory)
            (directory / ".ready").touch()
    return Environment(directory)


def _tool(*command: str, cwd: Path | None = None) -> None:
    if command[0] == "uv":
        command = (sys.executable, "-m", *command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_SECONDS, check=False, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def triton() -> Environment:
    return environment(["tritonclient[http,grpc]==2.73.0", "numpy<3"])


@pytest.fixture(scope="session")
def kserve() -> Environment:
    return environment(["kserve==0.21.0"])


@pytest.fixture(scope="session")
def schemathesis() -> Environment:
    return environment(["schemathesis==4.32.5"])


@pytest.fixture(scope="session")
def perf_analyzer() -> Callable[..., str]:
    """Runs perf_analyzer. Its own wheels need glibc 2.38, newer than Debian 12's; until 2.47 the wheels of
    tritonclient carried it, built for an older one. It wants two libraries beside it."""
    libraries = ["nvidia-cuda-runtime-cu12==12.4.127"]
    made = environment(["tritonclient==2.47.0", *libraries], _libb64)
    site = next(made.directory.glob("lib/python*/site-packages"))
    path = f"{made.directory / 'libb64'}:{site / 'nvidia' / 'cuda_runtime' / 'lib'}"
    return lambda *arguments: made.run(
        [str(made.directory / "bin" / "perf_analyzer"), *arguments], {"LD_LIBRARY_PATH": path}
    )


def _libb64(directory: Path) -> None:
    _tool("apt-get", "update", "--quiet")
    _tool("apt-get", "download", "--quiet", "libb64-0d", cwd=directory)
    _tool("dpkg-deb", "-x", str(next(directory.glob("libb64*.deb"))), str(directory / "deb"))
    (directory / "libb64").symlink_to(next((directory / "deb").rglob("libb64.so*")).parent)


@dataclass(frozen=True)
class Served:
    """tx:FP32[1..8, 4] -> ty = 2 tx, over both protocols; shared memory of files whose names begin with t."""

    worker: WorkerProcess
    http: str
    grpc: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("served")
    operator, bucket, port = Operator(), Bucket(directory / "bucket"), free_port()
    worker = WorkerProcess(
        directory / "worker", operator, bucket, TRTMODEL_GRPC_PORT=str(port), TRTMODEL_SHARED_MEMORY_PREFIX="t"
    )
    digest, _ = bucket.publish(
        REVISION_1,
        {"factor": 2.0},
        inputs=[TensorSpec("tx", "FP32", (-1, 4))],
        outputs=[TensorSpec("ty", "FP32", (-1, 4))],
    )
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    try:
        worker.wait_ready()
        yield Served(worker, f"127.0.0.1:{worker.port}", f"127.0.0.1:{port}")
    finally:
        assert worker.stop() == 0, worker.tail()
