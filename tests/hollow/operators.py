"""Operator processes as a Deployment would start them, against a hollow cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from free_ports import free_port

NAMESPACE = "trtmodel-system"
_SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class OperatorProcess:
    """`python -m trtmodel_operator.main` with free ports. Use as a context manager: it is killed at the end."""

    def __init__(self, kubeconfig: Path, folder: Path, name: str, **environment: str) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "PYTHONPATH")}
        self._settings = {
            "KUBECONFIG": str(kubeconfig),
            "POD_NAME": name,
            "TRTMODEL_NAMESPACE": NAMESPACE,
            "TRTMODEL_WORKER_IMAGE": "worker:1",
            "TRTMODEL_HOST": "127.0.0.1",
            "TRTMODEL_HTTP_PORT": str(free_port()),
            "TRTMODEL_METRICS_PORT": str(free_port()),
        } | environment
        with self._log.open("a") as log:
            command = [sys.executable, "-m", "trtmodel_operator.main"]
            self.process = subprocess.Popen(command, env=kept | self._settings, stderr=log)

    def __enter__(self) -> OperatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def metrics_port(self) -> int:
        return int(self._settings["TRTMODEL_METRICS_PORT"])

    @property
    def log(self) -> str:
        return self._log.read_text()

    def probe(self, path: str) -> tuple[int, str]:
        """Status and text; 0 and the cause if there is no answer."""
        return self._get("TRTMODEL_HTTP_PORT", path)

    def metrics(self, *names: str) -> dict[tuple[str, str], float]:
        """(name, labels as text) -> value, of all series or those of these names; empty if it does not answer."""
        query = "&".join(f"name[]={name}" for name in names)
        status, text = self._get("TRTMODEL_METRICS_PORT", f"/metrics?{query}")
        return {(n, labels): float(v) for n, labels, v in _SERIES.findall(text)} if status == 200 else {}

    def leads(self) -> bool:
        return self.metrics("trtmodel_operator_leader").get(("trtmodel_operator_leader", "")) == 1.0

    def until(self, condition: Callable[[], bool], seconds: float = 60.0, every: float = 0.05) -> float:
        """How long it took, in seconds. Raises AssertionError with the log if it takes longer, or the process ends."""
        began = time.monotonic()
        while not condition():
            ended = self.process.poll()
            assert ended is None, f"{self.name} ended with {ended}:\n{self.log[-4000:]}"
            assert time.monotonic() - began < seconds, f"not within {seconds} s:\n{self.log[-4000:]}"
            time.sleep(every)
        return time.monotonic() - began

    def _get(self, port: str, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._settings[port]}{path}", timeout=20) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()
        except OSError as e:
            return 0, str(e)


def total(series: Mapping[tuple[str, str], float], name: str, labels: str = "") -> float:
    """Sum over the series of this name whose labels contain `labels`."""
    return sum(value for (n, text), value in series.items() if n == name and labels in text)
