"""The values that the operator thinks in. Frozen, plain, without behaviour that does input or output.

Observed --decide--> Decision = new Memory + Actions + Situation (what conditions are made of)
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from trtmodel_contract.control import Report, Role
from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.identity import EngineSettings, ModelRef, Storage
from trtmodel_contract.jobs import BuildTask, FoundArtifact, JobResult, ResolveTask

# ---------------------------------------------------------------------------------------------------------------
# What the user asked for
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CalibrationSpec:
    uri: str
    samples: int
    method: str
    per_channel: bool


@dataclass(frozen=True)
class Target:
    """A kind of node that the model must run on. `gpu` selects the label nvidia.com/gpu.product; '' = any node."""

    name: str
    gpu: str = ""
    gpus: int = 0
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class BuildSpec:
    """`deadline` in seconds: of one Job, all its tries included."""

    deadline: int
    retries: int
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, object], ...] = ()
    resources: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifySpec:
    task: Task
    dataset_uri: str
    samples: int
    thresholds: Thresholds


@dataclass(frozen=True)
class ServingSpec:
    """`request_timeout` and `health_interval` in seconds. `pod` is the closed list of pod settings, as written."""

    replicas: int
    image: str
    contexts: int
    request_timeout: float
    health_interval: float
    service_name: str
    http_port: int
    pod: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """`workers` is a number or a percentage as written ("50%"); `hold` in seconds of observed time."""

    workers: int | str
    hold: float


@dataclass(frozen=True)
class AnalysisSpec:
    """`interval` in seconds: how often the figures are looked at."""

    interval: float
    min_requests: int
    max_error_rate_increase: float
    max_latency_ratio: float


@dataclass(frozen=True)
class RolloutSpec:
    steps: tuple[Step, ...]
    analysis: AnalysisSpec
    progress_deadline: float
    history_limit: int
    paused: bool


@dataclass(frozen=True)
class Spec:
    source_uri: str
    source_pin: str
    storage: Storage
    credentials_secret: str
    engine: EngineSettings
    calibration: CalibrationSpec | None
    targets: tuple[Target, ...]
    build: BuildSpec
    verify: VerifySpec
    serving: ServingSpec
    rollout: RolloutSpec


# ---------------------------------------------------------------------------------------------------------------
# What cannot be observed again: .status.rollout
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Artifact:
    """One engine of a revision on one target. `load_key` is the key's text, which is all that a boot pointer keeps of
    it. `verdict_text` is the gate's sentence when it was accepted."""

    target: str
    load_key: str
    manifest_digest: str
    driver: str = ""
    verdict_text: str = ""


@dataclass(frozen=True)
class Deployed:
    """A revision with its engines: stable, candidate or standby."""

    revision: str
    artifacts: tuple[Artifact, ...]


@dataclass(frozen=True)
class Resolved:
    """What the resolve Job of `key` (a hash of the fields that it reads, and the counter) found out."""

    key: str
    source_sha256: str
    revision: str
    calibration_digest: str
    dataset_digest: str


@dataclass(frozen=True)
class Built:
    """An engine that exists in the bucket, with its gate figures. Judged anew with today's thresholds. `gate` is the
    hash of the data set, task and number of samples that the figures were measured with."""

    revision: str
    target: str
    artifact: FoundArtifact
    gate: str


@dataclass(frozen=True)
class Failure:
    """A Job that ended for good. Kept, since the Job itself is collected after a day."""

    job: str
    reason: str
    message: str


@dataclass(frozen=True)
class StepMemory:
    """The step in hand. An `index` equal to the number of steps is the last preparation, of all workers.

    `plan` is the hash of the steps: an edited plan starts again. `began_at` is when the step began. `told` are the
    workers (short hashes of their uids) that were told to hold the candidate: whose death may be its doing. `members`
    is the hash of those that were routed to it when `routed` became true: other members mean a new window.
    `held` counts the seconds during which the operator watched all members serve the candidate; `seen_at` is the last
    look at the figures (0 = no worker was routed yet), whose `verdict`, `figures` (short) and `sentence` are kept, so
    that status changes with the looks and not with every pass. `fails` counts successive looks that failed for the
    latency (two are needed). `baseline` is the window before the rollout: what a fleet of one is compared with.
    """

    index: int
    plan: str
    began_at: float
    told: tuple[str, ...] = ()
    members: str = ""
    routed: bool = False
    held: float = 0.0
    seen_at: float = 0.0
    fails: int = 0
    baseline: str = ""
    verdict: str = ""
    figures: str = ""
    sentence: str = ""


@dataclass(frozen=True)
class Rejected:
    """A revision that is not tried again until the spec, or `key` (hash of verify and analysis), changes."""

    revision: str
    key: str
    reason: str
    message: str


@dataclass(frozen=True)
class Platform:
    """Image and pod settings of the workers; `hash` names their Deployment."""

    image: str
    hash: str


@dataclass(frozen=True)
class HistoryEntry:
    """One finished rollout, newest first in the history. `reason` is a constant, `message` a sentence."""

    revision: str
    outcome: str  # Promoted | RolledBack | GateFailed | Aborted | Superseded
    reason: str
    at: str  # RFC 3339, seconds
    digests: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True)
