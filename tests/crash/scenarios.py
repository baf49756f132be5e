"""What people and the cluster do to a model, and a run of it to its end.

A scenario is a script: each entry acts once its condition holds. A pass of the operator takes no time; between passes
the clock goes on by what the operator asked for, at most 5 s since events tell it earlier.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from acts import (
    SOURCES,
    SPEC,
    A,
    B,
    Script,
    about_to_pass,
    applies,
    at_once,
    awaiting,
    commands,
    deletes,
    edits,
    goes_back_to,
    heals,
    in_step,
    job,
    kills,
    last_worker,
    loses_status,
    on_canary,
    phase,
    replaces,
    restores_status,
    serving,
    sets,
    stable,
    stalled,
    waited,
)
from machines import KEY, WINDOWS_KEPT
from memory_scenarios import MEMORY
from odd_scenarios import ODD
from platform_scenarios import DISTURBED, PLATFORMS
from ports import Hooks, Ports
from trtmodel_operator.ports import ClusterError, Conflict
from trtmodel_operator.queue import BACKOFF_FIRST, BACKOFF_MOST
from trtmodel_operator.reconcile import Reconciler
from world import World

MOST_PASSES = 400
MOST_WAIT = 5.0  # seconds until some event wakes the operator
LOOP = asyncio.new_event_loop()

# ---------------------------------------------------------------------------------------------------------------
# Scenarios
# ---------------------------------------------------------------------------------------------------------------

_UP = serving(A)
SCENARIOS: dict[str, Script] = {
    "first rollout": (),
    "good update": ((_UP, applies(B)),),
    "slow update": ((_UP, applies("s3://m/slow")),),
    "failing update": ((_UP, applies("s3://m/failing")),),
    "update that no worker can load": ((_UP, applies("s3://m/unloadable")),),
    "update whose host dies": ((_UP, applies("s3://m/deadly")),),
    "update that fails its gate": ((_UP, applies("s3://m/wrong")),),
    "update without traffic": ((_UP, sets(traffic=0)), (at_once, applies(B))),
    "build that fails for good": ((_UP, applies("s3://m/unbuildable")),),
    "build that fails, is healed and tried again": (
        (_UP, applies("s3://m/broken")),
        (stalled("BuildFailed"), heals("s3://m/broken")),
        (at_once, commands("retry#1")),
    ),
    "storage away during the build": (
        (_UP, applies(B)),
        (job("build"), sets(storage_down=True)),
        (lambda w: any(tries == 2 for _, tries in w.due.values()), sets(storage_down=False)),
    ),
    "storage away for too long, then tried again": (
        (_UP, applies(B)),
        (job("build"), sets(storage_down=True)),
        (stalled("StorageUnavailable"), sets(storage_down=False)),
        (at_once, commands("retry#1")),
    ),
    "storage away while workers load": (
        (_UP, applies(B)),
        (phase("Preparing"), sets(storage_down=True)),
        (waited(20), sets(storage_down=False)),
    ),
    "storage away beyond the deadline while workers load": (
        (_UP, applies(B)),
        (lambda w: len(w.bucket) == 2, sets(storage_down=True)),
        (stalled("ProgressDeadlineExceeded"), sets(storage_down=False)),
    ),
    "image missing for a while": (
        (job("resolve"), sets(image_missing=True)),
        (lambda w: w.condition("Progressing")[1] == "ImagePullBackOff", sets(image_missing=False)),
    ),
    "source changed for good in mid-canary": ((_UP, applies(B)), (on_canary, applies("s3://m/c"))),
    "a to b to a": ((_UP, applies(B)), (on_canary, applies(A))),
    "a to b to a while b is built": ((_UP, applies(B)), (job("build"), applies(A))),
    "a to b to c while b is built": ((_UP, applies(B)), (job("build"), applies("s3://m/c"))),
    "bad, then fixed": ((_UP, applies("s3://m/slow")), (lambda w: w.condition("Stalled")[0] == "True", applies(B))),
    "steps edited to fewer in mid-step": (
        (_UP, applies(B)),
        (in_step(1), edits(rollout__steps=[{"workers": 1, "hold": "10s"}])),
    ),
    "steps edited in mid-step": (
        (_UP, applies(B)),
        (in_step(1), edits(rollout__steps=[{"workers": 1, "hold": "10s"}, {"workers": 2, "hold": "10s"}])),
    ),
    "scaled in in mid-step": ((_UP, applies(B)), (on_canary, edits(serving__replicas=2))),
    "scaled out in mid-step": ((_UP, applies(B)), (in_step(1), edits(serving__replicas=6))),
    "scaled out right before the step is passed": (
        (_UP, sets(traffic=2)),
        (at_once, edits(source__uri=B, rollout__progressDeadline="10m")),
        (about_to_pass, edits(serving__replicas=6)),
    ),
    "scaled to zero in mid-step and back": (
        (_UP, applies(B)),
        (on_canary, edits(serving__replicas=0)),
        (phase("ScaledToZero"), edits(serving__replicas=3)),
    ),
    "member lost": ((_UP, applies(B)), (in_step(0), kills(True))),
    "member's container dies": ((_UP, applies(B)), (in_step(0), kills(True, "kill_container"))),
    "stable worker lost": ((_UP, applies(B)), (in_step(0), kills(False))),
    "worker that says everything at once": ((_UP, applies(B)), (phase("Preparing"), last_worker(lie="eager"))),
    "worker that answers with a strange engine": (
        (_UP, applies(B)),
        (on_canary, last_worker(lie="strange")),
        (waited(30), last_worker(lie="")),
    ),
    "worker unreachable for a while": (
        (_UP, applies(B)),
        (in_step(1), last_worker(reachable=False)),
        (waited(30), last_worker(reachable=True)),
    ),
    "worker unreachable beyond the deadline": (
        (_UP, applies(B)),
        (in_step(0), last_worker(reachable=False)),
        (stalled("ProgressDeadlineExceeded"), last_worker(reachable=True)),
    ),
    "aborted in mid-canary": ((_UP, applies(B)), (on_canary, commands("abort#1"))),
    "aborted while it is built": ((_UP, applies(B)), (job("build"), commands("abort#1"))),
    "aborted, then tried again": (
        (_UP, applies(B)),
        (on_canary, commands("abort#1")),
        (lambda w: w.condition("Stalled")[0] == "True", commands("retry#2")),
    ),
    "rolled back by command after its promotion": ((_UP, applies(B)), (serving(B), commands("rollback#1"))),
    "rolled back by command in mid-canary": ((_UP, applies(B)), (in_step(1), commands("rollback#1"))),
    "paused in mid-step and resumed": (
        (_UP, applies(B)),
        (in_step(0), edits(rollout__paused=True)),
        (phase("Paused"), edits(rollout__paused=False)),
    ),
    "paused by command in mid-step and resumed": (
        (_UP, applies(B)),
        (in_step(0), commands("pause#1")),
        (phase("Paused"), commands("resume#2")),
    ),
    "failing update, paused by command": ((_UP, applies("s3://m/failing")), (in_step(0), commands("pause#1"))),
    "promoted by command in mid-step": ((_UP, applies(B)), (in_step(0), commands("promote#1"))),
    "step skipped by command": ((_UP, applies(B)), (in_step(0), commands("skip-step#1"))),
    "paused, and rolled back by command to an older revision": (
        (_UP, applies(B)),
        (serving(B), applies("s3://m/c")),
        (serving("s3://m/c"), edits(rollout__paused=True)),
        (at_once, goes_back_to(A)),
    ),
    "rolled back to an older revision while storage is away": (
        (_UP, applies(B)),
        (serving(B), applies("s3://m/c")),
        (serving("s3://m/c"), sets(storage_down=True)),
        (at_once, goes_back_to(A)),
        (waited(30), sets(storage_down=False)),
    ),
    "worker on another kind of node": (
        (_UP, sets(node="other")),
        (at_once, kills(False)),
        (lambda w: len(w.rollout["stable"]["artifacts"]) == 2 and serving(A)(w), applies(B)),
    ),
    "spec unreadable in mid-step, then put right": (
        (_UP, applies(B)),
        (in_step(0), edits(rollout__progressDeadline="soon")),
        (phase("Invalid"), edits(rollout__progressDeadline="2m")),
    ),
    "paused and edited, then resumed": (
        (_UP, edits(rollout__paused=True, source__uri=B)),
        (phase("Paused"), edits(rollout__paused=False)),
    ),
    "back to what was rejected in mid-canary": (
        (_UP, applies("s3://m/failing")),
        (lambda w: w.condition("Stalled")[0] == "True", applies(B)),
        (on_canary, applies("s3://m/failing")),
    ),
    "another file at the same address, and a refresh": (
        (_UP, replaces(A, SOURCES[B])),
        (at_once, commands("refresh#1")),
    ),
    "status lost at rest": ((_UP, loses_status),),
    "status lost in mid-canary": ((_UP, applies(B)), (on_canary, loses_status)),
    "status lost after a rollback by command": (
        (_UP, applies(B)),
        (serving(B), commands("rollback#1")),
        (stalled("RolledBackByCommand"), loses_status),
    ),
    "status lost while it is built": ((_UP, applies(B)), (job("build"), loses_status)),
    "status restored from a backup": ((_UP, applies(B)), (serving(B), restores_status)),
    "deleted while it is resolved": ((job("resolve"), deletes(False)),),
    "deleted while it is built": ((job("build"), deletes(True)),),
    "deleted while it is deployed": ((phase("Deploying"), deletes(False)),),
    "deleted in mid-canary": ((_UP, applies(B)), (on_canary, deletes(True))),
    "deleted while it is promoted": ((_UP, applies(B)), (stable(B), deletes(False))),
    "deleted at rest": ((_UP, deletes(True)),),
}

# Other models than SPEC, with scenarios of their own.
_TWO = {
    **SPEC,
    "targets": [{"name": "one", "gpu": "NVIDIA-A10"}, {"name": "two", "gpu": "NVIDIA-L4"}],
    "serving": {"replicas": 2},
}
_HOLD = {**_TWO, "rollout": {**SPEC["rollout"], "onTargetFailure": "Hold"}}
_NONE = {**SPEC, "serving": {"replicas": 0}}
_ALONE = {**SPEC, "serving": {"replicas": 1}}
_MIRROR = {"workers": 1, "weight": 0, "shadow": 50, "hold": "10s"}
_QUARTER = {"workers": 1, "weight": 25, "hold": "10s"}
_SHARES = {**SPEC, "rollout": {**SPEC["rollout"], "steps": [_MIRROR, _QUARTER, {"workers": "50%", "hold": "10s"}]}}
_PAUSE = [{"workers": 1, "hold": "15s", "pause": True}, {"workers": "50%", "hold": "10s"}]
_PAUSING = {**SPEC, "rollout": {**SPEC["rollout"], "steps": _PAUSE}}
_MANUAL = {**SPEC, "rollout": {**SPEC["rollout"], "promotion": "Manual"}}


def _by(**analysis: object) -> dict[str, Any]:
    """SPEC, judged by more."""
    return {**SPEC, "rollout": {**SPEC["rollout"], "analysis": {**SPEC["rollout"]["analysis"], **analysis}}}


_HOOKS = {
    stage: _by(webhooks=[{"name": "ok", "stage": f"Confirm{stage}", "url": "https://x"}])
    for stage in ("Rollout", "Promotion")
}
_QUERIED = _by(prometheus=[{"name": "quality", "query": "avg(quality)", "min": 0.9}])
_SILENT = (_UP, sets(traffic=0)), (at_once, applies(B))
_UNCONFIRMED = ((_UP, sets(confirms=False)), (at_once, applies(B)), (awaiting, sets(confirms=True)))
OTHER_SPECS: dict[str, tuple[dict[str, Any], Script]] = {
    "two targets, good update": (_TWO, ((_UP, applies(B)),)),
    "two targets, failing update": (_TWO, ((_UP, applies("s3://m/failing")),)),
    "two targets, one fails and the other is held, then aborted": (
        _HOLD,
        ((_UP, applies("s3://m/half")), (stalled("TargetFailed"), commands("abort#1"))),
    ),
    "two targets, one fails and the other is held, steps edited, then aborted": (
        _HOLD,
        (
            (_UP, applies("s3://m/half")),
            (stalled("TargetFailed"), edits(rollout__steps=[{"workers": 1, "hold": "20s"}])),
            (lambda w: w.rollout["step"] is not None and w.rollout["step"]["held"] > 20, commands("abort#1")),
        ),
    ),
    "shares, good update": (_SHARES, ((_UP, applies(B)),)),
    "shares, failing update": (_SHARES, ((_UP, applies("s3://m/failing")),)),
    "shares, slow update": (_SHARES, ((_UP, applies("s3://m/slow")),)),
    "shares, steps edited in mid-step": (
        _SHARES,
        ((_UP, applies(B)), (in_step(2), edits(rollout__steps=[_QUARTER, {"workers": "50%", "hold": "10s"}]))),
    ),
    "shares, scaled in in mid-step": (_SHARES, ((_UP, applies(B)), (in_step(1), edits(serving__replicas=2)))),
    "shares, member lost": (_SHARES, ((_UP, applies(B)), (in_step(1), kills(True)))),
    "shares, spec unreadable in mid-step, then put right": (
        _SHARES,
        (
            (_UP, applies(B)),
            (in_step(1), edits(rollout__progressDeadline="soon")),
            (phase("Invalid"), edits(rollout__progressDeadline="2m")),
        ),
    ),
    "shares, fleet of one": ({**_SHARES, "serving": {"replicas": 1}}, ((_UP, applies(B)),)),
    "step that pauses, then resumed": (
        _PAUSING,
        ((_UP, applies(B)), (phase("Paused"), commands("resume#1"))),
    ),
    "step that pauses, scaled out meanwhile, then resumed": (
        _PAUSING,
        (
            (_UP, edits(rollout__steps=[{"workers": "50%", "hold": "15s", "pause": True}])),
            (at_once, applies(B)),
            (phase("Paused"), edits(serving__replicas=6)),
            (lambda w: phase("Paused")(w) and w.on_candidate() == 3, commands("resume#1")),
        ),
    ),
    "manual promotion": (_MANUAL, ((_UP, applies(B)), (phase("Paused"), commands("promote#1")))),
    "rollout that a webhook confirms late": (_HOOKS["Rollout"], _UNCONFIRMED),
    "promotion that a webhook confirms late": (_HOOKS["Promotion"], _UNCONFIRMED),
    "promotion that a webhook never confirms": (_HOOKS["Promotion"], _UNCONFIRMED[:2]),
    "promotion that a webhook never answers": (
        _HOOKS["Promotion"],
        ((_UP, sets(confirms=None)), (at_once, applies(B))),
    ),
    "rollout that a webhook never confirms, aborted": (
        _HOOKS["Rollout"],
        (*_UNCONFIRMED[:2], (awaiting, commands("abort#1"))),
    ),
    "queried, good update": (_QUERIED, ((_UP, applies(B)),)),
    "queried, outside its bounds": (_QUERIED, ((_UP, sets(gives=0.5)), (at_once, applies(B)))),
    "queried, Prometheus down for a while": (
        _QUERIED,
        ((_UP, applies(B)), (in_step(0), sets(gives=None)), (waited(20), sets(gives=1.0))),
    ),
    "queried, Prometheus down beyond the deadline": (_QUERIED, ((_UP, applies(B)), (in_step(0), sets(gives=None)))),
    "no traffic, golden samples": (_by(noData="Synthetic"), _SILENT),
    "no traffic, golden samples fail": (
        _by(noData="Synthetic"),
        ((_UP, sets(traffic=0)), (at_once, applies("s3://m/failing"))),
    ),
    "fleet of one, never any traffic, golden samples": (
        {**_by(noData="Synthetic"), "serving": {"replicas": 1}},
        ((at_once, sets(traffic=0)), (_UP, applies(B))),
    ),
    "no traffic, promoted": (_by(noData="Promote"), _SILENT),
    "manual promotion, aborted instead": (_MANUAL, ((_UP, applies(B)), (phase("Paused"), commands("abort#1")))),
    "first rollout without workers": (_NONE, ((phase("ScaledToZero"), edits(serving__replicas=2)),)),
    "fleet of one, good update": (_ALONE, ((_UP, applies(B)),)),
    "fleet of one, slow update": (_ALONE, ((_UP, applies("s3://m/slow")),)),
    "fleet of one, more steps than a worker keeps windows": (
        {**_ALONE, "rollout": {**SPEC["rollout"], "steps": [{"workers": 1, "hold": "10s"}] * (WINDOWS_KEPT + 1)}},
        ((_UP, applies(B)),),
    ),
    # Its figures went with it: nothing is left to compare the candidate with, and what is not proved is not promoted.
    "fleet of one, worker lost": (_ALONE, ((_UP, applies(B)), (in_step(0), kills(True)))),
}
OTHER_SPECS |= PLATFORMS | MEMORY | ODD
ALL = [*SCENARIOS, *OTHER_SPECS]
SOME = [name for name in ALL if name not in PLATFORMS or name in DISTURBED]


# ---------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A world, what is still to be done to it, and how long nothing was left to do."""

    world: World
    script: Script
    idle: int = 0
    failures: int = 0
    passes: int = field(default=0)

    def fork(self, world: World | None = None) -> Run:
        return dataclasses.replace(self, world=world or self.world.fork())

    def over(self) -> bool:
        return self.idle >= 3 and not self.script

    def state(self) -> int:
        """Runs of one state have one future."""
        return hash((len(self.script), min(self.idle, 3), self.failures, self.world.state()))

    def people(self) -> None:
        if self.script and self.script[0][0](self.world):
            self.script[0][1](self.world)
            self.script = self.script[1:]

    def step(self, ports: Ports | None = None) -> None:
        """What people do, one pass, and time until the next."""
        self.people()
        self.rest(LOOP.run_until_complete(self.one_pass(ports or Ports(self.world))))

    async def one_pass(self, ports: Ports) -> float | None:
        """Seconds until the next is wanted, after a failure as the queue has it; None = when something happens."""
        self.passes += 1
        assert self.passes < MOST_PASSES, f"no end after {MOST_PASSES} passes: {self.world.model}"
        try:
            hooks = Hooks(ports.world)
            image = ports.world.default_image
            wanted = await Reconciler(ports, ports, ports, ports, ports, image, inquiries=hooks).reconcile(KEY)
        except (Conflict, ClusterError) as e:
            if (again := getattr(e, "again", None)) is not None:
                return float(again)
            self.failures += 1
            return max(getattr(e, "retry_after", 0.0), min(BACKOFF_MOST, BACKOFF_FIRST * 2.0 ** (self.failures - 1)))
        self.failures = 0
        return wanted

    def rest(self, wanted: float | None) -> None:
        self.idle = self.idle + 1 if wanted is None else 0
        self.pass_time(MOST_WAIT if wanted is None else wanted if self.failures else min(wanted, MOST_WAIT))

    def pass_time(self, seconds: float) -> None:
        """In pieces, since workers and Jobs go on meanwhile."""
        piece = MOST_WAIT if self.script else max(MOST_WAIT, seconds / 12)  # people miss nothing that takes longer
        while seconds > piece:
            self.world.tick(piece)
            self.people()
            seconds -= piece
        self.world.tick(seconds)


