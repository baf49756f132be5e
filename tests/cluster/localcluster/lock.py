"""One cluster per machine: a lock for the time of a command, and a record of the clone that owns the cluster."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .settings import ClusterError, Settings
from .shell import say

_LONGEST_WAIT = 1800.0  # a first `up` builds for many minutes


def owner(settings: Settings) -> str | None:
    """The clone that owns the cluster, or None."""
    try:
        return str(json.loads(settings.owner_file.read_text())["clone"])
    except (OSError, ValueError, KeyError):
        return None


def refuse_another_clones(settings: Settings) -> None:
    """Raise ClusterError when the cluster belongs to another clone that still exists."""
    held = owner(settings)
    if held is not None and held != str(settings.clone) and Path(held).exists():
        raise ClusterError(
            f"the cluster of this machine ({settings.run}) belongs to the clone {held}.\n"
            f"To free it, run there: tests/cluster/cluster down --purge"
        )


@contextmanager
def exclusive(settings: Settings) -> Iterator[None]:
    """Hold the cluster for one command. Another command of this clone is waited for; another clone's refuses."""
    path = settings.owner_file
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline, told = time.monotonic() + _LONGEST_WAIT, False
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        refuse_another_clones(settings)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # `down --purge` deletes the file under its lock: the lock counts only on the file of that name.
            if path.exists() and os.fstat(fd).st_ino == path.stat().st_ino:
                break
        except BlockingIOError:
            if not told:
                say(f"waiting for another command on this cluster (lock: {path})")
                told = True
        os.close(fd)
        if time.monotonic() > deadline:
            raise ClusterError(f"{path} stayed locked for {_LONGEST_WAIT:.0f} s")
        time.sleep(0.2)
    try:
        refuse_another_clones(settings)
        yield
    finally:
        if owner(settings) is None:
            path.unlink(missing_ok=True)
        os.close(fd)


def take(settings: Settings) -> None:
    """Write this clone into the record. Call it under the lock."""
    settings.owner_file.write_text(json.dumps({"clone": str(settings.clone), "run": str(settings.run)}) + "\n")


def release(settings: Settings) -> None:
    """Forget the owner. Call it under the lock, which removes the file at its end."""
    settings.owner_file.write_text("")
