"""Requests through front and host: what they cost, alone, together, and while another engine is loaded beside."""

from __future__ import annotations

import time

import gpu_serving
import numpy as np
import pytest
from trtmodel_contract.control import EngineState
from trtmodel_worker.engines.base import allocate_anew
from worker_harness import eventually

SECONDS = 4.0
CLIENTS = 4  # processes


@pytest.mark.parametrize("runtime", ["TensorRT", "TensorRTPlain"])
def test_a_request_of_one_row_costs_little_more_than_its_run(runtime, tmp_path, resnet, resnet_engine, figures):
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, runtime, lanes=1) as served:
        found = {
            "ready_s": round(served.ready_seconds, 2),
            "binary": served.measure(served.request(1), 1, SECONDS),
            "shared_memory": served.measure(served.request(1, shared_memory=True), 1, SECONDS),
        }
        expected = resnet_engine.create_lane().run(resnet.sample(1), allocate_anew)["logits"]
        assert np.array_equal(served.answers(1), expected)
    figures(**found)
    assert not found["binary"]["bad"]
    assert not found["shared_memory"]["bad"]


@pytest.mark.parametrize("name", ["resnet", "magika"])
def test_many_requests_of_one_row_are_answered(name, request, tmp_path, figures):
    model, engine = request.getfixturevalue(name), request.getfixturevalue(f"{name}_engine")
    found = {}
    with gpu_serving.Served(tmp_path, model, engine, lanes=4) as served:
        for concurrency in (1, 4, 16, 64):
            processes = min(CLIENTS, concurrency)
            request_file = served.request(1, shared_memory=name == "resnet")
            found[f"at_{concurrency}"] = served.measure(request_file, concurrency // processes, SECONDS, processes)
        for rows in (4, 16, 32):
            found[f"rows_{rows}"] = served.measure(served.request(rows, shared_memory=True), 2, SECONDS, 2)
    figures(**found)
    assert not any(each["bad"] for each in found.values()), found


def test_a_second_engine_is_loaded_beside_traffic_and_takes_over(tmp_path, resnet, resnet_engine, figures):
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=2) as served:
        worker, (first, second) = served.worker, served.engines
        load = served.client(served.request(1, shared_memory=True), 1, 40.0)
        time.sleep(4.0)
        marks = [time.monotonic()]
        worker.desire(first, standby=second)
        eventually(lambda: (e := worker.engine(second.manifest_digest)) and e.state is EngineState.READY, "loaded", 120)
        marks.append(time.monotonic())
        time.sleep(3.0)
        marks.append(time.monotonic())
        worker.desire(second, standby=first)
        worker.wait_routed(second.manifest_digest)
        marks.append(time.monotonic())
        time.sleep(2.0)
        marks.append(time.monotonic())
        worker.desire(first, standby=second)
        worker.wait_routed(first.manifest_digest)
        marks.append(time.monotonic())
        flip = worker.report().models["m"].flip_seconds
        seen = load.result()
    parts = {
        "before": seen.between(marks[0] - 3.0, marks[0] - 0.1), "loading": seen.between(marks[0], marks[1]),
        "standby_idle": seen.between(marks[1] + 0.2, marks[2]), "flip": seen.between(marks[2], marks[3] + 0.5),
        "rollback": seen.between(marks[4], marks[5] + 0.5),
    }  # fmt: skip
    found = {name: gpu_serving.percentiles(ms) for name, ms in parts.items()}
    figures(**found, load_s=round(marks[1] - marks[0], 2), wish_to_routes_s=round(marks[3] - marks[2], 3),
            rollback_s=round(marks[5] - marks[4], 3), flip_ms=round(1e3 * flip, 3), bad=seen.bad[:5])  # fmt: skip
    assert not seen.bad


def test_two_engines_share_one_gpu_by_weight(tmp_path, resnet, resnet_engine, figures):
    found = {}
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=2) as served:
        worker, (first, second) = served.worker, served.engines
        request_file = served.request(1, shared_memory=True)
        found["alone"] = served.measure(request_file, 4, SECONDS)
        worker.desire(first, second)
        eventually(lambda: (e := worker.engine(second.manifest_digest)) and e.state is EngineState.READY, "loaded", 120)
        found["idle_beside"] = served.measure(request_file, 4, SECONDS)
        worker.desire(first, second, weight=50)
        eventually(lambda: worker.report().models["m"].routes.weight == 50, "the weight is 50")
        found["weight_50"] = served.measure(request_file, 4, SECONDS)
    figures(**found)
    assert not any(each["bad"] for each in found.values()), found


def test_the_first_request_is_as_fast_as_later_ones(tmp_path, resnet, resnet_engine, figures):
    with gpu_serving.Served(tmp_path, resnet, resnet_engine, lanes=1) as served:
        seen = served.client(served.request(1), 1, 2.0).result()
    figures(first_ms=[round(float(ms), 3) for ms in seen.ms[:3]], steady=gpu_serving.percentiles(seen.ms[20:]))
    assert not seen.bad
