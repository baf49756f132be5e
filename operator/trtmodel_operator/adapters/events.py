"""Events for people, posted beside the reconciler: it never waits for them, and they never take the place of a write
that a rollout needs. More than can be posted are dropped, with a line in the log. What is told again, in the same words
and soon, is counted in the first of them (its `series`), so that something that comes and goes fills nobody's list."""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from urllib.parse import quote

from trtmodel_operator.adapters.api import Api, TokenBucket
from trtmodel_operator.ports import ClusterError, Conflict, Json

WAITING_MOST = 1000
PER_SECOND = 20.0
BURST = 100
NOTE_BYTES = 1024  # the API server refuses a longer one
SERIES_SECONDS = 360.0  # after the last time, as client-go has it: later it is an event of its own
SERIES_KEPT = 1000
DRAIN_SECONDS = 2.0  # of posting at the end of the process
_NAME = 230  # of the 253 characters of a name; the time takes the rest

log = logging.getLogger(__name__)


@dataclass
class _Series:
    """An event that was posted: under which name, how often it was told, and when last (monotonic)."""

    name: str
    count: int
    told_at: float


class EventPoster:
    """`controller` and `instance` name the poster. Close it."""

    def __init__(self, api: Api, controller: str, instance: str, manager: str) -> None:
        self._api, self._controller, self._instance, self._manager = api, controller, instance, manager
        self._waiting: asyncio.Queue[Json] = asyncio.Queue(WAITING_MOST)
        self._bucket = TokenBucket(PER_SECOND, BURST)
        self._series: OrderedDict[tuple[str, ...], _Series] = OrderedDict()  # told last at the end
        self._task: asyncio.Task[None] | None = None

    def post(self, regarding: Json, reason: str, message: str, *, warning: bool) -> None:
        """Returns at once. `regarding` is the object, with apiVersion, kind and metadata."""
        if self._task is None:
            self._task = asyncio.create_task(self._post_forever(), name="events")
        try:
            self._waiting.put_nowait(self._event(regarding, reason, message, warning))
        except asyncio.QueueFull:
            log.warning("event %s dropped: %d wait already", reason, WAITING_MOST)

    async def close(self) -> None:
        if self._task is None:
            return
        try:
            await asyncio.wait_for(self._waiting.join(), DRAIN_SECONDS)
        except TimeoutError:
            log.warning("%d events dropped at the end", self._waiting.qsize())
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def _post_forever(self) -> None:
        while True:
            event = await self._waiting.get()
            await self._bucket.take()
            try:
                await self._tell(event)
            except (ClusterError, Conflict) as e:
                log.warning("event %s not posted: %s", event["reason"], e)
            finally:
                self._waiting.task_done()

    async def _tell(self, event: Json) -> None:
        """Raises ClusterError, Conflict."""
        path = f"/apis/events.k8s.io/v1/namespaces/{quote(event['metadata']['namespace'])}/events"
        what = (event["regarding"]["uid"], event["type"], event["reason"], event["note"])
        held, now = self._series.pop(what, None), time.monotonic()
        if held is not None and now - held.told_at < SERIES_SECONDS:
            series = {"count": held.count + 1, "lastObservedTime": event["eventTime"]}
            try:
                # An event of the past does no harm, whoever leads by now.
                await self._api.merge(
                    f"{path}/{quote(held.name)}",
                    {"series": series},
                    manager=self._manager,
                    throttled=False,
                    fenced=False,
                )
            except ClusterError as e:
                if e.status != 404:  # the API server drops events after an hour
                    raise
            else:
                self._series[what] = _Series(held.name, held.count + 1, now)
                return
        await self._api.create(path, event, manager=self._manager, throttled=False, fenced=False)
        self._series[what] = _Series(event["metadata"]["name"], 1, now)
        while len(self._series) > SERIES_KEPT:
            self._series.popitem(last=False)

    def _event(self, regarding: Json, reason: str, message: str, warning: bool) -> Json:
        now = datetime.datetime.now(datetime.UTC)
        meta = regarding["metadata"]
        return {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"namespace": meta["namespace"], "name": f"{meta['name'][:_NAME]}.{now.timestamp():.6f}"},
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": "Warning" if warning else "Normal",
            "reason": reason[:128],
            "action": "Reconcile",
            "note": message.encode()[:NOTE_BYTES].decode(errors="ignore"),
            "reportingController": self._controller,
            "reportingInstance": self._instance[:128],
            "regarding": {
                "apiVersion": regarding["apiVersion"],
                "kind": regarding["kind"],
                "namespace": meta["namespace"],
                "name": meta["name"],
                "uid": meta["uid"],
                "resourceVersion": meta.get("resourceVersion", ""),
            },
        }
