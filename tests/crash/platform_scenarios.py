"""Scenarios of other workers: another image, other pod settings, with room for one more or without."""

from __future__ import annotations

from typing import Any

from acts import (
    SPEC,
    A,
    Act,
    B,
    Condition,
    Script,
    applies,
    at_once,
    commands,
    deletes,
    edits,
    job,
    loses_status,
    on_canary,
    phase,
    serving,
    sets,
    stalled,
    waited,
)
from trtmodel_operator.manifests import ANNOTATION_POD
from world import World

NEW = "worker:2"  # of another runtime, so that its engines have another load key
_UP = serving(A)
_TWO = {
    **SPEC,
    "targets": [{"name": "one", "gpu": "NVIDIA-A10"}, {"name": "two", "gpu": "NVIDIA-L4"}],
    "serving": {"replicas": 2},
}
_ALONE = {**SPEC, "serving": {"replicas": 1}}
_DOWN = {**_ALONE, "rollout": {**SPEC["rollout"], "allowDowntime": True}}
_KEPT = {**SPEC, "rollout": {**SPEC["rollout"], "memoryPolicy": "Availability"}}
_MANUAL = {**SPEC, "rollout": {**SPEC["rollout"], "promotion": "Manual"}}
_SETTINGS = {"annotations": {"team": "b"}}


def asks_for(image: str = NEW, promised: int = 4, **more: Any) -> Act:
    """Another image; and from now on as many workers serve at each moment as are promised."""

    def act(world: World) -> None:
        world.promised = promised
        world.edit(serving__image=image, **more)

    return act


def made_of(image: str, workers: int) -> Condition:
    """So many workers that serve are of this image."""

    def holds(world: World) -> bool:
        serving_ = [w for w in world.workers.values() if w.serves(world) and w.leaves_at is None]
        return sum(w.image == image for w in serving_) == workers

    return holds


def tried(index: int) -> Condition:
    """Workers of another platform answer in this step."""

    def holds(world: World) -> bool:
        step = world.rollout["step"]
        return step is not None and bool(step.get("platform")) and step["index"] == index and step["routed"]

    return holds


def unpinned(world: World) -> None:
    """A status of before platforms were changed."""
    platform = {k: v for k, v in world.rollout["platform"].items() if k != "pod"}
    rollout = {k: v for k, v in world.rollout.items() if k != "defaultImage"}
    world.lose_status({**rollout, "platform": platform})


def kills_new(how: str) -> Act:
    """A worker of the new image."""

    def act(world: World) -> None:
        world.promised = 0
        for uid in [w.uid for w in world.workers.values() if w.image == NEW and w.leaves_at is None][:1]:
            getattr(world, how)(uid)

    return act


def loses_a_place(room: int) -> Act:
    """A new worker goes, and there is no room for the one that replaces it."""

    def act(world: World) -> None:
        kills_new("kill_pod")(world)
        world.room = room

    return act


def tells_no_settings(world: World) -> None:
    """A careless hand has taken the annotation from the Deployment that names what its pods were made of."""
    for (kind, _), manifest in list(world.objects.items()):
        if kind == "Deployment":
            meta = manifest["metadata"]
            kept = {k: v for k, v in meta["annotations"].items() if k != ANNOTATION_POD}
            world.apply({**manifest, "metadata": {**meta, "annotations": kept}})


def scaled(replicas: int) -> Act:
    def act(world: World) -> None:
        world.promised = 0
        world.edit(serving__replicas=replicas)

    return act


def _both(*conditions: Condition) -> Condition:
    return lambda world: all(c(world) for c in conditions)


