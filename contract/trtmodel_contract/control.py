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

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from trtmodel_contract.codec import canonical, dumps, encode, sha256_hex
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
    """Manifest digests. `weight` is the percentage of requests that the candidate answers."""

    stable: str
    candidate: str = ""
    weight: int = 0


@dataclass(frozen=True)
class DesiredModel:
    """Everything that a worker should hold and route for one model. Engines that are not listed are released.
    A changed `window` starts new counters."""

    engines: tuple[DesiredEngine, ...]
    routes: Routes
    window: str


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
    """One engine of a worker. `message` says why it failed. `deaths` counts hosts that ended unasked."""

    revision: str
    manifest_digest: str
    role: Role
    state: EngineState
    reason: str = ""
    message: str = ""
    load_seconds: float | None = None
    deaths: int = 0


@dataclass(frozen=True)
class AttemptCounts:
    """Attempts by the engine that they were routed to, before retry, hedge or fallback. `failed` is by class.
    `compute` is by batch bucket: histogram of compute seconds (see `histogram`)."""

    ok: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)
    abandoned: int = 0
    compute: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelReport:
    """`windows`: window id -> manifest digest -> counts; the newest few windows. `flip_seconds` is how long the last
    change of routes took; `routed_at` when (seconds since the epoch, worker's clock)."""

    engines: tuple[EngineReport, ...]
    routes: Routes
    windows: Mapping[str, Mapping[str, AttemptCounts]]
    flip_seconds: float | None = None
    routed_at: float | None = None


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
