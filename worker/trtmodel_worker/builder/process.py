"""Run a module of ours in a process of its own, and tell how it ended. Imports nothing that takes memory."""

from __future__ import annotations

import collections
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.errors import StorageError, no_space

MOST_SECONDS = 24 * 3600  # the Job's own deadline ends it long before; this one is for builds on a laptop
LAST_WORDS = 12  # lines
EXIT_NO_SPACE = 28


class StageDied(Exception):
    """The process ended without an answer. The text has its exit and its last words."""


@contextlib.contextmanager
def telling_no_space() -> Iterator[None]:
    """In such a process: a full disk ends it with a code of its own, which `run_module` understands."""
    try:
        yield
    except OSError as e:
        if not no_space(e):
            raise
        sys.stderr.write(f"{e}\n")
        sys.exit(EXIT_NO_SPACE)


@dataclass(frozen=True)
class Ended:
    """How a process ended. `code` is negative after a signal."""

    code: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{_ended(self.code)}. Last words: {' | '.join(self.words)[-600:] or 'none'}"


def run_module(arguments: list[str], most_seconds: float = MOST_SECONDS) -> Ended:
    """Run a module of ours as a program, with what it says on standard error, and end it with this process. Raises
    StorageError (NoSpace) where the disk was full for it."""
    command = [sys.executable, "-m", *arguments]
    words = collections.deque[str](maxlen=LAST_WORDS)
    # A Job that is asked to end while Popen is at work would leave a process that nobody knows: it is told afterwards.
    # Not by a signal mask, which holds for one thread: another one would take the signal, and Python act on it here.
    asked_to_end: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
    except BaseException:
        signal.signal(signal.SIGTERM, former)
        raise
    timer = threading.Timer(most_seconds, process.kill)
    timer.daemon = True
    try:
        signal.signal(signal.SIGTERM, former)
        for number in asked_to_end:
            signal.raise_signal(number)
        timer.start()
        assert process.stderr is not None
        for line in process.stderr:
            sys.stderr.write(line)
            words.append(line.strip())
        code = process.wait()
    finally:
        timer.cancel()
        process.kill()
        process.wait()
    if code == EXIT_NO_SPACE:
        text = f"{arguments[0].rpartition('.')[2]}: the local disk is full or read-only: {words[-1] if words else ''}"
        raise StorageError(Reason.NO_SPACE, f"{text}: give the pod more ephemeral storage", transient=True)
    return Ended(code, tuple(words))


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed, probably for lack of memory: raise spec.build.resources.limits.memory"
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}"
    return f"ended with code {code}"
