"""A host that is prepared beside traffic gives way, but not its lanes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from trtmodel_worker.host.reserve import ReservedThread, make_way
from worker_harness import REVISION_1, REVISION_2, Bucket, Load, Operator, WorkerProcess


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_that_were_made_before_keep_their_priority_and_what_they_make_has_it() -> None:
    found: list[int] = []

    def gives_way() -> None:  # in a thread of its own: this one could not raise its priority again
        reserved = ReservedThread("reserved")
        make_way()
        child = threading.Thread(target=lambda: found.append(niceness()))
        child.start()
        child.join()
        found.append(reserved.start(niceness).result(30))
        found.append(niceness())

    before = niceness()
    thread = threading.Thread(target=gives_way)
    thread.start()
    thread.join()
    assert found == [19, before, 19]
    assert niceness() == before


def test_what_reserved_work_raises_is_raised_where_it_is_waited_for() -> None:
    def fails() -> None:
        raise OSError("no such plan")

    with pytest.raises(OSError, match="no such plan"):
        ReservedThread("reserved").start(fails).result(30)


def test_beside_traffic_a_host_prepares_at_the_lowest_priority_and_serves_at_the_usual_one(tmp_path: Path) -> None:
    operator, bucket = Operator(), Bucket(tmp_path / "bucket")
    first, second = (bucket.publish(r, {"factor": f})[0] for r, f in ((REVISION_1, 2.0), (REVISION_2, 3.0)))
    stable, candidate = operator.artifact(REVISION_1, first), operator.artifact(REVISION_2, second)
    worker = WorkerProcess(tmp_path / "worker", operator, bucket)
    worker.point(stable)
    worker.start()
    try:
        worker.wait_ready()
        (alone,) = worker.host_pids()
        with Load(worker.port, {REVISION_1: 2.0, REVISION_2: 3.0}, clients=2) as load:
            load.wait_for(50)
            worker.desire(stable, candidate)
            worker.wait_engine(second)
        assert load.failures == []
        (beside,) = set(worker.host_pids()) - {alone}
        usual, others = priorities(alone)
        assert set(others) == {usual}
        main, others = priorities(beside)
        assert (main, others.count(usual)) == (19, 2)  # its lanes; libraries have made threads of their own
    finally:
        assert worker.stop() == 0


def priorities(pid: int) -> tuple[int, list[int]]:
    """Of a host's main thread, and of its other ones."""
    threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    others = [os.getpriority(os.PRIO_PROCESS, tid) for tid in threads if tid != pid]
    return os.getpriority(os.PRIO_PROCESS, pid), others
