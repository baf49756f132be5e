"""What the operator asks of a worker, what a worker answers, and what a worker boots from.

Desired state is declarative and fenced: (uid of the TRTModel, sequence). A worker refuses a lower sequence, and an
equal one with other content; the identical request renews the candidate's time to live.

    operator                                    worker
       | PUT /control/v1/desired  (seq 7) --------> |  load, warm, self-test
       | GET /control/v1/report?after=41&wait=30 -> |  answers when something changed
       | <------------------------- report 42 ------|  engine Ready, self-test passed
       | PUT /control/v1/desired  (seq 8: route) -> |  one assignment
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from trtmodel_contract.codec import LATER, canonical, dumps, encode, sha256_hex
from trtmodel_contract.identity import LoadKey, ModelRef, Storage
from trtmodel_contract.signing import Signature

DESIRED_PATH = "/control/v1/desired"
REPORT_PATH = "/control/v1/report"
CONTROL_PORT = 8081
HTTP_PORT = 8080
GRPC_PORT = 9000
METRICS_PORT = 8082
POINTER_FILE = "pointer.json"
POINTER_SIGNATURE_FILE = "pointer.sig.json"
KEYS_FILE = "keys.json"
NOT_RESIDENT = "NotResident"
DEVICE_LOST = "DeviceLost"


class Role(str, enum.Enum):
    STABLE = "Stable"
    CANDIDATE = "Candidate"
    STANDBY = "Standby"


@dataclass(frozen=True)
class Fence:
    uid: str
    sequence: int


@dataclass(frozen=True)
class SignedArtifact:
    """An engine that passed this model's gate: `signature` is over `signing.artifact_payload`."""

    revision: str
    manifest_digest: str
    signature: Signature


@dataclass(frozen=True)
class DesiredEngine:
    role: Role
    artifact: SignedArtifact


@dataclass(frozen=True)
class Routes:
    """Manifest digests. `weight` is the percentage of requests that the candidate answers. `shadow` is the percentage
    of stable's answers after which the same request also runs on the candidate, for comparison only: it does so while
    nothing else waits, and no client sees it. A candidate that is only shadowed is named here with a weight of 0.

    In a report, `stable` is '' while the candidate answers alone because memory holds one engine only."""

    stable: str
    candidate: str = ""
    weight: int = 0
    shadow: int = field(default=0, metadata=LATER)


@dataclass(frozen=True)
class DesiredModel:
    """Everything that a worker should hold and route for one model. Engines that are not listed are released.
    A changed `window` starts new counters. `may_drain`: other workers serve, so this one may leave service for as
    long as it takes to change engines, if memory does not hold both. `baseline` is a window that stays in the report
    however many follow it: what stable did before the rollout. `synthetic`: too few requests come: golden samples run,
    one at a time and only while nothing else waits, until stable and candidate each have so many attempts in the
    window."""

    engines: tuple[DesiredEngine, ...]
    routes: Routes
    window: str
    may_drain: bool = field(default=False, metadata=LATER)
    baseline: str = field(default="", metadata=LATER)
    synthetic: int = field(default=0, metadata=LATER)


@dataclass(frozen=True)
class DesiredState:
    """The fenced body."""

    fence: Fence
    models: Mapping[str, DesiredModel]

    def content_hash(self) -> str:
        """Hash of what is asked, without the fence: tells a renewal from a conflict."""
        return sha256_hex(canonical(encode(self)["models"]))


@dataclass(frozen=True)
class DesiredRequest:
    """Body of PUT desired. The ttl is outside the fenced body, so that an identical request renews it: after
    `candidate_ttl_seconds` without one, a worker that has a stable routes to it alone."""

    SCHEMA: ClassVar[str] = "trtmodel.io/desired/v1"

    desired: DesiredState
    candidate_ttl_seconds: int = 300


class EngineState(str, enum.Enum):
    FETCHING = "Fetching"
    LOADING = "Loading"
    READY = "Ready"  # loaded, warm and self-tested, whether or not it is routed to
    FAILED = "Failed"
    DOWN = "Down"  # was Ready, its host died and is being replaced


@dataclass(frozen=True)
class EngineReport:
    """One engine of a worker. `message` says why it failed. `deaths` counts hosts that ended unasked. `Fetching` with
    the reason `NOT_RESIDENT` is no failure: memory is to hold one engine, and this is not the one that answers now. The
    reason `DEVICE_LOST` says nothing about the engine: no other could be loaded there either."""

    revision: str
    manifest_digest: str
    role: Role
    state: EngineState
    reason: str = ""
    message: str = ""
    load_seconds: float | None = None
    deaths: int = 0


