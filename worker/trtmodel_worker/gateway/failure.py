"""What a caller is told when the front refuses: its HTTP status as a code of gRPC.

The codes are those that Triton and KServe answer with, where these agree with gRPC's own meaning: the library itself
says RESOURCE_EXHAUSTED for a message that is too large, and UNAVAILABLE is what clients retry.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import grpc

from trtmodel_worker.gateway.client import Answer

REVISION = "x-trtmodel-revision"
_CODES = {  # of every status that the front answers with: see front/openapi.py
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    431: grpc.StatusCode.INVALID_ARGUMENT,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}
Metadata = tuple[tuple[str, str], ...]


class Failure(Exception):
    """A call that is not answered as asked."""

    def __init__(self, code: Any, message: str, metadata: Metadata = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.metadata = metadata

    async def abort(self, context: Any) -> NoReturn:
        """End the call with it."""
        await context.abort(self.code, self.message, self.metadata)
        raise AssertionError("abort returns never")


def refusal(answer: Answer) -> Failure:
    """What an answer other than 200 says. Retry-After goes along in its own name, and as gRPC's pushback, which
    clients with a retry policy follow."""
    code = _CODES.get(answer.status, grpc.StatusCode.UNKNOWN)
    metadata = revision_metadata(answer)
    seconds = answer.headers.get(b"retry-after", b"")
    if seconds.isdigit():
        metadata += (("retry-after", seconds.decode()), ("grpc-retry-pushback-ms", str(1000 * int(seconds))))
    return Failure(code, _message(answer), metadata)


def revision_metadata(answer: Answer) -> Metadata:
    """Which revision answered."""
    revision = answer.headers.get(REVISION.encode())
    return ((REVISION, revision.decode("ascii", "replace")),) if revision else ()


def _message(answer: Answer) -> str:
    try:
        error = str(json.loads(answer.body)["error"])
        return f"{error}: raise TRTMODEL_MAX_BODY_BYTES or send less at once" if answer.status == 413 else error
    except (ValueError, KeyError, TypeError):
        return f"the worker's front answered {answer.status}"
