"""How soon a thread that wakes up gets a processor that another one is using.

Linux (6.12 and later) lets any thread ask for shorter slices. Its share of the time stays the same, but when it wakes
up it interrupts threads of longer slices, where it would otherwise wait for theirs to end: 1.4 ms on two processors,
2.8 on eight. So what a request passes through asks for short ones, and what works beside it does not; what is prepared
meanwhile asks for the longest, so that everybody interrupts it, clients on the same processors too.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from pathlib import Path

FRONT_SECONDS = 0.0001  # the least that there is
HOST_SECONDS = 0.0005  # lanes give way to the front, the rest to lanes
PREPARING_SECONDS = 0.1  # the most that there is
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_ATTRIBUTES = struct.Struct("<IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def ask_for_slices(seconds: float, thread: int = 0) -> bool:
    """Of `thread` (0: the calling one), and of threads and processes that it starts from now on; 0: as long as the
    kernel's. False where there is no such choice."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    now = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(numbers[1], thread, now, _ATTRIBUTES.size, 0):
        return False
    _, policy, _, nice, priority, *_ = _ATTRIBUTES.unpack(now.raw)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, nice, priority, round(1e9 * seconds), 0, 0)
    if call(numbers[0], thread, wanted, 0):
        return False
    return not seconds or slice_seconds(thread) == seconds


def give_slices_back() -> None:
    """All threads of this process have the kernel's again."""
    for task in Path("/proc/self/task").iterdir():
        ask_for_slices(0.0, int(task.name))


def slice_seconds(thread: int = 0) -> float:
    """What `thread` (0: the calling one) has asked for or got from the kernel; 0 where nobody says."""
    numbers = _CALLS.get(platform.machine())
    now = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if numbers is None or ctypes.CDLL(None).syscall(numbers[1], thread, now, _ATTRIBUTES.size, 0):
        return 0.0
    return int(_ATTRIBUTES.unpack(now.raw)[5]) / 1e9
