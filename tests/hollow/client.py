"""The API server as the hollow parts use it: plain JSON, a list and then a watch for ever."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

Json = dict[str, Any]

PAGE = "1000"
AGAIN_SECONDS = 0.2
LONGEST_LINE = 4 << 20

log = logging.getLogger("hollow")


class Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


class Kube:
    """Use as an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = json.loads(kubeconfig.read_text())
        self._url = config["clusters"][0]["cluster"]["server"]
        self._token = config["users"][0]["user"]["token"]

    async def __aenter__(self) -> Kube:
        self._session = aiohttp.ClientSession(
            self._url,
            headers={"Authorization": f"Bearer {self._token}"},
            connector=aiohttp.TCPConnector(ssl=False, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            trust_env=False,
            read_bufsize=LONGEST_LINE,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: Json | None = None, content: str = "application/json") -> Json:
        """Raises Refused, or what aiohttp raises."""
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": content}
        timeout = aiohttp.ClientTimeout(total=60)
        async with self._session.request(method, path, data=data, headers=headers, timeout=timeout) as answer:
            text = await answer.read()
        if answer.status >= 300:
            raise Refused(answer.status, text.decode(errors="replace"))
        return dict(json.loads(text))

    async def merge(self, path: str, body: Json) -> Json:
        return await self.call("PATCH", path, body, "application/merge-patch+json")

    async def list_all(self, path: str, selector: str = "") -> tuple[list[Json], str]:
        """The items and the list's resourceVersion."""
        items: list[Json] = []
        following = ""
        while True:
            page = await self.call("GET", f"{path}?limit={PAGE}&labelSelector={selector}&continue={following}")
            items += page.get("items") or ()
            following = page["metadata"].get("continue") or ""
            if not following:
                return items, page["metadata"]["resourceVersion"]

    async def watch(self, path: str, selector: str = "") -> AsyncIterator[tuple[str, Json]]:
        """Every object as ADDED, then what changes. After an interruption every object comes again."""
        while True:
            try:
                items, version = await self.list_all(path, selector)
                for item in items:
                    yield "ADDED", item
                url = f"{path}?watch=1&allowWatchBookmarks=true&labelSelector={selector}&resourceVersion={version}"
                async with self._session.get(url) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        if event["type"] != "BOOKMARK":
                            yield event["type"], event["object"]
            except (aiohttp.ClientError, OSError, Refused, ValueError) as e:
                log.info("watch of %s: %s", path, e)
            await asyncio.sleep(AGAIN_SECONDS)
