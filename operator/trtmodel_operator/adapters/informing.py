"""kopf as an informer of TRTModels, and nothing else: it keeps nothing on objects and compares nothing."""

from __future__ import annotations

from typing import Any

import aiohttp
import kopf

from trtmodel_operator.adapters.api import PAGE
from trtmodel_operator.adapters.pacing import ForEver, Pace
from trtmodel_operator.manifests import GROUP

CONNECT_SECONDS, REQUEST_SECONDS = 10, 30


class NoProgress(kopf.ProgressStorage):  # type: ignore[misc]
    """There are no handlers whose progress could be kept."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return

    def purge(self, **_: Any) -> None:
        return

    def touch(self, **_: Any) -> None:
        return

    def clear(self, *, essence: Any) -> Any:
        return essence


class NoDifference(kopf.DiffBaseStorage):  # type: ignore[misc]
    """No handler asks what changed. kopf's own storage copies each object three times to find out, which was a third of
    the operator's CPU in a thousand rollouts."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return {}

    def store(self, **_: Any) -> None:
        return


def informer_settings() -> kopf.OperatorSettings:
    """No peering (the Lease elects), no scanning (fewer rights), no events, no finalizer."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    # kopf removes a finalizer of this name from every object, since nothing needs it: it must be nobody's.
    settings.persistence.finalizer = f"kopf.{GROUP}/unused"
    settings.persistence.progress_storage = NoProgress()
    settings.persistence.diffbase_storage = NoDifference()
    settings.watching.chunk_size = PAGE
    # So long kopf holds an object after its last event, as it came: with five seconds, all that the first list shows.
    settings.queueing.idle_timeout = 0.2
    settings.networking.connect_timeout = CONNECT_SECONDS
    settings.networking.request_timeout = REQUEST_SECONDS
    settings.networking.error_backoffs = ForEver()
    return settings


def session(pace: Pace, **kwargs: Any) -> kopf.AiohttpSession | None:
    """What kopf speaks to the API server with, as its login handler returns it: the pod's service account, else the
    kubeconfig; None if there is neither. Asked again when the server no longer takes the token."""
    found = kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)
    if found is None:
        return None
    made = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=found.as_ssl_context()),
        headers=found.as_http_headers(),
        proxy=found.proxy_url,
        middlewares=(pace,),
        trust_env=False,
    )
    return kopf.AiohttpSession(
        server=found.server,
        default_namespace=found.default_namespace,
        priority=found.priority,
        expiration=found.expiration,
        aiohttp_session=made,
    )
