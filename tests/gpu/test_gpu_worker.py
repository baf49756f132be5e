"""Requests through front and host: what they cost, alone, together, and while another engine is loaded beside."""

from __future__ import annotations

import threading
import time

import gpu_serving
import numpy as np
import pytest
from gpu_bare import BareLoop
from trtmodel_contract.control import EngineState, Routes
from trtmodel_worker.engines.base import allocate_anew
from worker_harness import eventually

SECONDS = 4.0
CLIENTS = 4  # processes
FIRST_TRIES = 4  # new clients, one after the other
WAYS = (("", ""), (", client that does not sleep", "spin"))

pytestmark = pytest.mark.timeout(120)


def bare_rate(engine, rows, loops, seconds=1.0):
    """Runs per second of `loops` bare loops side by side."""
    bares = [BareLoop(engine, ((rows, 3, 224, 224),)) for _ in range(loops)]
    counts, end = [0] * loops, time.perf_counter() + seconds

    def work(i):
        while time.perf_counter() < end:
            bares[i].run()
            counts[i] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in bares:
        each.free()
    return sum(counts) / seconds


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "anywhere"])
@pytest.mark.parametrize(("runtime", "limit"), [("TensorRT", 0.65), ("TensorRTPlain", 0.95)])
def test_a_request_of_one_row_costs_little_more_than_its_run(
    runtime, limit, apart, tmp_path, resnet, resnet_engine, figures, bar
):
    """Where the worker has processors of its own, and where everything runs wherever it comes to."""
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, runtime, lanes=1, apart=apart) as served:
        found = {
            "ready_s": round(served.ready_seconds, 2),
            **{
                f"shared memory{name}": served.measure(served.request(1, shared_memory=True), 1, 2.0, how=how)
                for name, how in WAYS
            },
            **{f"binary{name}": served.measure(served.request(1), 1, 2.0, how=how) for name, how in WAYS},
        }
        expected = resnet_engine.create_lane().run(resnet.sample(1), allocate_anew)["logits"]
        assert np.array_equal(served.answers(1), expected)
    figures(**found)
    for how in (f"{kind}{name}" for kind in ("shared memory", "binary") for name, _ in WAYS):
        where = f"{runtime}, {'processors of its own' if apart else 'anywhere'}"
        bar(f"round trip of one row, {where}, {how}, p50", found[how]["p50_ms"], limit, "ms")
        assert not found[how]["bad"]


def test_many_requests_of_one_row_are_answered(tmp_path, resnet, resnet_engine, figures, bar):
    found = {"bare_loops_4": round(bare_rate(resnet_engine, 1, 4), 1)}
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=4) as served:
        request_file = served.request(1, shared_memory=True)
        for concurrency in (4, 8, 16, 64):
            processes = min(CLIENTS, concurrency)
            found[f"at_{concurrency}"] = served.measure(request_file, concurrency // processes, SECONDS, processes)
    figures(**found)
    best = max(found[name]["per_second"] for name in found if name.startswith("at_"))
    bar("throughput at batch 1, four lanes, shared memory", best, 4500, "requests/s", least=True)
    bar("the same, as a share of four bare loops", 100 * best / found["bare_loops_4"], None, "%")
    assert not any(each["bad"] for name, each in found.items() if name.startswith("at_")), found


def test_batches_are_answered_as_fast_as_bare_loops_run_them(tmp_path, resnet, resnet_engine, figures, bar):
    """Requests of 4 to 32 rows in shared memory, several under way in each of several clients."""
    found = {}
    for rows in (4, 8, 16, 32):
        found[f"rows_{rows}"] = {f"bare_loops_{n}": round(rows * bare_rate(resnet_engine, rows, n), 1) for n in (1, 4)}
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=4) as served:
        for rows in (4, 8, 16, 32):
            seen = served.measure(served.request(rows, shared_memory=True), 2, SECONDS, CLIENTS)
            assert not seen["bad"], seen
            found[f"rows_{rows}"] |= seen | {"rows_per_second": round(rows * seen["per_second"], 1)}
    figures(**found)
    for rows in (4, 8, 16, 32):
        each = found[f"rows_{rows}"]
        share = 100 * each["rows_per_second"] / each["bare_loops_1"]
        bar(f"rows per second at bucket {rows} against one bare loop", share, 95, "%", least=True)
        share = 100 * each["rows_per_second"] / each["bare_loops_4"]
        bar(f"rows per second at bucket {rows} against four bare loops", share, None, "%")


