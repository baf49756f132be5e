"""What the reconciler needs of the world, as Protocols: the adapters implement them, the tests replace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trtmodel_contract.control import DesiredRequest, Report
from trtmodel_contract.progress import JobProgress
from trtmodel_contract.signing import Signature

from trtmodel_operator.model import Answer, Decision, Lookup, Observed, WebhookSpec

Key = tuple[str, str]  # namespace, name
Json = dict[str, Any]

# The API server's answers to who is not known, or lacks a right. Neither another try nor another process helps, but
# somebody may give the right back at any time: so it is asked for again and again, and the probe of readiness says it.
NO_RIGHT = (401, 403)


class Conflict(Exception):
    """Somebody wrote the object since it was read: start over with fresh facts."""


class ClusterError(Exception):
    """A call to the Kubernetes API failed. Its text names verb, resource and cause. `status` is the HTTP status (0 if
    there was no answer); `retry_after` is what the server asked for, in seconds (0 if nothing). `again`: when the
    model's next pass is due all the same, in seconds; None where failures in a row make it later and later."""

    again: float | None = None

    def __init__(self, verb: str, resource: str, cause: str, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(f"cannot {verb} {resource}: {cause}")
        self.status = status
        self.retry_after = retry_after


class WorkerError(Exception):
    """A worker could not be asked, or refused. The text is the cause, fit for a condition's message."""


class Cluster(Protocol):
    """The Kubernetes API: every call bounded by a timeout; raises Conflict, or ClusterError for the rest."""

    async def get_model(self, key: Key) -> Json | None: ...

    async def list_models(self) -> Mapping[Key, str]:
        """Every TRTModel in the namespaces that are watched -> its resourceVersion."""
        ...

    async def children(self, key: Key) -> Mapping[str, Sequence[Json]]:
        """Raw children by label, by kind: Job, Pod, Deployment, ConfigMap, Service. What is kept of them, which may be
        a moment old, or a live list."""
        ...

    async def write_memory(self, key: Key, resource_version: str, rollout: Json) -> str:
        """Server-side apply of .status.rollout with a precondition; the new resourceVersion. Raises Conflict."""
        ...

    async def write_status(self, key: Key, status: Json) -> None:
        """Server-side apply of everything else in .status, by a field manager of its own."""
        ...

    async def guard(self, key: Key, uid: str, *, on: bool) -> None:
        """The finalizer that holds the TRTModel until its artifacts are removed. Raises Conflict if it is gone."""
        ...

    async def apply(self, manifest: Json) -> None:
        """Server-side apply of a child. Raises ClusterError (422) where what has its name is somebody else's."""
        ...

    async def create_job(self, manifest: Json) -> None:
        """Create by a deterministic name: AlreadyExists is success. A build that another TRTModel made is joined: it
        gets one more owner. Raises Conflict where it was removed to be made anew."""
        ...

    async def delete_job(self, key: Key, name: str) -> None:
        """Background propagation; a missing Job is success. One that others wait for, too, is only left."""
        ...

    async def scale_workload(self, key: Key, name: str, replicas: int) -> None:
        """So many replicas of the Deployment of this name; nothing else of it is written. Raises Conflict if it is
        gone."""
        ...

    async def delete_workload(self, key: Key, name: str) -> None:
        """The Deployment and the ConfigMap of this name; a missing one is success."""
        ...

    async def post_event(self, regarding: Json, reason: str, message: str, *, warning: bool) -> None:
        """A failure to post an event is logged and fails nothing."""
        ...


class Workers(Protocol):
    """The workers' control ports, authenticated by signatures."""

    async def report(self, ip: str, uid: str) -> Report:
        """Raises WorkerError with the cause when it cannot be had within the timeout."""
        ...

    async def send(self, ip: str, uid: str, request: DesiredRequest) -> None:
        """Raises WorkerError. A 409 is no error: the held fence is in the next report."""
        ...

    def follow(self, key: Key, workers: Mapping[str, tuple[str, int]], *, closely: bool = True) -> None:
        """Enqueue `key` when one of these workers (uid -> address, report version that was seen) has news. Workers of
        the key that are not named any more are no longer followed. Not `closely`: only as far as that is cheap."""
        ...


class Refusals(Protocol):
    """What Kubernetes says of Jobs that get no pod."""

    async def why(self, namespace: str, uid: str) -> str:
        """Why no pod of the Job can be made, as it was told last; '' if nothing was told, or it cannot be had soon: it
        is news for people, never waited for."""
        ...


class Progress(Protocol):
    """The port on which a Job says how far it is."""

    async def ask(self, ip: str) -> JobProgress:
        """Raises WorkerError when it cannot be had within the timeout: it is news for people, never waited for."""
        ...


class Inquiries(Protocol):
    """What is looked up outside the cluster, beside the passes. Nothing here waits."""

    def answers(self, key: Key) -> tuple[Answer, ...]:
        """The newest answer of each lookup that is followed and was answered."""
        ...

    def follow(self, key: Key, lookups: Sequence[Lookup]) -> None:
        """Ask these again and again, and no others. Enqueues `key` when an answer says something new."""
        ...

    def tell(self, hook: WebhookSpec, key: str, body: str) -> None:
        """Once, with a few tries; a failure is logged and fails nothing."""
        ...


class Signer(Protocol):
    def sign(self, payload: bytes) -> Signature: ...

    def public_keys(self) -> Mapping[str, str]:
        """Key id -> base64 of the raw public key; what workers may trust now. The one that signs stands first."""
        ...


class KeyWatch(Protocol):
    """Who exchanges the signing key and must know which keys workers list."""

    def saw(self, key: Key, observed: Observed) -> None: ...

    def forget(self, key: Key) -> None: ...


class Metrics(Protocol):
    """What the reconciler counts. Called only after what is counted was persisted."""

    def persisted(self, key: Key, seen: Observed, decision: Decision, status: Mapping[str, object]) -> None:
        """What changed between two memories, and where the model stands."""
        ...

    def forget(self, key: Key) -> None:
        """The TRTModel is gone: its series are dropped."""
        ...


class Turns(Protocol):
    """Who goes first where many changes come at once."""

    def acted(self, key: Key) -> None:
        """The pass over this TRTModel has done what there is to do at once; what is left is to tell of it."""
        ...

    async def calm(self, most: float) -> None:
        """Returns when all passes over what people changed have acted, at the latest after so many seconds."""
        ...


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch."""
        ...
