"""The Kubernetes API as the operator uses it: which paths, which field manager, which precondition.

Four field managers, so that one does not remove what another wrote (a server-side apply owns exactly what it last
sent): the memory, the rest of status, the finalizer, and the children.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.children import PATHS, KeptChildren
from trtmodel_operator.adapters.events import EventPoster
from trtmodel_operator.adapters.informer import LABEL_JOB_NAME, has_ended
from trtmodel_operator.adapters.models import KeptModels
from trtmodel_operator.manifests import (
    API_VERSION,
    GROUP,
    KIND,
    LABEL_KIND,
    LABEL_MODEL,
    LABEL_ROLE,
    LABEL_WAITING,
    ROLE_JOB,
    waiting_label,
)
from trtmodel_operator.model import JobKind
from trtmodel_operator.ports import ClusterError, Conflict, Json, Key

PLURAL = "trtmodels"
MANAGER_ROLLOUT = "trtmodel-rollout"
MANAGER_STATUS = "trtmodel-status"
MANAGER_GUARD = "trtmodel-guard"
MANAGER_CHILDREN = "trtmodel-children"
MANAGER_OPERATOR = "trtmodel-operator"  # its own Lease, key pair and events
FINALIZER = f"{GROUP}/artifacts"  # only on TRTModels with deletionPolicy Delete

_CHILDREN = {kind: f"{base}/namespaces/{{}}/{plural}" for kind, (base, plural) in PATHS.items()}
_APPLIED = _CHILDREN | {"PodDisruptionBudget": "/apis/policy/v1/namespaces/{}/poddisruptionbudgets"}


class KubernetesCluster:
    """Implements `ports.Cluster` and `lease.LeaseStore`. `namespaces` = where TRTModels are listed; empty: everywhere.
    `instance` names this replica in events. With `kept`, children are read from there while that is fresh; with
    `models`, TRTModels that are kept are."""

    def __init__(
        self,
        api: Api,
        namespaces: Sequence[str] = (),
        instance: str = "trtmodel-operator",
        kept: KeptChildren | None = None,
        models: KeptModels | None = None,
    ) -> None:
        self._api, self._kept, self._models = api, kept, models
        self._namespaces = tuple(namespaces)
        self._events = EventPoster(api, f"{GROUP}/operator", instance, MANAGER_OPERATOR)

    async def close(self) -> None:
        """Posts the events that wait."""
        await self._events.close()

    async def require_crd(self) -> None:
        """Raises ClusterError if TRTModels are not known to the API server. kopf with scanning disabled would serve
        nothing and say nothing."""
        found = await self._api.get(f"/apis/{API_VERSION}")
        if not any(r.get("name") == PLURAL for r in (found or {}).get("resources") or ()):
            way_out = "helm upgrade with crds.install=true, or kubectl apply --server-side -f crds/trtmodel.yaml"
            cause = f"the CRD of TRTModels is not installed: {way_out}"
            raise ClusterError("GET", f"/apis/{API_VERSION}", cause, 404)

    async def get_model(self, key: Key) -> Json | None:
        if self._models is not None and (kept := self._models.get(key)) is not None:
            return kept
        drops = self._models.drops if self._models is not None else 0
        found = await self._api.get(_model_path(key))
        # Another model's drop costs one more question; to keep one that was deleted meanwhile would cost more.
        if self._models is not None and found is not None and self._models.drops == drops:
            self._models.put(found)
        return found

    async def list_models(self) -> dict[Key, str]:
        found: dict[Key, str] = {}
        for path in self._model_paths():
            for item in await self._api.list_all(path, keep=_key_and_version):
                found[item["namespace"], item["name"]] = item["resourceVersion"]
        if self._models is not None:
            self._models.compare(found)
        return found

    async def models(self, see: Callable[[Json], None]) -> None:
        """Shows every TRTModel in the namespaces that are watched, one after the other; some twice, where a list has to
        be read again."""
        for path in self._model_paths():
            await self._api.list_all(path, keep=see)

    def _model_paths(self) -> list[str]:
        paths = [f"/apis/{API_VERSION}/namespaces/{quote(n)}/{PLURAL}" for n in self._namespaces]
        return paths or [f"/apis/{API_VERSION}/{PLURAL}"]

    async def children(self, key: Key) -> Mapping[str, Sequence[Json]]:
        if self._kept is not None and (kept := self._kept.children(key)) is not None:
            return await self._with_results(key[0], kept)
        namespace, name = key
        selectors = {kind: f"{LABEL_MODEL}={name}" for kind in _CHILDREN if kind != "Job"}
        # Jobs before pods: a Job that is seen to have ended has a pod whose result was there before.
        jobs = await self._api.list_all(_CHILDREN["Job"].format(quote(namespace)), waiting_label(name))
        lists = (self._api.list_all(_CHILDREN[kind].format(quote(namespace)), s) for kind, s in selectors.items())
        found = dict(zip(selectors, await asyncio.gather(*lists), strict=True)) | {"Job": jobs}
        made_by_others = [j for j in jobs if (j["metadata"].get("labels") or {}).get(LABEL_MODEL) != name]
        for job in made_by_others:  # their pods carry the label of the model that made them
            found["Pod"] += await self._pods_of(namespace, job)
        return found

    async def _with_results(self, namespace: str, found: dict[str, list[Json]]) -> Mapping[str, Sequence[Json]]:
        """Jobs and pods are watched each on their own: a Job may be seen to have ended before its pod is. A result that
        is not seen would be taken for one that cannot be read, which is for good."""
        for job in found["Job"]:
            if has_ended(job) and not _explained(job, found["Pod"]):
                pods = await self._pods_of(namespace, job)
                seen = {p["metadata"]["uid"] for p in pods}
                found["Pod"] = [p for p in found["Pod"] if p["metadata"]["uid"] not in seen] + pods
        return found

    async def _pods_of(self, namespace: str, job: Json) -> list[Json]:
        selector = f"{LABEL_JOB_NAME}={job['metadata']['name']}"
        return await self._api.list_all(_CHILDREN["Pod"].format(quote(namespace)), selector)

    async def write_memory(self, key: Key, resource_version: str, rollout: Json) -> str:
        body = _apply_body(key) | {"status": {"rollout": rollout}}
        body["metadata"]["resourceVersion"] = resource_version
        return str((await self._apply_status(key, body, MANAGER_ROLLOUT))["metadata"]["resourceVersion"])

    async def write_status(self, key: Key, status: Json) -> None:
        await self._apply_status(key, _apply_body(key) | {"status": status}, MANAGER_STATUS)

    async def guard(self, key: Key, uid: str, *, on: bool) -> None:
        # With the uid, or an apply would make a TRTModel where one has gone. What others put there is theirs.
        body = _apply_body(key)
        body["metadata"] |= {"uid": uid} | ({"finalizers": [FINALIZER]} if on else {})
        try:
            await self._api.apply(_model_path(key), body, manager=MANAGER_GUARD)
        except ClusterError as e:
            if e.status == 422 and "metadata.uid" in str(e):  # another one of this name is there by now
                raise Conflict(str(e)) from e
            raise
        finally:
            self._doubt(key)  # without the finalizer it may be gone

    async def apply(self, manifest: Json) -> None:
        """Raises ClusterError if what has this name is somebody else's: it would be taken over, and go with the
        TRTModel."""
        path, meta = _child_path(manifest), manifest["metadata"]
        held = self._kept.child(manifest["kind"], (meta["namespace"], meta["name"])) if self._kept is not None else None
        if held is None or owner_uid(manifest) not in owner_uids(held):
            held = await self._look(path)
            if held is not None and (cause := _foreign(held, manifest)):
                raise ClusterError("PATCH", path, cause, 422)
        # Nothing is forced where nothing stood: what somebody makes in this moment stays theirs.
        answer = await self._api.apply(path, manifest, manager=MANAGER_CHILDREN, force=held is not None)
        self._wrote(answer)

    async def _look(self, path: str) -> Json | None:
        """What stands there, also what has no label of ours. There is no right to read it; a merge of nothing changes
        nothing, and answers with the object."""
        try:
            return await self._api.merge(path, {}, manager=MANAGER_CHILDREN, throttled=False)
        except ClusterError as e:
            if e.status == 404:
                return None
            raise

    def _wrote_model(self, answer: Json) -> Json:
        if self._models is not None:
            self._models.answered(answer)
        return answer

    def _doubt(self, key: Key) -> None:
        """It may be another one than is kept: the next pass asks for it."""
        if self._models is not None:
            self._models.drop(key)

    def _wrote(self, answer: Json) -> None:
        if self._kept is not None:
            self._kept.wrote(answer)

    async def create_job(self, manifest: Json) -> None:
        path = _child_path(manifest)
        try:
            self._wrote(await self._api.create(path.rpartition("/")[0], manifest, manager=MANAGER_CHILDREN))
        except Conflict:
            await self._join(path, manifest)

    async def _join(self, path: str, manifest: Json) -> None:
        """A Job of this name is there: of an earlier pass, or of another TRTModel that needs the same engine. In the
        second case it gets one more owner, so that it outlives the other one."""
        held = await self._api.get(path)
        if held is None:
            raise Conflict(f"{path} went while it was joined")
        meta, mine = held["metadata"], manifest["metadata"]
        if not owner_uids(manifest) or owner_uid(manifest) in owner_uids(held):
            return
        if "deletionTimestamp" in meta:
            raise Conflict(f"{path}: it is being deleted, and is made anew when it is gone")
        if (meta.get("labels") or {}).get(LABEL_KIND) != JobKind.BUILD.value:
            cause = "a Job of this name belongs to a deleted TRTModel of the same name: it is tried again when the"
            raise ClusterError("POST", path, f"{cause} garbage collector has removed it", 409)
        if _ended_by_chance(held):
            await self._api.delete(path, meta["resourceVersion"])
            raise Conflict(f"{path} had failed for reasons that may be over: it is made anew")
        change = {
            "resourceVersion": meta["resourceVersion"],
            "labels": {name: "" for name in mine["labels"] if name.startswith(LABEL_WAITING)},
            "ownerReferences": [*(meta.get("ownerReferences") or ()), _plain_owner(manifest)],
        }
        self._wrote(await self._api.merge(path, {"metadata": change}, manager=MANAGER_CHILDREN))

    async def delete_job(self, key: Key, name: str) -> None:
        path = f"{_CHILDREN['Job'].format(quote(key[0]))}/{quote(name)}"
        held = await self._api.get(path)
        if held is None:
            return
        meta = held["metadata"]
        owners = meta.get("ownerReferences") or ()
        others = [o for o in owners if (o.get("kind"), o.get("name")) != (KIND, key[1])]
        if not others:
            await self._api.delete(path, meta["resourceVersion"])
            return
        change = {
            "resourceVersion": meta["resourceVersion"],
            "labels": {waiting_label(key[1]): None},
            "ownerReferences": others,
        }
        self._wrote(await self._api.merge(path, {"metadata": change}, manager=MANAGER_CHILDREN))

    async def scale_workload(self, key: Key, name: str, replicas: int) -> None:
        # A merge and no apply: an apply owns exactly what it last sent, and with the replicas alone it would remove the
        # template. The next apply of the whole takes the field back.
        path = f"{_CHILDREN['Deployment'].format(quote(key[0]))}/{quote(name)}"
        try:
            self._wrote(await self._api.merge(path, {"spec": {"replicas": replicas}}, manager=MANAGER_CHILDREN))
        except ClusterError as e:
            if e.status == 404:  # deleted since it was read
                raise Conflict(str(e)) from e
            raise

    async def delete_workload(self, key: Key, name: str) -> None:
        for kind in ("Deployment", "ConfigMap"):
            await self._api.delete(f"{_CHILDREN[kind].format(quote(key[0]))}/{quote(name)}")

    async def unfinished_jobs(self) -> list[Json]:
        """The Jobs of all TRTModels in the namespaces that are watched, but for those that ended."""
        if self._kept is not None and (kept := self._kept.unfinished_jobs()) is not None:
            return kept
        paths = [_CHILDREN["Job"].format(quote(n)) for n in self._namespaces]
        selector = f"{LABEL_ROLE}={ROLE_JOB}"
        lists = [
            await self._api.list_all(p, selector, keep=lambda job: None if has_ended(job) else job)
            for p in paths or ["/apis/batch/v1/jobs"]
        ]
        return [job for listed in lists for job in listed]

    async def resume_job(self, job: Json) -> None:
        """A suspended Job begins. Raises Conflict if it changed since it was read."""
        body = {"metadata": {"resourceVersion": job["metadata"]["resourceVersion"]}, "spec": {"suspend": False}}
        self._wrote(await self._api.merge(_child_path(job), body, manager=MANAGER_CHILDREN))

    async def remove_job(self, job: Json) -> None:
        """Raises Conflict if it changed since it was read."""
        await self._api.delete(_child_path(job), job["metadata"]["resourceVersion"])

    async def post_event(self, regarding: Json, reason: str, message: str, *, warning: bool) -> None:
        self._events.post({"apiVersion": API_VERSION, "kind": KIND} | regarding, reason, message, warning=warning)

    async def get_lease(self, namespace: str, name: str) -> Json | None:
        return await self._api.get(_lease_path(namespace, name), urgent=True)

    async def create_lease(self, lease: Json) -> Json:
        path = _lease_path(lease["metadata"]["namespace"], lease["metadata"]["name"])
        at = path.rpartition("/")[0]
        return await self._api.create(at, lease, manager=MANAGER_OPERATOR, throttled=False, always=True)

    async def replace_lease(self, lease: Json) -> Json:
        # Behind a thousand status writes a renewal would come too late: it does not wait for its turn.
        path = _lease_path(lease["metadata"]["namespace"], lease["metadata"]["name"])
        return await self._api.replace(path, lease, manager=MANAGER_OPERATOR, throttled=False, always=True)

    async def get_secret(self, namespace: str, name: str) -> Json | None:
        """Only of the operator's own namespace: it has no right on any other."""
        return await self._api.get(f"/api/v1/namespaces/{quote(namespace)}/secrets/{quote(name)}")

    async def create_secret(self, secret: Json) -> Json:
        """Raises Conflict if it exists."""
        path = f"/api/v1/namespaces/{quote(secret['metadata']['namespace'])}/secrets"
        return await self._api.create(path, secret, manager=MANAGER_OPERATOR)

    async def replace_secret(self, secret: Json) -> Json:
        """Raises Conflict if it changed since it was read."""
        path = (
            f"/api/v1/namespaces/{quote(secret['metadata']['namespace'])}/secrets/{quote(secret['metadata']['name'])}"
        )
        return await self._api.replace(path, secret, manager=MANAGER_OPERATOR)

    async def _apply_status(self, key: Key, body: Json, manager: str) -> Json:
        try:
            return self._wrote_model(await self._api.apply(f"{_model_path(key)}/status", body, manager=manager))
        except Conflict:
            self._doubt(key)
            raise
        except ClusterError as e:
            if e.status == 404:  # deleted since it was read
                self._doubt(key)
                raise Conflict(str(e)) from e
            raise


