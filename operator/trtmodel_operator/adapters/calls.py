"""HTTP to what stands outside the cluster's API: an allowed address, a few calls at a time, each with an end, an answer
of bounded length, and no redirects (they would lead past the list of addresses)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import aiohttp
from yarl import URL

from trtmodel_operator.adapters import bounded
from trtmodel_operator.adapters.addresses import Addresses, NotAllowed

AT_ONCE = 32  # over all
AT_ONCE_PER_HOST = 4  # so that a server that hangs takes nobody else's place
HOSTS_KEPT = 1024
WAIT = 30.0  # seconds for a free place
ANSWER_BYTES = 1 << 20
REDIRECTS = range(300, 400)


class CallError(Exception):
    """There is no answer. The text is the cause, fit for a condition's message."""


class Calls:
    """Open it in the event loop that uses it; close it."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=AT_ONCE, force_close=True),
            cookie_jar=aiohttp.DummyCookieJar(),  # of all models: none is told what a server said to another
            trust_env=False,
        )
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._hosts: dict[str, asyncio.Semaphore] = {}

    async def close(self) -> None:
        await self._session.close()

    async def post(self, address: str, data: bytes, headers: Mapping[str, str], timeout: float) -> tuple[int, bytes]:
        """Status and body of the answer. Raises CallError."""
        try:
            url = self._addresses.check(address)
        except NotAllowed as e:
            raise CallError(str(e)) from e
        origin = str(url.origin())
        if origin not in self._hosts and len(self._hosts) >= HOSTS_KEPT:
            # A wildcard in the list lets authors make up names for ever. Who loses its gate gets another.
            del self._hosts[next(iter(self._hosts))]
        host = self._hosts.setdefault(origin, asyncio.Semaphore(AT_ONCE_PER_HOST))
        # One end for both: what is signed for the call is valid for a minute.
        late = asyncio.get_running_loop().time() + WAIT
        slow = f"{origin} answers too slowly: {AT_ONCE_PER_HOST} calls to it are under way"
        full = f"{origin} was not called: {AT_ONCE} calls to other servers are under way, and they answer too slowly"
        async with _place(host, late, slow), _place(self._gate, late, full):
            return await self._exchange(url, origin, data, headers, timeout)

    async def _exchange(
        self, url: URL, origin: str, data: bytes, headers: Mapping[str, str], timeout: float
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout):
                request = self._session.post(url, data=data, headers=headers, allow_redirects=False)
                async with request as answer:
                    return answer.status, await _read(answer, origin)
        except TimeoutError as e:
            raise CallError(f"no answer from {origin} within {timeout:g} s") from e
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise CallError(f"{origin} cannot be reached: {shown(str(e)) or type(e).__name__}") from e


@contextlib.asynccontextmanager
async def _place(gate: asyncio.Semaphore, late: float, full: str) -> AsyncIterator[None]:
    """Raises CallError with the text `full` if none is free by the time `late`."""
    try:
        async with asyncio.timeout_at(late):
            await gate.acquire()
    except TimeoutError as e:
        raise CallError(full) from e
    try:
        yield
    finally:
        gate.release()


async def _read(answer: aiohttp.ClientResponse, origin: str) -> bytes:
    if answer.status in REDIRECTS:
        raise CallError(f"{origin} sends us elsewhere ({answer.status}), and redirects are not followed")
    try:
        return await bounded.read(answer, ANSWER_BYTES)
    except bounded.TooLong as e:
        raise CallError(f"{origin} answers with more than {ANSWER_BYTES >> 20} MiB") from e


def shown(said: bytes | str) -> str:
    """The beginning of a foreign text, in one line."""
    begin = said[:400].decode(errors="replace") if isinstance(said, bytes) else said[:400]
    text = "".join(c if c.isprintable() else " " for c in begin)
    return " ".join(text.split())[:200]
