"""What to remember, what to do then, and where the model stands."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtmodel_contract.control import Role
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import BuildTask, CollectTask, ResolveTask

from trtmodel_operator.model.asked import Target
from trtmodel_operator.model.checks import Lookup
from trtmodel_operator.model.memory import Deployed, Memory, Platform
from trtmodel_operator.model.observed import JobKind


@dataclass(frozen=True)
class CreateJob:
    """`load_key` and `nodes`: the build is for workers that report this key, on one of the nodes that they run on; ''
    and none leave the choice to the scheduler."""

    name: str
    kind: JobKind
    target: Target
    task: ResolveTask | BuildTask | CollectTask
    image: str
    load_key: str = ""
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeleteJob:
    name: str


@dataclass(frozen=True)
class ApplyPointer:
    """The boot pointer of one target's workload, and the public keys beside it. `storage` is where the engines
    lie."""

    workload: str
    target: str
    sequence: int
    stable: Deployed
    standby: Deployed | None
    storage: Storage


@dataclass(frozen=True)
class ApplyService:
    """In front of all workers."""


@dataclass(frozen=True)
class ApplyWorkload:
    """The Deployment of one target's workers. `only_replicas`: it is there and made of what people chose, so nothing
    else of it is written; else pods would be replaced when an operator that makes them otherwise scales."""

    name: str
    target: Target
    platform: Platform
    replicas: int
    only_replicas: bool = False


@dataclass(frozen=True)
class DeleteWorkload:
    """Deployment and boot pointer of a target that the spec names no more."""

    name: str


@dataclass(frozen=True)
class Guard:
    """The finalizer that holds a TRTModel until its artifacts are removed: put on, or taken off, which is the last
    thing that is done to it."""

    on: bool


@dataclass(frozen=True)
class PlannedEngine:
    role: Role
    revision: str
    manifest_digest: str


@dataclass(frozen=True)
class Signal:
    """What one worker should hold and route. Signed and sent by the adapter. `may_drain`: others serve, so that it may
    leave service to change engines where memory holds one. `baseline`: the window of before the rollout, to be kept.
    `synthetic`: golden samples are run until the window counts so many requests. `weight` and `shadow` in percent: see
    Routes."""

    pod: str
    uid: str
    ip: str
    engines: tuple[PlannedEngine, ...]
    stable: str
    candidate: str
    weight: int
    window: str
    may_drain: bool = False
    baseline: str = ""
    synthetic: int = 0
    shadow: int = 0


Action = CreateJob | DeleteJob | ApplyPointer | ApplyService | ApplyWorkload | DeleteWorkload | Guard | Signal


class Stage(str, enum.Enum):
    """Where a model stands. An output of decide for conditions to be made of; never stored, never read back."""

    DELETING = "Deleting"
    INVALID = "Invalid"
    RESOLVING = "Resolving"
    BUILDING = "Building"
    GATE_FAILED = "GateFailed"
    GATE_INCONCLUSIVE = "GateInconclusive"
    DEPLOYING = "Deploying"  # the first engine: no stable yet
    PREPARING = "Preparing"
    CANARY = "Canary"
    PROMOTING = "Promoting"
    SERVING = "Serving"
    ROLLED_BACK = "RolledBack"
    SCALED_TO_ZERO = "ScaledToZero"
    PAUSED = "Paused"
    STALLED = "Stalled"  # a Job failed for good, or a deadline passed


@dataclass(frozen=True)
class Situation:
    """`reason` is a CamelCase constant, `message` a sentence with cause and way out, `summary` the CANARY column.
    `stuck`: it waits for something that may never come, such as a node that a Job fits on."""

    stage: Stage
    reason: str
    message: str
    summary: str = ""
    stuck: bool = False


@dataclass(frozen=True)
class Notice:
    """Something that happened once, for an event: a command that was taken or not."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Decision:
    """`rule` is the name of the rule that decided. `requeue` in seconds; None = only when something happens. `wanted`
    is the revision that today's spec means, '' while that is not known; `gate` the key that figures of today's data
    set carry (see Built); `builds` the names of the Jobs that this pass asks for an engine, by target. `lookups` are
    what is to be looked up outside: those that a decision names no more are given up."""

    rule: str
    memory: Memory
    actions: tuple[Action, ...]
    situation: Situation
    requeue: float | None = None
    notices: tuple[Notice, ...] = ()
    wanted: str = ""
    gate: str = ""
    builds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lookups: tuple[Lookup, ...] = ()
