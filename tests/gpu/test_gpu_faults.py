"""Faults of a real device under load: no request fails, and what it costs those that it hits is told."""

from __future__ import annotations

import os
import signal
import time

import gpu_serving
import pytest
from gpu_serving import metric, percentiles, stopped
from trtmodel_contract.control import EngineState
from trtmodel_gpu_faults import TRIGGER, ask_for
from worker_harness import eventually

SECONDS = 14.0
HIT_SECONDS = 0.5


@pytest.fixture(params=["sibling", "standby"])
def served(request, tmp_path, resnet, resnet_engine):
    """A worker with a second host of the engine, or with another engine that stands by."""
    TRIGGER.unlink(missing_ok=True)
    sibling = request.param == "sibling"
    environment = {"TRTMODEL_HEALTH_INTERVAL_SECONDS": "600"}
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, "TensorRTFaulty", lanes=2, hosts=2 if sibling else 1,
                            **environment) as served:  # fmt: skip
        served.first = served.hosts()
        if not sibling:
            worker, (first, second) = served.worker, served.engines
            worker.desire(first, standby=second)
            eventually(
                lambda: (e := worker.engine(second.manifest_digest)) and e.state is EngineState.READY, "loaded", 120
            )
        yield served
    TRIGGER.unlink(missing_ok=True)


def under_load(served, fault, seconds=SECONDS):
    """What clients saw, and when the fault was."""
    clients = served.client(served.request(1, shared_memory=True), 2, seconds, 0.001)
    time.sleep(4.0)
    began = time.monotonic()
    fault()
    ended = time.monotonic()
    return clients.result(), began, ended


def told(figures, served, seen, began, ended, **more):
    hit = seen.between(began, ended + HIT_SECONDS)
    counts = {name: metric(served.worker, f"{name}_total") for name in ("hedges", "replays", "retries", "host_deaths",
                                                                         "rebuilt_lanes")}  # fmt: skip
    figures(quiet=percentiles(seen.between(began - 3.0, began - 0.2)), hit=percentiles(hit), bad=len(seen.bad),
            why=seen.bad[:3], counts=counts, **more)  # fmt: skip


def test_a_kernel_that_stores_to_address_zero_fails_no_request(served, figures):
    dead = set(served.hosts())
    seen, began, ended = under_load(served, lambda: ask_for("sticky"))
    gone = dead - set(served.hosts())
    told(figures, served, seen, began, ended, ended_hosts=len(gone), log=_lines(served, "device context was poisoned"))
    assert not seen.bad
    assert len(gone) == 1
    assert "(exit code 70)" in served.worker.log.read_text()


def test_a_host_that_is_killed_fails_no_request(served, figures):
    seen, began, ended = under_load(served, lambda: os.kill(served.first[0], signal.SIGKILL))
    told(figures, served, seen, began, ended)
    assert not seen.bad


def test_a_host_that_is_stopped_fails_no_request(served, figures):
    def stop():
        with stopped(served.first[0]):
            time.sleep(0.8)

    seen, began, ended = under_load(served, stop)
    told(figures, served, seen, began, ended)
    assert not seen.bad


@pytest.mark.parametrize("fault", ["memory", "recoverable"])
@pytest.mark.parametrize("served", ["sibling"], indirect=True)
def test_a_fault_that_another_lane_can_cure_fails_no_request(served, fault, figures):
    hosts = set(served.hosts())
    seen, began, ended = under_load(served, lambda: ask_for(fault), 8.0)
    told(figures, served, seen, began, ended)
    assert not seen.bad
    assert set(served.hosts()) == hosts


def _lines(served, text):
    return [line[-300:] for line in served.worker.log.read_text().splitlines() if text in line or "CRITICAL" in line][
        :5
    ]
