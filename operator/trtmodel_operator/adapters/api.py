"""Plain JSON over the Kubernetes API: kubernetes.aio does configuration, TLS and tokens; documents stay dictionaries.

Typed models would drop the fields that they do not know, and cost twenty times more to decode. The client wraps
neither aiohttp's errors nor timeouts, so every failure is turned into one ClusterError here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import aiohttp
import orjson
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, ApiException, Configuration

from trtmodel_operator.ports import ClusterError, Conflict, Json

REQUEST_TIMEOUT = 15.0  # seconds, of one call, its wait for a connection included
CONNECT_TIMEOUT = 5.0
# Objects of a list that come in one answer. A page of whole objects takes 65 KB of memory each and holds up the event
# loop while it is read: with 100 that is 10 ms.
PAGE = 100
# A change costs two or three writes. With 20 a second, a hundred models that change at once would wait for a quarter of
# a minute; the API server's own priority and fairness guards it, and its 429 is honoured.
WRITES_PER_SECOND = 100.0
WRITE_BURST = 200
# Calls under way at a time, and so the connections that a storm opens: to open one costs as much as half a write. The
# Lease's are not among them, nor are watches, which hold a connection each (five for each namespace).
CALLS_AT_ONCE = 32
WATCH_SECONDS = 300  # after which the API server ends a watch, so that watches spread over its replicas again
TOO_MANY_REQUESTS = 429
QUIET_MOST = 10.0  # seconds that all calls wait at most when the server asks for it; a pass must end in 45
QUIET_SPREAD = 0.5  # seconds over which those that waited are sent
_EVENT_BYTES = 8 << 20  # of one event of a watch; etcd holds no object that is nearly as large
_ERROR_BYTES = 2000  # of an answer that is no Status object, what goes into the message

OnCall = Callable[[str, str, str], None]  # verb, resource, code


@dataclass(frozen=True)
class Page:
    """Of a list: `version` is that of the whole list, where a watch begins."""

    items: list[Json]
    version: str


class TokenBucket:
    """Lets through `rate` calls a second, and `burst` at once after a quiet time. First come, first served."""

    def __init__(
        self,
        rate: float,
        burst: int,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate, self._burst, self._now, self._sleep = rate, burst, now, sleep
        self._tokens, self._at = float(burst), now()

    async def take(self) -> None:
        # The token is taken before the wait, into the negative: so the order of arrival is the order of leaving.
        self._tokens = min(self._burst, self._tokens + (self._now() - self._at) * self._rate) - 1.0
        self._at = self._now()
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate)


async def configuration() -> Configuration:
    """The pod's service account; else the kubeconfig that KUBECONFIG names, else the default one."""
    settings = Configuration()
    try:
        kubernetes_config.load_incluster_config(client_configuration=settings)
    except kubernetes_config.ConfigException:
        file = os.environ.get("KUBECONFIG")
        await kubernetes_config.load_kube_config(file, client_configuration=settings, persist_config=False)
    return settings


