"""Where the time of a lone caller's request goes, stage by stage: ``python gpu_stages.py [--runtime R] [--seconds S]
[--out FILE]``.

    client sends | front: bytes, head, request, understood, filled, lane told | host: message, read, copy, graph, done |
    front: answer, written | client has it

`--runtime Test` is a dry run without a GPU, on the test runtime. Of each way (shared memory or binary, a client that
sleeps or spins) it prints when each stage was passed: of all requests the median, of the very first one, and of the
first ones of later clients on warm connections the median. `--stops N`: also what happens after SIGSTOP of a host under
load, N times, note by note. To note takes a microsecond.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [
    str(HERE),
    str(ROOT / "contract"),
    str(ROOT / "worker"),
    *map(str, (ROOT / "tests", ROOT / "tests/worker")),
]

import gpu_models  # noqa: E402
import gpu_serving  # noqa: E402
from worker_harness import REVISION_1, Bucket, Operator, WorkerProcess, eventually  # noqa: E402

_spec = importlib.util.spec_from_file_location("stages", HERE / "stages" / "sitecustomize.py")
stages = importlib.util.module_from_spec(_spec)  # not by its name: this interpreter may have another module of it
_spec.loader.exec_module(stages)

ROW = (3, 224, 224)
SENT, RECEIVED = "client: sends", "client: has the answer"
LATER_CLIENTS = 4
STOP_SECONDS = 0.3
SHOWN_SECONDS = 0.03


@contextlib.contextmanager
def noted(folder, runtime, lanes=1, hosts=1, **environment):
    """(worker, inputs of one row) with a worker whose processes note."""
    shutil.rmtree(stages.FOLDER, ignore_errors=True)
    stages.FOLDER.mkdir()
    search = os.pathsep.join([str(HERE / "stages"), gpu_serving.search_path()])
    if runtime == "Test":
        row = np.random.default_rng(1).standard_normal((1, *ROW)).astype(np.float32)
        with worker_of_tests(folder, search, lanes, hosts, **environment) as worker:
            yield worker, {"image": row}
    else:
        model = gpu_models.resnet50()
        engine = gpu_serving.load(model)
        with gpu_serving.Served(folder, model, engine, runtime, lanes, hosts, PYTHONPATH=search,
                                **environment) as served:  # fmt: skip
            yield served.worker, model.sample(1)
    shutil.rmtree(stages.FOLDER)


@contextlib.contextmanager
def worker_of_tests(folder, search, lanes, hosts, **environment):
    from trtmodel_contract.manifest import TensorSpec

    operator, bucket = Operator(), Bucket(folder / "bucket")
    specs = {kind: (TensorSpec(name, "FP32", (-1, *ROW)),) for kind, name in (("inputs", "image"), ("outputs", "y"))}
    digest, _ = bucket.publish(REVISION_1, {"work": 0.0005}, **specs)
    settings = {
        "PYTHONPATH": os.pathsep.join([search, str(ROOT / "tests/worker/plugin")]), "TRTMODEL_CONTEXTS": str(lanes),
        "TRTMODEL_HOSTS": str(hosts), "TRTMODEL_SHARED_MEMORY_PREFIX": gpu_serving.SHM_PREFIX, **environment,
    }  # fmt: skip
    worker = WorkerProcess(folder / "worker", operator, bucket, **settings)
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    try:
        eventually(lambda: _is_ready(worker), "the worker is ready", gpu_serving.READY_SECONDS)
        yield worker
    finally:
        worker.stop()


def _is_ready(worker):
    with contextlib.suppress(OSError):
        return worker.get("/v2/health/ready").status == 200
    return False


def read_notes():
    """(when in ns, stage, process), in order."""
    found = []
    for path in stages.FOLDER.iterdir():
        pairs = np.fromfile(path, np.int64).reshape(-1, 2)
        pairs = pairs[pairs[:, 1] > 0]
        found += [(when, stages.NAMES[number], path.name) for number, when in pairs.tolist()]
    return sorted(found)


def passed(notes, seen):
    """For each request of a lone caller: when it passed each stage, in microseconds since it was sent."""
    times, found = np.array([when for when, *_ in notes]), []
    for sent, ms in zip(seen.sent, seen.ms, strict=True):
        begin, end = round(1e9 * sent), round(1e9 * sent + 1e6 * ms)
        mine = {SENT: 0.0}
        for when, stage, _ in notes[np.searchsorted(times, begin) : np.searchsorted(times, end, "right")]:
            mine.setdefault(stage, (when - begin) / 1e3)
        found.append({**mine, RECEIVED: 1e3 * ms})
    return found


def medians(requests):
    names = {name for each in requests for name in each}
    common = [n for n in names if sum(n in each for each in requests) > len(requests) / 2]
    return {name: float(np.median([each[name] for each in requests if name in each])) for name in common}


def table(columns):
    """Lines of text. Each column: title, {stage: microseconds since the client sent}."""
    first = columns[0][1]
    names = sorted(first, key=first.__getitem__)
    lines = [f"{'us since it was sent (and since the line before)':46}" + "".join(f"{t:>24}" for t, _ in columns)]
    before = [0.0] * len(columns)
    for name in names:
        line = f"{name:46}"
        for i, (_, each) in enumerate(columns):
            at = each.get(name)
            line += f"{'-':>24}" if at is None else f"{at:15.0f} ({at - before[i]:+6.0f})"
            before[i] = before[i] if at is None else at
        lines.append(line)
    return lines


def pin(cpus, worker):
    """Front, hosts, and clients started from now on, each on a set of processors of its own: "0-1,2-3,4-5"."""
    sets = [set(range(int(low), int(high) + 1)) for low, _, high in (each.partition("-") for each in cpus.split(","))]
    for pid, mine in [(worker.pid, sets[0]), *((pid, sets[1]) for pid in worker.host_pids())]:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), mine)
    os.sched_setaffinity(0, sets[2])


def profile(folder, runtime, seconds, shared_memory, say, cpus="", **environment):
    kind = "shared memory" if shared_memory else "binary"
    with noted(folder, runtime, **environment) as (worker, inputs):
        request = gpu_serving.write_request(worker, folder, inputs, shared_memory)
        if cpus:
            pin(cpus, worker)
        time.sleep(1.0)

        def ask(for_seconds, how):
            return gpu_serving.start_client(worker.port, request, 1, for_seconds, how=how).result()

        clients = [("warm", ask(0.3, "warm")) for _ in range(LATER_CLIENTS)]
        clients += [("new", ask(0.3, "")) for _ in range(LATER_CLIENTS)]
        for how in ("", "spin"):
            clients.append((how or "sleeps", ask(seconds, how)))
        notes = read_notes()
    assert not any(seen.bad for _, seen in clients), clients
    every = [(how, passed(notes, seen)) for how, seen in clients]
    steady = {how: medians(requests[20:]) for how, requests in every[-2:]}
    later = {kind: medians([requests[0] for how, requests in every if how == kind][1:]) for kind in ("warm", "new")}
    for how, found in steady.items():
        say(f"\n{kind}, one caller that {how}")
        columns = [("median", found)]
        if how == "sleeps":
            columns += [("first of the worker", every[0][1][0]), ("later, warm connection", later["warm"]),
                        ("later, new client", later["new"])]  # fmt: skip
        say("\n".join(table(columns)))
    return {"steady_us": steady, "first_us": every[0][1][0], "later_us": later}


def stop_hosts(folder, runtime, times, say):
    """Two callers, two hosts, one of them stopped."""
    found = []
    with noted(folder, runtime, lanes=2, hosts=2) as (worker, inputs):
        request = gpu_serving.write_request(worker, folder, inputs, True)
        load = gpu_serving.start_client(worker.port, request, 2, 60.0, 0.001)
        time.sleep(2.5)
        marks = []
        for _ in range(times):
            pid = gpu_serving.busiest(worker.host_pids(), 0.3)
            marks.append((pid, time.monotonic()))
            with gpu_serving.stopped(pid):
                time.sleep(STOP_SECONDS)
            time.sleep(0.5)
        seen = load.stop()
        notes = read_notes()
        hedges = gpu_serving.metric(worker, "hedges_total")
    for pid, began in marks:
        slowest = sorted(seen.between(began, began + STOP_SECONDS))[-3:]
        say(f"\nhost-{pid} was stopped: slowest {[round(float(ms), 2) for ms in slowest]} ms")
        found.append({"slowest_ms": [float(ms) for ms in slowest]})
        if slowest[-1] < 5.0:
            continue
        begin = round(1e9 * began)
        for when, stage, process in notes:
            if begin - 2_000_000 <= when <= begin + 1e9 * SHOWN_SECONDS:
                say(f"  {(when - begin) / 1e6:8.3f} ms  {process:16} {stage}")
    say(f"\n{hedges:.0f} hedges, quiet p50 {np.median(seen.ms):.3f} ms, {len(seen.bad)} failed")
    return {"stops": found, "hedges": hedges}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtime", default="TensorRT")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--only", choices=("shared", "binary", "stops"), default="")
    parser.add_argument("--cpus", default="", help='of front, hosts and clients: "0-1,2-3,4-5"')
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the worker's environment")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "trtmodel-stages.json")
    given = parser.parse_args()
    found, environment = {}, dict(each.split("=", 1) for each in given.set)
    with tempfile.TemporaryDirectory() as folder:
        for shared_memory in (True, False):
            name = "shared" if shared_memory else "binary"
            if given.only in ("", name):
                place = Path(folder, name)
                place.mkdir()
                print(f"{name} {environment or ''}", flush=True)
                found[name] = profile(
                    place, given.runtime, given.seconds, shared_memory, print, given.cpus, **environment
                )
        if given.stops:
            place = Path(folder, "stops")
            place.mkdir()
            found["stops"] = stop_hosts(place, given.runtime, given.stops, print)
    given.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
