"""Many engines, one after the other: memory of the device and of the front stays what it was."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import gpu_serving
import numpy as np
from trtmodel_worker.engines.base import allocate_anew
from trtmodel_worker.engines.tensorrt.device import Cuda
from worker_harness import eventually

SWAPS = int(os.environ.get("TRTMODEL_GPU_SWAPS", "20"))
LOADS = int(os.environ.get("TRTMODEL_GPU_LOADS", "100"))


def resident(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) >> 10
    return 0


def test_swaps_leave_the_memory_as_it_was(tmp_path, magika, magika_engine, figures):
    cuda, free, front, seconds = Cuda(), [], [], []
    with gpu_serving.Served(tmp_path, magika, magika_engine, lanes=2) as served:
        worker = served.worker
        load = served.client(served.request(1), 1, 8.0 * SWAPS + 60)
        for turn in range(SWAPS):
            wanted = served.engines[(turn + 1) % 2]
            began = time.monotonic()
            worker.desire(wanted)
            worker.wait_routed(wanted.manifest_digest)
            seconds.append(time.monotonic() - began)
            eventually(lambda: len(worker.host_pids()) == 1, "the old host is gone", 60)
            free.append(cuda.memory()[0] >> 20)
            front.append(resident(worker.pid))
        seen = load.stop()
    figures(
        swaps=SWAPS,
        requests=len(seen.ms),
        bad=seen.bad[:3],
        free_device_mib=[free[0], free[len(free) // 2], free[-1]],
        front_mib=[front[0], front[-1]],
        seconds={"median": round(float(np.median(seconds)), 2), "max": round(max(seconds), 2)},
    )
    assert not seen.bad
    assert free[0] - free[-1] < 64


def test_engines_loaded_and_freed_in_one_process_leave_its_memory_as_it_was(magika, figures):
    """Jobs do that, and a lane that is made anew is part of it."""
    cuda, free, mine, took = Cuda(), [], [], []
    inputs = magika.sample(1)
    for _ in range(LOADS):
        began = time.perf_counter()
        engine = gpu_serving.load(magika)
        lane = engine.create_lane()
        lane.bind(inputs, allocate_anew)
        lane.run(inputs, allocate_anew)
        took.append(time.perf_counter() - began)
        del lane, engine
        gc.collect()
        free.append(cuda.memory()[0] >> 20)
        mine.append(resident(os.getpid()))
    figures(loads=LOADS, free_device_mib=[free[2], free[LOADS // 2], free[-1]], host_mib=[mine[2], mine[-1]],
            load_ms=round(1e3 * float(np.median(took)), 1))  # fmt: skip
    assert free[2] - free[-1] < 64