def test_small_requests_are_answered_fast(tmp_path, magika, magika_engine, figures, bar):
    found = {}
    with gpu_serving.Served(tmp_path, magika, magika_engine, lanes=4) as served:
        for concurrency in (1, 64):
            processes = min(CLIENTS, concurrency)
            found[f"at_{concurrency}"] = served.measure(served.request(1), concurrency // processes, 3.0, processes)
    figures(**found)
    bar("Magika, round trip of one row, p50", found["at_1"]["p50_ms"], None, "ms")
    bar("Magika, 64 callers", found["at_64"]["per_second"], None, "requests/s")
    assert not any(each["bad"] for each in found.values()), found


def test_a_second_engine_is_loaded_beside_traffic_and_takes_over(tmp_path, resnet, resnet_engine, figures, bar):
    """The client tells when the other engine answered first. The worker is asked for its report only when it has news,
    or after a while: to sign and write one takes its loop a millisecond."""
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=2) as served:
        worker, (first, second) = served.worker, served.engines
        load = served.client(served.request(1, shared_memory=True), 1, 60.0)
        time.sleep(4.0)
        marks = [time.monotonic()]
        worker.desire(first, standby=second)
        _loaded(worker, second)
        marks.append(time.monotonic())
        time.sleep(3.0)
        for stable, standby in ((second, first), (first, second)):
            marks.append(time.monotonic())
            worker.desire(stable, standby=standby)
            time.sleep(2.0)
            worker.wait_routed(stable.manifest_digest)
        flip = worker.report().models["m"].flip_seconds
        seen = load.stop()
    begun, loaded, flipped, back = marks
    parts = {
        "before": seen.between(begun - 3.0, begun - 0.1), "loading": seen.between(begun, loaded),
        "standby_idle": seen.between(loaded + 0.2, flipped), "flip": seen.between(flipped, flipped + 0.5),
        "rollback": seen.between(back, back + 0.5),
    }  # fmt: skip
    found = {name: gpu_serving.percentiles(ms) for name, ms in parts.items()}
    turns = [turn for turn in seen.turns if seen.sent[turn] > flipped]  # a hedge that wins is a turn, too
    assert len(turns) >= 2
    firsts = [round(float(seen.ms[turn]), 3) for turn in turns]
    routed, returned = (
        float((seen.sent + seen.ms / 1e3)[next(turn for turn in turns if seen.sent[turn] > since)] - since)
        for since in (flipped, back)
    )
    during = [i for i in np.argsort(seen.ms)[::-1] if begun <= seen.sent[i] <= loaded][:40]
    slowest = sorted((round(float(seen.sent[i] - begun), 3), round(float(seen.ms[i]), 2)) for i in during)
    figures(**found, load_s=round(loaded - begun, 2), wish_to_answer_s=round(routed, 4), bad=seen.bad[:5],
            rollback_s=round(returned, 4), flip_ms=round(1e3 * flip, 3), first_of_each_turn_ms=firsts,
            slowest_while_loading=slowest)  # fmt: skip
    steady = found["standby_idle"]["p50_ms"]
    bar("p99 while the second engine loads, against before", found["loading"]["p99_ms"] / found["before"]["p99_ms"],
        1.5, "x")  # fmt: skip
    bar("flip", 1e3 * flip, 5, "ms")
    bar("manifest to serving: loading, and from the wish to the first answer", loaded - begun + routed, 5, "s")
    bar("roll-back, until the first answer", returned, 1, "s")
    bar("first request of an engine that takes over, against the steady p50", firsts[0] / steady, 1.2, "x")
    assert not seen.bad


