"""Run a stage in a process of its own and make sense of how it ended."""

from __future__ import annotations

import collections
import signal
import subprocess
import sys
import threading
from pathlib import Path

from trtmodel_contract.codec import dumps, loads

from trtmodel_worker.builder.stages import Answer, Request
from trtmodel_worker.engines.building import Rejected

MOST_SECONDS = 24 * 3600  # the Job's own deadline ends it long before; this one is for builds on a laptop
LAST_WORDS = 12  # lines


class StageDied(Exception):
    """The process ended without an answer. The text has its exit and its last words."""


def run(stage: str, request: Request, work: Path) -> Answer:
    """The stage's answer. Raises Rejected for what the stage rejected, StageDied for a crash."""
    request_path, answer_path = work / f"{stage}.request.json", work / f"{stage}.answer.json"
    request_path.write_bytes(dumps(request))
    answer_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "trtmodel_worker.builder.stages", stage, str(request_path), str(answer_path)]
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
    timer = threading.Timer(MOST_SECONDS, process.kill)
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
    if not answer_path.exists():
        raise StageDied(f"stage {stage} {_ended(code)}. Last words: {' | '.join(words)[-600:] or 'none'}")
    answer = loads(Answer, answer_path.read_bytes())
    if answer.rejected is not None:
        raise Rejected(answer.rejected, answer.message)
    return answer


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed, probably for lack of memory: raise spec.build.resources.limits.memory"
    if code < 0:
        return f"crashed with {signal.Signals(-code).name}"
    return f"ended with code {code}"
