"""A Job's process: the task comes in the environment, the result goes into the termination message.

Whatever happens, there is a message: without one, all that the operator can say is an exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtmodel_contract.codec import DocumentError, loads
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.jobs import (
    CREDENTIALS_DIR_ENV,
    TASK_ENV,
    BuildTask,
    CollectResult,
    CollectTask,
    JobResult,
    Reason,
    ResolveTask,
)

from trtmodel_worker.builder import progress
from trtmodel_worker.builder.sources import Place
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore, StorageError
from trtmodel_worker.storage.errors import no_space
from trtmodel_worker.storage.uris import without_queries

TERMINATION_LOG_ENV = "TRTMODEL_TERMINATION_LOG"
CACHE_DIR_ENV = "TRTMODEL_CACHE_DIR"
DEFAULT_TERMINATION_LOG = "/dev/termination-log"
DEFAULT_CACHE_DIR = "/var/cache/trtmodel"

_EXITS = {
    Reason.DONE: JobExit.DONE,
    Reason.SOURCE_CHANGED: JobExit.SOURCE_CHANGED,
    Reason.GATE_INCONCLUSIVE: JobExit.INCONCLUSIVE,
    # May be cured by another try, on another node, or later. Everything else is rejected for good.
    Reason.STORAGE_UNAVAILABLE: JobExit.RETRY,
    Reason.NO_SPACE: JobExit.RETRY,
    Reason.BUILD_FAILED: JobExit.RETRY,
    Reason.INTERNAL: JobExit.RETRY,
}

log = logging.getLogger("trtmodel.job")


def main(kind: str) -> int:
    """`kind` is ``resolve``, ``build`` or ``collect``. Returns the exit code."""
    # The first process of a container ignores the signals that it does not handle: a Job that nobody wants any more
    # would hold its GPU until the pod's grace is over.
    signal.signal(signal.SIGTERM, _stop)
    _log_discreetly(kind)
    progress.board.enter("fetch" if kind == "build" else kind)
    with progress.served():
        result, code = _run(kind)
    result = replace(result, message=without_queries(result.message))
    log.info("%s: %s (exit %d)", result.reason.value, result.message, code)
    path = Path(os.environ.get(TERMINATION_LOG_ENV, DEFAULT_TERMINATION_LOG))
    path.write_bytes(result.to_termination_message())
    return code


class _Discreet(logging.Formatter):
    """Tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return without_queries(super().format(record))


def _log_discreetly(kind: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Discreet(f"%(asctime)s %(levelname)s {kind} %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _stop(number: int, _frame: Any) -> None:
    """Ends without a message: why it was ended, the Job's status tells. Stages and their files go with it."""
    log.info("asked to end")
    sys.exit(128 + number)


def _run(kind: str) -> tuple[JobResult, JobExit]:
    from trtmodel_worker.builder.process import StageDied

    try:
        result = {"resolve": _resolve, "build": _build, "collect": _collect}[kind]()
    except Rejected as e:
        result = JobResult(e.reason, e.message)
        if e.reason is Reason.INTERNAL:  # operator and image do not fit each other: no retry helps
            return result, JobExit.REJECTED
    except StorageError as e:
        result = JobResult(e.reason, e.message)
    except StageDied as e:
        result = JobResult(Reason.BUILD_FAILED, str(e))
    except DocumentError as e:
        return JobResult(Reason.INTERNAL, f"the task in {TASK_ENV} is not understood: {e}"), JobExit.REJECTED
    except Exception as e:
        if no_space(e):
            text = f"the Job's disk is full or read-only: {e}: give the pod more ephemeral storage"
            return JobResult(Reason.NO_SPACE, text), _EXITS[Reason.NO_SPACE]
        log.exception("a defect of the Job itself")
        result = JobResult(Reason.INTERNAL, f"{type(e).__name__}: {e}: this is a defect, see the Job's log")
    return result, _EXITS.get(result.reason, JobExit.REJECTED)


def _resolve() -> JobResult:
    from trtmodel_worker.builder.resolve import resolve

    task = loads(ResolveTask, os.environ.get(TASK_ENV, ""))
    place = _place(task)
    found = resolve(task, place)
    text = f"revision {found.revision}: source {found.source_sha256[:12]}, {found.source_bytes:,} bytes"
    return JobResult(Reason.DONE, f"{text}, {len(found.found)} engines exist", resolve=found)


def _build() -> JobResult:
    from trtmodel_worker.builder.build import build

    task = loads(BuildTask, os.environ.get(TASK_ENV, ""))
    place = _place(task)
    place.cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.cache, prefix="work-") as work:
        ended = build(task, place, Path(work), progress.board.say)
    return JobResult(ended.reason, ended.message, build=ended.result)


def _collect() -> JobResult:
    from trtmodel_worker.builder import collect

    task = loads(CollectTask, os.environ.get(TASK_ENV, ""))
    credentials = os.environ.get(CREDENTIALS_DIR_ENV, "")
    store = ArtifactStore(task.storage, task.namespace, credentials or None)
    only = (task.cluster, task.model.uid) if task.model is not None else None
    rules = collect.Rules(task.grace_seconds, task.delete, only=only)
    try:
        done = collect.collect(store, rules, log.info)
        if task.delete and done.waiting:
            log.info("%d engines are out of use: they go when no Job can have found them any more", done.waiting)
            time.sleep(collect.WAIT_SECONDS)
            done = done.joined(collect.collect(store, rules, log.info))
    except collect.NothingIsPinned as e:
        raise Rejected(Reason.INTERNAL, str(e)) from e
    what = f"{done.deleted} engines, {done.objects} objects, {done.freed_bytes:,} bytes"
    text = f"{what} {'removed' if task.delete else 'would be removed'}; {done.kept} engines kept"
    result = CollectResult(done.deleted, done.waiting, done.kept, done.freed_bytes)
    return JobResult(Reason.DONE, "; ".join([text, *done.problems]), collect=result)


def _place(task: ResolveTask | BuildTask) -> Place:
    credentials = os.environ.get(CREDENTIALS_DIR_ENV, "")
    cache = Path(os.environ.get(CACHE_DIR_ENV, DEFAULT_CACHE_DIR))
    return Place(task.storage, Path(credentials) if credentials else None, cache)
