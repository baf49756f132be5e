"""grpc.health.v1.Health: SERVING while the worker is ready, for the whole server and for the inference service."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from trtmodel_worker.gateway import health_pb2 as pb
from trtmodel_worker.gateway.failure import Failure
from trtmodel_worker.gateway.service import NAME as INFERENCE
from trtmodel_worker.gateway.service import InferenceService

NAME = "grpc.health.v1.Health"
_LOOK_SECONDS = 1.0  # how old what is told to those who watch may be, whatever their number


class Health:
    """`end` makes it NOT_SERVING and ends the streams of those who watch."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._ending = asyncio.Event()
        self._looking: asyncio.Task[int] | None = None
        self._looked_at = 0.0

    def handler(self) -> Any:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        handlers = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }
        return grpc.method_handlers_generic_handler(NAME, handlers)

    def end(self) -> None:
        self._ending.set()

    async def _check(self, data: bytes, context: Any) -> bytes:
        if not await _known(data, context):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known services are '' and {INFERENCE!r}")
        return _response(await self._status())

    async def _watch(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        known = await _known(data, context)
        said = None
        while True:
            status = await self._look() if known else pb.HealthCheckResponse.SERVICE_UNKNOWN
            if status != said:
                said = status
                yield _response(status)
            if self._ending.is_set():
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), _LOOK_SECONDS)

    async def _look(self) -> int:
        """The status, asked for once for all who watch."""
        now = asyncio.get_running_loop().time()
        if self._looking is None or self._ending.is_set() or now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._looking = asyncio.create_task(self._status())
        return await asyncio.shield(self._looking)

    async def _status(self) -> int:
        if self._ending.is_set():
            return int(pb.HealthCheckResponse.NOT_SERVING)
        try:
            ready = await self._service.is_ready()
        except Failure:
            ready = False
        return int(pb.HealthCheckResponse.SERVING if ready else pb.HealthCheckResponse.NOT_SERVING)


async def _known(data: bytes, context: Any) -> bool:
    try:
        return pb.HealthCheckRequest.FromString(data).service in ("", INFERENCE)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the message is no grpc.health.v1.HealthCheckRequest")
        raise


def _response(status: int) -> bytes:
    return pb.HealthCheckResponse(status=status).SerializeToString()  # type: ignore[arg-type]
