"""The command as a user types it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from free_ports import free_port
from worker_harness import eventually

TRTMODEL = Path(sys.executable).with_name("trtmodel")
READY_SECONDS = 90.0


def trtmodel(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    command = [str(TRTMODEL), *map(str, arguments), "--cache", str(cache)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=cache.parent)


class Served:
    """`trtmodel serve` on free ports, until the end of the with block."""

    def __init__(self, model: Path, cache: Path, *arguments: object, grpc: bool = False) -> None:
        self.http, self.metrics = free_port(), free_port()
        self.grpc = free_port() if grpc else 0
        ports = ["--http", self.http, "--grpc", self.grpc, "--metrics", self.metrics]
        self._command = [str(TRTMODEL), "serve", str(model), "--cache", str(cache), *map(str, [*ports, *arguments])]
        self._cwd = cache.parent
        self.said: list[str] = []

    def start(self) -> Served:
        self.process = subprocess.Popen(
            # As in a terminal, also where the tests run in the background of a shell, which ignores Ctrl-C.
            ["env", "--default-signal=INT", *self._command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._cwd,
        )
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        return self

    def __enter__(self) -> Served:
        self.start()
        eventually(lambda: self.is_ready() or self.process.poll() is not None, "ready", READY_SECONDS)
        assert self.process.poll() is None, self.text
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def is_ready(self) -> bool:
        return "trtmodel: ready: " in self.text

    @property
    def text(self) -> str:
        return "".join(self.said)

    @property
    def curl(self) -> str:
        """The command line that it proposes."""
        eventually(lambda: [line for line in self.said if line.startswith("  curl ")], "a curl command is shown")
        return next(line for line in self.said if line.startswith("  curl ")).strip()

    def ask(self, method: str, path: str, document: Any = None) -> tuple[int, dict[str, str], Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, None if document is None else json.dumps(document))
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, json.loads(body) if body else None

    def infer(self, name: str, inputs: Sequence[dict[str, Any]]) -> tuple[int, dict[str, str], Any]:
        return self.ask("POST", f"/v2/models/{name}/infer", {"inputs": list(inputs)})

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C. The exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def children(self) -> list[int]:
        """All processes below it."""
        found: list[int] = []
        at = [self.process.pid]
        while at:
            task = Path(f"/proc/{at.pop()}/task")
            with contextlib.suppress(OSError):
                below = [int(pid) for t in task.iterdir() for pid in (t / "children").read_text().split()]
                found += below
                at += below
        return found


def runs(pid: int) -> bool:
    """Whether the process is there and is no zombie."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
