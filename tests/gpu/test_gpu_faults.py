"""Faults of a real device under load: no request fails, and what it costs those that it hits is told."""

from __future__ import annotations

import os
import signal
import time

import gpu_serving
import numpy as np
import pytest
from gpu_serving import metric, percentiles, stopped
from trtmodel_contract.control import EngineState
from trtmodel_gpu_faults import TRIGGER, ask_for
from worker_harness import eventually

SECONDS = 7.0
QUIET_SECONDS = 3.5  # before the fault
BUSY_SECONDS = 0.5
HIT_SECONDS = 0.5
LEAST_HEDGE_MS, HEDGE_FACTOR = 10.0, 5.0  # as the worker has them: `hedgeAfter: Auto`

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def hedging():
    return True


@pytest.fixture(params=["sibling", "standby"])
def served(request, hedging, tmp_path, resnet, resnet_engine):
    """A worker with a second host of the engine, or with another engine that stands by."""
    TRIGGER.unlink(missing_ok=True)
    sibling = request.param == "sibling"
    environment = {"TRTMODEL_HEALTH_INTERVAL_SECONDS": "600"}
    if not hedging:
        environment["TRTMODEL_HEDGE_AFTER_SECONDS"] = "3600"
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, "TensorRTFaulty", lanes=2, hosts=2 if sibling else 1,
                            **environment) as served:  # fmt: skip
        served.beside, served.hedging = request.param, hedging
        if not sibling:
            worker, (first, second) = served.worker, served.engines
            worker.desire(first, standby=second)
            eventually(
                lambda: (e := worker.engine(second.manifest_digest)) and e.state is EngineState.READY, "loaded", 60
            )
        yield served
    TRIGGER.unlink(missing_ok=True)


def under_load(served, fault, seconds=SECONDS):
    """What clients saw, and when the fault was."""
    clients = served.client(served.request(1, shared_memory=True), 2, seconds, 0.001)  # not all lanes have work
    time.sleep(QUIET_SECONDS - BUSY_SECONDS)
    served.busiest = gpu_serving.busiest(served.hosts(), BUSY_SECONDS)
    served.hedge_ms = max(LEAST_HEDGE_MS, HEDGE_FACTOR * gpu_serving.quantile(served.worker, "compute", 0.99))
    began = time.monotonic()
    fault()
    ended = time.monotonic()
    return clients.result(), began, ended


def told(figures, bar, what, served, seen, began, ended, **more):
    hit, quiet = seen.between(began, ended + HIT_SECONDS), percentiles(seen.between(began - 3.0, began - 0.2))
    counts = {name: metric(served.worker, f"{name}_total")
              for name in ("hedges", "replays", "retries", "host_deaths", "rebuilt_lanes")}  # fmt: skip
    figures(quiet=quiet, hit=percentiles(hit), slowest_ms=[round(float(ms), 2) for ms in sorted(hit)[-4:]],
            hedge_ms=round(served.hedge_ms, 2), bad=len(seen.bad), why=seen.bad[:3], counts=counts, **more)  # fmt: skip
    how = f"{what}, {served.beside}{'' if served.hedging else ', without hedging'}"
    bar(f"{how}: failed requests", len(seen.bad), 0)
    added = float(hit.max()) - quiet["p50_ms"]
    inference = quiet["p99_ms"]
    allowed = served.hedge_ms + inference if served.hedging else None
    bar(f"{how}: latency added to the slowest request", added, allowed, "ms")
    assert not seen.bad


def test_a_kernel_that_stores_to_address_zero_fails_no_request(served, figures, bar):
    _sticky(served, figures, bar)


@pytest.mark.parametrize("hedging", [False])
@pytest.mark.parametrize("served", ["sibling"], indirect=True)
def test_without_hedging_a_sticky_error_fails_no_request_either(served, hedging, figures, bar):
    _sticky(served, figures, bar)


def _sticky(served, figures, bar):
    dead = set(served.hosts())
    seen, began, ended = under_load(served, lambda: ask_for("sticky"))
    gone = dead - set(served.hosts())
    log = _lines(served, "device context was poisoned")
    told(figures, bar, "sticky error", served, seen, began, ended, ended_hosts=len(gone), log=log)
    assert len(gone) == 1
    assert "(exit code 70)" in served.worker.log.read_text()


def test_a_host_that_is_killed_fails_no_request(served, figures, bar):
    seen, began, ended = under_load(served, lambda: os.kill(served.busiest, signal.SIGKILL))
    told(figures, bar, "SIGKILL", served, seen, began, ended)


def test_a_host_that_nobody_can_stand_in_for_is_started_again_at_full_pace(
    tmp_path, resnet, resnet_engine, figures, bar
):
    """Requests wait for it, longer than they may or not: what counts is when the first one is answered again."""
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=2, TRTMODEL_REQUEST_TIMEOUT_SECONDS="30") as served:
        load = served.client(served.request(1, shared_memory=True), 2, 60.0, 0.001)
        time.sleep(2.0)
        killed, old = time.monotonic(), served.hosts()
        os.kill(old[0], signal.SIGKILL)
        eventually(lambda: set(served.hosts()) - set(old) and metric(served.worker, "lanes{") == 2, "it is back", 60)
        time.sleep(0.5)
        seen = load.stop()
    after = seen.sent + seen.ms / 1e3
    back = float(np.diff(after[after > killed - 0.5]).max())
    figures(back_s=round(back, 2), bad=seen.bad[:3])
    bar("SIGKILL of the only host, nothing stands by: seconds without an answer", back, None, "s")
    bar("SIGKILL of the only host, nothing stands by: failed requests", len(seen.bad), 0)
    assert not seen.bad


def test_a_host_that_is_stopped_fails_no_request(served, figures, bar):
    def stop():
        with stopped(served.busiest):
            time.sleep(0.8)

    seen, began, ended = under_load(served, stop)
    told(figures, bar, "SIGSTOP", served, seen, began, ended)


@pytest.mark.parametrize("hedging", [False])
@pytest.mark.parametrize("served", ["sibling"], indirect=True)
def test_without_hedging_requests_of_a_stopped_host_wait_and_none_fails(served, hedging, figures, bar):
    def stop():
        with stopped(served.busiest):
            time.sleep(0.8)

    seen, began, ended = under_load(served, stop)
    told(figures, bar, "SIGSTOP of 0.8 s", served, seen, began, ended)


def test_lack_of_device_memory_fails_no_request(served, figures, bar):
    hosts = set(served.hosts())
    seen, began, ended = under_load(
        served,
        lambda: ask_for("memory"),
    )
    told(figures, bar, "out of memory", served, seen, began, ended)
    assert set(served.hosts()) == hosts


@pytest.mark.parametrize("served", ["sibling"], indirect=True)
def test_a_lane_that_is_rebuilt_fails_no_request(served, figures, bar):
    hosts = set(served.hosts())
    seen, began, ended = under_load(
        served,
        lambda: ask_for("recoverable"),
    )
    told(figures, bar, "lane rebuilt", served, seen, began, ended)
    assert set(served.hosts()) == hosts


def _lines(served, text):
    lines = served.worker.log.read_text().splitlines()
    return [line[-300:] for line in lines if text in line or "CRITICAL" in line][:5]
