from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from trtmodel_operator import controller as controllers
from trtmodel_operator.controller import Controller, WatchBroken, Witness
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.ports import ClusterError, Conflict, Key
from trtmodel_operator.queue import AGAIN, ASKED, CHANGED, WorkQueue

A: Key = ("ml", "a")
B: Key = ("ml", "b")


class Cluster:
    def __init__(self, **models: str) -> None:
        self.models = {("ml", name): version for name, version in models.items()}
        self.down = False
        self.lists = 0

    async def list_models(self) -> dict[Key, str]:
        self.lists += 1
        if self.down:
            raise ClusterError("GET", "trtmodels", "connection refused")
        return dict(self.models)


class Stage:
    """A controller with fast times."""

    def __init__(self, reconcile: Callable[[Key], Awaitable[float | None]], cluster: Cluster, **options: Any) -> None:
        self.queue, self.metrics, self.witness, self.broken = WorkQueue(), OperatorMetrics(), Witness(), 0
        options.setdefault("resync", 60.0)
        self.controller = Controller(
            self.queue,
            reconcile,
            cluster,
            self.metrics,
            self.witness,
            self._break,
            **options,  # type: ignore[arg-type]
        )

    def _break(self) -> None:
        self.broken += 1

    def count(self, result: str) -> float:
        return self.metrics.registry.get_sample_value("trtmodel_operator_reconcile_total", {"result": result}) or 0.0


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(20):
            await scene()

    asyncio.run(go())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - what it waits for is no event
            await asyncio.sleep(0.005)


def test_every_model_that_a_list_shows_gets_a_pass_without_any_event() -> None:
    async def scene() -> None:
        seen: list[Key] = []

        async def reconcile(key: Key) -> None:
            seen.append(key)

        stage = Stage(reconcile, Cluster(a="1", b="1"))
        stage.controller.start()
        await until(lambda: sorted(seen) == [A, B])
        assert stage.count("done") == 2
        await stage.controller.stop()

    play(scene)


def test_the_resync_goes_on_after_a_list_that_failed_and_finds_what_no_event_told() -> None:
    async def scene() -> None:
        seen: list[Key] = []

        async def reconcile(key: Key) -> None:
            seen.append(key)

        cluster = Cluster(a="1")
        cluster.down = True
        stage = Stage(reconcile, cluster, resync=0.02)
        stage.witness.deliver(B, "1")  # known from the watch, deleted while the watch was down
        stage.controller.start()
        await until(lambda: cluster.lists >= 2)
        assert seen == []
        cluster.down = False
        await until(lambda: {A, B} <= set(seen))
        await stage.controller.stop()

    play(scene)


def test_what_is_found_to_be_gone_gets_a_pass_after_the_one_under_way() -> None:
    async def scene() -> None:
        seen: list[Key] = []
        found = asyncio.Event()

        async def reconcile(key: Key) -> None:
            seen.append(key)
            await found.wait()

        cluster = Cluster()
        stage = Stage(reconcile, cluster, resync=0.02)
        cluster.down = True
        stage.controller.start()
        stage.witness.deliver(A, "1")
        stage.queue.add(A)
        await until(lambda: seen == [A])
        cluster.down = False
        await until(lambda: not stage.witness.delivered(A))  # a list showed it
        found.set()
        await until(lambda: seen == [A, A])
        await stage.controller.stop()

    play(scene)


def test_an_edit_that_no_event_told_gets_a_pass_at_the_next_list(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        added: list[tuple[Key, int]] = []

        async def reconcile(_: Key) -> None: ...

        cluster = Cluster(a="9", b="9")
        stage = Stage(reconcile, cluster, resync=0.02)
        for key in cluster.models:
            stage.witness.deliver(key, "9")
        add = stage.queue.add
        monkeypatch.setattr(stage.queue, "add", lambda key, rank: (added.append((key, rank)), add(key, rank)))
        stage.controller.start()
        await until(lambda: cluster.lists >= 2)
        assert {rank for _, rank in added} == {AGAIN}
        cluster.models[B] = "10"
        await until(lambda: (B, CHANGED) in added)
        assert (A, CHANGED) not in added
        await stage.controller.stop()

    play(scene)


def test_what_is_known_is_looked_at_again_one_by_one_and_what_is_new_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "AGAIN_RATE", 0.001)  # so that a list brings one of them

    async def scene() -> None:
        seen: list[str] = []

        async def reconcile(key: Key) -> None:
            seen.append(key[1])

        cluster = Cluster(**{f"m{n}": "1" for n in range(10)})
        stage = Stage(reconcile, cluster, resync=0.05)
        for key in cluster.models:
            stage.witness.deliver(key, "1")  # or the watch would be taken for broken
        stage.controller.start()
        await until(lambda: len(seen) >= 10)
        for key in (("ml", "new"), ("ml", "newer")):
            cluster.models[key] = "1"
            stage.witness.deliver(key, "1")
        await until(lambda: {"new", "newer"} <= set(seen))
        assert len(seen) <= 12 + cluster.lists
        await until(lambda: all(seen.count(f"m{n}") >= 2 for n in range(10)))
        assert seen.count("m0") <= seen.count("m9") + 2
        await stage.controller.stop()

    play(scene)


