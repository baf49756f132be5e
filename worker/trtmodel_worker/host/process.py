"""The host process: load, warm, prove, then serve lanes until the front says stop or is gone."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NoReturn

from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.control import DEVICE_LOST
from trtmodel_contract.exitcodes import HostExit
from trtmodel_contract.manifest import Manifest, TensorSpec

from trtmodel_worker.engines.base import CannotLoad, DeviceLost, Engine, EngineError, Lane
from trtmodel_worker.engines.registry import runtime
from trtmodel_worker.host.arena import Arena
from trtmodel_worker.host.counting import fewest_lanes
from trtmodel_worker.host.lanes import LaneMaker, LaneServer
from trtmodel_worker.host.pace import Pace
from trtmodel_worker.host.proving import SelfTestFailed, read_samples, self_test
from trtmodel_worker.host.rows import why_not_batchable
from trtmodel_worker.host.sharing import Shared
from trtmodel_worker.host.warming import Runner, Timings, best_step, warm
from trtmodel_worker.host.wire import FORGET, MAX_TEXT_BYTES, SHARE, HostConfig, Ready, Refused
from trtmodel_worker.lifetime import end_with_parent
from trtmodel_worker.slices import HOST_SECONDS, PREPARING_SECONDS, ask_for_slices, give_slices_back

log = logging.getLogger(__name__)
_FINISH_SECONDS = 60.0


class _Refusal(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def serve(config: HostConfig) -> NoReturn:
    """Run one engine as `config` says, each lane in a thread of its own. Ends the process without cleaning up the
    runtime: its memory is freed anyway, and destroying an engine may block, above all on a device that is poisoned."""
    _die_with(config.parent_pid)
    control = socket.socket(fileno=config.control_fd)
    if config.pulsed:
        ask_for_slices(PREPARING_SECONDS)
    try:
        ready, lanes, shared = _prepare_or_refuse(config)
    except _Refusal as e:
        log.error("%s: %s", e.reason, e)
        control.send(dumps(Refused(e.reason, str(e)[:MAX_TEXT_BYTES])))
        os._exit(HostExit.DEVICE_LOST if e.reason == DEVICE_LOST else HostExit.CANNOT_LOAD)
    stop, stopped = os.pipe()
    os.set_blocking(stopped, False)
    signal.set_wakeup_fd(stopped, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    give_slices_back()  # a runtime's own threads have those of who made them
    ask_for_slices(HOST_SECONDS)
    threads = ThreadPoolExecutor(len(lanes), thread_name_prefix="lane")
    running = [threads.submit(lane.run) for lane in lanes]
    for future in running:
        future.add_done_callback(_end_if_broken)
    gc.collect()
    gc.freeze()  # a runtime's modules are many objects, and no lane runs while all of them are looked at
    control.send(dumps(ready))
    # `select` takes no number from 1,024 on, and these are the front's, which may have as many clients.
    heard = select.poll()
    for descriptor in (control.fileno(), stop):
        heard.register(descriptor, select.POLLIN)
    while control.fileno() in dict(heard.poll()) and _told(control, shared):
        pass
    for fd in config.lane_fds[: len(lanes)]:
        _hang_up(fd)
    wait(running, _FINISH_SECONDS)
    os._exit(HostExit.DONE)


def _told(control: socket.socket, shared: Shared | None) -> bool:
    """The front says something about a client's file, or (False) has closed its end."""
    try:
        what, descriptors, _, _ = socket.recv_fds(control, len(FORGET), 1, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return False
    for descriptor in descriptors:
        if shared is not None and what in (SHARE, FORGET):
            (shared.share if what == SHARE else shared.forget)(descriptor)
        else:
            os.close(descriptor)
    return bool(what)


def _end_if_broken(lane: Future[None]) -> None:
    """A lane whose thread has ended by a defect would keep its requests until they hang."""
    defect = lane.exception()
    if defect is not None:
        log.critical("a lane broke down: this process ends", exc_info=defect)
        os._exit(HostExit.CANNOT_LOAD)


def _prepare_or_refuse(config: HostConfig) -> tuple[Ready, list[LaneServer], Shared | None]:
    """Raises _Refusal. A device that is not there is the node's fault, at whatever step it shows, not the engine's."""
    try:
        return _prepare(config)
    except DeviceLost as e:
        raise _Refusal(DEVICE_LOST, f"the device cannot be used: {e}") from e


def _prepare(config: HostConfig) -> tuple[Ready, list[LaneServer], Shared | None]:
    manifest = loads(Manifest, config.manifest)
    goldens = [_read(fd, size) for fd, size in zip(config.golden_fds, config.golden_sizes, strict=True)]
    plan = memoryview(mmap.mmap(config.plan_fd, config.plan_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ))
    os.close(config.plan_fd)  # an engine that is done with the plan gives its memory back: it is as large as the engine
    started = time.perf_counter()
    maker, lanes = _load(config, manifest, plan)
    loaded = time.perf_counter()
    pace = Pace(config.duty, clock=time.process_time if config.pulsed else time.perf_counter)
    try:
        timings = warm(lanes, manifest, config.buckets, pace)
        if config.auto:
            lanes = _worth_it(lanes, manifest, config, timings)
    except DeviceLost:
        raise
    except Exception as e:
        raise _Refusal("WarmUpFailed", f"warm-up failed: {type(e).__name__}: {e}") from e
    warmed = time.perf_counter()
    arena = Arena(config.arena_fd, config.arena_size)
    try:
        maker.serve_from(arena.view, pace)
        samples = read_samples(manifest, goldens)
        del goldens
        self_test(lanes, samples, manifest.outputs, pace)
        why = why_not_batchable(lanes[0], manifest, samples, pace)
    except SelfTestFailed as e:
        raise _Refusal("SelfTestFailed", str(e)) from e
    except DeviceLost:
        raise
    except EngineError as e:
        raise _Refusal("WarmUpFailed", f"it could not be made ready: {type(e).__name__}: {e}") from e
    shared = maker.shared()
    servers = [
        LaneServer(lane, maker, socket.socket(fileno=fd), arena, manifest, samples, config.spin_seconds, shared)
        for lane, fd in zip(lanes, config.lane_fds, strict=False)
    ]
    for fd in config.lane_fds[len(lanes) :]:
        os.close(fd)
    log.info(
        "%s: loaded in %.3f s, warm after %.3f s, proved after %.3f s; %s",
        config.name, loaded - started, warmed - started, time.perf_counter() - started,
        f"its rows are not run together: {why}" if why else "rows of different requests may be run together",
    )  # fmt: skip
    ready = Ready(
        slowest_seconds=timings.slowest,
        bucket_seconds={str(rows): seconds for rows, seconds in timings.by_bucket.items()},
        batchable=not why,
        why=why,
        lanes=len(lanes),
        pins=shared is not None,
    )
    return ready, servers, shared


def _worth_it(lanes: list[Lane], manifest: Manifest, config: HostConfig, timings: Timings) -> list[Lane]:
    step = best_step(manifest, config.buckets, timings)
    runs = [Runner(lane, step.shapes, manifest.inputs) for lane in lanes]
    for run in runs:
        run()
    count, rates = fewest_lanes(runs, timings.slowest)
    figures = ", ".join(f"{n}: {rate:,.0f}" for n, rate in rates.items())
    log.info("%s: %d lanes, by runs per second of so many (%s)", config.name, count, figures)
    return lanes[:count]


def _load(config: HostConfig, manifest: Manifest, plan: memoryview) -> tuple[LaneMaker, list[Lane]]:
    try:
        engine = runtime(config.runtime).load(plan, manifest.profiles, len(config.lane_fds))
        _agree("inputs", manifest.inputs, engine)
        _agree("outputs", manifest.outputs, engine)
        maker = LaneMaker(engine, manifest)
        return maker, [maker.make() for _ in config.lane_fds]
    except (CannotLoad, ValueError, ImportError) as e:
        raise _Refusal("CannotLoad", str(e)) from e
    except DeviceLost:
        raise
    except (EngineError, MemoryError) as e:
        raise _Refusal("CannotLoad", f"{type(e).__name__}: {e}") from e


def _agree(kind: str, wanted: Sequence[TensorSpec], engine: Engine) -> None:
    found: Sequence[TensorSpec] = getattr(engine, kind)
    if tuple(found) != tuple(wanted):
        raise CannotLoad(f"the engine's {kind} are {_names(found)}, the manifest says {_names(wanted)}")


def _names(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{s.name!r} {s.datatype}{list(s.shape)}" for s in specs)


def _read(fd: int, size: int) -> bytes:
    with os.fdopen(fd, "rb") as f:
        f.seek(0)
        return f.read(size)


def _hang_up(fd: int) -> None:
    """End of file for the lane's thread after the message that it works on."""
    with socket.socket(fileno=os.dup(fd)) as channel:
        try:
            channel.shutdown(socket.SHUT_RD)
        except OSError:
            log.info("the front had hung up")


def _die_with(parent: int) -> None:
    """No orphan holds a GPU after the front is gone, however it went."""
    end_with_parent()
    if os.getppid() != parent:
        raise SystemExit("the front is gone")