def begun(name: str) -> Run:
    spec, script = OTHER_SPECS[name] if name in OTHER_SPECS else (SPEC, SCENARIOS[name])
    return Run(World(spec, SOURCES), script)


class Ends:
    """How runs end, remembered for every state on their way: who comes to a known state has come to a known end.
    `known` is what others of the same outcome have found out."""

    def __init__(self, outcome: Callable[[World], dict[str, Any]], known: dict[int, dict[str, Any]] | None = None):
        self.outcome = outcome
        self.known = {} if known is None else known
        self.runs = 0
        self.passes = 0

    def of(self, run: Run) -> dict[str, Any]:
        """Plays the run to its end, or to a state whose end is known."""
        self.runs += 1
        run.passes, on_the_way = 0, []
        while True:
            state = run.state()
            end = self.known.get(state)
            if end is None and run.over():
                end = self.outcome(run.world)
            if end is not None:
                self.known.update(dict.fromkeys(on_the_way, end))
                return end
            on_the_way.append(state)
            run.step()
            self.passes += 1


def outcome(world: World) -> dict[str, Any]:
    """The state of the world, without times, counters and names that the number of passes decides."""
    if world.model is None:
        return {"gone": True, "left": (sorted(world.objects), sorted(world.workers))}
    rollout = world.rollout
    return {
        **{role: _engines(rollout[role]) for role in ("stable", "candidate", "standby")},
        "rejected": [(r["revision"], r["reason"]) for r in rollout["rejected"]],
        "history": [(h["revision"], h["outcome"]) for h in rollout["history"]],
        "failure": (rollout["failure"] or {}).get("reason"),
        "conditions": [(c["type"], c["status"], c["reason"]) for c in world.model["status"]["conditions"]],
        "jobs": sorted(world.jobs_created),
        "running": sorted(world.due),
        "routes": sorted((w.routes.stable, w.routes.candidate) for w in world.workers.values()),
        "held": sorted(sorted((d, str(e[1].value)) for d, e in w.engines.items()) for w in world.workers.values()),
        "objects": sorted(key for key in world.objects if key[0] != "Pod"),
        "images": sorted(w.image for w in world.workers.values()),
        "spec": world.model["spec"],
    }


def _engines(deployed: dict[str, Any] | None) -> object:
    """In whatever order they were built; and without what the gate said, which an adopted revision has lost."""
    if deployed is None:
        return None
    return deployed["revision"], sorted((a["target"], a["loadKey"], a["manifestDigest"]) for a in deployed["artifacts"])


def essence(world: World) -> dict[str, Any]:
    """The end, without what is another pod's by right, and without Jobs that nobody asks for any more."""
    return {k: v for k, v in outcome(world).items() if k not in ("held", "jobs", "objects")}


def check_always(world: World) -> None:
    """What must hold however it ends. (What must hold at each moment, the world asserts.)"""
    again = world.jobs_deleted if world.misled else ()  # what was deleted by mistake is made again
    twice = [name for name in set(world.jobs_created) if world.jobs_created.count(name) > 1 + again.count(name)]
    assert not twice, "a Job was created twice"
    assert world.model is None or set(world.model["metadata"].get("annotations", {})) <= {"trtmodel.io/command"}