class Memory:
    """Written to .status.rollout with a precondition before any effect. `sequence` rises with every change of what
    workers should do (`plan` is the hash of it): together with the uid it is the fence.

    `window` is the id under which workers count attempts now. `stable_resolved` is what `resolved` was when stable
    was promoted: a spec that goes back to it needs no Job. `attempt` counts the retries that a person asked for,
    `resolve_counter` the refreshes, `source_changes` the sources that changed under a build without one succeeding.
    `waiting` is what the progress deadline counts for (another word starts the clock again), `waited` the observed
    seconds of it, `waited_at` when it was looked at last. `command` is the text of the last one that was taken.
    """

    sequence: int = 0
    plan: str = ""
    stable: Deployed | None = None
    candidate: Deployed | None = None
    standby: Deployed | None = None
    resolved: Resolved | None = None
    stable_resolved: Resolved | None = None
    resolve_counter: int = 0
    source_changes: int = 0
    attempt: int = 0
    built: tuple[Built, ...] = ()
    failure: Failure | None = None
    step: StepMemory | None = None
    rejected: tuple[Rejected, ...] = ()
    platform: Platform | None = None
    command: str = ""
    window: str = ""
    waiting: str = ""
    waited: float = 0.0
    waited_at: float = 0.0
    history: tuple[HistoryEntry, ...] = ()


# ---------------------------------------------------------------------------------------------------------------
# What was seen in this pass
# ---------------------------------------------------------------------------------------------------------------


class JobKind(str, enum.Enum):
    RESOLVE = "resolve"
    BUILD = "build"


class JobState(str, enum.Enum):
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class ObservedJob:
    """`result` is the newest termination message that could be read; `trouble` what the cluster says when there is
    none, or while it runs: Unschedulable, ImagePullBackOff, OOMKilled, DeadlineExceeded ... with its message."""

    name: str
    kind: JobKind
    target: str
    state: JobState
    result: JobResult | None = None
    trouble: str = ""
    message: str = ""
    started_at: float | None = None


@dataclass(frozen=True)
class ObservedWorker:
    """A worker pod that has not ended (an evicted one is no worker). `report` is None if it could not be asked; then
    `silence` says why: it is unknown, not healthy. `restarts` of its container, `restarted_at` when the last one that
    died ended (lastState.terminated.finishedAt); `trouble` as for jobs."""

    pod: str
    uid: str
    ip: str
    target: str
    platform: str
    ready: bool
    terminating: bool
    created_at: float
    report: Report | None = None
    silence: str = ""
    restarts: int = 0
    restarted_at: float | None = None
    trouble: str = ""
    message: str = ""


@dataclass(frozen=True)
class ObservedWorkload:
    """A worker Deployment. `fingerprint` is the hash that we left in an annotation when we applied it: another one
    means that it must be applied again. `image` is that of its pods."""

    name: str
    target: str
    platform: str
    replicas: int
    ready_replicas: int
    fingerprint: str
    image: str = ""
    trouble: str = ""
    message: str = ""


@dataclass(frozen=True)
class ObservedPointer:
    """A boot pointer as it lies in the cluster: `content` = hash of everything but the sequence and the signatures,
    whose key ids are in `key_ids`. `stable` and `standby` are what it names (see manifests.read_pointer)."""

    name: str
    sequence: int
    content: str
    stable: Deployed | None = None
    standby: Deployed | None = None
    key_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """`trtmodel.io/command: <verb>[@<revision>]#<nonce>`; `text` is the whole of it."""

    verb: str
    revision: str
    text: str


@dataclass(frozen=True)
class Observed:
    """One pass's facts. `now` in seconds since the epoch. `spec` is None when it cannot be read: `spec_error`.
    `key_ids` are the operator's public keys of today, `published_key_ids` those in the ConfigMap that workers mount
    (None: not looked at)."""

    now: float
    model: ModelRef
    generation: int
    deleting: bool
    spec: Spec | None
    memory: Memory
    spec_error: str = ""
    command: Command | None = None
    jobs: tuple[ObservedJob, ...] = ()
    workloads: tuple[ObservedWorkload, ...] = ()
    pointers: tuple[ObservedPointer, ...] = ()
    workers: tuple[ObservedWorker, ...] = ()
    default_image: str = ""
    service_fingerprint: str = ""
    key_ids: tuple[str, ...] = ()
    published_key_ids: tuple[str, ...] | None = None


# ---------------------------------------------------------------------------------------------------------------
# What to do
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CreateJob:
    name: str
    kind: JobKind
    target: Target
    task: ResolveTask | BuildTask
    image: str


@dataclass(frozen=True)
class DeleteJob:
    name: str


@dataclass(frozen=True)
class ApplyPointer:
    """The boot pointer of one target's workload, and the public keys beside it."""

    workload: str
    target: str
    sequence: int
    stable: Deployed
    standby: Deployed | None


@dataclass(frozen=True)
class ApplyWorkload:
    """Deployment and Service of one target's workers."""

    name: str
    target: Target
    platform: Platform
    replicas: int


@dataclass(frozen=True)
class PlannedEngine:
    role: Role
    revision: str
    manifest_digest: str


@dataclass(frozen=True)
class Signal:
    """What one worker should hold and route. Signed and sent by the adapter."""

    pod: str
    uid: str
    ip: str
    engines: tuple[PlannedEngine, ...]
    stable: str
    candidate: str
    weight: int
    window: str


Action = CreateJob | DeleteJob | ApplyPointer | ApplyWorkload | Signal


class Stage(str, enum.Enum):
    """Where a model stands. An output of decide for conditions to be made of; never stored, never read back."""

    DELETING = "Deleting"
    INVALID = "Invalid"
    RESOLVING = "Resolving"
    BUILDING = "Building"
    GATE_FAILED = "GateFailed"
    GATE_INCONCLUSIVE = "GateInconclusive"
    REJECTED = "Rejected"
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
    set carry (see Built)."""

    rule: str
    memory: Memory
    actions: tuple[Action, ...]
    situation: Situation
    requeue: float | None = None
    notices: tuple[Notice, ...] = ()
    wanted: str = ""
    gate: str = ""
