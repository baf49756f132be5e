"""Why no pod of a Job can be made: a quota, an admission policy, a RuntimeClass or a ServiceAccount that is not there.
The Job's status is silent about it; the Job controller tells it in events only."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from urllib.parse import quote

from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.troubles import shortened
from trtmodel_operator.ports import ClusterError, Json

FAILED_CREATE, SUCCESSFUL_CREATE = "FailedCreate", "SuccessfulCreate"
TIMEOUT = 2.0  # seconds: a pass waits for it
HELD = 20.0  # seconds for which an answer counts: the API server looks through all events of a namespace for each
REMEMBERED = 4096  # Jobs
_SECOND = len("2026-01-01T00:00:00")
# The recorder's and the controller's beginnings, and the pod's name: another one with each try.
_POD = re.compile(r'^(?:\(combined from similar events\): )?(?:Error creating: )?(pods "[^"]*" is forbidden)?')

log = logging.getLogger(__name__)


class EventRefusals:
    """Implements `ports.Refusals`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._held: dict[str, tuple[float, str]] = {}

    async def why(self, namespace: str, uid: str) -> str:
        since, found = self._held.get(uid, (0.0, ""))
        if since and time.monotonic() - since < HELD:
            return found
        try:
            async with asyncio.timeout(TIMEOUT):
                found = await self._ask(namespace, uid)
        except (ClusterError, TimeoutError) as e:
            log.debug("events of a Job in %s: %s", namespace, e or "no answer in time")
        if len(self._held) >= REMEMBERED:
            self._held.clear()
        self._held[uid] = (time.monotonic(), found)
        return found

    async def _ask(self, namespace: str, uid: str) -> str:
        path = f"/apis/events.k8s.io/v1/namespaces/{quote(namespace)}/events"
        told = await self._api.list_all(path, fields=f"regarding.uid={uid}")
        last = max((e for e in told if e.get("reason") in (FAILED_CREATE, SUCCESSFUL_CREATE)), key=_at, default=None)
        if last is None or last["reason"] == SUCCESSFUL_CREATE:  # what was refused before is over
            return ""
        return shortened(_POD.sub(_instead, str(last.get("note") or ""), count=1))


def _at(event: Json) -> tuple[str, bool]:
    """When it was told last, to the second, by the fields of today and by those that Kubernetes' own controllers fill;
    of one second what was made after all."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max(str(time or "")[:_SECOND] for time in times), event.get("reason") == SUCCESSFUL_CREATE


def _instead(found: re.Match[str]) -> str:
    return "a pod is forbidden" if found[1] else ""
