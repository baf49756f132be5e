"""Many engines, one after the other: memory of the device and of the fronts stays what it was."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path

import gpu_serving
import numpy as np
import pytest
from trtmodel_worker.engines.base import allocate_anew
from trtmodel_worker.engines.tensorrt.device import Cuda
from worker_harness import eventually

SWAPS = int(os.environ.get("TRTMODEL_GPU_SWAPS", "200"))
SECONDS = float(os.environ.get("TRTMODEL_GPU_SWAPS_SECONDS", "900"))  # then no other round is begun
WORKERS = int(os.environ.get("TRTMODEL_GPU_SWAPPING_WORKERS", "4"))
LOADS = int(os.environ.get("TRTMODEL_GPU_LOADS", "100"))
FIRST_ROUNDS = 3  # in which what is needed once is loaded
FLAT_DEVICE_MIB, FLAT_HOST_MIB = 64, 16


def resident(pid):
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) >> 10
    return 0


def settled_memory(cuda):
    """The driver cleans up for some 0.1 s after a process that is gone: the most that is free within half a second."""
    end, most = time.monotonic() + 0.5, 0
    while time.monotonic() < end:
        most = max(most, cuda.memory()[0])
        time.sleep(0.02)
    return most


@pytest.mark.timeout(SECONDS + 180)
def test_swaps_leave_the_memory_as_it_was(tmp_path, magika, magika_engine, figures, bar):
    """So many swaps under load, by several workers side by side: a round is one swap of each, and memory is read
    between rounds, when each worker has one host."""
    cuda, seconds, lock = Cuda(), [], threading.Lock()
    free, fronts, hosts = [], [], []
    rounds, end, enough = SWAPS // WORKERS, time.monotonic() + SECONDS, threading.Event()

    def read():
        free.append(settled_memory(cuda) >> 20)
        fronts.append([resident(served.worker.pid) for served in workers])
        hosts.append(max(resident(served.hosts()[0]) for served in workers))
        if time.monotonic() > end:
            enough.set()

    settled = threading.Barrier(WORKERS, read)

    def swap(served):
        worker = served.worker
        try:
            for turn in range(rounds):
                wanted = served.engines[(turn + 1) % 2]
                began = time.monotonic()
                worker.desire(wanted)
                eventually(lambda wanted=wanted: _stable(worker) == wanted.manifest_digest, "it is routed", 60)
                with lock:
                    seconds.append(time.monotonic() - began)
                eventually(lambda: len(worker.host_pids()) == 1, "the old host is gone", 60)
                settled.wait(90)
                if enough.is_set():
                    return
        except BaseException:
            settled.abort()
            raise

    with contextlib.ExitStack() as stack:
        workers = []
        for number in range(WORKERS):
            folder = tmp_path / str(number)
            folder.mkdir()
            made = gpu_serving.Served(folder, magika, magika_engine, lanes=1, TRTMODEL_BATCH_BUCKETS="1,8")
            workers.append(stack.enter_context(made))
        loads = [served.client(served.request(1), 1, SECONDS + 120, 0.001) for served in workers]
        threads = [threading.Thread(target=swap, args=(served,)) for served in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seen = [load.stop() for load in loads]
    done, bad = len(seconds), [text for each in seen for text in each.bad]
    since = min(FIRST_ROUNDS, len(free) - 1)
    figures(
        swaps=done,
        workers=WORKERS,
        requests=sum(len(each.ms) for each in seen),
        bad=bad[:3],
        free_device_mib=free[:: max(1, len(free) // 10)] + free[-1:],
        fronts_mib=fronts[:: max(1, len(fronts) // 5)] + fronts[-1:],
        newest_host_mib=[hosts[0], hosts[len(hosts) // 2], hosts[-1]],
        seconds={"median": round(float(np.median(seconds)), 2), "max": round(max(seconds), 2)},
    )
    bar("swaps under load", done, SWAPS, least=True)
    bar("swaps under load: failed requests", len(bad), 0)
    bar("swaps: free device memory lost, after the first rounds", free[since] - free[-1], FLAT_DEVICE_MIB, "MiB")
    grown = max(b - a for a, b in zip(fronts[since], fronts[-1], strict=True))
    bar("swaps: memory that a front has grown by, after the first rounds", grown, FLAT_HOST_MIB, "MiB")
    bar("swaps: memory of the newest host against the first", hosts[-1] - hosts[0], FLAT_HOST_MIB, "MiB")
    assert not bad
    assert len(free) == rounds or enough.is_set(), f"{len(free)} rounds of {rounds}"


def _stable(worker):
    return worker.report().models["m"].routes.stable


@pytest.mark.timeout(120)
def test_engines_loaded_and_freed_in_one_process_leave_its_memory_as_it_was(magika, figures, bar):
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
    bar(f"{LOADS} loads in one process: free device memory lost", free[2] - free[-1], FLAT_DEVICE_MIB, "MiB")
    bar(f"{LOADS} loads in one process: host memory grown by", mine[-1] - mine[2], FLAT_HOST_MIB, "MiB")
