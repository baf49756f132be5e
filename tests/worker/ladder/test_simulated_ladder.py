"""The ladder's rungs, one by one, with pretended hosts: what exactly follows each failure, and for whom."""

from __future__ import annotations

import asyncio
import itertools
import time

import numpy as np
import pytest
from simulated import DEATH_SECONDS, WIDTHS, Behave, PretendedHost, World, run
from trtmodel_worker.front.calls import Failed, Unreadable
from trtmodel_worker.front.lanes import LanePort
from trtmodel_worker.host.wire import FailureClass


def first(faults: list[object]) -> Behave:
    """The first batches fail so, one after the other, the others are answered."""
    left = iter(faults)

    def behave(host: PretendedHost, lane: LanePort, x: np.ndarray) -> object:
        return next(left, "ok")

    return behave  # type: ignore[return-value]


def on_values(numbers: set[int], fault: object) -> Behave:
    """A batch with one of these requests in it fails so."""

    def behave(host: PretendedHost, lane: LanePort, x: np.ndarray) -> object:
        return fault if numbers & {int(v) for v in x[:, 0]} else "ok"

    return behave  # type: ignore[return-value]


def statuses(w: World) -> list[int]:
    return [r.failures[0].status if r.failures else 200 for r in w.requests]


def test_an_invalid_request_is_refused_alone() -> None:
    async def story(w: World) -> None:
        engine = w.engine(behave=on_values({48}, FailureClass.INVALID_INPUT))
        for _ in range(8):
            w.send(engine)
        await w.settle()
        assert statuses(w) == [200, 200, 400, 200, 200, 200, 200, 200]
        assert w.counted(engine) == {"ok": 7, "abandoned": 0}

    run(story)


def test_an_invalid_request_whose_client_is_gone_makes_no_other_one_invalid() -> None:
    async def story(w: World) -> None:
        engine = w.engine(behave=on_values({16}, FailureClass.INVALID_INPUT), lanes=1)
        bad, good = w.send(engine), w.send(engine)
        await asyncio.sleep(0.0005)  # both are with the host
        w.cancel(bad)
        await w.settle()
        assert [len(good.answers), len(good.failures)] == [1, 0]

    run(story)


def test_an_answer_that_cannot_be_written_costs_no_other_request_its_own() -> None:
    async def story(w: World) -> None:
        engine = w.engine(lanes=1)
        broken, *others = [w.send(engine) for _ in range(4)]

        def fail(*_: object) -> None:
            broken.cancelled = True
            raise OSError("the codec has a defect")

        broken.call.on_answer = fail
        await w.settle()
        assert [len(r.answers) for r in others] == [1, 1, 1]
        assert [f.status for f in broken.failures] == [500]

    run(story)


@pytest.mark.parametrize("budget", [10.0, 100.0])
def test_a_full_batch_that_fails_twice_right_after_the_start_fails_no_request(budget: float) -> None:
    async def story(w: World) -> None:
        engine = w.engine(behave=first([FailureClass.RECOVERABLE] * 2), lanes=2)
        for _ in range(8):
            w.send(engine)
        await w.settle()
        assert statuses(w) == [200] * 8
        assert w.counted(engine) == {"ok": 8, "abandoned": 0, "Recoverable": 16}

    run(story, budget=budget)


def test_an_engine_that_fails_everything_gets_a_tenth_more_attempts_and_no_multiple() -> None:
    async def story(w: World) -> None:
        engine = w.engine(behave=lambda *_: FailureClass.INTERNAL, hosts=2)
        for _ in range(5000):
            w.send(engine)
            await asyncio.sleep(0.001)
        await w.settle()
        assert 500 in statuses(w)
        assert set(statuses(w)) <= {500, 503}
        assert engine.attempts - engine.uncounted < 1.1 * 5000 + 200 + sum(r.call.deaths for r in w.requests)

    run(story, budget=10.0)


def test_without_a_budget_nothing_is_tried_again() -> None:
    async def story(w: World) -> None:
        engine = w.engine(behave=first([FailureClass.RECOVERABLE]))
        w.send(engine)
        await w.settle()
        assert statuses(w) == [500]
        assert engine.attempts == 1

    run(story, budget=0.0)


