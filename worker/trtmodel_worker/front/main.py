"""The front process: three ports, one loop. Ends with 0 after a SIGTERM, when everything was answered."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from trtmodel_worker.cpus import cpu_limit
from trtmodel_worker.front.control import ControlEndpoints
from trtmodel_worker.front.endpoints import Endpoints, Limits
from trtmodel_worker.front.http import HttpServer
from trtmodel_worker.front.logs import Log
from trtmodel_worker.front.metrics import MetricsEndpoints
from trtmodel_worker.front.shadow import Shadow
from trtmodel_worker.front.tracing import Tracing, recorder_of
from trtmodel_worker.front.worker import Worker
from trtmodel_worker.gateway.supervisor import Gateway
from trtmodel_worker.placement import fronts_core, step_aside, take, thread_siblings
from trtmodel_worker.settings import MIB, Settings, SettingsError, from_environment
from trtmodel_worker.slices import FRONT_SECONDS, ask_for_slices

log = logging.getLogger(__name__)
_PR_SET_DUMPABLE = 4
_FINISH_SECONDS = 30.0  # with the drain delay within the pod's grace period of 60 s
_RELEASE_SECONDS = 20.0
_SWITCH_SECONDS = 0.0005  # a thread beside the loop keeps the interpreter for so long; Python's 5 ms hold requests up
_EXPORT_SECONDS = 2.0  # for the last spans
_MOST_CONNECTIONS = 16384
_MOST_INNER_CONNECTIONS = 64  # of the control and the metrics port


def main() -> NoReturn:
    """Serve until SIGTERM. Ends the process."""
    lines = Log()
    try:
        code = _run()
    except Exception:
        log.critical("this worker ends by a defect", exc_info=True)
        code = 1
    lines.close()
    os._exit(code)  # a thread may still wait for a storage that does not answer


def _run() -> int:
    try:
        settings = from_environment(os.environ)
    except SettingsError as e:
        log.critical("%s", e)
        return 2
    # Its memory holds credentials: no core file, and no other process of this user may look into it.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)
    # Modules live as long as the process. A full collection that walks them takes 20 ms, in which no request moves.
    gc.freeze()
    ask_for_slices(FRONT_SECONDS)
    sys.setswitchinterval(_SWITCH_SECONDS)
    loop = _new_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(serve(settings))


async def serve(settings: Settings) -> int:
    """Run the worker. Returns when it was told to end and has answered everything."""
    worker = Worker(settings)
    core = fronts_core(settings.own_core, os.sched_getaffinity(0), cpu_limit(), thread_siblings)
    if core:
        log.info("the front has the processors %s for itself", sorted(core))
        take(core)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(initializer=step_aside))
    limits = Limits(settings.body_bytes, settings.json_bytes, settings.request_seconds)
    tracing = Tracing(recorder_of(os.environ, settings.model))
    shadow = Shadow(worker.router, worker.windows, settings.request_seconds)
    gateway = Gateway(settings, _FINISH_SECONDS) if settings.grpc_port else None

    def is_ready() -> bool:
        return worker.is_ready() and (gateway is None or gateway.settled)

    endpoints = Endpoints(
        settings.model, settings.runtime, worker.router, limits, is_ready, shadow,
        settings.shared_memory_prefix, tracing, worker.sharing,
    )  # fmt: skip
    server = HttpServer(
        endpoints, settings.staging_bytes, _most_connections(), lambda: worker.swapper.room.leaving, endpoints.connected
    )
    control = HttpServer(ControlEndpoints(worker), 64 * MIB, _MOST_INNER_CONNECTIONS)
    metrics = HttpServer(MetricsEndpoints(worker, endpoints, server), MIB, _MOST_INNER_CONNECTIONS)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    host = settings.bind or None
    await worker.begin()
    try:
        await control.listen(host, settings.control_port)
        await metrics.listen(host, settings.metrics_port)
        if gateway is not None:
            await server.listen_unix(gateway.path)
            gateway.start()
        await server.listen(host, settings.http_port)  # last: who sees it live finds the others
    except OSError as e:
        log.critical("a port cannot be used: %s", e)
        return 1
    work = asyncio.create_task(worker.run(), name="worker")
    ended = asyncio.create_task(told.wait(), name="told")
    await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        log.critical("the worker ended by itself", exc_info=work.exception())
        return 1
    log.info("told to end: not ready from now on, accepting for %.1f s", settings.drain_seconds)
    worker.begin_drain()
    server.announce_end()
    finished_by = loop.time() + settings.drain_seconds + _FINISH_SECONDS
    leaving = asyncio.create_task(gateway.end(), name="gateway's end") if gateway is not None else None
    await asyncio.sleep(settings.drain_seconds)  # endpoints lag: requests still come here
    if leaving is not None:
        await leaving  # before the server that it asks
    await server.close(max(1.0, finished_by - loop.time()))
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
        await asyncio.wait_for(work, _RELEASE_SECONDS)
    await control.close(0.0)
    await metrics.close(0.0)
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.to_thread(tracing.close), _EXPORT_SECONDS)
    log.info("everything was answered")
    return 0


def _most_connections() -> int:
    """Half of the descriptors that this process may have, so that files, hosts and the other ports never lack one:
    without any, health cannot be asked for, and the pod would be killed. The usual soft limit, 1024, is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST_CONNECTIONS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(_MOST_CONNECTIONS, soft // 2)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()  # type: ignore[no-any-return]
