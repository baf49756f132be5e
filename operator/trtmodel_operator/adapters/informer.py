"""The children of all TRTModels, kept as the API server tells of them, so that a pass lists nothing.

A list by label makes the API server look at every object of the namespace: five lists a pass, with thousands of models,
are the most expensive thing that an operator can do. Kept is what a pass reads of a child, as compressed text: a pod as
it comes takes fifty times as much memory.

    list (in pages) -> watch with bookmarks -> watch again from where it ended -> 410: list again

What is kept may be a moment behind. Passes are made for that (the memory has a precondition, effects may be repeated).
The API server sends no bookmark of a kind of which it has seen no event since it started, however long that is: so a
watch that says nothing is opened again, and that it could be opened is a sign of life. Without one for longer than
`SILENCE` the watch is not believed at all: then passes list for themselves.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import time
import zlib
from collections.abc import Callable, Iterable, Mapping

import orjson

from trtmodel_operator.adapters.api import Api
from trtmodel_operator.manifests import ENV_MODEL_UID, LABEL_MODEL, LABEL_WAITING
from trtmodel_operator.ports import NO_RIGHT, ClusterError, Json, Key

OPEN_AGAIN = 70.0  # seconds of silence; the API server sends a bookmark every minute, where it sends any
SILENCE = 90.0
AGAIN_FIRST, AGAIN_MOST = 0.2, 15.0  # seconds until a watch that broke is opened again
AT_ONCE = 5.0  # a watch that ends sooner than that ended at once
LABEL_JOB_NAME = "batch.kubernetes.io/job-name"  # the Job controller's, on every pod
JOB = "job:"  # before the name of a Job under which its pods are filed; no TRTModel can be named so

OnChange = Callable[[str, Json], None]  # kind, metadata

log = logging.getLogger(__name__)


class Kept:
    """The children of one kind, by their names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._texts: dict[Key, tuple[int, bytes]] = {}
        self._index: dict[Key, dict[Key, None]] = {}  # model or Job -> names; in order of arrival
        self._of: dict[Key, frozenset[Key]] = {}
        self._unfinished: dict[Key, None] = {}  # Jobs

    def __len__(self) -> int:
        return len(self._texts)

    def put(self, item: Json) -> bool:
        """False if it is older than what is held: an answer to our own write may come before the events before it."""
        meta = item["metadata"]
        name, version = (meta["namespace"], meta["name"]), int(meta["resourceVersion"])
        held = self._texts.get(name)
        if held is not None and version <= held[0]:
            return False
        self._texts[name] = version, zlib.compress(orjson.dumps(pruned(self.kind, item)), 1)
        self._file(name, frozenset((meta["namespace"], owner) for owner in _filed_under(self.kind, meta)))
        if self.kind == "Job" and not has_ended(item):
            self._unfinished[name] = None
        else:
            self._unfinished.pop(name, None)
        return True

    def remove(self, meta: Json) -> bool:
        name = meta["namespace"], meta["name"]
        held = self._texts.get(name)
        if held is None or int(meta["resourceVersion"]) < held[0]:
            return False
        self._drop(name)
        return True

    def drop_but(self, names: Iterable[Key], version: int) -> list[Json]:
        """Forget what a list of this version did not show; the metadata of what went."""
        gone = [n for n in self._texts.keys() - set(names) if self._texts[n][0] <= version]
        metas = [_object(self._texts[n][1])["metadata"] for n in gone]
        for name in gone:
            self._drop(name)
        return metas

    def names(self) -> set[Key]:
        return set(self._texts)

    def get(self, name: Key) -> Json | None:
        held = self._texts.get(name)
        return None if held is None else _object(held[1])

    def of(self, owner: Key) -> list[Json]:
        """Of the TRTModel of this name, or with `JOB` before it, of the Job."""
        return [_object(self._texts[name][1]) for name in self._index.get(owner, ())]

    def unfinished(self) -> list[Json]:
        """Jobs that did not end."""
        return [_object(self._texts[name][1]) for name in self._unfinished]

    def _drop(self, name: Key) -> None:
        self._file(name, frozenset())
        self._unfinished.pop(name, None)
        del self._texts[name]

    def _file(self, name: Key, under: frozenset[Key]) -> None:
        before = self._of.pop(name, frozenset())
        for owner in before - under:
            names = self._index[owner]
            del names[name]
            if not names:
                del self._index[owner]
        for owner in under - before:
            self._index.setdefault(owner, {})[name] = None
        if under:
            self._of[name] = under


