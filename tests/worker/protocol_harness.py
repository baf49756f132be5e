"""A real worker that serves one engine, for tests that only talk to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from worker_harness import REVISION_1, Answer, Bucket, Operator, WorkerProcess

INFER = "/v2/models/m/infer"


def serve(tmp: Path, behaviour: dict[str, Any], environment: dict[str, str], **publish: Any) -> Iterator[WorkerProcess]:
    """It must end well, too."""
    operator, bucket = Operator(), Bucket(tmp / "bucket")
    worker = WorkerProcess(tmp / "worker", operator, bucket, **environment)
    digest, _ = bucket.publish(REVISION_1, behaviour, **publish)
    worker.point(operator.artifact(REVISION_1, digest))
    worker.start()
    try:
        worker.wait_ready()
        yield worker
    finally:
        assert worker.stop() == 0, worker.tail()


def parts(answer: Answer) -> tuple[Any, bytes]:
    """The JSON part of an answer, and the binary data behind it."""
    length = answer.headers.get("inference-header-content-length")
    if length is None:
        return answer.json, b""
    return json.loads(answer.body[: int(length)]), answer.body[int(length) :]