_BEGUN = (_UP, asks_for())
_OPEN = _both(tried(0), made_of(NEW, 1))
_LAST = made_of(NEW, 3)
PLATFORMS: dict[str, tuple[dict[str, Any], Script]] = {
    "image change": (SPEC, (_BEGUN,)),
    "settings change": (SPEC, ((_UP, sets(promised=4)), (at_once, edits(serving__pod=_SETTINGS)))),
    "image change that fails": (SPEC, ((_UP, asks_for("worker:failing")),)),
    "image change whose engines cannot be built": (SPEC, ((_UP, asks_for("worker:unable")),)),
    "image change whose workers do not start": (SPEC, ((_UP, asks_for("worker:crashing")),)),
    "image change that fails, then the right one": (
        SPEC,
        ((_UP, asks_for("worker:failing")), (stalled("ErrorRateTooHigh"), asks_for())),
    ),
    "image change that fails, then set back": (
        SPEC,
        ((_UP, asks_for("worker:failing")), (stalled("ErrorRateTooHigh"), asks_for(""))),
    ),
    "image change aborted": (SPEC, (_BEGUN, (_OPEN, commands("abort#1")))),
    "image change aborted while all are replaced": (SPEC, (_BEGUN, (_LAST, commands("abort#1")))),
    "image change aborted while engines are built": (SPEC, (_BEGUN, (job("build"), commands("abort#1")))),
    "image change aborted, then tried again": (
        SPEC,
        (_BEGUN, (_OPEN, commands("abort#1")), (stalled("Aborted"), commands("retry#2"))),
    ),
    "image change rolled back by command": (SPEC, (_BEGUN, (tried(1), commands("rollback#1")))),
    "image change taken back by the spec": (SPEC, (_BEGUN, (_OPEN, edits(serving__image="")))),
    "image change promoted by command": (SPEC, (_BEGUN, (_OPEN, commands("promote#1")))),
    "image change paused and resumed": (
        SPEC,
        (_BEGUN, (_OPEN, commands("pause#1")), (phase("Paused"), commands("resume#2"))),
    ),
    "image change, promotion by a person": (_MANUAL, (_BEGUN, (phase("Paused"), commands("promote#1")))),
    "settings change in mid-canary": (SPEC, ((_UP, applies(B)), (on_canary, edits(serving__pod=_SETTINGS)))),
    "model change in mid-image-change": (SPEC, (_BEGUN, (_OPEN, applies(B)))),
    "image and model change together": (SPEC, ((_UP, asks_for(source__uri=B)),)),
    "image change after a revision that failed": (
        SPEC,
        ((_UP, applies("s3://m/failing")), (stalled("ErrorRateTooHigh"), edits(serving__pod=_SETTINGS))),
    ),
    "scaled out in an image change": (SPEC, (_BEGUN, (_OPEN, scaled(6)))),
    "scaled in in an image change": (SPEC, (_BEGUN, (_OPEN, scaled(2)))),
    "scaled to zero in an image change and back": (
        SPEC,
        (_BEGUN, (_OPEN, scaled(0)), (phase("ScaledToZero"), scaled(3))),
    ),
    "new worker lost in an image change": (SPEC, (_BEGUN, (_OPEN, kills_new("kill_pod")))),
    "new worker's container dies in an image change": (SPEC, (_BEGUN, (_OPEN, kills_new("kill_container")))),
    "status lost in an image change": (SPEC, (_BEGUN, (_OPEN, loses_status))),
    "status lost when the old workers leave": (SPEC, (_BEGUN, (made_of(NEW, 4), loses_status))),
    "another image before anything was promoted": (SPEC, ((phase("Deploying"), edits(serving__image=NEW)),)),
    "workers that do not start, and then another image": (
        {**SPEC, "serving": {"replicas": 2, "image": "worker:crashing"}},
        ((waited(20), edits(serving__image=NEW)),),
    ),
    "the operator's image changes": (SPEC, ((_UP, sets(default_image=NEW)), (at_once, scaled(5)))),
    "an older status, then an image change": (SPEC, ((_UP, unpinned), _BEGUN)),
    "deleted in an image change": (SPEC, (_BEGUN, (_OPEN, sets(promised=0)), (at_once, deletes(True)))),
    "two targets, image change": (_TWO, ((_UP, asks_for()),)),
    "two targets, image change aborted": (_TWO, ((_UP, asks_for()), (tried(0), commands("abort#1")))),
    "fleet of one, image change": (_ALONE, ((_UP, asks_for(promised=1)),)),
    "no spare GPU": (SPEC, ((_UP, sets(room=4)), (at_once, asks_for(promised=3)))),
    "no spare GPU, aborted": (
        SPEC,
        ((_UP, sets(room=4)), (at_once, asks_for(promised=3)), (tried(1), commands("abort#1"))),
    ),
    "no spare GPU, a place is lost late, until there is one": (
        SPEC,
        (
            (_UP, sets(room=4)),
            (at_once, asks_for(promised=3)),
            (tried(1), loses_a_place(3)),
            (stalled("NoRoomForWorker"), sets(room=4)),
        ),
    ),
    "image change, a place is lost late, until there is one": (
        _KEPT,
        (_BEGUN, (tried(1), loses_a_place(3)), (stalled("NoRoomForWorker"), sets(room=None))),
    ),
    "old workers of which nobody knows what they were made of": (
        {**SPEC, "serving": {"replicas": 4, "pod": _SETTINGS}},
        ((_UP, tells_no_settings), (at_once, asks_for())),
    ),
    "no spare GPU, never fewer workers, until there is room": (
        _KEPT,
        ((_UP, sets(room=4)), (at_once, asks_for()), (stalled("NoRoomForWorker"), sets(room=5))),
    ),
    "no spare GPU, fleet of one, taken back": (
        _ALONE,
        ((_UP, sets(room=1)), (at_once, asks_for(promised=1)), (stalled("NoRoomForWorker"), edits(serving__image=""))),
    ),
    "no spare GPU, fleet of one that may be down": (_DOWN, ((_UP, sets(room=1)), (at_once, asks_for(promised=0)))),
}
# Those that two operators and a cluster in trouble meet, too.
DISTURBED = ("image change that fails", "image change aborted", "settings change in mid-canary", "no spare GPU")
ENDS: dict[str, str] = {
    "image change": "a Serving: Promoted, Promoted on worker:2",
    "settings change": "a Serving: Promoted, Promoted",
    "image change that fails": "a ErrorRateTooHigh: RolledBack, Promoted",
    "image change whose engines cannot be built": "a BuildFailed: RolledBack, Promoted",
    "image change whose workers do not start": "a CrashLoopBackOff: RolledBack, Promoted",
    "image change that fails, then the right one": "a Serving: Promoted, RolledBack, Promoted on worker:2",
    "image change that fails, then set back": "a Serving: RolledBack, Promoted",
    "image change aborted": "a Aborted: Aborted, Promoted",
    "image change aborted while all are replaced": "a Aborted: Aborted, Promoted",
    "image change aborted while engines are built": "a Aborted: Aborted, Promoted",
    "image change aborted, then tried again": "a Serving: Promoted, Aborted, Promoted on worker:2",
    "image change rolled back by command": "a RolledBackByCommand: RolledBack, Promoted",
    "image change taken back by the spec": "a Serving: Superseded, Promoted",
    "image change promoted by command": "a Serving: Promoted, Promoted on worker:2",
    "image change paused and resumed": "a Serving: Promoted, Promoted on worker:2",
    "image change, promotion by a person": "a Serving: Promoted, Promoted on worker:2",
    "settings change in mid-canary": "b Serving: Promoted, Promoted, Promoted",
    "model change in mid-image-change": "b Serving: Promoted, Promoted, Superseded, Promoted on worker:2",
    "image and model change together": "b Serving: Promoted, Promoted, Promoted on worker:2",
    "image change after a revision that failed": "a ErrorRateTooHigh: Promoted, RolledBack, Promoted",
    "scaled out in an image change": "a Serving: Promoted, Promoted on worker:2",
    "scaled in in an image change": "a Serving: Promoted, Promoted on worker:2",
    "scaled to zero in an image change and back": "a Serving: Promoted, Promoted on worker:2",
    "new worker lost in an image change": "a Serving: Promoted, Promoted on worker:2",
    "new worker's container dies in an image change": "a WorkerDied: RolledBack, Promoted",
    "status lost in an image change": "a Serving: Promoted on worker:2",
    "status lost when the old workers leave": "a Serving:  on worker:2",
    "another image before anything was promoted": "a Serving: Promoted on worker:2",
    "workers that do not start, and then another image": "a Serving: Promoted on worker:2",
    "the operator's image changes": "a Serving: Promoted",
    "an older status, then an image change": "a Serving: Promoted, Promoted on worker:2",
    "deleted in an image change": "gone",
    "two targets, image change": "a Serving: Promoted, Promoted on worker:2",
    "two targets, image change aborted": "a Aborted: Aborted, Promoted",
    "fleet of one, image change": "a Serving: Promoted, Promoted on worker:2",
    "no spare GPU": "a Serving: Promoted, Promoted on worker:2",
    "no spare GPU, aborted": "a Aborted: Aborted, Promoted",
    "no spare GPU, a place is lost late, until there is one": "a Serving: Promoted, Promoted on worker:2",
    "image change, a place is lost late, until there is one": "a Serving: Promoted, Promoted on worker:2",
    "old workers of which nobody knows what they were made of": "a Serving: Promoted, Promoted on worker:2",
    "no spare GPU, never fewer workers, until there is room": "a Serving: Promoted, Promoted on worker:2",
    "no spare GPU, fleet of one, taken back": "a Serving: Superseded, Promoted",
    "no spare GPU, fleet of one that may be down": "a Serving: Promoted, Promoted on worker:2",
}