def owner_uid(child: Json) -> str:
    """uid of the controlling owner; '' if nobody controls it."""
    owners = child["metadata"].get("ownerReferences") or ()
    return next((str(o["uid"]) for o in owners if o.get("controller")), "")


def owner_uids(child: Json) -> tuple[str, ...]:
    """uids of all owners: several TRTModels may wait for one build."""
    return tuple(str(o.get("uid")) for o in child["metadata"].get("ownerReferences") or ())


def _key_and_version(item: Json) -> Json:
    return {name: item["metadata"][name] for name in ("namespace", "name", "resourceVersion")}


def _told(pod: Json) -> bool:
    """One of its containers ended with a message."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    return any(((s.get("state") or {}).get("terminated") or {}).get("message") for s in statuses)


def _explained(job: Json, pods: Sequence[Json]) -> bool:
    """All tries that the Job counted are seen, and the last one left a message."""
    mine = [p for p in pods if owner_uid(p) == job["metadata"]["uid"]]
    status = job.get("status") or {}
    if not mine or len(mine) < int(status.get("failed") or 0) + int(status.get("succeeded") or 0):
        return False
    return _told(max(mine, key=lambda p: str(p["metadata"]["creationTimestamp"])))


def _plain_owner(manifest: Json) -> Json:
    """The owner of a manifest of ours as one of several, of whom only the first controls."""
    return {k: v for k, v in manifest["metadata"]["ownerReferences"][0].items() if k != "controller"}


def _foreign(held: Json, manifest: Json) -> str:
    """Why it must not be taken over; '' if it may: it is this TRTModel's, or had one of the same name that was deleted
    or restored from a backup, or lost its owner and has our label."""
    labels = [m["metadata"].get("labels") or {} for m in (held, manifest)]
    owner = next((o for o in held["metadata"].get("ownerReferences") or () if o.get("controller")), None)
    mine = next(iter(manifest["metadata"].get("ownerReferences") or ()), None)
    if mine is None or mine["uid"] in owner_uids(held):
        return ""
    if owner is None and labels[0].get(LABEL_MODEL) == labels[1].get(LABEL_MODEL) is not None:
        return ""
    if owner is not None and (owner.get("kind"), owner.get("name")) == (KIND, mine["name"]):
        return ""
    kind = manifest["kind"]
    whose = f"is that of {owner.get('kind')} {owner.get('name')}" if owner else "is not this TRTModel's"
    way_out = "set spec.serving.service.name" if kind == "Service" else "give the TRTModel another name"
    return f"a {kind} of this name exists and {whose}: {way_out}, or remove it"


def _ended_by_chance(job: Json) -> bool:
    """It failed, and not by an exit code that says that no retry helps."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    failed = next((c for c in conditions if c.get("type") == "Failed" and c.get("status") == "True"), None)
    return failed is not None and failed.get("reason") != "PodFailurePolicy"


def _apply_body(key: Key) -> Json:
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"namespace": key[0], "name": key[1]}}


def _model_path(key: Key) -> str:
    return f"/apis/{API_VERSION}/namespaces/{quote(key[0])}/{PLURAL}/{quote(key[1])}"


def _child_path(manifest: Json) -> str:
    meta = manifest["metadata"]
    return f"{_APPLIED[manifest['kind']].format(quote(meta['namespace']))}/{quote(meta['name'])}"


def _lease_path(namespace: str, name: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{quote(namespace)}/leases/{quote(name)}"
