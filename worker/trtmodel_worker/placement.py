"""A core of its own for the front's loop: everything else that a worker runs has the others.

A processor of a virtual machine is most often half of a core, and who looks for its next message without sleeping takes
the other half's time. One row of ResNet-50 on an H200, front, host and client on 16 such processors, alone on the
machine: wherever they came to run, each line of the front took twice as long (24 instead of 11 us until a head was
read) as with processors of its own, and the whole 0.77 instead of 0.62 ms.

Only where the processors are this container's alone. Elsewhere a neighbour may have the same core, and a process that
is bound to it cannot go out of its way. Kubernetes gives whole processors to a Guaranteed pod where the kubelet's CPU
manager policy is `static`: then the cgroup's quota is as many as the mask has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from trtmodel_worker.slices import ask_for_slices

FEWEST = 6  # processors of which the front takes two
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"

_others: frozenset[int] = frozenset()
"""Of this process, whose front has taken a core; empty while it has not."""


def fronts_core(
    asked: bool | None, mine: Collection[int], quota: float | None, siblings: Callable[[int], Collection[int]]
) -> frozenset[int]:
    """The processors that the front takes of `mine`; none if it is to run anywhere. `asked`: None for Auto. The highest
    numbers, since interrupts most often go to the lowest ones. Where the kernel tells of no second thread, two
    neighbours: a virtual machine may hide it."""
    exclusive = quota is not None and quota == len(mine)
    if asked is False or (asked is None and not exclusive) or len(mine) < FEWEST:
        return frozenset()
    last = max(mine)
    core = frozenset(siblings(last)) & frozenset(mine)
    return core if len(core) > 1 else frozenset(sorted(mine)[-2:])


def take(core: Collection[int]) -> None:
    """The calling thread is the front's loop and has this core from now on, threads and processes that it starts with
    it, unless they step aside. Nothing happens for none."""
    global _others  # noqa: PLW0603 - there is one front in a process
    if core:
        _others = frozenset(os.sched_getaffinity(0)) - frozenset(core)
        os.sched_setaffinity(0, core)


def others() -> frozenset[int]:
    """What is left for everything else; none if nobody has taken a core."""
    return _others


def leave_to_front() -> None:
    """As `step_aside`, and with the kernel's own slices."""
    ask_for_slices(0.0)
    step_aside()


def step_aside() -> None:
    """The calling thread does not need the front's core, nor what it starts."""
    if _others:
        os.sched_setaffinity(0, _others)


def thread_siblings(cpu: int) -> frozenset[int]:
    """Processors of the same core, `cpu` among them, as far as the kernel tells."""
    try:
        text = Path(_TOPOLOGY.format(cpu)).read_text()
        parts = [part.partition("-") for part in text.strip().split(",")]
        return frozenset(n for low, _, high in parts for n in range(int(low), int(high or low) + 1))
    except (OSError, ValueError):
        return frozenset({cpu})
