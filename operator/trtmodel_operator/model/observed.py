"""What was seen in one pass."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtmodel_contract.control import Report
from trtmodel_contract.identity import ModelRef, Storage
from trtmodel_contract.jobs import JobResult
from trtmodel_contract.progress import JobProgress

from trtmodel_operator.model.asked import Spec
from trtmodel_operator.model.checks import Answer
from trtmodel_operator.model.memory import Deployed, Memory


class JobKind(str, enum.Enum):
    RESOLVE = "resolve"
    BUILD = "build"
    COLLECT = "collect"


class JobState(str, enum.Enum):
    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class ObservedJob:
    """`result` is the newest termination message that could be read; `trouble` what the cluster says when there is
    none, or while it runs: Unschedulable, ImagePullBackOff, OOMKilled, DeadlineExceeded ... with its message.
    `suspended`: it waits for its turn. `load_key`: it builds for workers with this key. `progress` is what it says of
    itself, None if it could not be asked. `made_by` is the name of the TRTModel that made it, '' if nothing tells.
    `failures`: so many of its tries failed; an eviction is none."""

    name: str
    kind: JobKind
    target: str
    state: JobState
    result: JobResult | None = None
    trouble: str = ""
    message: str = ""
    started_at: float | None = None
    suspended: bool = False
    load_key: str = ""
    progress: JobProgress | None = None
    made_by: str = ""
    made_at: float | None = None
    failures: int = 0


@dataclass(frozen=True)
class ObservedWorker:
    """A worker pod that has not ended (an evicted one is no worker). `report` is None if it could not be asked; then
    `silence` says why: it is unknown, not healthy. `restarts` counts the containers of it that died, and `death` says
    how the last one did; `trouble` as for jobs; `running`: a container of it runs. `platform` is the hash of what it
    was made of."""

    pod: str
    uid: str
    ip: str
    target: str
    ready: bool
    terminating: bool
    report: Report | None = None
    silence: str = ""
    restarts: int = 0
    death: str = ""
    trouble: str = ""
    message: str = ""
    node: str = ""
    running: bool = True
    platform: str = ""


@dataclass(frozen=True)
class ObservedWorkload:
    """A worker Deployment. `fingerprint` is the hash of what people chose, left in an annotation when it was applied:
    another one means that it must be applied again. `image` is that of its pods, `pod` their settings as JSON (see
    Platform; '' where nothing tells)."""

    name: str
    target: str
    platform: str
    replicas: int
    fingerprint: str
    image: str = ""
    trouble: str = ""
    message: str = ""
    pod: str = ""


@dataclass(frozen=True)
class ObservedPointer:
    """A boot pointer as it lies in the cluster: `content` = hash of everything but the sequence and the signatures,
    whose key ids are in `key_ids`. `stable` and `standby` are what it names, `storage` where they lie (see
    manifests.read_pointer)."""

    name: str
    sequence: int
    content: str
    stable: Deployed | None = None
    standby: Deployed | None = None
    key_ids: tuple[str, ...] = ()
    storage: Storage | None = None


@dataclass(frozen=True)
class Command:
    """`trtmodel.io/command: <verb>[@<revision>]#<nonce>`; `text` is the whole of it."""

    verb: str
    revision: str
    text: str


@dataclass(frozen=True)
class Observed:
    """One pass's facts. `now` in seconds since the epoch. `spec` is None when it cannot be read: `spec_error`.
    `key_ids` are the operator's public keys of today, the one that signs first, `published_key_ids` those in the
    ConfigMap that workers mount (None: not looked at). `cluster` names this installation in the bucket, where several
    clusters may pin what they need; '' pins nothing. `guarded`: our finalizer holds the object; `deleted_at` is when it
    was asked to go. `answers` are of what earlier decisions asked to look up."""

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
    cluster: str = ""
    answers: tuple[Answer, ...] = ()
    guarded: bool = False
    deleted_at: float | None = None
