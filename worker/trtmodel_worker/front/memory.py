"""Is there room for one more engine, and what is done if not. A fat candidate must not get the whole pod killed.

fits -> load it beside what serves (Availability)
fits without the standby -> the standby goes first
fits alone, and this worker may leave service -> unload what serves, then load (Resource)
else -> it is refused, with the figures
"""

from __future__ import annotations

import contextlib
import enum
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.control import MemoryPolicy, Role
from trtmodel_contract.manifest import MEASURED_LANES, Manifest, MemoryNeed

MARGIN = 1.1  # needs were measured on another day, with other neighbours
_MIB = 1 << 20
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as the largest number of pages


class Action(enum.Enum):
    LOAD = "load"
    RELEASE_STANDBY = "release the standby"
    UNLOAD = "leave service and unload what serves"
    REST = "leave it unloaded: another engine answers"
    REFUSE = "refuse it for now"


@dataclass(frozen=True)
class Free:
    """Bytes that are free now; None where nothing is known, which limits nothing."""

    host_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True)
class Situation:
    """What is in memory: `standby` and `serving` are what a standby and the engines that answer would give back, None
    if there is none. And what the engine in question is for: its `role`; `wanted`: it is to answer here alone;
    `shares`: only beside another one. `may_leave`: this worker may leave service for a while."""

    serving: MemoryNeed | None = None
    standby: MemoryNeed | None = None
    role: Role = Role.STABLE
    wanted: bool = True
    shares: bool = False
    may_leave: bool = False


@dataclass(frozen=True)
class Verdict:
    """`reason` is a sentence for people."""

    action: Action
    policy: MemoryPolicy
    reason: str


def need_of(manifest: Manifest, hosts: int, lanes: int) -> MemoryNeed:
    """What was measured when the engine was built, for each of its `hosts` with so many `lanes`, and its files: they
    lie in memory while it is loaded."""
    files = manifest.plan.size + sum(golden.blob.size for golden in manifest.golden)
    need = manifest.memory
    device = need.device_bytes + need.lane_bytes * max(0, lanes - MEASURED_LANES)
    return MemoryNeed(device * hosts, need.host_bytes * hosts + files)


def decide_memory(policy: str, need: MemoryNeed, free: Free, situation: Situation) -> Verdict:
    """`policy`: that of the settings: Auto, Availability or Resource. Whatever is unloaded, it is known before from the
    recorded needs that the engine then fits."""
    if policy == MemoryPolicy.RESOURCE and situation.serving is not None:
        why = "memory policy Resource keeps one engine in memory"
        if situation.role is Role.STANDBY:
            return Verdict(Action.REST, MemoryPolicy.RESOURCE, why)
        return _one_at_a_time(need, free, situation, why)
    if _fits(need, free):
        return Verdict(Action.LOAD, MemoryPolicy.AVAILABILITY, f"it {_figures(need, free)}")
    without_standby = _plus(free, situation.standby)
    if situation.standby is not None and situation.role is not Role.STANDBY and _fits(need, without_standby):
        text = f"it {_figures(need, free)}; the standby makes room"
        return Verdict(Action.RELEASE_STANDBY, MemoryPolicy.AVAILABILITY, text)
    short = f"it {_figures(need, free)}"
    if policy == MemoryPolicy.AVAILABILITY and situation.serving is not None:
        text = f"{short}: raise the memory limit, or set the memory policy to Auto"
        return Verdict(Action.REFUSE, MemoryPolicy.AVAILABILITY, text)
    if situation.serving is None or situation.role is Role.STANDBY:
        return Verdict(Action.REFUSE, MemoryPolicy.AVAILABILITY, f"{short}: raise the memory limit")
    return _one_at_a_time(need, free, situation, f"{short}: too little beside what serves")


def _one_at_a_time(need: MemoryNeed, free: Free, situation: Situation, why: str) -> Verdict:
    if situation.shares:
        text = f"{why}, and a share of the requests or a shadow takes two: give it all of them or none"
        return Verdict(Action.REFUSE, MemoryPolicy.RESOURCE, text)
    if not situation.wanted:
        return Verdict(Action.REST, MemoryPolicy.RESOURCE, f"{why}, and another one answers")
    emptied = _plus(_plus(free, situation.standby), situation.serving)
    if not _fits(need, emptied):
        text = f"alone it {_figures(need, emptied)} with everything else unloaded, which is too little: raise the limit"
        return Verdict(Action.REFUSE, MemoryPolicy.RESOURCE, text)
    if not situation.may_leave:
        text = f"{why}, and this worker may not leave service to change engines: no other worker serves"
        return Verdict(Action.REFUSE, MemoryPolicy.RESOURCE, f"{text} (more replicas, or allowDowntime)")
    return Verdict(Action.UNLOAD, MemoryPolicy.RESOURCE, f"{why}; what serves is unloaded first")


def _fits(need: MemoryNeed, free: Free) -> bool:
    pairs = ((need.host_bytes, free.host_bytes), (need.device_bytes, free.device_bytes))
    return all(have is None or want * MARGIN <= have for want, have in pairs)


def _plus(free: Free, more: MemoryNeed | None) -> Free:
    if more is None:
        return free
    host = None if free.host_bytes is None else free.host_bytes + more.host_bytes
    return Free(host, None if free.device_bytes is None else free.device_bytes + more.device_bytes)


def _figures(need: MemoryNeed, free: Free) -> str:
    host = f"needs {_mib(need.host_bytes)} of memory with a margin of 10 %, {_mib(free.host_bytes)} are free"
    if not need.device_bytes:
        return host
    return f"{host}; {_mib(need.device_bytes)} of device memory, {_mib(free.device_bytes)} are free"


def _mib(size: int | None) -> str:
    return "an unknown number" if size is None else f"{size / _MIB:,.1f} MiB"


class HostMemory:
    """How much memory this process may still take: the least that any control group above it leaves, or what the node
    has. Files that the kernel has cached and not used lately are as good as free.

    The groups are named by `<proc>/self/cgroup`. Within a container those names are often the node's, and the mounted
    tree begins at the container's own group: then the tree's root is meant."""

    def __init__(self, groups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> None:
        self._groups = groups
        self._proc = proc

    def free_bytes(self) -> int | None:
        """None if nothing can be read."""
        found = [_remaining(directory, *names) for directory, names in self._directories()]
        found.append(_available(self._proc / "meminfo"))
        known = [value for value in found if value is not None]
        return min(known) if known else None

    def _directories(self) -> list[tuple[Path, tuple[str, str, str]]]:
        """Each group that limits this process, and how its version names limit, use and inactive files."""
        found = []
        for line in _read(self._proc / "self" / "cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if number == "0" and not controllers:
                root, names = self._groups, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                root = self._groups / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            inner = root / path.strip("/")
            if not inner.is_dir():
                inner = root
            while True:
                found.append((inner, names))
                if inner == root:
                    break
                inner = inner.parent
        return found


def _remaining(directory: Path, limit_name: str, use_name: str, inactive_name: str) -> int | None:
    limit, use = _number(_read(directory / limit_name)), _number(_read(directory / use_name))
    if limit is None or use is None or limit >= _UNLIMITED:
        return None
    lines = _read(directory / "memory.stat").splitlines()
    words = next((line.split() for line in lines if line.startswith(inactive_name + " ")), ["", "0"])
    return max(0, limit - max(0, use - (_number(words[1]) or 0)))


def _available(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            kib = _number(line.split()[1])
            return None if kib is None else kib * 1024
    return None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