class Api:
    """One API server. Reads are not throttled; writes share a token bucket. When the server says 429 to one call, all
    but the lease's wait for as long as it asks: it counts the calls of a client together. `may_write` is asked at the
    last moment before a write is sent. Close it."""

    def __init__(
        self,
        settings: Configuration,
        *,
        on_call: OnCall = lambda *_: None,
        timeout: float = REQUEST_TIMEOUT,
        bucket: TokenBucket | None = None,
    ) -> None:
        self.may_write: Callable[[], bool] = lambda: True
        # A proxy for the outside world, set in the environment, must not carry the traffic to the API server.
        settings.client_session_kwargs = {"trust_env": False}
        settings.connection_pool_maxsize = 0  # no limit of the client's: watches alone may be more than its hundred
        self._gate = asyncio.Semaphore(CALLS_AT_ONCE)
        self._client = ApiClient(settings)
        self._client.user_agent = "trtmodel-operator"
        self._on_call = on_call
        self._timeout = aiohttp.ClientTimeout(total=timeout, connect=min(CONNECT_TIMEOUT, timeout))
        self._bucket = bucket or TokenBucket(WRITES_PER_SECOND, WRITE_BURST)
        self._quiet_until = 0.0  # monotonic

    async def close(self) -> None:
        await self._client.close()

    async def get(self, path: str, *, urgent: bool = False) -> Json | None:
        """None if there is no such object. `urgent`: also while the server asks us to wait."""
        try:
            return await self._read(path, urgent=urgent)
        except ClusterError as e:
            if e.status == 404:
                return None
            raise

    async def list_all(
        self,
        path: str,
        selector: str = "",
        keep: Callable[[Json], Json | None] = lambda item: item,
        *,
        fields: str = "",
    ) -> list[Json]:
        """All pages, of what has these labels and `fields`. A list whose continuation expired in the middle is read
        again from its start, once. `keep` says what to keep of each item, so that thousands are never held whole; None:
        nothing."""
        try:
            return await self._all_pages(path, selector, fields, keep)
        except ClusterError as e:
            if e.status != 410:
                raise
        return await self._all_pages(path, selector, fields, keep)

    async def pages(self, path: str, selector: str = "", fields: str = "") -> AsyncIterator[Page]:
        """One after the other, so that a long list is never held as a whole. Raises ClusterError, with status 410 if
        the continuation expired."""
        selectors = {"labelSelector": selector, "fieldSelector": fields}
        query = {"limit": str(PAGE)} | {name: value for name, value in selectors.items() if value}
        while True:
            page = await self._read(path, query)
            meta = page.get("metadata") or {}
            # Items of a list carry neither kind nor apiVersion.
            kind = str(page.get("kind", "")).removesuffix("List")
            items = [{"apiVersion": page.get("apiVersion"), "kind": kind} | item for item in page.get("items") or ()]
            yield Page(items, str(meta.get("resourceVersion") or ""))
            following = meta.get("continue")
            if not following:
                return
            query = query | {"continue": following}

    async def watch(
        self, path: str, selector: str, version: str, silence: float, opened: Callable[[], None]
    ) -> AsyncIterator[Json]:
        """Events after `version`, until the server ends it, or nothing comes for `silence` seconds, bookmarks included.
        `opened` is called when the server has agreed. Raises ClusterError, with status 410 if that version is too
        old."""
        query = {"watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_SECONDS)}
        query |= {"labelSelector": selector, "resourceVersion": version}
        timeout = aiohttp.ClientTimeout(total=None, connect=self._timeout.connect, sock_read=silence)
        code, cause = "error", ""
        try:
            answer = await self._open("GET", f"{path}?{urlencode(query)}", None, "application/json", timeout)
            code = str(answer.status)
            if answer.status != 200:
                data = await answer.read()
                wait = _seconds(answer.headers.get("Retry-After"))
                raise ClusterError("WATCH", path, _cause(answer.reason, data), answer.status, wait)
            opened()
            async for line in _lines(answer.response):
                event = orjson.loads(line)
                if event.get("type") == "ERROR":
                    said = event.get("object") or {}
                    raise ClusterError("WATCH", path, str(said.get("message")), int(said.get("code") or 0))
                yield event
            return
        except TimeoutError:
            if code == "200":
                return
            code, cause = "timeout", f"it was not opened within {silence:g} s"
        except (ApiException, kubernetes_config.ConfigException, aiohttp.ClientError, OSError, ValueError) as e:
            cause = f"{type(e).__name__}: {e}"
        finally:
            self._on_call("WATCH", resource_of(path), code)
        raise ClusterError("WATCH", path, cause)

    async def create(
        self,
        path: str,
        body: Json,
        *,
        manager: str,
        throttled: bool = True,
        always: bool = False,
        fenced: bool = True,
    ) -> Json:
        """Raises Conflict if it exists. `always`: at once, and whatever `may_write` says; not `fenced`: the latter."""
        query = {"fieldManager": manager}
        return await self._write("POST", path, body, query, throttled=throttled, always=always, fenced=fenced)

    async def replace(
        self, path: str, body: Json, *, manager: str, throttled: bool = True, always: bool = False
    ) -> Json:
        """With metadata.resourceVersion as precondition: raises Conflict. `always`: at once, and whatever `may_write`
        says."""
        query = {"fieldManager": manager}
        return await self._write("PUT", path, body, query, throttled=throttled, always=always)

    async def apply(self, path: str, body: Json, *, manager: str, force: bool = True) -> Json:
        """Server-side apply. With `force` it takes over fields of others; without it raises Conflict where they have
        another value, as it does if `body` has a resourceVersion that is not the current one."""
        query = {"fieldManager": manager, "force": str(force).lower()}
        return await self._write("PATCH", path, body, query, content_type="application/apply-patch+yaml")

    async def merge(self, path: str, body: Json, *, manager: str, throttled: bool = True, fenced: bool = True) -> Json:
        """A JSON merge patch. Raises Conflict if `body` has a resourceVersion that is not the current one. If it is not
        `fenced`: whatever `may_write` says."""
        query, kind = {"fieldManager": manager}, "application/merge-patch+json"
        return await self._write("PATCH", path, body, query, content_type=kind, throttled=throttled, fenced=fenced)

    async def delete(self, path: str, resource_version: str = "") -> None:
        """With everything that it owns, in the background. A missing object is success. Without the policy, the API
        server would orphan the pods of a Job. Raises Conflict if it has another `resource_version` than the one given
        (not asked without one)."""
        options: Json = {"propagationPolicy": "Background"}
        if resource_version:
            options["preconditions"] = {"resourceVersion": resource_version}
        try:
            await self._write("DELETE", path, options, {})
        except ClusterError as e:
            if e.status != 404:
                raise

    async def _all_pages(
        self, path: str, selector: str, fields: str, keep: Callable[[Json], Json | None]
    ) -> list[Json]:
        pages = self.pages(path, selector, fields)
        return [kept async for page in pages for i in page.items if (kept := keep(i)) is not None]

    async def _write(
        self,
        method: str,
        path: str,
        body: Json,
        query: Mapping[str, str],
        *,
        content_type: str = "application/json",
        throttled: bool = True,
        always: bool = False,
        fenced: bool = True,
    ) -> Json:
        if throttled:
            await self._bucket.take()
        async with contextlib.nullcontext() if always else self._gate:
            if not always:
                await self._while_asked_to_wait()
            if fenced and not always and not self.may_write():  # the last thing before it is sent
                raise ClusterError(method, path, "this process could not renew its lease: another may lead by now")
            try:
                return await self._call(method, path, body=body, query=query, content_type=content_type)
            except ClusterError as e:
                if e.status == 409:
                    raise Conflict(str(e)) from e
                raise

    async def _read(self, path: str, query: Mapping[str, str] | None = None, *, urgent: bool = False) -> Json:
        """`urgent`: without waiting for a place, or for what the server asks."""
        if urgent:
            return await self._call("GET", path, query=query)
        async with self._gate:
            await self._while_asked_to_wait()
            return await self._call("GET", path, query=query)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        url = f"{path}?{urlencode(query)}" if query else path
        code, status, retry_after = "error", 0, 0.0
        try:
            answer = await self._open(method, url, body, content_type, self._timeout)
            data = await answer.read()
            status, code = answer.status, str(answer.status)
            if 200 <= status < 300:
                return dict(orjson.loads(data)) if data else {}
            cause, retry_after = _cause(answer.reason, data), _seconds(answer.headers.get("Retry-After"))
        except TimeoutError:
            cause, code = "no answer in time: is the API server reachable and healthy?", "timeout"
        except (ApiException, kubernetes_config.ConfigException, aiohttp.ClientError, OSError, ValueError) as e:
            cause = f"{type(e).__name__}: {e}"
        finally:
            self._on_call(method, resource_of(path), code)
        if status == TOO_MANY_REQUESTS:
            self._quiet_until = max(self._quiet_until, time.monotonic() + min(QUIET_MOST, max(1.0, retry_after)))
        raise ClusterError(method, path, cause, status, retry_after)

    async def _while_asked_to_wait(self) -> None:
        while (left := self._quiet_until - time.monotonic()) > 0:  # noqa: ASYNC110 - it may be put off meanwhile
            await asyncio.sleep(left + random.uniform(0.0, QUIET_SPREAD))  # noqa: S311 - spreads load

    async def _open(
        self, method: str, url: str, body: Json | None, content_type: str, timeout: aiohttp.ClientTimeout
    ) -> Any:
        """The client's answer, whose body was not read yet."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        request = await self._client.param_serialize(
            method, url, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        return await self._client.call_api(*request, _request_timeout=timeout)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Closes the answer however it ends: a watch that is left must not hold its connection."""
    rest = b""
    try:
        async for chunk in answer.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line:
                    yield line
            if len(rest) > _EVENT_BYTES:
                raise ValueError(f"an event is longer than {_EVENT_BYTES >> 20} MiB")
    finally:
        answer.close()


def resource_of(path: str) -> str:
    """`jobs` of /apis/batch/v1/namespaces/ml/jobs/x; `trtmodels/status` keeps its subresource. For metrics: never a
    name, so that the number of series is bounded."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return "/".join(parts[:1] + parts[2:])


def _cause(reason: Any, data: bytes) -> str:
    try:
        found = orjson.loads(data)
        if isinstance(found, dict) and found.get("message"):
            return str(found["message"])[:_ERROR_BYTES]
    except ValueError:
        pass
    return f"{reason}: {data[:_ERROR_BYTES].decode(errors='replace')}".rstrip(": ")


def _seconds(header: str | None) -> float:
    return min(float(header), 300.0) if header and header.isdecimal() else 0.0
