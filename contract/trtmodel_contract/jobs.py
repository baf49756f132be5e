"""What a Job is told (one JSON document in the environment) and what it answers (its termination message)."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from trtmodel_contract.codec import LATER, dumps
from trtmodel_contract.gate import GateFigures, Task, Thresholds
from trtmodel_contract.identity import EngineSettings, LoadKey, ModelRef, Storage, short_hash
from trtmodel_contract.manifest import TensorSpec
from trtmodel_contract.text import cut_json

TASK_ENV = "TRTMODEL_TASK"
TERMINATION_MESSAGE_BYTES = 4096  # the kubelet cuts what is longer, and cut JSON is no JSON
MESSAGE_BYTES = 700  # what a message keeps of itself where not everything fits
CREDENTIALS_DIR_ENV = "TRTMODEL_CREDENTIALS_DIR"  # a mounted Secret: files AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY


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
    """Find out what the source is, whether it can work, and what exists already. Takes no GPU.

    `cluster` (a uid; '': the Job pins nothing) and `keep` decide what the collector leaves alone, not what is resolved:
    leave both out of a hash that says whether to resolve again. `keep`: the digests of *all* manifests that the model
    lives on, history included; None: not told, so that old pins stay."""

    SCHEMA: ClassVar[str] = "trtmodel.io/resolve-task/v1"

    model: ModelRef
    source_uri: str
    source_pin: str
    storage: Storage
    engine: EngineSettings
    calibration: CalibrationRequest | None
    dataset: DataSet
    verify_task: Task
    cluster: str = field(default="", metadata=LATER)
    keep: tuple[str, ...] | None = field(default=None, metadata=LATER)


@dataclass(frozen=True)
class BuildTask:
    """Build, prove and publish one engine on the node where this runs. `cluster` as in ResolveTask."""

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
    cluster: str = field(default="", metadata=LATER)


@dataclass(frozen=True)
class CollectTask:
    """Remove what nothing needs from the bucket of a namespace; with `model`, what only that model of `cluster` pinned,
    and its pins: for a TRTModel that was deleted with deletionPolicy Delete. Without `delete` nothing is changed."""

    SCHEMA: ClassVar[str] = "trtmodel.io/collect-task/v1"

    namespace: str
    storage: Storage
    cluster: str
    model: ModelRef | None = None
    delete: bool = False
    grace_seconds: int = 172800


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
class CollectResult:
    """`deleted` engines with their figures and blobs (or would be, without `delete`); `waiting` ones are out of use
    and go the next time; `kept` are pinned or young. `freed_bytes` counts every object that was removed."""

    deleted: int
    waiting: int
    kept: int
    freed_bytes: int


@dataclass(frozen=True)
class JobResult:
    """The termination message of a Job's container."""

    SCHEMA: ClassVar[str] = "trtmodel.io/result/v1"

    reason: Reason
    message: str
    resolve: ResolveResult | None = None
    build: BuildResult | None = None
    collect: CollectResult | None = field(default=None, metadata=LATER)

    def to_termination_message(self) -> bytes:
        """At most 4,096 bytes, whatever is in it. What does not fit goes in this order: the end of the message, all
        but the worst output of each check, tensors, found artifacts (the operator then builds what it might have
        reused, which is slow but right)."""
        for candidate in self._ever_shorter():
            data = dumps(candidate)
            if len(data) <= TERMINATION_MESSAGE_BYTES:
                return data
        raise AssertionError("the last of them has only a reason and a short message")

    def _ever_shorter(self) -> Iterator[JobResult]:
        # Messages quote paths and foreign errors: half a surrogate pair (a file name that is no UTF-8) cannot be sent.
        whole = dataclasses.replace(self, message=self.message.encode("utf-8", "replace").decode())
        yield whole
        brief = dataclasses.replace(whole, message=cut_json(whole.message, MESSAGE_BYTES))
        yield brief
        brief = dataclasses.replace(
            brief,
            resolve=brief.resolve and dataclasses.replace(brief.resolve, found=_brief(brief.resolve.found)),
            build=brief.build and dataclasses.replace(brief.build, artifact=_brief((brief.build.artifact,))[0]),
        )
        yield brief
        if brief.resolve is not None:
            bare = dataclasses.replace(brief.resolve, inputs=(), outputs=())
            for found in (bare.found, bare.found[:3], bare.found[:1], ()):
                yield dataclasses.replace(brief, resolve=dataclasses.replace(bare, found=found))
        what = "The result does not fit into the 4,096 bytes of a termination message: a name in it is far too long. "
        yield JobResult(Reason.INTERNAL, what + cut_json(whole.message, MESSAGE_BYTES))


def _brief(found: tuple[FoundArtifact, ...]) -> tuple[FoundArtifact, ...]:
    return tuple(dataclasses.replace(f, figures=f.figures and _brief_figures(f.figures)) for f in found)


def _brief_figures(figures: GateFigures) -> GateFigures:
    outputs = {_brief_name(name): output for name, output in figures.worst().outputs.items()}
    return dataclasses.replace(figures, outputs=outputs, shapes_checked=figures.shapes_checked[:16])


def _brief_name(name: str) -> str:
    """Long names keep their end, which tells outputs apart, and a hash, so that no two become one."""
    return name if len(name) <= 60 else f"{short_hash(name)}...{cut_json(name[-40:], 100)}"
