"""What is done where memory is short: tables of the rules, and the kernel's files as both versions write them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from trtmodel_contract.control import MemoryPolicy, Role
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.manifest import Blob, Golden, Manifest, MemoryNeed
from trtmodel_worker.front.artifacts import Refused
from trtmodel_worker.front.memory import Action, Free, HostMemory, Situation, decide_memory, need_of
from trtmodel_worker.front.room import Asked, MemoryRules, Room

GIB = 1 << 30
MANIFEST = Manifest(
    revision="0123456789", load_key=LoadKey("Test", "1", "cpu"), number=1, driver="", build={}, source_sha256="a" * 64,
    plan=Blob("b" * 64, 3_163_737), inputs=(), outputs=(), profiles=(), memory=MemoryNeed(0, 0),
    golden=(Golden(Blob("c" * 64, 12), 1, {}),), tools={}, created_at="2026-01-02T03:04:05Z",
)  # fmt: skip


def host(gib: float) -> MemoryNeed:
    return MemoryNeed(0, int(gib * GIB))


def free(gib: float) -> Free:
    return Free(int(gib * GIB))


NEXT = host(4)
BESIDE = Situation(serving=host(9), may_leave=True)
ALONE = Situation()


@pytest.mark.parametrize(
    ("policy", "there", "situation", "action", "chosen"),
    [
        ("Auto", free(4.5), BESIDE, Action.LOAD, MemoryPolicy.AVAILABILITY),
        ("Auto", free(4.3), BESIDE, Action.UNLOAD, MemoryPolicy.RESOURCE),  # the margin is 10 %
        ("Auto", Free(), BESIDE, Action.LOAD, MemoryPolicy.AVAILABILITY),
        ("Availability", free(4.5), BESIDE, Action.LOAD, MemoryPolicy.AVAILABILITY),
        ("Availability", free(3), BESIDE, Action.REFUSE, MemoryPolicy.AVAILABILITY),
        ("Resource", free(100), BESIDE, Action.UNLOAD, MemoryPolicy.RESOURCE),
        ("Resource", free(100), Situation(serving=host(9)), Action.REFUSE, MemoryPolicy.RESOURCE),
        ("Resource", free(5), ALONE, Action.LOAD, MemoryPolicy.AVAILABILITY),
        ("Resource", free(3), ALONE, Action.REFUSE, MemoryPolicy.AVAILABILITY),
        ("Auto", free(3), ALONE, Action.REFUSE, MemoryPolicy.AVAILABILITY),
        ("Auto", free(3), Situation(serving=host(9)), Action.REFUSE, MemoryPolicy.RESOURCE),
        ("Auto", free(1), Situation(serving=host(3), may_leave=True), Action.REFUSE, MemoryPolicy.RESOURCE),
        ("Auto", free(3), Situation(host(9), host(2)), Action.RELEASE_STANDBY, MemoryPolicy.AVAILABILITY),
        ("Availability", free(3), Situation(host(9), host(2)), Action.RELEASE_STANDBY, MemoryPolicy.AVAILABILITY),
        ("Auto", free(1), Situation(host(9), host(2)), Action.REFUSE, MemoryPolicy.RESOURCE),
        ("Auto", free(1), Situation(host(9), host(2), may_leave=True), Action.UNLOAD, MemoryPolicy.RESOURCE),
        ("Auto", free(3), Situation(host(9), host(2), Role.STANDBY), Action.REFUSE, MemoryPolicy.AVAILABILITY),
        ("Resource", free(100), Situation(host(9), role=Role.STANDBY), Action.REST, MemoryPolicy.RESOURCE),
        ("Auto", free(3), Situation(host(9), wanted=False, may_leave=True), Action.REST, MemoryPolicy.RESOURCE),
        ("Resource", free(99), Situation(host(9), wanted=False, may_leave=True), Action.REST, MemoryPolicy.RESOURCE),
        ("Auto", free(3), Situation(host(9), shares=True, may_leave=True), Action.REFUSE, MemoryPolicy.RESOURCE),
        ("Auto", free(5), Situation(host(9), shares=True), Action.LOAD, MemoryPolicy.AVAILABILITY),
    ],
)
def test_each_situation_has_one_verdict(
    policy: str, there: Free, situation: Situation, action: Action, chosen: MemoryPolicy
) -> None:
    verdict = decide_memory(policy, NEXT, there, situation)
    assert (verdict.action, verdict.policy) == (action, chosen), verdict.reason


def test_E06_that_four_do_not_fit_beside_nine_of_twelve_is_said_with_figures_before_anything_is_unloaded() -> None:
    verdict = decide_memory("Availability", host(4), free(3), Situation(serving=host(9), may_leave=True))
    assert verdict.action is Action.REFUSE
    assert "needs 4,096.0 MiB" in verdict.reason
    assert "3,072.0 MiB are free" in verdict.reason
    alone = decide_memory("Auto", host(14), free(3), Situation(serving=host(9), may_leave=True))
    assert alone.action is Action.REFUSE
    assert "12,288.0 MiB" in alone.reason


def test_each_host_takes_the_measured_memory_and_the_files_are_shared() -> None:
    engine = replace(MANIFEST, memory=MemoryNeed(5, 1000))
    assert need_of(engine, 1, 1) == MemoryNeed(5, 1000 + 3_163_737 + 12)
    assert need_of(engine, 3, 8) == MemoryNeed(15, 3000 + 3_163_737 + 12)


@pytest.mark.parametrize(("lanes", "device"), [(0, 500), (2, 500), (3, 570), (5, 710)])
def test_each_lane_beyond_the_two_that_were_measured_takes_more_of_the_device(lanes: int, device: int) -> None:
    engine = replace(MANIFEST, memory=MemoryNeed(500, 1000, 70))
    assert need_of(engine, 1, lanes).device_bytes == device
    assert need_of(engine, 2, lanes).device_bytes == 2 * device


@pytest.mark.parametrize(
    ("device_free", "action"), [(None, Action.LOAD), (9 * GIB, Action.LOAD), (8 * GIB, Action.UNLOAD)]
)
def test_device_memory_counts_as_well_where_it_is_known(device_free: int | None, action: Action) -> None:
    need = MemoryNeed(8 * GIB, GIB)
    situation = Situation(serving=MemoryNeed(8 * GIB, GIB), may_leave=True)
    verdict = decide_memory("Auto", need, Free(100 * GIB, device_free), situation)
    assert verdict.action is action
    assert "of device memory" in verdict.reason or action is Action.UNLOAD


def room_of(lanes: int, mib: int) -> Room:
    async def free() -> Free:
        return Free(device_bytes=mib << 20)

    rules = MemoryRules("Auto", False, 1, lanes, 0.0, free, lambda: 0)
    return Room(rules, cast("Any", SimpleNamespace(table=None)), list, cast("Any", None), lambda: None)


@pytest.mark.parametrize(("lanes", "there_is"), [(0, True), (4, True), (6, False)])
def test_a_worker_asks_for_room_for_its_lanes_and_a_spare_one(lanes: int, there_is: bool) -> None:
    engine = replace(MANIFEST, memory=MemoryNeed(500 << 20, 0, 100 << 20))
    entry = cast("Any", SimpleNamespace(role=Role.STABLE))
    room = room_of(lanes, 1000)
    with contextlib.nullcontext() if there_is else pytest.raises(Refused, match=r"1,000\.0 MiB of device"):
        asyncio.run(room.make(entry, engine, lambda: Asked(True, False, False)))
    assert room.report is not None
    assert room.report.need_device_bytes == (500 + 100 * max(0, lanes - 1 if lanes else 0)) << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       8000 kB\nMemAvailable:   5000 kB\n"


def test_the_tightest_of_the_groups_of_version_2_counts_without_cached_files(tmp_path: Path) -> None:
    groups = tree(
        tmp_path / "cgroup",
        {
            "pod/memory.max": "3000000\n",
            "pod/memory.current": "2500000\n",
            "pod/memory.stat": "anon 1\nfile 900000\ninactive_file 700000\nactive_file 200000\n",
            "pod/box/memory.max": "max\n",
            "pod/box/memory.current": "2000000\n",
        },
    )
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/pod/box\n", "meminfo": MEMINFO})
    assert HostMemory(groups, proc).free_bytes() == 3_000_000 - (2_500_000 - 700_000)


def test_a_group_of_version_1_counts_with_all_below_it(tmp_path: Path) -> None:
    groups = tree(
        tmp_path / "cgroup",
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "5\n",
            "memory/box/memory.limit_in_bytes": "4000000\n",
            "memory/box/memory.usage_in_bytes": "3000000\n",
            "memory/box/memory.stat": "inactive_file 1\ntotal_inactive_file 500000\n",
        },
    )
    proc = tree(tmp_path / "proc", {"self/cgroup": "4:memory:/box\n1:cpu:/\n0::/\n", "meminfo": MEMINFO})
    assert HostMemory(groups, proc).free_bytes() == 1_500_000


def test_a_container_that_sees_its_own_group_as_the_root_reads_that(tmp_path: Path) -> None:
    groups = tree(tmp_path / "cgroup", {"memory.max": "1000\n", "memory.current": "400\n"})
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/kubepods/pod1/box\n", "meminfo": MEMINFO})
    assert HostMemory(groups, proc).free_bytes() == 600


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"memory.max": "max\n", "memory.current": "4\n"}, 5000 * 1024),
        ({}, 5000 * 1024),
        ({"memory.max": "100\n", "memory.current": "400\n"}, 0),
        ({"memory.max": "nonsense\n", "memory.current": "4\n"}, 5000 * 1024),
    ],
)
def test_without_a_limit_the_node_decides(tmp_path: Path, files: dict[str, str], found: int) -> None:
    proc = tree(tmp_path / "proc", {"self/cgroup": "0::/\n", "meminfo": MEMINFO})
    assert HostMemory(tree(tmp_path / "cgroup", files), proc).free_bytes() == found


def test_nothing_to_read_is_unknown_and_not_zero(tmp_path: Path) -> None:
    assert HostMemory(tmp_path, tmp_path).free_bytes() is None


def test_on_this_machine_something_is_free() -> None:
    found = HostMemory().free_bytes()
    assert found is not None
    assert 0 < found <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