@dataclass(frozen=True)
class OutputAgreement:
    """How near the candidate's values of one output are to stable's, as sums over rows, so that the figures of several
    workers can be added. Means are these divided by `rows`.

    `ranked`: rows that have a first place (two values or more, or whole numbers), `top1_equal`: those of them where it
    is the same. `cosine` is 1 for two rows of zeros. `relative_error` is the norm of the difference over the norm of
    stable's row, at most 1,000 a row. `incomparable` rows have another shape, or NaN or infinity where the other has
    not: they are in `rows`, not in `top1_equal`, with a cosine of 0 and a relative error of 1."""

    rows: int = 0
    ranked: int = 0
    top1_equal: int = 0
    cosine: float = 0.0
    relative_error: float = 0.0
    incomparable: int = 0

    def plus(self, other: OutputAgreement) -> OutputAgreement:
        """Of this worker and another, or of earlier requests and later ones."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return OutputAgreement(*(one + two for one, two in pairs))


@dataclass(frozen=True)
class ShadowCounts:
    """Requests that stable answered and that were also run on this candidate, for comparison. Their attempts are
    counted here and nowhere else: they would say nothing of what clients met.

    `mirrored` were answered by both. `dropped` should have run by the share, and did not since an engine had work to
    do. `failed` is by class and `compute` as in `AttemptCounts`. `outputs` is by the output's name; very large outputs
    are not compared, of large ones only the first rows."""

    mirrored: int = 0
    dropped: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    compute: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    outputs: Mapping[str, OutputAgreement] = field(default_factory=dict)


@dataclass(frozen=True)
class AttemptCounts:
    """Attempts by the engine that they were routed to, before retry, hedge or fallback. `failed` is by class.
    `compute` is by batch bucket: histogram of compute seconds (see `histogram`). `shadow`: None if there was none.
    `synthetic`: so many of them were golden samples that the worker ran since too few requests came."""

    ok: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    abandoned: int = 0
    compute: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    shadow: ShadowCounts | None = field(default=None, metadata=LATER)
    synthetic: int = field(default=0, metadata=LATER)


class MemoryPolicy(str, enum.Enum):
    """How a worker changes engines. Availability: the new one is loaded beside the old one, which serves on. Resource:
    the worker leaves service, unloads the old one and loads the new one, so that memory holds one at a time."""

    AVAILABILITY = "Availability"
    RESOURCE = "Resource"


@dataclass(frozen=True)
class MemoryReport:
    """The last decision on memory: by which policy an engine was loaded, or would have to be, and why, in a sentence.
    Bytes that it needs by its manifest (its files in memory included, no margin) and that were free at that moment;
    None where the worker cannot know."""

    policy: MemoryPolicy
    reason: str
    need_host_bytes: int
    need_device_bytes: int
    free_host_bytes: int | None = None
    free_device_bytes: int | None = None


@dataclass(frozen=True)
class ModelReport:
    """`windows`: window id -> manifest digest -> counts; the newest few windows. `flip_seconds` is how long the last
    change of routes took; `routed_at` when (seconds since the epoch, worker's clock)."""

    engines: tuple[EngineReport, ...]
    routes: Routes
    windows: Mapping[str, Mapping[str, AttemptCounts]]
    flip_seconds: float | None = None
    routed_at: float | None = None
    memory: MemoryReport | None = field(default=None, metadata=LATER)


class WorkerState(str, enum.Enum):
    STARTING = "Starting"
    NO_ENGINE = "NoEngine"  # nothing in the pointer for this load key
    SERVING = "Serving"
    NOT_SERVING = "NotServing"  # its engine cannot be loaded or its hosts are down
    DRAINING = "Draining"


@dataclass(frozen=True)
class Report:
    """Answer to GET report. `version` rises with every change that the operator may care about."""

    SCHEMA: ClassVar[str] = "trtmodel.io/report/v1"

    version: int
    pod: str
    pod_uid: str
    load_key: LoadKey
    driver: str
    state: WorkerState
    message: str
    fence: Fence
    pointer_sequence: int
    key_ids: tuple[str, ...]
    models: Mapping[str, ModelReport]


@dataclass(frozen=True)
class ControlError:
    """Body of a refused control request. With 409, `held` is the fence that the worker holds."""

    SCHEMA: ClassVar[str] = "trtmodel.io/control-error/v1"

    reason: str
    message: str
    held: Fence | None = None


@dataclass(frozen=True)
class PointerEntry:
    """One revision, for every load key that it was built for (load key as text)."""

    revision: str
    artifacts: Mapping[str, SignedArtifact]


@dataclass(frozen=True)
class BootPointer:
    """What a worker starts with when no operator is there. Lives in a ConfigMap; does not expire."""

    SCHEMA: ClassVar[str] = "trtmodel.io/pointer/v1"

    model: ModelRef
    storage: Storage
    sequence: int
    stable: PointerEntry
    standby: PointerEntry | None = None

    def text(self) -> bytes:
        """The exact bytes that are signed and stored."""
        return dumps(self)
