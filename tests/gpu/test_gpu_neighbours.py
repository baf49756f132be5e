"""What the driver and the device do to a bare loop while another process begins or ends on the same GPU, and what a
bare loop takes after a pause: no worker has a part in it. What a worker shows in these cases is to be held against it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time

import gpu_serving
import numpy as np
import pytest
from gpu_bare import BareLoop
from gpu_models import HERE
from gpu_serving import percentiles
from trtmodel_contract.codec import dumps
from trtmodel_contract.manifest import Blob
from worker_harness import REVISION_1

SHAPES = ((1, 3, 224, 224),)
QUIET_SECONDS = 1.0
AFTER_SECONDS = 0.5
START_SECONDS = 40.0
PAUSES = (0.05, 0.3, 1.0)
TRIES = 4
TINY = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Length: 0\r\n\r\n"

pytestmark = pytest.mark.timeout(120)


class Loop:
    """A bare loop in a thread, from `with` to its end. With `pause` seconds between two runs, as a client of a worker
    leaves the GPU alone between two requests."""

    def __init__(self, engine, pause=0.0):
        self._engine, self._pause = engine, pause
        self._stop = threading.Event()
        self.began, self.took = [], []

    def __enter__(self):
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        return self

    def _work(self):
        with BareLoop(self._engine, SHAPES) as bare:
            while not self._stop.is_set():
                began = time.monotonic()
                bare.run()
                self.began.append(began)
                self.took.append(1e3 * (time.monotonic() - began))
                if self._pause:
                    time.sleep(self._pause)

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        self.seen = gpu_serving.Seen(np.array(self.began), np.array(self.took), [])


class Other:
    """A process of gpu_culprit.py. Entered when it is ready."""

    def __init__(self, what, *arguments):
        environment = {**os.environ, "PYTHONPATH": gpu_serving.search_path()}
        command = [sys.executable, str(HERE / "gpu_culprit.py"), what, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self):
        assert self.says() == "ready"
        return self

    def says(self):
        return self.process.stdout.readline().strip()

    def begin(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __exit__(self, *_):
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=START_SECONDS)


def told(figures, bar, what, loop, marks, **more):
    """`marks`: when it began and ended."""
    began, ended = marks
    quiet, beside = loop.seen.between(began - QUIET_SECONDS, began - 0.05), loop.seen.between(began, ended)
    found = {"quiet": percentiles(quiet), "beside": percentiles(beside), "seconds": round(ended - began, 3)}
    figures(**found, slowest_ms=[round(float(ms), 2) for ms in sorted(beside)[-8:]], **more)
    bar(f"bare loop, {what}: slowest run", float(beside.max()), None, "ms")
    bar(f"bare loop, {what}: p99 against before", found["beside"]["p99_ms"] / found["quiet"]["p99_ms"], None, "x")


def test_a_sticky_error_of_one_process_holds_up_what_others_run(resnet_engine, figures, bar):
    with Other("store") as other, Loop(resnet_engine) as loop:
        time.sleep(QUIET_SECONDS)
        marks = [time.monotonic()]
        other.begin()
        said = other.says()
        other.process.wait(START_SECONDS)
        marks.append(time.monotonic() + AFTER_SECONDS)
        time.sleep(AFTER_SECONDS)
    told(figures, bar, "another process stores to address 0", loop, marks, culprit=said)
    assert said.startswith("700"), said


@pytest.mark.parametrize("what", ["run", "idle"])
def test_what_others_run_while_a_process_is_killed(what, resnet_engine, figures, bar):
    with Other(what) as other, Loop(resnet_engine) as loop:
        other.begin()
        time.sleep(QUIET_SECONDS)
        marks = [time.monotonic()]
        os.kill(other.process.pid, signal.SIGKILL)
        other.process.wait(START_SECONDS)
        reaped = time.monotonic() - marks[0]
        marks.append(time.monotonic() + AFTER_SECONDS)
        time.sleep(AFTER_SECONDS)
    how = "runs" if what == "run" else "holds a context"
    told(figures, bar, f"a process that {how} is killed", loop, marks, reaped_ms=round(1e3 * reaped, 1))
    bar(f"a process that {how} is killed: until it is reaped", 1e3 * reaped, None, "ms")


@pytest.mark.parametrize("duty", [1.0, 0.15])
@pytest.mark.parametrize("pause", [0.0, 0.0003], ids=["busy", "half idle"])
def test_what_others_run_while_an_engine_host_starts(duty, pause, tmp_path, resnet, resnet_engine, figures, bar):
    def put(data):
        digest = hashlib.sha256(data).hexdigest()
        (tmp_path / digest).write_bytes(data)
        return Blob(digest, len(data))

    manifest = gpu_serving.describe(resnet, resnet_engine, REVISION_1, "TensorRT", put)
    (tmp_path / "manifest").write_bytes(dumps(manifest))
    with Other("load", str(duty), str(tmp_path)) as other, Loop(resnet_engine, pause) as loop:
        time.sleep(QUIET_SECONDS)
        marks = [time.monotonic()]
        other.begin()
        assert other.says() == "loaded"
        marks.append(time.monotonic())
        time.sleep(0.1)
    how = f"a host starts that computes {duty:.0%} of the time, GPU {'half idle' if pause else 'busy'}"
    told(figures, bar, how, loop, marks)


def test_a_bare_loop_after_a_pause(resnet_engine, figures, bar):
    found, usual = {}, []
    with BareLoop(resnet_engine, SHAPES) as bare:

        def run():
            began = time.perf_counter()
            bare.run()
            return 1e3 * (time.perf_counter() - began)

        for pause in PAUSES:
            firsts = []
            for _ in range(TRIES):
                usual += [run() for _ in range(300)][-100:]
                time.sleep(pause)
                firsts.append([round(run(), 3) for _ in range(3)])
            found[f"after_{pause}_s"] = firsts
    steady = float(np.median(usual))
    figures(**found, steady_ms=round(steady, 3))
    for pause in PAUSES:
        first = float(np.median([first for first, *_ in found[f"after_{pause}_s"]]))
        bar(f"bare loop, first run after {pause} s, against the steady p50", first / steady, None, "x")


@pytest.fixture
def bare_server(request, tmp_path, resnet):
    """(port, file with a request) of a server that does nothing but run."""
    source, asked = tmp_path / "input", tmp_path / "request"
    source.write_bytes(next(iter(resnet.sample(1).values())).tobytes())
    asked.write_bytes(TINY)
    environment = {**os.environ, "PYTHONPATH": gpu_serving.search_path()}
    command = [sys.executable, str(HERE / "gpu_bare_server.py"), str(source), request.param]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    yield int(server.stdout.readline()), asked
    server.kill()
    server.communicate()


@pytest.mark.parametrize("bare_server", ["sleep", "spin"], indirect=True)
def test_the_least_round_trip(bare_server, request, figures, bar):
    """Also the first request after a pause: of a new client, and of one whose connection is warm."""
    port, asked = bare_server
    server = f"a server that {'spins' if 'spin' in request.node.name.split('[')[1] else 'sleeps'}"
    found = {}
    for how in ("warm", ""):
        time.sleep(1.0)
        firsts, seen = [], None
        for _ in range(TRIES):
            seen = gpu_serving.start_client(port, asked, 1, 0.5, how=how).result()
            firsts.append([round(float(ms), 3) for ms in seen.ms[:3]])
        steady = percentiles(seen.ms[20:])
        name = "warm connection" if how else "new client"
        found[name] = {"first_three_ms": firsts, "steady": steady}
        bar(f"{server}: first request after 1 s, {name}, against the steady p50", firsts[0][0] / steady["p50_ms"],
            None, "x")  # fmt: skip
        later = float(np.median([first for first, *_ in firsts[1:]]))
        bar(f"{server}: first request of a later client, {name}, against the steady p50", later / steady["p50_ms"],
            None, "x")  # fmt: skip
    for how in ("", "spin"):
        name = "client that spins" if how else "client that sleeps"
        found[name] = percentiles(gpu_serving.start_client(port, asked, 1, 2.0, how=how).result().ms)
        bar(f"{server}, {name}: least round trip of one row, p50", found[name]["p50_ms"], None, "ms")
    figures(**found)