def test_a_request_that_joins_one_that_was_tried_before_keeps_its_own_tries() -> None:
    async def story(w: World) -> None:
        engine = w.engine(behave=on_values({16}, FailureClass.RECOVERABLE), lanes=1)
        w.send(engine)
        await asyncio.sleep(0.0005)
        for _ in range(5):
            w.send(engine)
        await w.settle()
        assert statuses(w) == [500, 200, 200, 200, 200, 200]

    run(story, attempts=2)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_batches_that_do_not_fit_into_memory_become_smaller_and_no_request_fails(most: int) -> None:
    async def story(w: World) -> None:
        def behave(host: PretendedHost, lane: LanePort, x: np.ndarray) -> object:
            return FailureClass.OUT_OF_MEMORY if len(x) > most else "ok"

        engine = w.engine(behave=behave, lanes=2)  # type: ignore[arg-type]
        for _ in range(600):
            for _ in range(10):
                w.send(engine)
            await asyncio.sleep(0.02)
        await w.settle()
        assert set(statuses(w)) == {200}
        assert max(engine.sizes[-50:]) == most if most < 5 else 4
        assert w.counted(engine)["OutOfMemory"] < 0.05 * w.counted(engine)["ok"]

    run(story)


def test_rows_that_turn_out_to_depend_on_the_data_are_run_one_by_one_and_none_that_waits_is_mixed_up() -> None:
    async def story(w: World) -> None:
        engine = w.engine(lanes=1)
        for rows in (1, 2, 3, 1, 2):
            w.send(engine, rows)
        await asyncio.sleep(0.0005)
        for rows in (1, 2, 3, 1, 2):
            w.send(engine, rows)
        engine.scheduler._unbatch()
        await w.settle()
        assert set(statuses(w)) == {200}
        assert engine.sizes[-5:] == [1, 2, 3, 1, 2]

    run(story)


def test_requests_that_came_while_rows_were_not_run_together_are_padded_by_their_own_rows() -> None:
    async def story(w: World) -> None:
        engine = w.engine(lanes=1, buckets=(4, 8))
        engine.scheduler.batchable = False
        for rows in (1, 3, 2):
            w.send(engine, rows)
        engine.scheduler.batchable = True
        await w.settle()
        assert set(statuses(w)) == {200}

    run(story)


def test_what_is_taken_over_waits_its_turn_and_within_the_limit() -> None:
    async def story(w: World) -> None:
        standby = w.engine("standby", 3.0, lanes=1)
        stable = w.engine("stable", 2.0, lanes=1, helper="standby")
        stable.hosts[0].die(guilty=False)
        await asyncio.sleep(0.001)
        standby.seconds = (0.1, 0.1)
        for _ in range(40):
            w.send(stable, 8)
            await asyncio.sleep(0.001)
        assert standby.scheduler.waiting <= 20
        await w.settle()
        answered = [r for r in w.requests if r.answers]
        assert 200 in statuses(w)
        assert set(statuses(w)) == {200, 503}
        assert [r.number for r in sorted(answered, key=lambda r: r.ended_at)] == [r.number for r in answered]

    run(story, queue_limit=20)


def test_a_host_that_was_killed_from_outside_leaves_no_suspect() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=2)
        for _ in range(6):
            w.send(engine)
        await asyncio.sleep(0.0005)
        engine.hosts[0].die(guilty=False)
        await w.settle()
        assert statuses(w) == [200] * 6
        assert max(r.ended_at for r in w.requests) < 1000.2

    run(story)


@pytest.mark.parametrize("beside", ["sibling", "standby"])
@pytest.mark.parametrize("innocent", [True, False])
def test_what_a_killed_host_ran_does_not_wait_for_its_driver_to_clean_up(beside: str, innocent: bool) -> None:
    async def story(w: World) -> None:
        standby = w.engine("standby", 3.0)
        stable = w.engine("stable", 2.0, hosts=2 if beside == "sibling" else 1, lanes=1, helper="standby")
        stable.seconds = standby.seconds = (0.004, 0.004)
        request = w.send(stable)
        await asyncio.sleep(0.001)
        host = next(lane.host for lane in stable.scheduler._lanes.all if lane.attempt is not None)
        died = time.monotonic()
        host.die(guilty=False, innocent=innocent)
        await w.settle()
        assert len(request.answers) == 1
        assert (request.ended_at - died < DEATH_SECONDS) == innocent
        assert stable.arena.in_use == 0

    run(story)


