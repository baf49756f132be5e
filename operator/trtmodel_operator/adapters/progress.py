"""Asking Jobs how far they are: briefly, a few at a time, and never more than is shown in status."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from trtmodel_contract.codec import DocumentError, loads
from trtmodel_contract.progress import MESSAGE_LENGTH, PROGRESS_PATH, PROGRESS_PORT, STAGE_LENGTH, JobProgress

from trtmodel_operator.ports import WorkerError
from trtmodel_operator.text import cut

TIMEOUT = 1.0  # seconds: a pass waits for it
AT_ONCE = 32  # over all models
ANSWER_BYTES = 16 << 10  # a longer answer is refused
# Seconds for which a Job that let us wait is not asked again: where a NetworkPolicy swallows what we send, or hundreds
# of Jobs run, passes would do nothing but wait.
LEFT_ALONE = 60.0
REMEMBERED = 4096  # addresses


class HttpProgress:
    """Implements `ports.Progress`. Open it in the event loop that uses it; close it."""

    def __init__(self, port: int = PROGRESS_PORT) -> None:
        self._port = port
        connector = aiohttp.TCPConnector(limit=AT_ONCE, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=False)
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._until: dict[str, float] = {}

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, ip: str) -> JobProgress:
        if time.monotonic() < self._until.get(ip, 0.0):
            raise WorkerError(f"{ip} did not answer lately")
        host = f"[{ip}]" if ":" in ip else ip
        url = f"http://{host}:{self._port}{PROGRESS_PATH}"
        body = b""
        try:
            # The wait for a free place counts, too: where hundreds of Jobs run, some are not asked this time.
            async with asyncio.timeout(TIMEOUT), self._gate, self._session.get(url, allow_redirects=False) as answer:
                async for part in answer.content.iter_chunked(ANSWER_BYTES):
                    body += part
                    if len(body) > ANSWER_BYTES:
                        raise WorkerError(f"{ip} answers with more than {ANSWER_BYTES >> 10} KiB")
                if answer.status != 200:
                    raise WorkerError(f"{ip} answers {answer.status}")
        except TimeoutError as e:
            if len(self._until) >= REMEMBERED:
                self._until.clear()
            self._until[ip] = time.monotonic() + LEFT_ALONE
            raise WorkerError(f"no answer from {ip}:{self._port} within {TIMEOUT:g} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise WorkerError(f"{ip}:{self._port} cannot be reached: {e}") from e
        try:
            found = loads(JobProgress, body)
        except DocumentError as e:
            raise WorkerError(f"{ip} answers with no progress of a Job: {e}") from e
        percent = found.percent if found.percent is not None and 0 <= found.percent <= 100 else None
        return JobProgress(cut(found.stage, STAGE_LENGTH), cut(found.message, MESSAGE_LENGTH), found.since, percent)
