"""Checks and Jobs by the hundred: a process that has loaded everything forks for each of them, and for each stage.

What runs is what runs in a pod: `main` of the Job, `main` of the check, `main` of each stage, every one in a process of
its own. Only starting an interpreter and loading ONNX, a second each, is paid once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_SECONDS = 200.0  # a busy machine takes ten times the five seconds that the slowest needs
TOO_LATE = -1000


class Forge:
    """The process that forks. One request at a time."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def run(self, arguments: list[str], log: Path, **environment: str) -> int:
        """The exit code of `arguments`: negative after a signal, TOO_LATE if it had to be ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"arguments": arguments, "log": str(log), "environment": environment}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks is gone"
        return int(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()


def _serve() -> None:
    import onnxruntime  # noqa: F401
    from trtmodel_worker.builder import build, examine, main, process, resolve, stages  # noqa: F401
    from trtmodel_worker.engines.onnxruntime import build as _  # noqa: F401

    programs: dict[str, Callable[[list[str]], int]] = {
        "trtmodel_worker.builder.examine": examine.main,
        "trtmodel_worker.builder.stages": stages.main,
        "checks": lambda rest: [examine.main(rest[i : i + 2]) for i in range(0, len(rest), 2)][-1],
        "job": lambda rest: main.main(rest[0]),
    }

    def run_module(arguments: list[str], most_seconds: float = MOST_SECONDS) -> Any:
        return process.Ended(_fork(programs, arguments, most_seconds), ())

    for module in list(sys.modules.values()):
        if getattr(module, "run_module", None) is process.run_module and module is not process:
            module.run_module = run_module  # type: ignore[attr-defined]
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.update(request["environment"])
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        answers.write(f"{_fork(programs, request['arguments'], MOST_SECONDS)}\n")
        answers.flush()


def _fork(programs: dict[str, Callable[[list[str]], int]], arguments: list[str], most_seconds: float) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = programs[arguments[0]](arguments[1:])
        except SystemExit as e:
            code = int(e.code or 0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + most_seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return TOO_LATE
        time.sleep(0.002)


if __name__ == "__main__":
    _serve()
