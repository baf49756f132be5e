"""Why no pod of a Job can be made: a quota, an admission policy, a RuntimeClass or a ServiceAccount that is not there.
The Job's status is silent about it; the Job controller tells it in events only."""

from __future__ import annotations

import re
from urllib.parse import quote

from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.troubles import shortened
from trtmodel_operator.ports import Json

FAILED_CREATE = "FailedCreate"
_POD = re.compile(r'^(Error creating: )?(pods "[^"]*" is forbidden)?')  # another name with each try


class EventRefusals:
    """Implements `ports.Refusals`."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def why(self, namespace: str, uid: str) -> str:
        path = f"/apis/events.k8s.io/v1/namespaces/{quote(namespace)}/events"
        told = await self._api.list_all(path, fields=f"regarding.uid={uid},reason={FAILED_CREATE}")
        return _words(max(told, key=_at)) if told else ""


def _at(event: Json) -> str:
    """When it was told last, by the fields of today and by those that Kubernetes' own controllers fill. All of them are
    UTC in one form."""
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime"))
    return max(str(time or "") for time in times)


def _words(event: Json) -> str:
    def instead(found: re.Match[str]) -> str:
        return "a pod is forbidden" if found[2] else ""

    return shortened(_POD.sub(instead, str(event.get("note") or ""), count=1))
