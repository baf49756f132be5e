"""Exit codes of Jobs and engine hosts: the only thing that is left when a process cannot speak any more."""

from __future__ import annotations

import enum


class JobExit(enum.IntEnum):
    """Exit codes of the Jobs' containers. podFailurePolicy fails the Job at once on those that no retry can cure."""

    DONE = 0
    REJECTED = 42  # bad model, unsupported, or the gate failed: for good
    SOURCE_CHANGED = 43  # resolve again
    INCONCLUSIVE = 44  # the gate needs more samples
    RETRY = 1  # anything else: storage down, crash, no space


FINAL_JOB_EXITS = (JobExit.REJECTED, JobExit.SOURCE_CHANGED, JobExit.INCONCLUSIVE)


class HostExit(enum.IntEnum):
    """Exit codes of an engine host."""

    DONE = 0
    CANNOT_LOAD = 69  # the engine was refused before it served: message on the control channel
    STICKY_ERROR = 70  # the device context is poisoned: only a new process helps
    DEVICE_LOST = 71
    LANE_LOST = 72  # a lane could not be made anew; what runs on the others is not why