class Informer:
    """Lists and watches one kind in some paths of the API (one for the cluster, or one for each namespace)."""

    def __init__(self, api: Api, kind: str, paths: Iterable[str], changed: OnChange) -> None:
        self.kept, self.kind = Kept(kind), kind
        self._api, self._changed = api, changed
        self._streams = {path: _Stream() for path in paths}

    def fresh(self) -> bool:
        """Whether all of it was heard of lately."""
        return all(s.listed and time.monotonic() - s.heard < SILENCE for s in self._streams.values())

    def silence(self) -> float:
        """Seconds since the stream that was silent longest was heard of. A refusal is an answer, too: no other process
        would get another one."""
        return max(time.monotonic() - max(s.heard, s.refused_at) for s in self._streams.values())

    def refused(self) -> str:
        """What the API server says to who lacks the right to list or watch; '' if it lacks none."""
        return next((s.refused for s in self._streams.values() if s.refused), "")

    async def run(self) -> None:
        """Until it is cancelled."""
        for stream in self._streams.values():
            stream.heard = time.monotonic()  # a process may have stood by for hours: nothing was listened to
        async with asyncio.TaskGroup() as group:
            for path, stream in self._streams.items():
                group.create_task(self._follow(path, stream), name=f"watch {path}")

    async def _follow(self, path: str, stream: _Stream) -> None:
        pause = AGAIN_FIRST
        while True:
            try:
                if not stream.version:
                    await self._list(path, stream)
                async for event in self._api.watch(path, LABEL_MODEL, stream.version, OPEN_AGAIN, stream.hear):
                    self._take(event, stream)
                    pause = AGAIN_FIRST
                # The server ends each after some minutes. One that ends them at once must not be asked without a pause.
                if time.monotonic() - stream.opened > AT_ONCE:
                    pause = AGAIN_FIRST
                await asyncio.sleep(pause)
                pause = min(AGAIN_MOST, pause * 2)
            except ClusterError as e:
                if e.status == 410:
                    log.info("%s are listed again: %s", self.kind, e)
                    stream.version = ""
                else:
                    log.warning("watch of %s: %s", self.kind, e)
                if e.status in NO_RIGHT:
                    stream.refuse(str(e))
                await asyncio.sleep(max(e.retry_after, pause * random.uniform(0.75, 1.0)))  # noqa: S311 - spreads load
                pause = min(AGAIN_MOST, pause * 2)

    async def _list(self, path: str, stream: _Stream) -> None:
        names: set[Key] = set()
        version = "0"
        async for page in self._api.pages(path, LABEL_MODEL):
            for item in page.items:
                names.add((item["metadata"]["namespace"], item["metadata"]["name"]))
                if self.kept.put(item):
                    self._changed(self.kind, item["metadata"])
            version = page.version
            stream.heard = time.monotonic()
            stream.refused = ""
            await asyncio.sleep(0)  # the passes' turn
        others = {n for n in self.kept.names() if not _lies_in(path, n[0])}
        for meta in self.kept.drop_but(names | others, int(version)):
            self._changed(self.kind, meta)
        stream.version, stream.listed = version, True

    def _take(self, event: Json, stream: _Stream) -> None:
        stream.heard = time.monotonic()
        item = event["object"]
        stream.version = item["metadata"]["resourceVersion"]
        if event["type"] == "BOOKMARK":
            return
        news = self.kept.remove(item["metadata"]) if event["type"] == "DELETED" else self.kept.put(item)
        if news:
            self._changed(self.kind, item["metadata"])


def _object(text: bytes) -> Json:
    return dict(orjson.loads(zlib.decompress(text)))


class _Stream:
    def __init__(self) -> None:
        self.version = ""  # of the list or the last event; '' before a list
        self.listed = False  # once: what is listed again after a 410 was heard of lately all the same
        self.heard = self.opened = time.monotonic()
        self.refused, self.refused_at = "", 0.0

    def hear(self) -> None:
        """It was opened."""
        self.heard = self.opened = time.monotonic()
        self.refused = ""

    def refuse(self, said: str) -> None:
        self.refused, self.refused_at = said, time.monotonic()


def pruned(kind: str, item: Json) -> Json:
    """Without what no pass reads. Of pods and templates the spec is most, and only a little of it says anything."""
    meta = {name: value for name, value in item["metadata"].items() if name != "managedFields"}
    spec = item.get("spec") or {}
    if kind == "Pod":
        spec = _pod_spec(spec)
    elif kind in ("Deployment", "Job"):
        template = spec.get("template") or {}
        spec = {**spec, "template": {"spec": _pod_spec(template.get("spec") or {})}}
    return {**item, "kind": kind, "metadata": meta, **({"spec": spec} if spec else {})}


def _pod_spec(spec: Json) -> Json:
    containers = [
        {
            "name": c.get("name"),
            "image": c.get("image"),
            "env": [e for e in c.get("env") or () if e.get("name") == ENV_MODEL_UID],
            **_memory_limit(str(((c.get("resources") or {}).get("limits") or {}).get("memory") or "")),
        }
        for c in spec.get("containers") or ()
    ]
    return {"nodeName": spec.get("nodeName"), "containers": containers}


@functools.lru_cache(maxsize=256)
def _memory_limit(text: str) -> Json:
    """One object for all containers of one limit: there are tens of thousands."""
    return {"resources": {"limits": {"memory": text}}} if text else {}


def has_ended(job: Json) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(c.get("type") in ("Complete", "Failed") and c.get("status") == "True" for c in conditions)


def owners(labels: Mapping[str, str]) -> set[str]:
    """The names of the TRTModels that a child is of: one, or for a build all that wait for it."""
    waiting = {name.removeprefix(LABEL_WAITING) for name in labels if name.startswith(LABEL_WAITING)}
    return waiting | {labels[LABEL_MODEL]} if LABEL_MODEL in labels else waiting


def _filed_under(kind: str, meta: Json) -> set[str]:
    """Jobs under who waits for them, the rest under the one that it is of; pods of Jobs under the Job, too."""
    labels: Mapping[str, str] = meta.get("labels") or {}
    if kind == "Job":
        return {name.removeprefix(LABEL_WAITING) for name in labels if name.startswith(LABEL_WAITING)}
    under = {labels[LABEL_MODEL]} if LABEL_MODEL in labels else set()
    return under | ({JOB + labels[LABEL_JOB_NAME]} if LABEL_JOB_NAME in labels else set())


def _lies_in(path: str, namespace: str) -> bool:
    return "/namespaces/" not in path or f"/namespaces/{namespace}/" in path
