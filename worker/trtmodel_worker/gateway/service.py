"""inference.GRPCInferenceService: each call is one request to the front. See inference.proto for the messages."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import quote

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message

from trtmodel_worker.gateway import inference_pb2 as pb
from trtmodel_worker.gateway.client import Answer, FrontClient, TooLate, Unreachable
from trtmodel_worker.gateway.failure import Failure, refusal, revision_metadata
from trtmodel_worker.gateway.translate import infer_body, infer_response, invalid, model_target

NAME = "inference.GRPCInferenceService"
ABOUT_SECONDS = 30.0  # for what is no inference
_MARGIN_SECONDS = 30.0  # the front keeps an inference's limit itself: this one is for a front that hangs
_STREAM_AHEAD = 64  # requests of one stream that are worked on; answers come in the order of the requests
_TRACE = ("traceparent", "tracestate")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{1,512}")
_FINAL_ASKED, _FINAL = "triton_enable_empty_final_response", "triton_final_response"
M = TypeVar("M", bound=Message)
_ENDING = "this worker is ending: open the stream anew"


class InferenceService:
    """`request_seconds`: the model's own limit, which a caller's deadline can only shorten. `called_at`: when the last
    inference was asked for, by the loop's clock."""

    def __init__(self, front: FrontClient, request_seconds: float) -> None:
        self._front = front
        self._request_seconds = request_seconds
        self._ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.called_at = float("-inf")

    def handler(self) -> Any:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        unary: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            "ServerLive": (pb.ServerLiveRequest, self._server_live),
            "ServerReady": (pb.ServerReadyRequest, self._server_ready),
            "ModelReady": (pb.ModelReadyRequest, self._model_ready),
            "ServerMetadata": (pb.ServerMetadataRequest, self._server_metadata),
            "ModelMetadata": (pb.ModelMetadataRequest, self._model_metadata),
            "ModelConfig": (pb.ModelConfigRequest, self._model_config),
            "ModelStatistics": (pb.ModelStatisticsRequest, self._model_statistics),
            "RepositoryIndex": (pb.RepositoryIndexRequest, self._repository_index),
            "RepositoryModelLoad": (pb.RepositoryModelLoadRequest, self._model_load),
            "RepositoryModelUnload": (pb.RepositoryModelUnloadRequest, self._model_unload),
            "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, self._memory_status),
            "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, self._memory_register),
            "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest, self._memory_unregister),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(_unary(kind, call)) for name, (kind, call) in unary.items()
        }
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self._model_infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._model_stream_infer)
        return grpc.method_handlers_generic_handler(NAME, handlers)

    def end(self) -> None:
        """Streams read no more requests, answer those that they have, and end."""
        self._ending.set()

    async def is_ready(self) -> bool:
        """Would the Service send requests here? Raises Failure where the front cannot be asked."""
        answer = await self._ask(b"GET", b"/v2/health/ready")
        return answer.status == 200

    # -- inference

    async def _model_infer(self, data: bytes, context: Any) -> bytes:
        try:
            message = _parse(pb.ModelInferRequest, data)
            answer = await self._infer(message, context)
        except Failure as e:
            await e.abort(context)
        context.set_trailing_metadata(revision_metadata(answer))
        return infer_response(answer, message.id)

    async def _infer(self, message: pb.ModelInferRequest, context: Any) -> Answer:
        """Raises Failure."""
        self.called_at = self._loop.time()
        target = model_target(message.model_name, message.model_version, "infer")
        left = context.time_remaining()
        header, body = infer_body(message, left if left is not None and left < self._request_seconds else None)
        for name, value in context.invocation_metadata() or ():
            if name in _TRACE and isinstance(value, str) and _HEADER_VALUE.fullmatch(value):
                header += f"{name}: {value}\r\n".encode()
        seconds = self._request_seconds + _MARGIN_SECONDS
        return _checked(await self._ask(b"POST", target, header, body, seconds))

    async def _model_stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue(_STREAM_AHEAD)
        reader = asyncio.create_task(self._read_stream(requests, context, answers))
        try:
            while (answer := await answers.get()) is not None:
                try:
                    yield await answer
                finally:
                    answer.cancel()
        finally:
            reader.cancel()
            while not answers.empty():
                waiting = answers.get_nowait()
                if waiting is not None:
                    waiting.cancel()
        if self._ending.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, _ENDING)

    async def _read_stream(
        self, requests: AsyncIterator[bytes], context: Any, answers: asyncio.Queue[asyncio.Task[bytes] | None]
    ) -> None:
        ending = asyncio.create_task(self._ending.wait())
        following = aiter(requests)
        try:
            while not ending.done():
                reading = asyncio.ensure_future(anext(following, None))
                await asyncio.wait({reading, ending}, return_when=asyncio.FIRST_COMPLETED)
                data = reading.result() if reading.done() else None
                if data is None:
                    reading.cancel()
                    break
                answer = asyncio.create_task(self._answer_in_stream(data, context))
                try:
                    await answers.put(answer)
                except asyncio.CancelledError:
                    answer.cancel()
                    raise
        finally:
            ending.cancel()
        await answers.put(None)

    async def _answer_in_stream(self, data: bytes, context: Any) -> bytes:
        """A request that fails does not end the stream."""
        request_id = ""
        try:
            message = _parse(pb.ModelInferRequest, data)
            request_id = message.id
            answer = await self._infer(message, context)
        except Failure as e:
            failed = pb.ModelStreamInferResponse(error_message=e.message)
            failed.infer_response.id = request_id
            return failed.SerializeToString()
        response = pb.ModelInferResponse.FromString(infer_response(answer, request_id))
        if _FINAL_ASKED in message.parameters and message.parameters[_FINAL_ASKED].bool_param:
            response.parameters[_FINAL].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=response).SerializeToString()

    # -- health and metadata

    async def _server_live(self, _: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=(await self._ask(b"GET", b"/v2/health/live")).status == 200)

    async def _server_ready(self, _: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=await self.is_ready())

    async def _model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        answer = await self._ask(b"GET", model_target(request.name, request.version, "ready"))
        if answer.status in (404, 503):  # as Triton's: what is not there is not ready
            return pb.ModelReadyResponse(ready=False)
        _checked(answer)
        return pb.ModelReadyResponse(ready=True)

    async def _server_metadata(self, _: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return _filled(pb.ServerMetadataResponse(), await self._read(b"/v2"))

    async def _model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        document = await self._read(model_target(request.name, request.version, ""))
        return _filled(pb.ModelMetadataResponse(), document)

    async def _model_config(self, request: pb.ModelConfigRequest) -> pb.ModelConfigResponse:
        document = await self._read(model_target(request.name, request.version, "config"))
        return _filled(pb.ModelConfigResponse(), {"config": document})

    async def _model_statistics(self, request: pb.ModelStatisticsRequest) -> pb.ModelStatisticsResponse:
        target = model_target(request.name, request.version, "stats") if request.name else b"/v2/models/stats"
        return _filled(pb.ModelStatisticsResponse(), await self._read(target))

    async def _repository_index(self, request: pb.RepositoryIndexRequest) -> pb.RepositoryIndexResponse:
        models = await self._send(b"/v2/repository/index", {"ready": request.ready})
        return _filled(pb.RepositoryIndexResponse(), {"models": models})

    async def _model_load(self, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
        await self._send(_repository_model(request.model_name, "load"), {})
        return pb.RepositoryModelLoadResponse()

    async def _model_unload(self, request: pb.RepositoryModelUnloadRequest) -> pb.RepositoryModelUnloadResponse:
        await self._send(_repository_model(request.model_name, "unload"), {})
        return pb.RepositoryModelUnloadResponse()

    # -- shared memory of local clients

    async def _memory_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        regions = await self._read(_region(request.name, "status"))
        document = {"regions": {region["name"]: region for region in regions}}
        return _filled(pb.SystemSharedMemoryStatusResponse(), document)

    async def _memory_register(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        if not request.name:
            raise invalid("the request names no region")
        document = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
        await self._send(_region(request.name, "register"), document)
        return pb.SystemSharedMemoryRegisterResponse()

    async def _memory_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await self._send(_region(request.name, "unregister"), {})
        return pb.SystemSharedMemoryUnregisterResponse()

    # -- the front

    async def _read(self, target: bytes) -> Any:
        return json.loads(_checked(await self._ask(b"GET", target)).body)

    async def _send(self, target: bytes, document: Any) -> Any:
        body = json.dumps(document).encode()
        answer = _checked(await self._ask(b"POST", target, b"content-type: application/json\r\n", [body]))
        return json.loads(answer.body or b"null")

    async def _ask(
        self,
        method: bytes,
        target: bytes,
        header: bytes = b"",
        body: list[bytes] | None = None,
        seconds: float = ABOUT_SECONDS,
    ) -> Answer:
        try:
            return await self._front.ask(method, target, seconds, header, body or ())
        except Unreachable as e:
            raise Failure(grpc.StatusCode.UNAVAILABLE, str(e)) from e
        except TooLate as e:
            raise Failure(grpc.StatusCode.DEADLINE_EXCEEDED, str(e)) from e


def _unary(kind: type[Message], call: Callable[[Any], Awaitable[Message]]) -> Any:
    async def handle(data: bytes, context: Any) -> bytes:
        try:
            return (await call(_parse(kind, data))).SerializeToString()
        except Failure as e:
            await e.abort(context)

    return handle


def _parse(kind: type[M], data: bytes) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as e:
        raise invalid(f"the message is no {kind.DESCRIPTOR.full_name}") from e


def _checked(answer: Answer) -> Answer:
    if answer.status != 200:
        raise refusal(answer)
    return answer


def _filled(message: M, document: Any) -> M:
    return ParseDict(document, message, ignore_unknown_fields=True)


def _repository_model(name: str, action: str) -> bytes:
    return f"/v2/repository/models/{quote(name, safe='')}/{action}".encode()


def _region(name: str, action: str) -> bytes:
    region = f"/region/{quote(name, safe='')}" if name else ""
    return f"/v2/systemsharedmemory{region}/{action}".encode()
