"""What is kept of the children of all TRTModels, together: fresh or not, and whom a change concerns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.informer import JOB, Informer, owners
from trtmodel_operator.manifests import LABEL_MODEL
from trtmodel_operator.ports import Json, Key

PATHS = {
    "Job": ("/apis/batch/v1", "jobs"),
    "Pod": ("/api/v1", "pods"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
}
FIRST_LIST_SECONDS = 120.0  # of tens of thousands of pods, on a busy machine; what passes list meanwhile costs more
DEAD = 240.0  # seconds; a watch that was silent for `informer.SILENCE` was opened again at least once by then


class KeptChildren:
    """`namespaces`: empty for all. `changed` is called with the kind and the TRTModel for everything that changes."""

    def __init__(
        self, api: Api, namespaces: Sequence[str], changed: Callable[[str, Key], None] = lambda *_: None
    ) -> None:
        self._changed = changed
        self._informers = {
            kind: Informer(api, kind, _paths(*where, namespaces), self._news) for kind, where in PATHS.items()
        }

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._informers.values():
                group.create_task(informer.run())

    async def ready(self) -> None:
        """Returns when everything was listed once, at the latest after two minutes: passes list for themselves until
        it is."""
        try:
            async with asyncio.timeout(FIRST_LIST_SECONDS):
                while not self.fresh():  # noqa: ASYNC110 - it is asked once in the life of a process
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return

    def fresh(self) -> bool:
        return all(informer.fresh() for informer in self._informers.values())

    def trouble(self) -> str:
        """Which watches are dead; '' if none is. While the API server is away the leader ends by its lease, long
        before: this is for a watch that alone hears nothing."""
        silences = {kind: informer.silence() for kind, informer in self._informers.items()}
        dead = [f"{kind} for {silence:.0f} s" for kind, silence in silences.items() if silence > DEAD]
        return f"nothing was heard of {', '.join(dead)}" if dead else ""

    def refused(self) -> dict[str, str]:
        """Kinds that this operator may not list or watch, and what the API server says to it."""
        said = {kind: informer.refused() for kind, informer in self._informers.items()}
        return {kind: text for kind, text in said.items() if text}

    def __len__(self) -> int:
        return sum(len(informer.kept) for informer in self._informers.values())

    def children(self, key: Key) -> dict[str, list[Json]] | None:
        """As `ports.Cluster.children` has it; None if it is not fresh."""
        if not self.fresh():
            return None
        namespace, name = key
        found = {kind: informer.kept.of(key) for kind, informer in self._informers.items()}
        for job in found["Job"]:
            if (job["metadata"].get("labels") or {}).get(LABEL_MODEL) != name:  # its pods carry its maker's label
                found["Pod"] += self._informers["Pod"].kept.of((namespace, JOB + job["metadata"]["name"]))
        return found

    def child(self, kind: str, name: Key) -> Json | None:
        """None also if it is not known: what has no label of ours is not kept, and some kinds are not."""
        informer = self._informers.get(kind)
        return informer.kept.get(name) if informer is not None and informer.fresh() else None

    def unfinished_jobs(self) -> list[Json] | None:
        """None if it is not fresh."""
        informer = self._informers["Job"]
        return informer.kept.unfinished() if informer.fresh() else None

    def wrote(self, item: Json) -> None:
        """The API server's answer to a write of ours: the next pass sees it, whenever the watch tells of it."""
        if informer := self._informers.get(item.get("kind", "")):
            informer.kept.put(item)

    def _news(self, kind: str, metadata: Json) -> None:
        for owner in owners(metadata.get("labels") or {}):
            self._changed(kind, (metadata["namespace"], owner))


def _paths(base: str, plural: str, namespaces: Sequence[str]) -> list[str]:
    return [f"{base}/namespaces/{n}/{plural}" for n in namespaces] or [f"{base}/{plural}"]
