"""Whether the front has a core for itself, which, and who leaves it alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest
from trtmodel_worker.placement import FEWEST, fronts_core, thread_siblings

ALL = range(16)


def alone(cpu: int) -> Collection[int]:
    return {cpu}


def beside(cpu: int) -> Collection[int]:
    """Threads of one core have neighbouring numbers."""
    return {cpu & ~1, cpu | 1}


def apart(cpu: int) -> Collection[int]:
    """As on many servers: the second threads have the upper half of the numbers."""
    return {cpu % 8, cpu % 8 + 8}


@pytest.mark.parametrize(("siblings", "core"), [(beside, {14, 15}), (apart, {7, 15}), (alone, {14, 15})])
def test_the_front_takes_a_whole_core(siblings: object, core: set[int]) -> None:
    assert fronts_core(True, ALL, None, siblings) == core  # type: ignore[arg-type]


def test_a_sibling_that_is_another_containers_is_not_taken() -> None:
    assert fronts_core(True, range(9, 16), None, apart) == {14, 15}


@pytest.mark.parametrize("quota", [None, 4.0, 15.0, 15.5, 17.0])
def test_by_itself_nothing_is_taken_that_others_may_use(quota: float | None) -> None:
    assert not fronts_core(None, ALL, quota, beside)


def test_processors_that_are_the_containers_alone_are_taken_unless_that_is_not_wanted() -> None:
    assert fronts_core(None, ALL, 16.0, beside) == {14, 15}
    assert not fronts_core(False, ALL, 16.0, beside)


def test_of_few_processors_none_is_taken() -> None:
    assert not fronts_core(True, range(FEWEST - 1), None, beside)
    assert fronts_core(True, range(FEWEST), None, beside)


def test_siblings_are_read_as_the_kernel_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtmodel_worker.placement._TOPOLOGY", str(tmp_path / "{}"))
    for cpu, text in enumerate(("0,8\n", "0-1\n", "2\n", "nonsense")):
        (tmp_path / str(cpu)).write_text(text)
    assert [thread_siblings(cpu) for cpu in range(5)] == [{0, 8}, {0, 1}, {2}, {3}, {4}]


PROGRAM = """
import os, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from trtmodel_worker import placement
mine = sorted(os.sched_getaffinity(0))
placement.take(mine[-1:])
assert os.sched_getaffinity(0) == set(mine[-1:])
child = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
with ThreadPoolExecutor(1, "aside", placement.leave_to_front) as aside:
    assert aside.submit(os.sched_getaffinity, 0).result() == set(mine[:-1]) == placement.others()
    assert subprocess.check_output(child) != aside.submit(subprocess.check_output, child).result()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_threads_that_step_aside_and_what_they_start_leave_the_core_alone() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
