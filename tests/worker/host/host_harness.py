"""An engine host as a process, with the test as its front."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.manifest import Manifest
from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.host.arena import Arena, plan_layout, sealed_bytes
from trtmodel_worker.host.wire import (
    MAX_MESSAGE_BYTES,
    Answer,
    HostConfig,
    Ready,
    Refused,
    parse_answer,
    probe_message,
    run_message,
)
from worker_harness import PLUGIN, Bucket

PATIENCE_SECONDS = 60.0


class HostProcess:
    """Used as a context: what is left of the process then is ended."""

    def __init__(
        self,
        bucket: Bucket,
        manifest: Manifest,
        *,
        runtime: str = "Test",
        lanes: int = 1,
        buckets: Sequence[int] = (),
        duty: float = 1.0,
        pulsed: bool = False,
    ) -> None:
        self.manifest = manifest
        self.layout = plan_layout(manifest.inputs, manifest.outputs, manifest.profiles, 4, 4096)
        self.arena = Arena.create("test-arena", self.layout.size)
        self.generation = 0
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(lanes + 1)]
        for ours, _ in pairs:
            ours.settimeout(PATIENCE_SECONDS)
        self.control, self.lanes = pairs[0][0], [ours for ours, _ in pairs[1:]]
        theirs = [other for _, other in pairs]
        blobs = [manifest.plan, *(golden.blob for golden in manifest.golden)]
        files = [sealed_bytes("test-blob", bucket.blob_path(blob.digest).read_bytes()) for blob in blobs]
        config = HostConfig(
            name="test", runtime=runtime, manifest=dumps(manifest).decode(), plan_fd=files[0],
            plan_size=manifest.plan.size, golden_fds=tuple(files[1:]),
            golden_sizes=tuple(golden.blob.size for golden in manifest.golden), arena_fd=self.arena.fd,
            arena_size=self.arena.size, lane_fds=tuple(s.fileno() for s in theirs[1:]),
            control_fd=theirs[0].fileno(), parent_pid=os.getpid(), buckets=tuple(buckets), duty=duty,
            pulsed=pulsed,
        )  # fmt: skip
        config_fd = sealed_bytes("test-config", dumps(config))
        os.lseek(config_fd, 0, os.SEEK_SET)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trtmodel_worker.host", "serve", str(config_fd)],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([PLUGIN, *_python_path()])},
            pass_fds=[config_fd, *files, self.arena.fd, *(s.fileno() for s in theirs)],
        )
        for fd in (config_fd, *files):
            os.close(fd)
        for other in theirs:
            other.close()

    def __enter__(self) -> HostProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)
        for channel in (self.control, *self.lanes):
            channel.close()
        self.arena.close()

    def ready(self) -> Ready:
        return loads(Ready, self.control.recv(MAX_MESSAGE_BYTES))

    def refused(self) -> Refused:
        return loads(Refused, self.control.recv(MAX_MESSAGE_BYTES))

    def send(self, inputs: Mapping[str, Any], lane: int = 0, slot: int = 0) -> int:
        """Start a run; its generation."""
        self.generation += 1
        base, places, shapes = self.layout.input_region(slot), [], []
        for spec, offset in zip(self.manifest.inputs, self.layout.input_offsets, strict=True):
            array = np.asarray(inputs[spec.name], DTYPES[spec.datatype])
            self.arena.array(base + offset, array.dtype, array.shape)[...] = array
            places.append(base + offset)
            shapes.append(array.shape)
        output = self.layout.output_region(slot)
        message = run_message(self.generation, output, self.layout.output_bytes, places, shapes)
        self.lanes[lane].send(message)
        return self.generation

    def probe(self, lane: int = 0) -> int:
        self.generation += 1
        self.lanes[lane].send(probe_message(self.generation))
        return self.generation

    def receive(self, lane: int = 0, outputs: int | None = None) -> Answer:
        count = len(self.manifest.outputs) if outputs is None else outputs
        return parse_answer(self.lanes[lane].recv(MAX_MESSAGE_BYTES), count)

    def arrays(self, answer: Answer) -> list[np.ndarray]:
        """Copies of the outputs."""
        assert answer.failure is None, answer.text
        return [
            self.arena.array(offset, DTYPES[spec.datatype], shape).copy()
            for spec, (offset, shape) in zip(self.manifest.outputs, answer.outputs, strict=True)
        ]

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_SECONDS)


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path).exists()]