def test_a_request_whose_host_was_killed_is_no_more_guilty_than_others_at_the_next_death() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=1, behave=on_values({32}, "crash"))
        innocent = w.send(engine)
        await asyncio.sleep(0.0005)
        host = next(lane.host for lane in engine.scheduler._lanes.all if lane.attempt is not None)
        for other in engine.hosts:
            if other is not host:
                other.die(guilty=False)
        host.die(guilty=False)
        poison = w.send(engine)  # they run together, once a host is there
        await w.settle()
        assert innocent.call.deaths == 1
        assert (len(innocent.answers), [f.status for f in poison.failures]) == (1, [500])

    run(story)


@pytest.mark.parametrize(("hosts", "lanes"), [(1, 1), (1, 2), (2, 1)])
def test_an_idle_engine_is_probed_however_few_lanes_it_has(hosts: int, lanes: int) -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=hosts, lanes=lanes)
        engine.scheduler.probe()
        await w.settle()
        assert engine.stats.probes == (1 if hosts == 1 else 2 - 1)

    run(story)


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_one_request_that_crashes_every_host_it_meets_fails_alone(hosts: int) -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=hosts, lanes=2, behave=on_values({16 * 20}, "crash"))
        alive = []
        for _ in range(200):
            w.send(engine)
            await asyncio.sleep(0.002)
            alive.append(len(engine.scheduler._lanes.all) > 0)
        await w.settle()
        assert [n for n, status in enumerate(statuses(w)) if status != 200] == [19]
        assert statuses(w)[19] == 500
        assert engine.deaths == 2
        assert all(alive) or hosts == 1

    run(story)


def test_a_request_that_crashed_two_hosts_is_refused_when_it_is_asked_again() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, behave=on_values({16}, "crash"))
        poison = w.send(engine)
        await w.settle()
        again: list[Failed] = []
        call = poison.call
        call.done, call.deaths, call.on_failure = False, 0, again.append
        engine.scheduler.submit(call)
        assert [f.status for f in again] == [500]
        assert engine.deaths == 2

    run(story)


def test_a_request_on_a_host_that_stops_is_answered_by_the_other_one_long_before_it_is_replaced() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=2)
        for _ in range(50):
            w.send(engine)
            await asyncio.sleep(0.005)
        engine.scheduler._lanes.free[-1].host.stop()
        for _ in range(200):
            w.send(engine)
            await asyncio.sleep(0.005)
        for host in engine.hosts:
            host.wake()
        await w.settle()
        assert set(statuses(w)) == {200}
        assert max(r.ended_at - r.call.since for r in w.requests) < 0.5
        assert engine.stats.hedge_wins > 0
        assert engine.deaths == 0

    run(story)


def test_a_free_lane_of_a_host_that_is_late_gets_nothing_while_another_host_is_in_time() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=3)
        engine.scheduler._lanes.free[-1].host.stop()
        for _ in range(50):
            for width in WIDTHS:
                w.send(engine, width=width)
            await asyncio.sleep(0.03)
        for host in engine.hosts:
            host.wake()
        await w.settle()
        assert set(statuses(w)) == {200}
        assert engine.stats.hedges <= 2  # of what it had before it was late

    run(story)


def test_while_the_only_host_is_stopped_nobody_waits_for_it_if_another_engine_may_answer() -> None:
    async def story(w: World) -> None:
        w.engine("standby", 3.0)
        engine = w.engine("stable", 2.0, helper="standby")
        for n in range(300):
            if n == 100:
                engine.hosts[0].stop()
            w.send(engine)
            await asyncio.sleep(0.005)
        engine.hosts[0].wake()
        await asyncio.sleep(0.1)
        back = w.send(engine)
        await w.settle()
        assert set(statuses(w)) == {200}
        assert max(r.ended_at - r.call.since for r in w.requests) < 0.15
        assert engine.deaths == 0
        assert back.answers[0][0] is engine

    run(story)


def test_what_a_killed_host_ran_does_not_wait_until_its_sockets_are_closed() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=1)
        await w.warm(engine)
        engine.scheduler.overdue.after = lambda _: 5.0
        host = engine.scheduler._lanes.free[-1].host
        host.stop()
        request = w.send(engine)
        await asyncio.sleep(0.0)
        host.killed = True
        await w.settle()
        assert [len(request.answers), len(request.failures)] == [1, 0]
        assert request.ended_at - request.call.since < min(1.0, DEATH_SECONDS)

    run(story)


