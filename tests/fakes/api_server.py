"""A small API server for tests of adapters and wiring, over real HTTP.

It models: resourceVersion (one counter), generation, uid, the status subresource, label selectors, pages, list and
watch with bookmarks left out, create/replace/delete, merge patches, preconditions (409), server-side apply with field
managers (what a manager no longer sends is removed; one that changes nothing keeps the resourceVersion; one that is not
forced and would change what another holds is refused), and faults.

It does not model: schemas, admission, defaults, quotas, garbage collection, list merge keys in an apply (there a list
replaces a list), expiry of watches. Tests that need those run on the real cluster.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

Json = dict[str, Any]

KINDS = {
    ("", "v1"): {
        "pods": "Pod",
        "configmaps": "ConfigMap",
        "services": "Service",
        "secrets": "Secret",
        "namespaces": "Namespace",
    },
    # kopf begins no watch before it has seen that namespaces and definitions exist.
    ("apiextensions.k8s.io", "v1"): {"customresourcedefinitions": "CustomResourceDefinition"},
    ("batch", "v1"): {"jobs": "Job"},
    ("apps", "v1"): {"deployments": "Deployment"},
    ("policy", "v1"): {"poddisruptionbudgets": "PodDisruptionBudget"},
    ("coordination.k8s.io", "v1"): {"leases": "Lease"},
    ("events.k8s.io", "v1"): {"events": "Event"},
    ("trtmodel.io", "v1alpha1"): {"trtmodels": "TRTModel"},
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """A request as it came in."""

    method: str
    path: str
    query: dict[str, str]
    body: Json
    agent: str


@dataclasses.dataclass(frozen=True)
class Where:
    group: str
    version: str
    plural: str
    namespace: str = ""
    name: str = ""
    subresource: str = ""


class FakeApiServer:
    """Runs in a thread of its own. `fault(seen)` may return a response (or sleep) before a request is handled."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[Seen] = []
        self.fault: Callable[[Seen], Any] | None = None
        self.kinds = {group: dict(plurals) for group, plurals in KINDS.items()}
        self._objects: dict[tuple[str, str, str, str], Json] = {}
        self._bases: dict[tuple[str, str, str, str], Json] = {}
        self._applied: dict[tuple[str, str, str, str], dict[tuple[str, str], Json]] = {}
        self._history: list[tuple[int, str, Json]] = []
        self._version = itertools.count(1)
        self._changed: asyncio.Condition
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # ----- for tests ---------------------------------------------------------------------------------------------

    def __enter__(self) -> FakeApiServer:
        self._thread.start()
        self._do(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def put(self, obj: Json, *, silently: bool = False) -> Json:
        """Create or replace, status included. `silently`: as if the watch had been down."""

        async def go() -> Json:
            return await self._store(self._place(obj), copy.deepcopy(obj), silently=silently)

        return self._do(go())

    def get(self, plural: str, namespace: str, name: str) -> Json | None:
        found = [o for (_, p, ns, n), o in self._objects.items() if (p, ns, n) == (plural, namespace, name)]
        return copy.deepcopy(found[0]) if found else None

    def all(self, plural: str) -> list[Json]:
        return [copy.deepcopy(o) for (_, p, _, _), o in sorted(self._objects.items()) if p == plural]

    def delete(self, plural: str, namespace: str, name: str, *, silently: bool = False) -> None:
        """`silently`: as if the watch had been down."""
        where = next(w for w in self._objects if w[1:] == (plural, namespace, name))

        async def go() -> None:
            await self._remove(where, silently=silently)

        self._do(go())

    def writes(self, agent: str = "") -> list[Seen]:
        return [s for s in self.seen if s.method != "GET" and agent in s.agent]

    def kubeconfig(self, folder: Path) -> Path:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "nobody"}}],
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "nobody", "user": {}}],
        }
        file = folder / "kubeconfig"
        file.write_text(json.dumps(config))
        return file

    # ----- the server --------------------------------------------------------------------------------------------

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    async def _start(self) -> None:
        self._changed = asyncio.Condition()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _end(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        seen = Seen(
            request.method,
            request.path,
            dict(request.query),
            json.loads(data) if data else {},
            request.headers.get("User-Agent", ""),
        )
        self.seen.append(seen)
        if self.fault is not None:
            answer = self.fault(seen)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is not None:
                return answer  # type: ignore[no-any-return]
        if (discovered := self._discovery(request.path)) is not None:
            return web.json_response(discovered)
        where = self._parse(request.path)
        if where is None or where.plural not in self.kinds.get((where.group, where.version), {}):
            return _status(404, "the server could not find the requested resource")
        if request.query.get("watch"):
            return await self._watch(request, where)
        return await self._answer(request, seen, where)

    async def _answer(self, request: web.Request, seen: Seen, where: Where) -> web.Response:
        key = (where.group, where.plural, where.namespace, where.name)
        if seen.method == "GET" and not where.name:
            return web.json_response(self._list(where, seen.query))
        if seen.method == "POST":
            obj = seen.body
            key = (*key[:3], obj["metadata"]["name"])
            if key in self._objects:
                return _status(409, f'{where.plural} "{key[3]}" already exists', "AlreadyExists")
            stored = await self._store(key, obj, manager=(seen.query.get("fieldManager", "?"), "Update", ""))
            return web.json_response(stored, status=201)
        if seen.method == "PATCH" and request.content_type != "application/merge-patch+json":
            return await self._apply(request, seen, where, key)
        held = self._objects.get(key)
        if held is None:
            return _status(404, f'{where.plural} "{where.name}" not found', "NotFound")
        asked = seen.body.get("preconditions") or seen.body.get("metadata") or {}
        if seen.method != "GET" and asked.get("resourceVersion") not in (None, held["metadata"]["resourceVersion"]):
            return _status(409, "the object has been modified", "Conflict")
        if seen.method == "PATCH":
            return web.json_response(await self._store(key, _patched(held, seen.body)))
        if seen.method == "PUT":
            return web.json_response(await self._store(key, seen.body))
        if seen.method == "DELETE":
            await self._remove(key)
        return web.json_response(held)

    async def _apply(
        self, request: web.Request, seen: Seen, where: Where, key: tuple[str, str, str, str]
    ) -> web.Response:
        if request.content_type != "application/apply-patch+yaml" or not seen.query.get("fieldManager"):
            return _status(415, f"{request.content_type} is not modelled")
        held = self._objects.get(key)
        if held is None and where.subresource:
            return _status(404, f'{where.plural} "{where.name}" not found', "NotFound")
        body = copy.deepcopy(seen.body)
        expected = body["metadata"].pop("resourceVersion", None)
        if held is not None and expected not in (None, held["metadata"]["resourceVersion"]):
            return _status(
                409, "the object has been modified; please apply your changes to the latest version", "Conflict"
            )
        if where.subresource == "status":
            body = {"status": body.get("status", {})}
        else:
            body.pop("status", None)
        applied = self._applied.setdefault(key, {})
        manager = (seen.query["fieldManager"], where.subresource)
        others = [a for m, a in applied.items() if m != manager]
        identity = {name: seen.body["metadata"].get(name, "") for name in ("namespace", "name")}
        base = self._bases.setdefault(
            key, {"apiVersion": seen.body["apiVersion"], "kind": seen.body["kind"], "metadata": identity}
        )
        merged: Json = {}
        for part in (base, *others):
            merged = _merge(merged, part)
        if held is not None and seen.query.get("force") != "true" and _contradicts(merged, body):
            return _status(409, "Apply failed with 1 conflict", "Conflict")
        merged = _merge(merged, body)
        applied[manager] = body
        stored = await self._store(key, merged, manager=(manager[0], "Apply", where.subresource), keep_base=True)
        return web.json_response(stored, status=200 if held else 201)

    async def _store(
        self,
        key: tuple[str, str, str, str],
        obj: Json,
        *,
        manager: tuple[str, str, str] | None = None,
        keep_base: bool = False,
        silently: bool = False,
    ) -> Json:
        held = self._objects.get(key)
        obj = copy.deepcopy(obj)
        meta = obj.setdefault("metadata", {})
        old = (held or {}).get("metadata") or {}
        version = next(self._version)
        meta["uid"] = old.get("uid") or meta.get("uid") or f"uid-{version}"
        meta["creationTimestamp"] = (
            old.get("creationTimestamp") or meta.get("creationTimestamp") or "2026-01-01T00:00:00Z"
        )
        meta["managedFields"] = list(old.get("managedFields") or ())
        if manager is not None:
            entry = {"manager": manager[0], "operation": manager[1]} | (
                {"subresource": manager[2]} if manager[2] else {}
            )
            if entry not in meta["managedFields"]:
                meta["managedFields"].append(entry)
        meta["generation"] = old.get("generation", 1) + (1 if held and held.get("spec") != obj.get("spec") else 0)
        meta["resourceVersion"] = old.get("resourceVersion", "")
        if held == obj:
            return obj
        if not keep_base:
            self._bases[key] = copy.deepcopy(obj)
        meta["resourceVersion"] = str(version)
        self._objects[key] = obj
        if not silently:
            await self._publish(version, "MODIFIED" if held else "ADDED", obj)
        return obj

    async def _remove(self, key: tuple[str, str, str, str], *, silently: bool = False) -> None:
        obj = self._objects.pop(key)
        self._bases.pop(key, None)
        self._applied.pop(key, None)
        version = next(self._version)
        obj["metadata"]["resourceVersion"] = str(version)
        if not silently:
            await self._publish(version, "DELETED", obj)

    async def _publish(self, version: int, kind: str, obj: Json) -> None:
        self._history.append((version, kind, copy.deepcopy(obj)))
        async with self._changed:
            self._changed.notify_all()

    def _list(self, where: Where, query: dict[str, str]) -> Json:
        items = [o for k, o in sorted(self._objects.items()) if self._matches(k[0], k[1], o, where, query)]
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(items)
        meta: Json = {"resourceVersion": str(next(self._version))}
        if start + limit < len(items):
            meta["continue"] = str(start + limit)
        page = [{k: v for k, v in o.items() if k not in ("kind", "apiVersion")} for o in items[start : start + limit]]
        kind = self.kinds[where.group, where.version][where.plural]
        version = f"{where.group}/{where.version}".lstrip("/")
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": meta, "items": page}

    async def _watch(self, request: web.Request, where: Where) -> web.StreamResponse:
        query = dict(request.query)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        await stream.prepare(request)
        seen = int(query.get("resourceVersion") or 0)
        while True:
            for version, kind, obj in [h for h in self._history if h[0] > seen]:
                seen = version
                plural = next(p for kinds in self.kinds.values() for p, k in kinds.items() if k == obj.get("kind"))
                group = obj["apiVersion"].rpartition("/")[0]
                if self._matches(group, plural, obj, where, query):
                    await stream.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")
            async with self._changed:
                if not any(h[0] > seen for h in self._history):
                    await self._changed.wait()

    def _matches(self, group: str, plural: str, obj: Json, where: Where, query: dict[str, str]) -> bool:
        if (group, plural) != (where.group, where.plural):
            return False
        if where.namespace and obj["metadata"].get("namespace") != where.namespace:
            return False
        labels = obj["metadata"].get("labels") or {}
        for term in filter(None, query.get("labelSelector", "").split(",")):
            name, has_value, value = term.partition("=")
            if name not in labels or (has_value and labels[name] != value):
                return False
        return True

    def _place(self, obj: Json) -> tuple[str, str, str, str]:
        group = obj["apiVersion"].rpartition("/")[0]
        plural = next(
            p for (g, _), kinds in self.kinds.items() if g == group for p, k in kinds.items() if k == obj["kind"]
        )
        return group, plural, obj["metadata"].get("namespace", ""), obj["metadata"]["name"]

    def _discovery(self, path: str) -> Json | None:
        if path == "/api":
            return {"versions": ["v1"]}
        if path == "/apis":
            groups = [
                {"name": g, "versions": [{"version": v}], "preferredVersion": {"version": v}}
                for g, v in self.kinds
                if g
            ]
            return {"groups": groups}
        for (group, version), kinds in self.kinds.items():
            if path == (f"/apis/{group}/{version}" if group else f"/api/{version}") and kinds:
                verbs = ["get", "list", "watch", "create", "patch", "delete"]
                resources = [
                    {"name": p, "singularName": k.lower(), "kind": k, "namespaced": True, "verbs": verbs}
                    for p, k in kinds.items()
                ]
                return {"resources": resources}
        return None

    def _parse(self, path: str) -> Where | None:
        parts = path.strip("/").split("/")
        if parts[0] == "api" and len(parts) > 2:
            group, version, rest = "", parts[1], parts[2:]
        elif parts[0] == "apis" and len(parts) > 3:
            group, version, rest = parts[1], parts[2], parts[3:]
        else:
            return None
        namespace = ""
        if rest[0] == "namespaces" and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        rest = [*rest, "", ""]
        return Where(group, version, rest[0], namespace, rest[1], rest[2])


def _merge(into: Json, part: Json) -> Json:
    result = dict(into)
    for name, value in part.items():
        held = result.get(name)
        result[name] = (
            _merge(held, value) if isinstance(held, dict) and isinstance(value, dict) else copy.deepcopy(value)
        )
    return result


def _contradicts(held: Json, part: Json) -> bool:
    """Some field of both has another value in `part`."""
    return any(
        _contradicts(held[name], value)
        if isinstance(held[name], dict) and isinstance(value, dict)
        else held[name] != value
        for name, value in part.items()
        if name in held
    )


def _patched(into: Json, patch: Json) -> Json:
    """RFC 7396: null removes, a list replaces a list."""
    result = {name: value for name, value in into.items() if not (name in patch and patch[name] is None)}
    for name, value in patch.items():
        if isinstance(value, dict):
            held = result.get(name)
            result[name] = _patched(held if isinstance(held, dict) else {}, value)
        elif value is not None:
            result[name] = copy.deepcopy(value)
    return result


def _status(code: int, message: str, reason: str = "", headers: dict[str, str] | None = None) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return web.json_response(body, status=code, headers=headers)


def refusal(code: int, message: str = "as the test wants it", **headers: str) -> web.Response:
    """For `fault`. Header names with _ for -."""
    return _status(code, message, headers={name.replace("_", "-"): value for name, value in headers.items()})
