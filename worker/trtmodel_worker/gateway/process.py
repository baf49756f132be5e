"""The gateway process: one gRPC port, until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal

import grpc
import uvloop

from trtmodel_worker.gateway.client import FrontClient
from trtmodel_worker.gateway.config import GatewayConfig
from trtmodel_worker.gateway.health import Health
from trtmodel_worker.gateway.service import InferenceService
from trtmodel_worker.lifetime import end_with_parent

log = logging.getLogger(__name__)
_MOST_CALLS = 4096  # at once; more get RESOURCE_EXHAUSTED
_MESSAGE_ROOM = 1 << 20  # a message's own bytes beside its tensors: the front judges the tensors' size itself
# A connection is asked to leave after this part of the time to finish (10 % more or less): so each one was asked while
# calls were still accepted when that time is over, and clients behind a Service come to know new workers.
_AGE, _AGE_AT_MOST = 0.5, 0.7
_QUIET_SECONDS = 1.0  # who called within it may be about to call again


def run(config: GatewayConfig) -> int:
    """Returns the exit code."""
    end_with_parent()
    if os.getppid() != config.parent_pid:
        return 1  # it ended before it could be tied to us
    gc.freeze()  # modules are no work for the garbage collector
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    return int(loop.run_until_complete(_serve(config)))


async def _serve(config: GatewayConfig) -> int:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    front = FrontClient(config.front)
    service = InferenceService(front, config.request_seconds)
    health = Health(service)
    server = grpc.aio.server(options=_options(config), maximum_concurrent_rpcs=_MOST_CALLS)
    server.add_generic_rpc_handlers((service.handler(), health.handler()))
    try:
        server.add_insecure_port(config.address)
    except RuntimeError as e:
        log.critical("the port cannot be used: %s", e)
        return 1
    await server.start()
    log.info("serving gRPC on %s", config.address)
    print("serving", flush=True)  # for the front
    await told.wait()
    health.end()
    await asyncio.sleep(config.drain_seconds)
    service.end()
    loop = asyncio.get_running_loop()
    end = loop.time() + config.finish_seconds
    await _until_quiet(service, loop.time() + _AGE_AT_MOST * config.finish_seconds)
    await server.stop(end - loop.time())  # accepts nothing more, waits for what runs
    front.close()
    log.info("everything was answered")
    return 0


async def _until_quiet(service: InferenceService, latest: float) -> None:
    """A server of gRPC that stops cancels calls that come at that moment, or lets them hang. So it stops only when
    nobody calls any more: each connection was asked to leave, or no call has come for a while."""
    loop = asyncio.get_running_loop()
    while True:
        noisy = min(latest, service.called_at + _QUIET_SECONDS) - loop.time()
        if noisy <= 0:
            return
        await asyncio.sleep(noisy)


def _options(config: GatewayConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.body_bytes + _MESSAGE_ROOM),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # else a second server on this port would silently take half of the calls
        ("grpc.max_connection_age_ms", int(1000 * _AGE * config.finish_seconds)),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]
