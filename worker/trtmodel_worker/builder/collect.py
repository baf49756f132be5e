"""The collector: removes from a namespace's bucket what nothing needs, without a lock and beside running Jobs.

An engine goes in two steps. First it is revoked: no Job finds it any more. Later, when each Job that may have found it
before has written its pin, the pins are read again, and only then is it removed: the manifest first, so that nobody
finds an engine whose files are gone, then figures and files that no other engine names, the marker last.

Whatever is younger than the grace stays: it may be of a Job that has not published yet. Ages are of the store's clock.

A blob goes by way of the trash: copied there, removed, and brought back if a manifest names it by then. A Job that
publishes the same bytes at that very moment has its manifest seen so, or sees itself that the blob is gone (`publish`
looks after its commit). Killed anywhere, it goes on where it was: it keeps no notes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from trtmodel_contract import storelayout as layout
from trtmodel_contract.codec import DocumentError, dumps, loads, sha256_hex
from trtmodel_contract.jobs import Reason
from trtmodel_contract.keeping import Cause, Pin, Revocation

from trtmodel_worker.storage import ArtifactStore, NotFound, StorageError
from trtmodel_worker.storage.backends import Entry

# A Job pins what it has found as its next request: this is more than a request may take with all its attempts.
SETTLE_SECONDS = 300.0
# Until the next look. A store tells its clock in whole seconds, and the age of an object perhaps more exactly: what was
# put out of use just before a second began would seem to be younger than the wait.
WAIT_SECONDS = SETTLE_SECONDS + 2.0
BATCH = 50  # blobs in the trash at a time: one that was published again is missed for so long
TIMING_SECONDS = 90 * 86400.0  # a timing cache that no build renewed for so long is of a runtime that is gone
_DIGEST = re.compile(rb"[0-9a-f]{64}")
_LEFT_OVER = re.compile(r".*/\.[0-9a-f]{32}")  # of a writer in a directory that serves as a bucket, at work or killed

Say = Callable[[str], None]


class NothingIsPinned(Exception):
    """No pin of any cluster: nothing tells what is in use, and everything would go."""


@dataclass(frozen=True)
class Rules:
    """`grace`: seconds for which everything new stays, more than any build's deadline. `only`: (cluster, uid) of a
    model that was deleted: what only it pinned goes, whatever its age, and nothing else. Without `delete` nothing
    changes."""

    grace: float
    delete: bool = False
    without_pins: bool = False
    only: tuple[str, str] | None = None
    settle: float = SETTLE_SECONDS


@dataclass
class Summary:
    """What a run did, or would do. `revoked` and `waiting` engines go in a later run."""

    kept: int = 0
    revoked: int = 0
    waiting: int = 0
    deleted: int = 0
    objects: int = 0
    freed_bytes: int = 0
    unfinished_uploads: int = 0
    problems: list[str] = field(default_factory=list)

    def joined(self, later: Summary) -> Summary:
        """Of two runs, one after the other."""
        return Summary(
            later.kept,
            self.revoked + later.revoked,
            later.waiting,
            self.deleted + later.deleted,
            self.objects + later.objects,
            self.freed_bytes + later.freed_bytes,
            self.unfinished_uploads + later.unfinished_uploads,
            later.problems,
        )


@dataclass(frozen=True)
class _Build:
    """One build as it lies under ``engines/``. `names`: every digest in its manifest."""

    key: layout.BuildKey
    manifest: Entry
    marker: Entry | None
    digest: str
    names: frozenset[str]


@dataclass(frozen=True)
class _Pinned:
    """What pins name, all together."""

    digests: frozenset[str] = frozenset()
    revisions: frozenset[str] = frozenset()

    def holds(self, build: _Build) -> bool:
        return build.digest in self.digests or build.key.revision in self.revisions


def _joined(pins: Iterable[_Pinned]) -> _Pinned:
    listed = list(pins)
    return _Pinned(
        frozenset().union(*(pin.digests for pin in listed)), frozenset().union(*(pin.revisions for pin in listed))
    )


def collect(store: ArtifactStore, rules: Rules, say: Say) -> Summary:
    """One run. Raises StorageError, NothingIsPinned: then nothing that is in use was removed."""
    return _Run(store, rules, say).run()


class _Run:
    def __init__(self, store: ArtifactStore, rules: Rules, say: Say) -> None:
        self._store, self._objects, self._root = store, store.objects, store.root
        self._rules, self._say = rules, say
        self._summary = Summary()
        self._pins: dict[str, _Pinned] = {}  # by key: a pin never changes
        self._manifests: dict[tuple[str, float], tuple[str, frozenset[str]]] = {}  # nor does a manifest
        self._now = self._objects.now()  # before anything is read: what is read later is newer

    def run(self) -> Summary:
        if self._rules.only is not None and self._rules.delete:
            self._objects.put(layout.leaving_key(self._root, *self._rules.only), b"")
        self._empty_trash()
        pinned = self._pinned()
        if not self._pins and not self._rules.without_pins and self._rules.only is None:
            text = f"there is no pin under {self._objects.where(layout.pins_prefix(self._root))}"
            raise NothingIsPinned(f"{text}: nothing tells which engines are in use, so none is removed")
        builds = list(self._builds())
        own = self._of_only()
        for build in builds:
            if self._rules.only is not None and not own.holds(build):
                self._summary.kept += 1
            else:
                self._decide(build, pinned)
        self._sweep(own.digests | {build.digest for build in builds if own.holds(build)})
        if self._rules.delete and self._rules.only is not None and not self._summary.waiting:
            self._drop_pins(*self._rules.only)
        return self._summary

    def _decide(self, build: _Build, pinned: _Pinned) -> None:
        if pinned.holds(build):
            self._keep(build)
        elif self._rules.only is None and self._is_young(build.manifest):
            self._summary.kept += 1
        elif build.marker is None:
            self._revoke(build)
        elif self._now - build.marker.modified < self._rules.settle:
            self._summary.waiting += 1
        else:
            self._delete(build)

    def _keep(self, build: _Build) -> None:
        """A Job found it just before it was revoked: it is in use, and may be found again."""
        self._summary.kept += 1
        if build.marker is None or not self._rules.delete:
            return
        try:
            why = loads(Revocation, self._store.read(build.marker.key))
        except (NotFound, DocumentError):
            return  # by hand
        if why.cause is Cause.COLLECTED:
            self._objects.delete(build.marker.key)

    def _revoke(self, build: _Build) -> None:
        self._say(f"{_name(build)}: nothing pins it, out of use")
        self._summary.revoked += 1
        self._summary.waiting += 1
        if self._rules.delete:
            key = layout.revoked_key(self._root, build.key.revision, build.key.load_key, build.key.number)
            self._objects.put_new(key, dumps(Revocation(Cause.COLLECTED, "nothing pinned it")))

    def _delete(self, build: _Build) -> None:
        if self._pinned().holds(build):  # since the run began
            self._keep(build)
            return
        self._say(f"{_name(build)}: removed")
        self._summary.deleted += 1
        self._remove(build.manifest)

    def _sweep(self, mine: frozenset[str]) -> None:
        """What no manifest names any more. Everything is listed anew: a Job may have published in the meantime."""
        builds, pinned = list(self._builds()), self._pinned()
        if not self._rules.delete:
            builds = [build for build in builds if not self._would_go(build, pinned)]
        alive = {build.digest for build in builds} | pinned.digests
        needed = set(alive)
        for build in builds:
            needed |= build.names
        for digest in alive - {build.digest for build in builds}:
            needed |= self._names_of_pinned(digest)
        gone, figures = self._names_of_deleted(mine - alive), []
        for entry in self._objects.entries(layout.gates_prefix(self._root)):
            owner = entry.key.removeprefix(layout.gates_prefix(self._root)).partition("/")[0]
            if owner in alive:
                needed |= _digests(self._read_or_nothing(entry.key))
            elif owner in mine:
                gone |= _digests(self._read_or_nothing(entry.key))
                figures.append(entry)
            elif self._may_go(entry, False):
                self._remove(entry)
        unneeded = []
        for entry in self._objects.entries(layout.blobs_prefix(self._root)):
            digest = entry.key.removeprefix(layout.blobs_prefix(self._root))
            if digest not in needed and self._may_go(entry, digest in gone):
                unneeded.append((digest in mine, entry))
        unneeded.sort(key=lambda pair: pair[0])  # manifests last: they tell what else there is
        for start in range(0, len(unneeded), BATCH):
            for _, entry in unneeded[start : start + BATCH]:
                self._throw_away(entry)
            self._empty_trash()
        for entry in figures:  # after the reports that nothing else names
            self._remove(entry)
        if self._rules.only is None:
            self._sweep_rest()
        for entry in self._objects.entries(layout.engines_prefix(self._root)):
            key = layout.parse_build(self._root, entry.key)
            if key is not None and key.marker and self._is_old_marker(entry, key):
                self._remove(entry)

    def _sweep_rest(self) -> None:
        for entry in self._objects.entries(f"{self._root}/"):
            old_timing = entry.key.startswith(layout.timing_prefix(self._root))
            old_timing = old_timing and self._now - entry.modified > TIMING_SECONDS
            if old_timing or (_LEFT_OVER.fullmatch(entry.key) and not self._is_young(entry)):
                self._remove(entry)
        if self._rules.delete:
            try:
                dropped = self._objects.drop_unfinished(f"{self._root}/", self._now - self._rules.grace)
                self._summary.unfinished_uploads = dropped
            except StorageError as e:  # a right that many do not grant: the rest is done all the same
                self._summary.problems.append(f"unfinished uploads stay: {e.message}")

    def _builds(self) -> Iterator[_Build]:
        manifests: dict[tuple[str, str, int], tuple[layout.BuildKey, Entry]] = {}
        markers: dict[tuple[str, str, int], Entry] = {}
        for entry in self._objects.entries(layout.engines_prefix(self._root)):
            key = layout.parse_build(self._root, entry.key)
            if key is not None and key.marker:
                markers[key.revision, key.load_key, key.number] = entry
            elif key is not None:
                manifests[key.revision, key.load_key, key.number] = (key, entry)
        for place, (key, entry) in sorted(manifests.items()):
            known = self._manifests.get((entry.key, entry.modified))
            if known is None:
                try:
                    data = self._store.read(entry.key)
                except NotFound:
                    continue  # another collector
                known = self._manifests[entry.key, entry.modified] = (sha256_hex(data), _digests(data))
            yield _Build(key, entry, markers.get(place), *known)

    def _pinned(self) -> _Pinned:
        """What any model of any cluster needs, as of now."""
        leaving = self._leaving()
        listed = {key for key in self._objects.list(layout.pins_prefix(self._root)) if not _LEFT_OVER.fullmatch(key)}
        for key in listed - self._pins.keys():
            try:
                pin = loads(Pin, self._store.read(key))
            except NotFound:
                continue
            except DocumentError as e:
                text = f"{self._objects.where(key)}: {e}: without knowing what it pins, nothing is removed"
                raise StorageError(Reason.INTERNAL, text) from e
            self._pins[key] = _Pinned(frozenset(pin.digests), frozenset(pin.revisions))
        return _joined(self._pins[key] for key in listed & self._pins.keys() if not key.startswith(leaving))

    def _leaving(self) -> tuple[str, ...]:
        """Where the pins lie that do not count: the deleted model's, and those of others that are deleted beside it.
        Otherwise two that go at once would each leave what they share to the other."""
        if self._rules.only is None:
            return ()
        prefix = layout.leaving_prefix(self._root)
        others = (key.removeprefix(prefix).split("/") for key in self._objects.list(prefix))
        models = {self._rules.only, *((parts[0], parts[1]) for parts in others if len(parts) == 2)}
        return tuple(layout.pins_prefix(self._root, *model) for model in models)

    def _of_only(self) -> _Pinned:
        """What the deleted model has pinned."""
        if self._rules.only is None:
            return _Pinned()
        own = layout.pins_prefix(self._root, *self._rules.only)
        return _joined(pin for key, pin in self._pins.items() if key.startswith(own))

    def _drop_pins(self, cluster: str, uid: str) -> None:
        for entry in self._objects.entries(layout.pins_prefix(self._root, cluster, uid)):
            self._objects.delete(entry.key)
        self._objects.delete(layout.leaving_key(self._root, cluster, uid))

    def _names_of_pinned(self, digest: str) -> frozenset[str]:
        return _digests(self._read_or_nothing(layout.blob_key(self._root, digest)))

    def _names_of_deleted(self, digests: frozenset[str]) -> frozenset[str]:
        """Blobs of removed engines of the deleted model, and their manifests, which lie among the blobs, too."""
        found = set(digests)
        for digest in digests:
            found |= self._names_of_pinned(digest)
        return frozenset(found)

    def _read_or_nothing(self, key: str) -> bytes:
        try:
            return self._store.read(key)
        except NotFound:
            return b""

    def _may_go(self, entry: Entry, is_mine: bool) -> bool:
        if self._rules.only is not None:
            return is_mine
        return not self._is_young(entry)

    def _would_go(self, build: _Build, pinned: _Pinned) -> bool:
        return (
            not pinned.holds(build)
            and build.marker is not None
            and self._now - build.marker.modified >= self._rules.settle
            and (self._rules.only is not None or not self._is_young(build.manifest))
        )

    def _is_young(self, entry: Entry) -> bool:
        return self._now - entry.modified < self._rules.grace

    def _is_old_marker(self, entry: Entry, key: layout.BuildKey) -> bool:
        """A marker whose manifest is gone, for longer than a Job may hold the number."""
        manifest = layout.manifest_key(self._root, key.revision, key.load_key, key.number)
        return not self._is_young(entry) and self._objects.stat(manifest) is None

    def _throw_away(self, entry: Entry) -> None:
        """Unless a Job has written the same bytes again since they were listed."""
        found = self._objects.stat(entry.key)
        if found is None or int(found.modified) != int(entry.modified):  # stores round it to seconds here and there
            return
        if self._rules.delete:
            try:
                self._objects.copy(entry.key, layout.trash_prefix(self._root) + entry.key.rpartition("/")[2])
            except NotFound:
                return  # another collector
        self._remove(entry)

    def _empty_trash(self) -> None:
        """What somebody needs is brought back, and a run that was killed is made good."""
        if not self._rules.delete:
            return
        prefix = layout.trash_prefix(self._root)
        thrown = list(self._objects.list(prefix))
        if not thrown:
            return
        builds = list(self._builds())
        needed = self._pinned().digests | {build.digest for build in builds}
        needed = needed.union(*(build.names for build in builds))
        for key in thrown:
            home = layout.blobs_prefix(self._root) + key.removeprefix(prefix)
            if key.removeprefix(prefix) in needed and self._objects.stat(home) is None:
                self._say(f"{key.removeprefix(prefix)[:12]} was published again: brought back")
                with contextlib.suppress(NotFound):  # another collector
                    self._objects.copy(key, home)
            self._objects.delete(key)

    def _remove(self, entry: Entry) -> None:
        self._summary.objects += 1
        self._summary.freed_bytes += entry.size
        if self._rules.delete:
            self._objects.delete(entry.key)


def _digests(data: bytes) -> frozenset[str]:
    """Every digest in a document, in whatever field: a later version may name blobs where this one knows none."""
    return frozenset(found.decode() for found in _DIGEST.findall(data))


def _name(build: _Build) -> str:
    return f"{build.key.revision} for {build.key.load_key} number {build.key.number} ({build.digest[:12]})"
