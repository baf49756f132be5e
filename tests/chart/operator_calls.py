"""Which rights the operator's code needs: its adapters are called, and a stand-in for the API notes what they ask."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import kopf
import pytest
from trtmodel_operator import main
from trtmodel_operator.adapters.api import Api, resource_of
from trtmodel_operator.adapters.cluster import _CHILDREN, KubernetesCluster
from trtmodel_operator.adapters.refusals import EventRefusals
from trtmodel_operator.ports import ClusterError, Conflict, Json

Right = tuple[str, str, str]  # API group, resource, verb
KEY = ("ml", "m")


@dataclass
class RecordingApi:
    """Has `held` at every path; `taken` refuses what would be created."""

    held: Json | None = None
    taken: bool = False
    rights: set[Right] = field(default_factory=set)

    def needs(self, path: str, *verbs: str) -> None:
        parts = path.strip("/").split("/")
        self.rights |= {("" if parts[0] == "api" else parts[1], resource_of(path), verb) for verb in verbs}

    async def get(self, path: str, **_: object) -> Json | None:
        if len(path.strip("/").split("/")) > 3:  # else it is discovery, which everybody may ask
            self.needs(path, "get")
        return self.held

    async def list_all(self, path: str, *_: object, **__: object) -> list[Json]:
        self.needs(path, "list")
        return []

    async def create(self, path: str, body: Json, **_: object) -> Json:
        self.needs(path, "create")
        if self.taken:
            raise Conflict("it exists")
        return body

    async def replace(self, path: str, body: Json, **_: object) -> Json:
        self.needs(path, "update")
        return body

    async def apply(self, path: str, body: Json, **_: object) -> Json:
        # An apply that makes the object asks for both rights; a TRTModel and its status are only changed.
        self.needs(path, "patch", *(() if "/trtmodels/" in path else ("create",)))
        return {"metadata": {"resourceVersion": "2"}} | body

    async def merge(self, path: str, body: Json, **_: object) -> Json:
        self.needs(path, "patch")
        if not body and self.held is None:  # nothing is changed, only looked at
            raise ClusterError("PATCH", path, "not found", 404)
        return body or dict(self.held or {})

    async def delete(self, path: str, *_: object, **__: object) -> None:
        self.needs(path, "delete")


def child(kind: str, labels: dict[str, str] | None = None) -> Json:
    owner = {"kind": "TRTModel", "name": "m", "uid": "u", "controller": True}
    meta: Json = {"namespace": "ml", "name": "x", "uid": "c", "resourceVersion": "1", "labels": labels or {}}
    return {"kind": kind, "metadata": meta | {"ownerReferences": [owner]}, "status": {}, "spec": {}}


def joined() -> Json:
    """A build of another model."""
    found = child("Job", {"trtmodel.io/kind": "build"})
    found["metadata"]["ownerReferences"][0] |= {"name": "other", "uid": "o"}
    return found


def joined_and_failed() -> Json:
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    return joined() | {"status": {"conditions": [failed]}}


Call = Callable[[KubernetesCluster], Awaitable[Any]]
OWN = {"metadata": {"namespace": "ops", "name": "own", "resourceVersion": "1"}}
CALLS: dict[str, Call] = {
    "require_crd": lambda c: c.require_crd(),
    "get_model": lambda c: c.get_model(KEY),
    "list_models": lambda c: c.list_models(),
    "models": lambda c: c.models(lambda _: None),
    "children": lambda c: c.children(KEY),
    "write_memory": lambda c: c.write_memory(KEY, "1", {}),
    "write_status": lambda c: c.write_status(KEY, {}),
    "guard": lambda c: c.guard(KEY, "u", on=True),
    "create_job": lambda c: c.create_job(child("Job")),
    "delete_job": lambda c: c.delete_job(KEY, "x"),
    "scale_workload": lambda c: c.scale_workload(KEY, "x", 2),
    "delete_workload": lambda c: c.delete_workload(KEY, "x"),
    "unfinished_jobs": lambda c: c.unfinished_jobs(),
    "resume_job": lambda c: c.resume_job(child("Job")),
    "remove_job": lambda c: c.remove_job(child("Job")),
    "get_lease": lambda c: c.get_lease("ops", "own"),
    "create_lease": lambda c: c.create_lease(OWN),
    "replace_lease": lambda c: c.replace_lease(OWN),
    "get_secret": lambda c: c.get_secret("ops", "own"),
    "create_secret": lambda c: c.create_secret(OWN),
    "replace_secret": lambda c: c.replace_secret(OWN),
}
APPLIED = ("Deployment", "ConfigMap", "Service", "PodDisruptionBudget")  # what reconcile makes by `apply`


def public_calls() -> set[str]:
    return {n for n, f in inspect.getmembers(KubernetesCluster, inspect.iscoroutinefunction) if not n.startswith("_")}


def needed(monkeypatch: pytest.MonkeyPatch) -> set[Right]:
    """Every right that some call needs."""
    return asyncio.run(_called()) | _watched(monkeypatch)


async def _called() -> set[Right]:
    rights: set[Right] = set()
    worlds = [(None, False), (child("Job"), False), (child("Job"), True), (joined(), True), (joined_and_failed(), True)]
    applied: dict[str, Call] = {kind: lambda c, kind=kind: c.apply(child(kind)) for kind in APPLIED}  # type: ignore[misc]
    for held, taken in worlds:
        api = RecordingApi(held, taken)
        cluster = KubernetesCluster(cast("Api", api))
        for call in (CALLS | applied).values():
            try:
                await call(cluster)
            except (Conflict, ClusterError):
                continue
        model = child("TRTModel")
        for _ in range(2):  # the second time it is counted
            await cluster.post_event(model, "Reason", "message", warning=False)
        await EventRefusals(cast("Api", api)).why("ml", "u")
        await cluster.close()
        rights |= api.rights
    return rights


def _watched(monkeypatch: pytest.MonkeyPatch) -> set[Right]:
    rights: set[Right] = set()

    def on_event(group: str, _version: str, plural: str, **_: object) -> Callable[[Any], Any]:
        rights.update((group, plural, verb) for verb in ("list", "watch"))
        return lambda handler: handler

    monkeypatch.setattr(kopf.on, "event", on_event)
    nothing = cast("Any", None)
    main.handlers(nothing, nothing, nothing, nothing, nothing, nothing)
    for path in _CHILDREN.values():  # which the operator's own informer follows
        api = RecordingApi()
        api.needs(path.format("ml"), "list", "watch")
        rights |= api.rights
    return rights
