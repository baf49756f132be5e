"""kubectl for the demo: calls with a time limit, and a watch on one TRTModel that others wait on."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

CALL_SECONDS = 60.0
Object = dict[str, Any]


class DemoError(Exception):
    """The demo cannot go on. The text names the cause and, where there is one, the way out."""


class Kubectl:
    """kubectl of the cluster whose environment it is given."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self.program = environment.get("KUBECTL", "kubectl")

    def run(self, *arguments: str | Path, text: str = "", seconds: float = CALL_SECONDS) -> str:
        """Its output. Raises DemoError with its words when it fails."""
        try:
            done = subprocess.run(
                [self.program, *arguments],
                input=text,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DemoError(f"kubectl {arguments[0]} {arguments[1]} did not end in {seconds:g} s") from None
        if done.returncode != 0:
            raise DemoError(f"kubectl {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Object:
        found: Object = json.loads(self.run("get", *arguments, "-o", "json"))
        return found

    def proxy(self, namespace: str, pod: str, port: int, path: str) -> str:
        """What a pod answers to GET, through the API server: works wherever kubectl does."""
        return self.run("get", "--raw", f"/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy{path}")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.program, *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
        )


class Follower:
    """A kubectl that watches, started again when the API server ends the watch. `take` gets its output."""

    def __init__(self, kubectl: Kubectl, take: Callable[[IO[str]], None], *arguments: str) -> None:
        self._kubectl, self._take, self._arguments = kubectl, take, arguments
        self._ended = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._ended.is_set():
            self._process = self._kubectl.start(*self._arguments)
            assert self._process.stdout is not None
            with self._process.stdout as output:
                self._take(output)
            self._process.wait()
            self._ended.wait(1)

    def close(self) -> None:
        self._ended.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join(5)


class ModelWatch:
    """The newest state of one TRTModel."""

    def __init__(self, kubectl: Kubectl, namespace: str, name: str) -> None:
        self._changed = threading.Condition()
        self._newest: Object | None = None
        self._follower = Follower(
            kubectl, self._read, "get", "trtmodels", "-n", namespace, "--field-selector", f"metadata.name={name}",
            "-o", "json", "--watch", "--output-watch-events",
        )  # fmt: skip

    def wait(self, what: str, seconds: float, done: Callable[[Object], bool]) -> Object:
        """The first state, from now on, of which `done` is true. Raises DemoError when it takes too long."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._newest is None or not done(self._newest):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise DemoError(f"{what}: not in {seconds:g} s. {describe(self._newest)}")
            return self._newest

    def close(self) -> None:
        self._follower.close()

    def _read(self, output: IO[str]) -> None:
        for line in output:  # one event each
            with self._changed:
                self._newest = json.loads(line)["object"]
                self._changed.notify_all()


def condition(model: Object, kind: str) -> Object:
    """A condition of the model, if it is about the newest generation; else one that is Unknown."""
    for found in model.get("status", {}).get("conditions", ()):
        if found["type"] == kind and found.get("observedGeneration") == model["metadata"]["generation"]:
            return dict(found)
    return {"type": kind, "status": "Unknown", "reason": "", "message": ""}


def revision(model: Object, role: str) -> str:
    """Of stable, candidate or standby; '' if there is none."""
    memory = model.get("status", {}).get("rollout", {}).get(role) or {}
    return str(memory.get("revision", ""))


def describe(model: Object | None) -> str:
    if model is None:
        return "The TRTModel was never seen."
    status = model.get("status", {})
    lines = [f"{c['type']}={c['status']} {c['reason']}: {c['message']}" for c in status.get("conditions", ())]
    return "\n  ".join([f"phase {status.get('phase')}", *lines]) if lines else "Its status is empty."