def test_all_that_a_stopped_host_has_is_run_elsewhere_at_once() -> None:
    async def story(w: World) -> None:
        standby = w.engine("standby", 3.0, lanes=2)
        engine = w.engine("stable", 2.0, helper="standby", lanes=2)
        await w.warm(engine)
        standby.seconds = (0.2, 0.2)
        engine.hosts[0].stop()
        both = [w.send(engine)]
        await asyncio.sleep(0.002)
        both.append(w.send(engine))
        await w.settle()
        assert [request.answers[0][0] for request in both] == [standby] * 2
        assert abs(both[0].ended_at - both[1].ended_at) < 0.1, "the second did not wait for the first one's end"

    run(story)


def test_nobody_looks_after_a_request_any_more_whose_client_is_gone() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=1, lanes=1)
        engine.hosts[0].stop()
        request = w.send(engine)
        await asyncio.sleep(0.1)
        assert engine.scheduler._hedges._timer is not None
        w.cancel(request)
        await asyncio.sleep(0.1)
        assert engine.scheduler._hedges._timer is None
        engine.hosts[0].wake()
        await w.settle()

    run(story)


def test_a_candidate_that_is_stopped_is_not_relieved_by_stable_before_it_is_ended() -> None:
    async def story(w: World) -> None:
        stable = w.engine("stable", 2.0)
        candidate = w.engine("candidate", 3.0, helper="stable")
        candidate.hedges_elsewhere = False
        candidate.hosts[0].stop()
        requests = [w.send(candidate, 8) for _ in range(10)]
        await asyncio.sleep(1.0)
        assert not any(r.ends for r in requests)
        await w.settle()
        assert set(statuses(w)) == {200}
        assert stable.attempts > 0

    run(story)


def test_hedges_are_few_when_everything_is_slow() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=2)
        for _ in range(60):
            w.send(engine)
            await asyncio.sleep(0.005)
        engine.seconds = (0.3, 0.4)
        before = engine.stats.batches
        for _ in range(100):
            w.send(engine)
            await asyncio.sleep(0.005)
        await w.settle()
        assert set(statuses(w)) == {200}
        assert engine.stats.hedges <= 1 + (engine.stats.batches - before) / 2

    run(story)


def test_slow_runs_get_no_double_load_though_each_host_has_one_lane_that_says_nothing_meanwhile() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=4, lanes=1)
        for _ in range(60):
            w.send(engine)
            await asyncio.sleep(0.005)
        engine.seconds = (0.3, 0.4)
        requests = [w.send(engine, 8) for _ in range(2)]  # of eight rows: no batch holds both
        await asyncio.sleep(0.25)
        assert engine.scheduler.running == 3, "one of them was hedged, and only one"
        await w.settle()
        assert all(len(request.answers) == 1 for request in requests)

    run(story)


def test_it_is_told_when_a_lane_gets_a_request_and_when_the_last_one_was_answered() -> None:
    async def story(w: World) -> None:
        engine = w.engine(lanes=2)
        scheduler, seen = engine.scheduler, list[tuple[int, int]]()
        scheduler.on_load = lambda: seen.append((scheduler.running, scheduler.waiting))
        scheduler.batchable = False
        for _ in range(3):  # the third waits for a lane
            w.send(engine)
        await w.settle()
        assert [load for load, _ in itertools.groupby(seen)] == [(1, 2), (2, 1), (2, 0), (1, 0), (0, 0)]

    run(story)


def test_a_candidate_whose_hosts_are_gone_is_answered_for_and_the_attempts_are_its_failures() -> None:
    async def story(w: World) -> None:
        w.engine("stable", 2.0)
        candidate = w.engine("candidate", 3.0, helper="stable")
        candidate.hosts[0].die(guilty=False)
        await asyncio.sleep(0)
        requests = [w.send(candidate) for _ in range(10)]
        await asyncio.sleep(0.1)
        assert [[engine.name for engine, _ in r.answers] for r in requests] == [["stable"]] * 10
        await w.settle()
        assert w.counted(candidate) == {"ok": 0, "abandoned": 0, "Down": 10, "HostDeath": 1}

    run(story)


def test_every_attempt_is_counted_once_whether_its_client_waits_or_not() -> None:
    async def story(w: World) -> None:
        engine = w.engine(lanes=1)
        engine.seconds = (0.3, 0.3)
        short, *others = [w.send(engine, seconds=0.1 if n == 0 else 60.0) for n in range(3)]
        await w.settle()
        assert [f.status for f in short.failures] == [503]
        assert [len(r.answers) for r in others] == [1, 1]
        assert w.counted(engine) == {"ok": 2, "abandoned": 1}

    run(story)