def test_a_pass_that_wants_another_one_gets_it_and_one_that_does_not_waits_for_events() -> None:
    async def scene() -> None:
        seen: list[Key] = []

        async def reconcile(key: Key) -> float | None:
            seen.append(key)
            return 0.01 if key == A else None

        stage = Stage(reconcile, Cluster(a="1", b="1"))
        stage.controller.start()
        await until(lambda: seen.count(A) >= 4)
        assert seen.count(B) == 1
        await stage.controller.stop()

    play(scene)


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (Conflict("modified"), "conflict"),
        (ClusterError("GET", "jobs", "down"), "error"),
        (ZeroDivisionError("a bug"), "bug"),
        (TimeoutError(), "timeout"),
    ],
)
def test_a_pass_that_fails_is_tried_again_and_stops_no_other(error: Exception, result: str) -> None:
    async def scene() -> None:
        seen: list[Key] = []

        async def reconcile(key: Key) -> None:
            seen.append(key)
            if key == A and seen.count(A) == 1:
                raise error

        stage = Stage(reconcile, Cluster(a="1", b="1"), workers=1)
        stage.controller.start()
        await until(lambda: seen.count(A) == 2 and B in seen)
        assert stage.count(result) == 1
        await until(lambda: stage.count("done") == 2)
        await stage.controller.stop()

    play(scene)


def test_what_a_busy_server_asks_for_is_waited() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        times: list[float] = []

        async def reconcile(_: Key) -> None:
            times.append(loop.time())
            if len(times) == 1:
                raise ClusterError("GET", "jobs", "too many requests", 429, retry_after=2.0)

        stage = Stage(reconcile, Cluster(a="1"))
        stage.controller.start()
        await until(lambda: len(times) == 2)
        assert times[1] - times[0] >= 2.0
        await stage.controller.stop()

    play(scene)


def test_a_failure_that_says_when_the_next_pass_is_due_is_not_tried_later_and_later() -> None:
    async def scene() -> None:
        times: list[float] = []

        async def reconcile(_: Key) -> None:
            times.append(asyncio.get_running_loop().time())
            error = ClusterError("PATCH", "deployments", "denied by a policy", 403)
            error.again = 0.02
            raise error

        stage = Stage(reconcile, Cluster(a="1"))
        stage.controller.start()
        await until(lambda: len(times) > 12)  # with pauses that double it would take an hour
        assert min(later - sooner for sooner, later in pairwise(times)) >= 0.02
        assert stage.count("error") >= 12
        await stage.controller.stop()

    play(scene)


def test_a_pass_that_hangs_is_given_up_and_the_worker_goes_on() -> None:
    async def scene() -> None:
        seen: list[Key] = []

        async def reconcile(key: Key) -> None:
            seen.append(key)
            if key == A:
                await asyncio.sleep(3600)

        stage = Stage(reconcile, Cluster(a="1", b="1"), workers=1, pass_timeout=0.05)
        stage.controller.start()
        await until(lambda: B in seen and stage.count("timeout") == 1)
        await stage.controller.stop()

    play(scene)


def test_what_people_ask_for_is_begun_while_all_other_workers_wait_for_answers() -> None:
    """Of a server that takes its time. What only changed has to wait."""

    async def scene() -> None:
        began, over = list[str](), asyncio.Event()

        async def reconcile(key: Key) -> float | None:
            began.append(key[1])
            await over.wait()
            return None

        stage = Stage(reconcile, Cluster(), workers=1, asked_workers=2)
        stage.controller.start()
        stage.queue.add(("ml", "changed-1"))
        await until(lambda: began == ["changed-1"])
        stage.queue.add(("ml", "changed-2"))
        for n in range(3):
            stage.queue.add(("ml", f"asked-{n}"), ASKED)
        await until(lambda: len(began) == 3)
        await asyncio.sleep(0.05)
        assert began == ["changed-1", "asked-0", "asked-1"]
        over.set()
        await until(lambda: len(began) == 5)
        await stage.controller.stop()

    play(scene)


