"""What a Job is told (one JSON document in the environment) and what it answers (its termination message)."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import ClassVar

from trtmodel_contract.codec import dumps
from trtmodel_contract.gate import GateFigures, Task, Thresholds
from trtmodel_contract.identity import EngineSettings, LoadKey, ModelRef, Storage
from trtmodel_contract.manifest import TensorSpec

TASK_ENV = "TRTMODEL_TASK"
TERMINATION_MESSAGE_BYTES = 4096  # the kubelet cuts what is longer, and cut JSON is no JSON
CREDENTIALS_DIR_ENV = "TRTMODEL_CREDENTIALS_DIR"  # a mounted Secret: files accessKeyId and secretAccessKey


class Reason(str, enum.Enum):
    """Why a Job ended, in words that become the reason of a condition."""

    DONE = "Done"
    SOURCE_NOT_FOUND = "SourceNotFound"
    ACCESS_DENIED = "AccessDenied"
    BUCKET_NOT_FOUND = "BucketNotFound"
    STORAGE_UNAVAILABLE = "StorageUnavailable"
    SOURCE_CHANGED = "SourceChanged"
    DIGEST_MISMATCH = "DigestMismatch"
    MODEL_INVALID = "ModelInvalid"
    OPERATOR_UNSUPPORTED = "OperatorUnsupported"
    PROFILE_MISMATCH = "ProfileMismatch"
    PRECISION_UNSUPPORTED = "PrecisionUnsupported"
    DATASET_INVALID = "DatasetInvalid"
    GATE_FAILED = "GateFailed"
    GATE_INCONCLUSIVE = "GateInconclusive"
    BUILD_FAILED = "BuildFailed"
    NO_SPACE = "NoSpace"
    INTERNAL = "InternalError"


@dataclass(frozen=True)
class DataSet:
    """An npz: arrays named as the inputs, first axis samples, optional `labels`. `digest` is known after resolve."""

    uri: str
    samples: int
    digest: str = ""


@dataclass(frozen=True)
class CalibrationRequest:
    data: DataSet
    method: str = "Entropy"
    per_channel: bool = True


@dataclass(frozen=True)
class ResolveTask:
    """Find out what the source is, whether it can work, and what exists already. Takes no GPU."""

    SCHEMA: ClassVar[str] = "trtmodel.io/resolve-task/v1"

    model: ModelRef
    source_uri: str
    source_pin: str
    storage: Storage
    engine: EngineSettings
    calibration: CalibrationRequest | None
    dataset: DataSet
    verify_task: Task


@dataclass(frozen=True)
class BuildTask:
    """Build, prove and publish one engine on the node where this runs."""

    SCHEMA: ClassVar[str] = "trtmodel.io/build-task/v1"

    model: ModelRef
    source_uri: str
    source_sha256: str
    revision: str
    storage: Storage
    engine: EngineSettings
    calibration: CalibrationRequest | None
    dataset: DataSet
    verify_task: Task
    thresholds: Thresholds


@dataclass(frozen=True)
class FoundArtifact:
    """An engine of the wanted revision that is in the bucket. `figures` if the wanted data set was already run."""

    load_key: LoadKey
    manifest_digest: str
    number: int
    driver: str
    figures: GateFigures | None = None


@dataclass(frozen=True)
class ResolveResult:
    source_sha256: str
    source_bytes: int
    revision: str
    calibration_digest: str
    dataset_digest: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    found: tuple[FoundArtifact, ...] = ()


@dataclass(frozen=True)
class BuildResult:
    """`figures` is None only if the gate never ran. Seconds are wall-clock of each stage."""

    revision: str
    artifact: FoundArtifact
    reused: bool
    plan_bytes: int
    build_seconds: float
    gate_seconds: float
    published_at: str


@dataclass(frozen=True)
class JobResult:
    """The termination message of a Job's container."""

    SCHEMA: ClassVar[str] = "trtmodel.io/result/v1"

    reason: Reason
    message: str
    resolve: ResolveResult | None = None
    build: BuildResult | None = None

    def to_termination_message(self) -> bytes:
        """At most 4,096 bytes: first the message is cut, then tensors and found artifacts are left out (the operator
        then builds what it might have reused, which is slow but right)."""
        for candidate in (self, *self._shorter()):
            data = dumps(candidate)
            if len(data) <= TERMINATION_MESSAGE_BYTES:
                return data
        raise ValueError("a result without message, tensors and artifacts is longer than 4,096 bytes")

    def _shorter(self) -> tuple[JobResult, ...]:
        brief = dataclasses.replace(self, message=self.message[:700])
        if self.resolve is None:
            return (brief, dataclasses.replace(self, message=self.message[:200]))
        bare = dataclasses.replace(self.resolve, inputs=(), outputs=())
        return (
            brief,
            dataclasses.replace(brief, resolve=bare),
            dataclasses.replace(brief, resolve=dataclasses.replace(bare, found=bare.found[:3])),
            dataclasses.replace(brief, resolve=dataclasses.replace(bare, found=())),
        )
