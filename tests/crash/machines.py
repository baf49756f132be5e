"""Workers of the simulated cluster: the real fence rules, boot from the pointer, loading that takes time, routes,
attempt counters by window, a candidate's time to live, restarts, and workers that lie.

Containers of a worker are replaced, never changed in place, so that a copy of a world costs next to nothing.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from trtmodel_contract.codec import loads, sha256_hex
from trtmodel_contract.control import (
    NOT_RESIDENT,
    AttemptCounts,
    BootPointer,
    DesiredEngine,
    DesiredModel,
    DesiredRequest,
    EngineReport,
    EngineState,
    Fence,
    ModelReport,
    Report,
    Role,
    Routes,
    ShadowCounts,
    WorkerState,
)
from trtmodel_contract.histogram import bucket_index
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.jobs import Reason
from trtmodel_operator.ports import Json, Key
from trtmodel_worker.front.fence import Conflict as FenceConflict
from trtmodel_worker.front.fence import Held, Ruling, judge_request, pointer_counts

KEY: Key = ("ml", "magika")
UID = "6b1e"
LOAD_SECONDS, START_SECONDS, GRACE_SECONDS = 3.0, 4.0, 6.0
NEVER = float("inf")  # when an engine is ready that is listed and not in memory
WINDOWS_KEPT = 4
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
}
STRANGE = "f" * 64  # the digest of an engine that nobody ever asked for


@dataclass(frozen=True)
class Source:
    """What lies at an address, and how its engine turns out. `differs`: of 2,000 answers in the gate. `fails_on`: the
    one target where it fails ('': everywhere)."""

    content: str
    differs: int = 0
    seconds: float = 0.008
    failing: float = 0.0
    fails_on: str = ""
    loads: bool = True
    dies: bool = False
    build_fails: Reason | None = None

    @property
    def sha256(self) -> str:
        return sha256_hex(self.content.encode())


@dataclass(frozen=True)
class Image:
    """What workers and Jobs of an image are like. `version` of its runtime is part of the load key."""

    version: str = "1.20"
    builds: bool = True
    starts: bool = True
    failing: float = 0.0


IMAGES = {
    "worker:1": Image(),
    "worker:2": Image("1.21"),
    "worker:failing": Image(failing=0.1),
    "worker:unable": Image("1.21", builds=False),
    "worker:crashing": Image(starts=False),
}


class Surroundings(Protocol):
    """What a worker meets: the time, the engines in the bucket, and whether the bucket answers."""

    time: float
    by_digest: dict[str, Source]
    storage_down: bool
    narrow: bool  # the memory of a worker holds one engine
    traffic: int  # requests a second, at every worker that serves


def load_key(target: str, node: str = "", image: str = "worker:1") -> LoadKey:
    """Nodes of one name have processors of one kind."""
    parts = ("cpu", "" if target == "default" else target, node)
    return LoadKey("ONNXRuntime", IMAGES[image].version, "-".join(part for part in parts if part))


@functools.lru_cache(maxsize=4096)
def read_pointer(text: str) -> BootPointer:
    return loads(BootPointer, text)


@functools.lru_cache(maxsize=4096)
def _indices(seconds: float) -> tuple[int, ...]:
    """A spread of 20 %, the same in each tick."""
    return tuple(bucket_index(seconds * (0.9 + 0.2 * i / 9)) for i in range(10))


def text_of(moment: float) -> str:
    return datetime.datetime.fromtimestamp(int(moment), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Worker:
    """One pod. `engines`: digest -> (revision, role, when it is ready; None while the bucket does not answer). `lie`:
    '' | 'eager' (it says that everything is ready and routed at once) | 'strange' (it answers with an engine that it
    was never told, if one believes it)."""

    name: str
    uid: str
    target: str
    labels: Mapping[str, str]
    born: float
    held: Held | None = None
    desired: DesiredModel | None = None
    asked: int = 0  # hash of `desired`
    engines: Mapping[str, tuple[str, Role, float | None]] = field(default_factory=dict)
    windows: Mapping[str, Mapping[str, AttemptCounts]] = field(default_factory=dict)
    counted: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # window -> digest -> hash of the counts
    failed: frozenset[str] = frozenset()  # as such an engine is reported until it is ready
    deaths: Mapping[str, int] = field(default_factory=dict)
    routes: Routes = field(default_factory=lambda: Routes(""))
    candidate_until: float = 0.0
    version: int = 1
    pointer_sequence: int = 0
    restarts: int = 0
    restarted_at: float | None = None
    leaves_at: float | None = None
    reachable: bool = True
    lie: str = ""
    node: str = ""
    image: str = "worker:1"
    placed: bool = True  # on a node

    # ------------------------------------------------------------------------------------------------------------
    # What it does
    # ------------------------------------------------------------------------------------------------------------

    def started(self, now: float) -> bool:
        return self.placed and IMAGES[self.image].starts and now >= self.born + START_SECONDS

    def ready(self, world: Surroundings, digest: str) -> bool:
        if digest not in self.engines or not world.by_digest[digest].loads:
            return False
        at = self.engines[digest][2]
        return at is not None and world.time >= at

    def serves(self, world: Surroundings) -> bool:
        return self.started(world.time) and self.ready(world, self.routes.stable or self.routes.candidate)

    def boot(self, world: Surroundings, pointer: BootPointer | None) -> None:
        """At its start, and whenever the pointer changes."""
        if pointer is None or not self.started(world.time):
            return
        self.pointer_sequence = pointer.sequence
        if not pointer_counts(self.held, pointer.sequence):
            return
        key = str(load_key(self.target, self.node, self.image))
        stable = pointer.stable.artifacts.get(key)
        if stable is None:
            return
        self.held = Held(Fence(UID, pointer.sequence))
        engines = [DesiredEngine(Role.STABLE, stable)]
        if pointer.standby is not None and key in pointer.standby.artifacts:
            engines.append(DesiredEngine(Role.STANDBY, pointer.standby.artifacts[key]))
        window = self.desired.window if self.desired else ""
        self._want(world, DesiredModel(tuple(engines), Routes(stable.manifest_digest), window))

    def told(self, world: Surroundings, request: DesiredRequest) -> bool:
        """False if it refuses: 409."""
        before = self.held.fence.sequence if self.held else 0
        try:
            ruling = judge_request(self.held, UID, request.desired)
        except FenceConflict:
            return False
        if ruling is Ruling.APPLY:
            assert request.desired.fence.sequence >= before, "the fence went back"
            self.held = Held(request.desired.fence, request.desired.content_hash())
            self._want(world, request.desired.models[KEY[1]])
        self.candidate_until = world.time + request.candidate_ttl_seconds
        self.settle(world)
        return True

    def _want(self, world: Surroundings, desired: DesiredModel) -> None:
        self.desired, self.asked = desired, hash(repr(desired))
        self.version += 1
        due = NEVER if world.narrow else None if world.storage_down else world.time + LOAD_SECONDS
        self.engines = dict(self.engines) | {
            e.artifact.manifest_digest: (
                e.artifact.revision,
                e.role,
                self.engines[e.artifact.manifest_digest][2] if e.artifact.manifest_digest in self.engines else due,
            )
            for e in desired.engines
        }
        if desired.window not in self.windows:
            beside = {desired.baseline} - {""}
            newest = [w for w in self.windows if w not in beside][-(WINDOWS_KEPT - 1) :]
            kept = {w: c for w, c in self.windows.items() if w in beside or w in newest}
            self.windows = kept | {desired.window: {}}
            self.counted = {w: self.counted.get(w, {}) for w in self.windows}

    def settle(self, world: Surroundings) -> None:
        """Routes by what is ready and wanted; lets go of what is neither listed nor routed."""
        if self.desired is None:
            return
        if world.narrow:
            self._change(world, self.desired)
            return
        if not world.storage_down and any(at is None for _, _, at in self.engines.values()):
            due = world.time + LOAD_SECONDS
            self.failed = frozenset(d for d, (_, _, at) in self.engines.items() if at is None)
            self.engines = {d: (r, role, due if at is None else at) for d, (r, role, at) in self.engines.items()}
        wanted = self.desired.routes
        stable = wanted.stable if self.ready(world, wanted.stable) else self.routes.stable
        candidate = wanted.candidate if self.ready(world, wanted.candidate) else ""
        if candidate and world.time >= self.candidate_until:
            candidate = ""
        if stable:
            tries = bool(candidate) and bool(wanted.weight or wanted.shadow)
            self.routes = Routes(stable, candidate, wanted.weight, wanted.shadow) if tries else Routes(stable)
        listed = {e.artifact.manifest_digest for e in self.desired.engines} | {stable}
        if not self.engines.keys() <= listed:
            self.engines = {d: e for d, e in self.engines.items() if d in listed}
        for digest in {self.routes.candidate} & self.engines.keys():
            if world.by_digest[digest].dies:
                self.deaths = {**self.deaths, digest: 1}

    def _change(self, world: Surroundings, desired: DesiredModel) -> None:
        """Where memory holds one engine: the candidate alone, or stable. To change it is to leave service, which must
        be permitted; what cannot be fetched is not left for."""
        candidate = next((e.artifact.manifest_digest for e in desired.engines if e.role is Role.CANDIDATE), "")
        held = next((d for d, (_, _, at) in self.engines.items() if at not in (None, NEVER)), "")
        in_time = world.time < self.candidate_until and (not candidate or world.by_digest[candidate].loads)
        wanted = candidate if candidate and (candidate == held or in_time) else desired.routes.stable
        self.failed = frozenset()
        if held != wanted and not world.storage_down:
            if held and self.ready(world, held) and not desired.may_drain:
                self.failed = frozenset({wanted})
            else:
                held = wanted
                times = dict.fromkeys(self.engines, NEVER) | {held: world.time + LOAD_SECONDS}
                self.engines = {d: (r, role, times[d]) for d, (r, role, _) in self.engines.items()}
        if not self.ready(world, held):
            self.routes = Routes("")
        elif held == candidate:
            self.routes = Routes("", held, 100)
        else:
            self.routes = Routes(held)
        listed = {e.artifact.manifest_digest for e in desired.engines} | {held}
        self.engines = {d: e for d, e in self.engines.items() if d in listed}

    def serve(self, world: Surroundings, seconds: float) -> None:
        n = round(world.traffic * seconds)
        if self.desired is None or not self.serves(world):
            return
        routes = self.routes
        for digest in (routes.stable, routes.candidate):
            held = self.windows[self.desired.window].get(digest, AttemptCounts())
            lacking = self.desired.synthetic - held.ok - sum(held.failed.values()) - round(n)
            self._count(world, digest, max(0, lacking), synthetic=True)
        if not n:
            return
        tried = round(n * routes.weight / 100) if routes.candidate else 0
        self._count(world, routes.candidate, tried)
        self._count(world, routes.stable, n - tried)
        self._count(world, routes.candidate, round((n - tried) * routes.shadow / 100), mirrored=True)
        self.version += 1

    def _count(
        self, world: Surroundings, digest: str, n: int, *, mirrored: bool = False, synthetic: bool = False
    ) -> None:
        if not n or not digest or self.desired is None:
            return
        source, window = world.by_digest[digest], self.windows[self.desired.window]
        held = window.get(digest, AttemptCounts())
        before = (held.shadow or ShadowCounts()) if mirrored else held
        share = max(source.failing, IMAGES[self.image].failing)
        failed = round(n * share) if source.fails_on in ("", self.target) else 0
        histogram = dict(before.compute.get("1", {}))
        for i, index in enumerate(_indices(source.seconds)):
            more = (n - failed + 9 - i) // 10
            if more:
                histogram[index] = histogram.get(index, 0) + more
        errors = {"Error": before.failed.get("Error", 0) + failed} if failed or before.failed else {}
        if isinstance(before, ShadowCounts):
            shadow = replace(before, mirrored=before.mirrored + n - failed, failed=errors, compute={"1": histogram})
            counts = replace(held, shadow=shadow)
        else:
            counts = replace(before, ok=before.ok + n - failed, failed=errors, compute={"1": histogram})
            counts = replace(counts, synthetic=before.synthetic + n) if synthetic else counts
        self.windows = {**self.windows, self.desired.window: {**window, digest: counts}}
        mark = hash(repr(counts))
        self.counted = {**self.counted, self.desired.window: {**self.counted[self.desired.window], digest: mark}}

    # ------------------------------------------------------------------------------------------------------------
    # What it says, and what the cluster says of it
    # ------------------------------------------------------------------------------------------------------------

    def report(self, world: Surroundings) -> Report:
        engines, routes = [], self.routes
        for digest, (name, role, at) in self.engines.items():
            state, reason = EngineState.LOADING, ""
            if self.ready(world, digest) or self.lie == "eager":
                state = EngineState.READY
            elif not world.by_digest[digest].loads:
                state = EngineState.FAILED
            elif world.narrow and digest in self.failed:
                state, reason = EngineState.FAILED, "NoMemory"
            elif at == NEVER:
                state, reason = EngineState.FETCHING, NOT_RESIDENT
            elif at is None or digest in self.failed:
                state, reason = EngineState.FAILED, Reason.STORAGE_UNAVAILABLE.value
            engines.append(EngineReport(name, digest, role, state, reason=reason, deaths=self.deaths.get(digest, 0)))
        if self.lie == "eager" and self.desired is not None:
            routes = self.desired.routes
        if self.lie == "strange":
            engines.append(EngineReport("eeeeeeeeee", STRANGE, Role.CANDIDATE, EngineState.READY, deaths=3))
            routes = Routes(routes.stable, STRANGE, 100)
        return Report(
            version=self.version,
            pod=self.name,
            pod_uid=self.uid,
            load_key=load_key(self.target, self.node, self.image),
            driver="",
            state=WorkerState.SERVING if self.routes.stable or self.routes.candidate else WorkerState.NO_ENGINE,
            message="",
            fence=self.held.fence if self.held else Fence(UID, 0),
            pointer_sequence=self.pointer_sequence,
            key_ids=("k1",),
            models={KEY[1]: ModelReport(tuple(engines), routes, self.windows)},
        )

    def pod(self, world: Surroundings) -> Json:
        started = self.started(world.time)
        container: Json = {"restartCount": self.restarts, "state": {"running": {}} if started else {"waiting": {}}}
        if self.placed and not IMAGES[self.image].starts:
            container["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
        if self.restarted_at is not None:
            container["lastState"] = {"terminated": {"finishedAt": text_of(self.restarted_at), "exitCode": 137}}
        meta = {
            "name": self.name,
            "uid": self.uid,
            "creationTimestamp": text_of(self.born),
            "labels": self.labels,
        }
        if self.leaves_at is not None:
            meta["deletionTimestamp"] = text_of(self.leaves_at)
        return {
            "metadata": meta,
            "spec": {
                "nodeName": self.node,
                "containers": [{"env": [{"name": "TRTMODEL_MODEL_UID", "value": UID}]}],
            },
            "status": {
                "phase": "Running",
                "podIP": f"10.0.0.{self.uid[1:]}",
                "conditions": [
                    {"type": "Ready", "status": "True" if self.serves(world) else "False"},
                    *(() if self.placed else (UNSCHEDULABLE,)),
                ],
                "containerStatuses": [container],
            },
        }

    def state(self, now: float, windows: set[str]) -> tuple[object, ...]:
        """All that its future depends on, with times relative to now. Of the windows only those that are looked at."""

        def left(at: float | None) -> float:
            return -1.0 if at is None else max(0.0, at - now)

        return (
            self.uid,
            left(self.born + START_SECONDS),
            self.held,
            self.asked,
            tuple((d, r, role.value, left(at)) for d, (r, role, at) in self.engines.items()),
            tuple((w, tuple(c.items()) if w in windows else ()) for w, c in self.counted.items()),
            tuple(self.deaths.items()),
            self.failed,
            self.routes,
            left(self.candidate_until) if self.desired and self.desired.routes.candidate else 0.0,
            self.pointer_sequence,
            self.restarts,
            None if self.restarted_at is None else now - self.restarted_at,
            None if self.leaves_at is None else left(self.leaves_at),
            self.reachable,
            self.lie,
            self.node,
            self.image,
            self.placed,
        )