def test_a_process_whose_passes_all_hang_says_that_it_is_stuck_and_a_busy_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controllers, "STUCK", 0.1)

    async def scene() -> None:
        release = asyncio.Event()

        async def reconcile(_: Key) -> None:
            await release.wait()

        stage = Stage(reconcile, Cluster(a="1"), workers=2)
        stage.controller.start()
        await asyncio.sleep(0.3)
        assert stage.controller.trouble() == ""  # one hangs, the other is idle
        stage.queue.add(B)
        await until(lambda: "no pass has ended" in stage.controller.trouble())
        release.set()
        await until(lambda: stage.controller.trouble() == "")
        await stage.controller.stop()

    play(scene)


def test_a_blocked_event_loop_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "LAG_MOST", 0.2)
    monkeypatch.setattr(controllers, "BEAT", 0.01)

    async def scene() -> None:
        async def reconcile(_: Key) -> None:
            import time

            time.sleep(0.4)  # noqa: ASYNC251 - the mistake that is to be noticed

        stage = Stage(reconcile, Cluster(a="1"))
        troubles: list[str] = []
        stage.metrics.lag.set = lambda lag: troubles.append(stage.controller.trouble())  # type: ignore[method-assign]
        stage.controller.start()
        await until(lambda: any("late" in trouble for trouble in troubles))
        await stage.controller.stop()

    play(scene)


def test_a_controller_whose_task_ended_is_in_trouble() -> None:
    async def scene() -> None:
        async def reconcile(_: Key) -> None: ...

        stage = Stage(reconcile, Cluster())
        stage.controller.start()
        assert stage.controller.trouble() == ""
        next(t for t in asyncio.all_tasks() if t.get_name() == "resync").cancel()
        await until(lambda: stage.controller.trouble() == "ended: resync")
        await stage.controller.stop()

    play(scene)


# ----- the witness of the watch -----------------------------------------------------------------------------------


def test_our_own_writes_are_no_news_and_those_of_others_are() -> None:
    witness = Witness()
    assert witness.deliver(A, "1", ("uid", 1))
    assert not witness.deliver(A, "2", ("uid", 1))  # only status differs
    assert witness.deliver(A, "3", ("uid", 2))
    witness.compare({})
    assert witness.deliver(A, "9", ("uid", 2))  # it was away in between


def test_a_watch_that_delivers_what_lists_show_is_trusted() -> None:
    witness = Witness()
    for version in ("1", "2", "3"):
        witness.deliver(A, version)
        assert witness.compare({A: version}) == []


def test_a_busy_object_may_be_ahead_in_every_list() -> None:
    witness = Witness()
    for n in range(10):
        witness.deliver(A, str(n))
        witness.compare({A: str(n + 1)})


def test_a_watch_that_delivers_nothing_any_more_is_found_broken_at_the_third_list() -> None:
    witness = Witness()
    witness.deliver(A, "1")
    witness.compare({A: "2"})
    witness.compare({A: "2"})
    with pytest.raises(WatchBroken, match="1 TRTModels, such as ml/a"):
        witness.compare({A: "3"})


def test_only_what_a_list_shows_newer_than_what_came_was_missed() -> None:
    witness = Witness()
    witness.deliver(A, "9")
    assert witness.missed({A: "9", B: "12"}) == []  # of B nothing came yet: it is new
    assert witness.missed({A: "8"}) == []  # its event was faster than the list
    assert witness.missed({}) == []
    assert witness.missed({A: "10"}) == [A]


def test_a_watch_that_recovers_is_trusted_again() -> None:
    witness = Witness()
    witness.deliver(A, "1")
    witness.compare({A: "2"})
    witness.compare({A: "2"})
    witness.deliver(A, "2")
    for _ in range(3):
        witness.compare({A: "2"})


def test_what_was_deleted_while_the_watch_was_down_is_told_once() -> None:
    witness = Witness()
    witness.deliver(A, "1")
    witness.deliver(B, "1")
    assert witness.compare({A: "1"}) == [B]
    assert witness.compare({A: "1"}) == []


def test_a_broken_watch_ends_the_process() -> None:
    async def scene() -> None:
        async def reconcile(_: Key) -> None: ...

        stage = Stage(reconcile, Cluster(a="2"), resync=0.02)
        stage.witness.deliver(A, "1")
        stage.controller.start()
        await until(lambda: stage.broken == 1)
        await stage.controller.stop()

    play(scene)
