"""Runs Jobs in processes of their own that are forked from this one, warm, and stops each at any of its operations.

An operation is each call of the storage port, before and after (the store that a Job opens is wrapped whole, whatever
methods it has), each file of the watched folder that is opened, made, renamed, linked or removed (Python's audit
events tell), and each stage of a build. So what a Job does is found, not listed: a new step is a new point to die at.

Commands come as JSON lines on standard input, answers go to standard output.

    run     a Job to its end, or until operation `at`, where it kills itself  -> {"status": ..., "operations": [...]}
    begin   a Job until operation `at`, where it waits                        -> {"paused": true | false}
    finish  the one that waits                                                -> as run
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODULES = (
    "numpy",
    "onnx",
    "onnxruntime",
    "trtmodel_worker.builder.main",
    "trtmodel_worker.builder.build",
    "trtmodel_worker.builder.resolve",
    "trtmodel_worker.builder.collect",
    "trtmodel_worker.builder.stages",
    "trtmodel_worker.engines.onnxruntime.build",
)
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate"}


class Operations:
    """Counts, and stops the process at the one that is meant."""

    def __init__(self, watched: str, at: int, stop: Callable[[], None]) -> None:
        self.watched, self.at, self.stop = watched, at, stop
        self.names: list[str] = []
        self.active = True

    def __call__(self, name: str) -> None:
        if not self.active:
            return
        if len(self.names) == self.at:
            self.active = False
            self.stop()
            self.active = True
        self.names.append(name)

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and self.active and isinstance(arguments[0], (str, os.PathLike)):
            path = os.fspath(arguments[0])
            if isinstance(path, str) and path.startswith(self.watched):
                self(f"{event} {Path(path).name}")


class Reader:
    def __init__(self, reader: Any, operation: Operations) -> None:
        self._reader, self._operation = reader, operation

    def read(self, *arguments: Any) -> Any:
        self._operation("read")
        return self._reader.read(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class Store:
    """An object store, or an object of it: each of its methods is an operation before and after."""

    def __init__(self, store: Any, operation: Operations) -> None:
        self._store, self._operation = store, operation

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name.startswith("_") or not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            self._operation(f"before {name}")
            result = found(*arguments, **named)
            if hasattr(result, "__enter__"):
                return self._opened(name, result)
            if hasattr(result, "open"):
                return Store(result, self._operation)
            if inspect.isgenerator(result):
                result = list(result)
            self._operation(f"after {name}")
            return iter(result) if isinstance(result, list) else result

        return call

    @contextlib.contextmanager
    def _opened(self, name: str, opened: Any) -> Iterator[Any]:
        with opened as found:
            self._operation(f"after {name}")
            reader = Reader(found[-1] if isinstance(found, tuple) else found, self._operation)
            yield (*found[:-1], reader) if isinstance(found, tuple) else reader


def instrument(operation: Operations) -> None:
    """In the forked process, which ends with it."""
    from trtmodel_worker.storage import backends

    original = backends.open_store

    def open_store(*arguments: Any, **named: Any) -> Any:
        return Store(original(*arguments, **named), operation)

    for module in list(sys.modules.values()):
        if getattr(module, "open_store", None) is original:
            module.open_store = open_store  # type: ignore[attr-defined]
    real_open = io.open

    def opening(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        opened = real_open(file, mode, *arguments, **named)
        if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith(operation.watched) and mode[0] in "wxa":
            operation(f"opened {Path(file).name}")
        return opened

    io.open = opening  # type: ignore[assignment]

    class Stage:
        """A module that a Job runs as a process, in this one: it dies with its Job there, too."""

        stderr: tuple[str, ...] = ()

        def __init__(self, command: list[str], **_: Any) -> None:
            name, arguments = command[2], command[3:]
            what = f"{name.rpartition('.')[2]} {arguments[0]}"
            operation(f"before {what}")
            self.code = importlib.import_module(name).main(arguments)
            operation(f"after {what}")

        def wait(self) -> int:
            return self.code

        def kill(self) -> None:
            pass

    subprocess.Popen = Stage  # type: ignore[assignment, misc]
    sys.addaudithook(operation.heard)


def job(command: dict[str, Any], stop: Callable[[], None], report: int) -> None:
    """Never returns."""
    code = 99
    try:
        log = os.open(command["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(command["environment"])
        from trtmodel_worker.builder import main

        known = set(sys.modules)
        operation = Operations(command["watched"], command["at"], stop)
        instrument(operation)
        code = int(main.main(command["kind"]))
        operation("the end")
        operation.active = False
        os.write(report, json.dumps([operation.names, sorted(set(sys.modules) - known)]).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class Server:
    def __init__(self) -> None:
        self.waiting: tuple[int, int, int] | None = None  # process, pipe that lets it go on, pipe of its report

    def run(self, command: dict[str, Any]) -> dict[str, Any]:
        reading, report = os.pipe()
        process = os.fork()
        if process == 0:
            job(command, lambda: os.kill(os.getpid(), signal.SIGKILL), report)
        os.close(report)
        return self.ended(process, reading)

    def begin(self, command: dict[str, Any]) -> dict[str, Any]:
        reading, report = os.pipe()
        going, go = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(go)

            def pause() -> None:
                os.write(report, b"paused\n")
                os.read(going, 1)

            job(command, pause, report)
        os.close(report)
        os.close(going)
        paused = os.read(reading, 7) == b"paused\n"
        if paused:
            self.waiting = (process, go, reading)
            return {"paused": True}
        os.close(go)
        return {"paused": False, **self.ended(process, reading)}

    def finish(self, _command: dict[str, Any]) -> dict[str, Any]:
        assert self.waiting is not None
        process, go, reading = self.waiting
        os.write(go, b"x")
        os.close(go)
        return self.ended(process, reading)

    def ended(self, process: int, reading: int) -> dict[str, Any]:
        with os.fdopen(reading, "rb") as f:
            said = f.read()
        _, status = os.waitpid(process, 0)
        names: list[str] = []
        with contextlib.suppress(ValueError):
            names, modules = json.loads(said)
            for name in modules:  # what a Job imports on its way, the next ones have already
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
        return {"status": os.waitstatus_to_exitcode(status), "operations": names}


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    server = Server()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(server, command["do"])(command)), flush=True)


if __name__ == "__main__":
    main()