def test_a_probe_that_fails_replaces_the_host_and_no_request_is_suspected() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=2)
        engine.drifted = True
        for _ in range(2):
            engine.seconds = (0.05, 0.05)
            w.send(engine)
            await asyncio.sleep(0.001)
            engine.scheduler.probe()
            await asyncio.sleep(0.2)
        engine.drifted = False
        await w.settle()
        assert statuses(w) == [200, 200]
        assert engine.stats.probe_failures == w.counted(engine)["WrongOutput"] >= 2

    run(story)


@pytest.mark.parametrize("failure", [FailureClass.INTERNAL, FailureClass.RECOVERABLE])
@pytest.mark.parametrize("lanes", [1, 2])
def test_requests_that_fail_one_after_the_other_end_no_host_that_proves_itself(
    failure: FailureClass, lanes: int
) -> None:
    async def story(w: World) -> None:
        engine = w.engine(behave=lambda *_: failure, lanes=lanes)
        for _ in range(40):
            w.send(engine)
            await asyncio.sleep(0.1)
        await w.settle()
        assert set(statuses(w)) == {500}
        assert engine.stats.probes >= 5
        assert engine.deaths == 0

    run(story)


@pytest.mark.parametrize("failure", [FailureClass.INTERNAL, FailureClass.RECOVERABLE])
@pytest.mark.parametrize(("lanes", "at_once"), [(1, 1), (2, 1), (2, 20)])
def test_a_host_on_which_requests_fail_and_its_own_samples_too_is_replaced(
    failure: FailureClass, lanes: int, at_once: int
) -> None:
    async def story(w: World) -> None:
        engine = w.engine(behave=lambda *_: failure, lanes=lanes)
        engine.drifted = True
        for _ in range(20):
            for _ in range(at_once):
                w.send(engine, 8)
            await asyncio.sleep(0.1 if at_once == 1 else 0.01)
            if engine.deaths:
                engine.drifted, engine.behave = False, lambda *_: "ok"
        await w.settle()
        assert engine.deaths == 1
        assert statuses(w)[-1] == 200

    run(story)


def test_a_full_batch_does_not_wait_for_the_company_of_another_shape() -> None:
    async def story(w: World) -> None:
        engine = w.engine(lanes=1)
        early = w.send(engine, 1, 3)
        full = [w.send(engine, 4, 5) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert [len(r.answers) for r in full] == [1, 1]
        assert not early.ends
        await w.settle()
        assert early.ended_at - early.call.since < 5.2

    run(story, delay=5.0)


def test_a_batch_is_fuller_with_a_delay_and_never_waits_longer_than_that() -> None:
    async def story(w: World) -> None:
        engine = w.engine(lanes=2)
        for _ in range(8):
            w.send(engine)
            await asyncio.sleep(0.01)
        await w.settle()
        assert engine.sizes == [8]
        lonely = w.send(engine)
        began = time.monotonic()
        await w.settle()
        assert lonely.ended_at - began < 0.6

    run(story, delay=0.5)


def test_a_request_that_met_a_dead_lane_goes_to_a_living_one_at_once() -> None:
    async def story(w: World) -> None:
        engine = w.engine(hosts=2, lanes=1)
        victim = engine.scheduler._lanes.free[-1].host
        victim.die(guilty=False)  # the front has not noticed
        for lane in victim.ends:
            lane.dying = False
            engine.scheduler._lanes.free.append(lane)
        request = w.send(engine)
        await asyncio.sleep(0.02)
        assert len(request.answers) == 1

    run(story)


class Gone(bytes):
    """Bytes that lie elsewhere, and are gone when they are wanted."""

    def read_into(self, place: memoryview) -> None:
        raise Unreadable("its file became shorter")

    def copy(self) -> memoryview:
        raise Unreadable("its file became shorter")


def test_a_request_whose_bytes_are_gone_fails_alone_and_costs_no_region() -> None:
    async def story(w: World) -> None:
        engine = w.engine()
        for _ in range(8):
            w.send(engine)
        for each in (w.requests[0], w.requests[3]):
            each.call.bodies = (Gone(each.sent.tobytes()),)
        await w.settle()
        assert statuses(w) == [400, 200, 200, 400, 200, 200, 200, 200]
        assert w.requests[3].failures[0].message == "its file became shorter"

    run(story)