def test_two_engines_share_one_gpu(tmp_path, resnet, resnet_engine, figures, bar):
    """Alone, beside one that stands by, beside an idle candidate, at weight 50, and with every request mirrored."""
    found = {}
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=2) as served:
        worker, (first, second) = served.worker, served.engines
        request_file = served.request(1, shared_memory=True)

        def measure(name):
            found[name] = served.measure(request_file, 2, SECONDS, 2)
            found[f"{name}, one caller"] = served.measure(request_file, 1, 2.0)

        measure("alone")
        worker.desire(first, standby=second)
        _loaded(worker, second)
        measure("standby")
        worker.desire(first, second, weight=50)
        eventually(lambda: worker.report().models["m"].routes.weight == 50, "the weight is 50")
        measure("weight 50")
        routes = Routes(first.manifest_digest, second.manifest_digest, 0, shadow=100)
        worker.desire(first, second, routes=routes)
        eventually(lambda: worker.report().models["m"].routes.shadow == 100, "every request is mirrored")
        measure("shadow 100")
        mirrored = {name: gpu_serving.metric(worker, f"{name}_total") for name in
                    ("mirrored_requests", "mirrors_dropped", "mirrors_failed")}  # fmt: skip
    figures(**found, mirrored=mirrored)
    alone, single = found["alone"], found["alone, one caller"]
    for name in ("standby", "weight 50", "shadow 100"):
        bar(f"{name}: throughput against one engine", 100 * found[name]["per_second"] / alone["per_second"], None, "%")
        bar(f"{name}: p99 against one engine", found[name]["p99_ms"] / alone["p99_ms"], None, "x")
        one = found[f"{name}, one caller"]
        bar(f"{name}: p99 of one caller against one engine", one["p99_ms"] / single["p99_ms"], None, "x")
    assert not any(each["bad"] for each in found.values()), found


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "anywhere"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm connection", "new client"])
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "binary"])
def test_the_first_request_is_as_fast_as_later_ones(
    shared_memory, warm, apart, tmp_path, resnet, resnet_engine, figures, bar
):
    """Of a worker that was never asked for an answer: by a client that is new as well, and by one that has asked for
    the worker's health on the same connection before."""
    firsts, parts = [], {}
    how = f"{'shared memory' if shared_memory else 'binary'}, {'warm connection' if warm else 'new client'}"
    how += ", processors of its own" if apart else ", anywhere"
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=1, apart=apart) as served:
        request_file = served.request(1, shared_memory=shared_memory)
        time.sleep(1.0)
        for _ in range(FIRST_TRIES):
            seen = served.client(request_file, 1, 0.5, how="warm" if warm else "").result()
            assert not seen.bad
            firsts.append([round(float(ms), 3) for ms in seen.ms[:3]])
            parts = parts or {part: gpu_serving.quantile(served.worker, part, 1.0)
                              for part in ("queue", "compute", "request")}  # fmt: skip
    steady = gpu_serving.percentiles(seen.ms[20:])
    figures(first_three_ms=firsts, steady=steady, slowest_of_the_first_client_ms=parts)
    bar(f"first request of a new worker against the steady p50, {how}", firsts[0][0] / steady["p50_ms"], 1.2, "x")
    usual = float(np.median([first for first, *_ in firsts[1:]]))
    bar(f"first request of a later client against the steady p50, {how}", usual / steady["p50_ms"], None, "x")


def _loaded(worker, engine):
    """Waits for news, as an operator does: a report every 20 ms, each signed and read, would be what is measured."""
    end, report = time.monotonic() + 90, worker.report()
    while not any(
        e.manifest_digest == engine.manifest_digest and e.state is EngineState.READY for e in report.models["m"].engines
    ):
        assert time.monotonic() < end, "the second engine is not loaded"
        report = worker.report(f"?after={report.version}&wait=5")
