"""This directory on PYTHONPATH makes a worker's front and hosts note when a request passes their stages: see
`gpu_stages.py`. Python imports a module of this name by itself, before anything else.

Each process has a file in `FOLDER` of pairs of 64-bit integers: which stage, and when, in ns of the monotonic clock. A
file that is mapped outlives a host, which ends without cleaning up.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import struct
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / "trtmodel-stages"
FRONT = (
    ("front: bytes are here", "front.connection", "Connection.buffer_updated", "before"),
    ("front: head is known", "front.endpoints", "Endpoints.admit", "after"),
    ("front: request is complete", "front.endpoints", "Endpoints.handle", "before"),
    ("front: it is understood", "front.scheduler", "Scheduler.submit", "before"),
    ("front: input is filled", "front.scheduler", "fill", "after"),
    ("front: lane is told", "front.lanes", "Lanes.send", "after"),
    ("front: host has answered", "front.scheduler", "Scheduler.readable", "before"),
    ("front: answer goes to its request", "front.endpoints", "Endpoints._answer", "before"),
    ("front: answer is written", "front.connection", "Connection.respond", "after"),
)
HOST = (
    ("host: message and reads are here", "host.lanes", "LaneServer._serve", "before"),
    ("host: what is elsewhere is read or found", "host.lanes", "LaneServer._fetch", "after"),
    ("host: copy to the device is asked for", "engines.tensorrt.device", "Stream.copy_in", "after"),
    ("host: graph is launched", "engines.tensorrt.device", "Stream.launch", "after"),
    ("host: copy from the device is asked for", "engines.tensorrt.device", "Stream.copy_out", "after"),
    ("host: device is done", "engines.tensorrt.device", "Stream.wait", "after"),
    ("host: answer is made", "host.lanes", "LaneServer._serve", "after"),
)
NAMES = [name for name, *_ in (*FRONT, *HOST)]
MOST = 1 << 19  # notes of a process
PAIR = struct.Struct("<qq")


def begin(role, stages):
    path = FOLDER / f"{role}-{os.getpid()}"
    with path.open("wb+") as file:
        file.truncate(MOST * PAIR.size)
        notes = mmap.mmap(file.fileno(), MOST * PAIR.size)
    at, end, write, clock = [0], MOST * PAIR.size, PAIR.pack_into, time.perf_counter_ns

    def note(number):
        if at[0] < end:
            write(notes, at[0], number, clock())
            at[0] += PAIR.size

    for name, module, what, when in stages:
        owner = importlib.import_module(f"trtmodel_worker.{module}")
        *holder, function = what.split(".")
        if holder:
            owner = getattr(owner, holder[0])
        setattr(owner, function, _noting(getattr(owner, function), note, NAMES.index(name), when))


def _noting(function, note, number, when):
    @functools.wraps(function)
    def before(*arguments, **named):
        note(number)
        return function(*arguments, **named)

    @functools.wraps(function)
    def after(*arguments, **named):
        found = function(*arguments, **named)
        note(number)
        return found

    return before if when == "before" else after


if FOLDER.is_dir() and "serve" in sys.orig_argv:
    if "trtmodel_worker" in sys.orig_argv:
        begin("front", FRONT)
    elif "trtmodel_worker.host" in sys.orig_argv:
        begin("host", HOST)
