"""The manifest: the one document that names every byte of an engine. Its own sha256 is the artifact's digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from trtmodel_contract.codec import LATER, dumps, sha256_hex
from trtmodel_contract.identity import LoadKey, Profile, require_sha256

MEASURED_LANES = 2


@dataclass(frozen=True)
class Blob:
    """Bytes under ``blobs/sha256/<digest>``."""

    digest: str
    size: int

    def __post_init__(self) -> None:
        require_sha256("a blob's digest", self.digest)


@dataclass(frozen=True)
class TensorSpec:
    """An input or output. `datatype` is a name of the Open Inference Protocol (FP32, INT64, BYTES ...); -1 in
    `shape` is a dynamic dimension."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Golden:
    """Inputs, and what the *built* engine answered to them when it was built.

    The blob is an npz with arrays ``i0, i1 ...`` and ``o0, o1 ...`` in the manifest's order of inputs and outputs
    (tensor names may hold characters that no file name allows). `rows` is the batch size. `tolerances` is by output
    name: max(4x the spread over reloads and lanes, the floor of the data type), absolute.
    """

    blob: Blob
    rows: int
    tolerances: Mapping[str, float]


@dataclass(frozen=True)
class MemoryNeed:
    """Measured peak need in bytes, from before the runtime was initialised to after warm-up, of a host with
    MEASURED_LANES lanes. `lane_bytes`: of the device, for each further lane; 0 where that was not measured."""

    device_bytes: int
    host_bytes: int
    lane_bytes: int = field(default=0, metadata=LATER)


@dataclass(frozen=True)
class Manifest:
    """One built engine. Written last and never changed: it is the commit marker.

    `build` holds the builder's settings by name (enum numbers differ between TensorRT versions).
    """

    SCHEMA: ClassVar[str] = "trtmodel.io/manifest/v1"

    revision: str
    load_key: LoadKey
    number: int
    driver: str
    build: Mapping[str, str]
    source_sha256: str
    plan: Blob
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    profiles: tuple[Profile, ...]
    memory: MemoryNeed
    golden: tuple[Golden, ...]
    tools: Mapping[str, str]
    created_at: str

    def digest(self) -> str:
        return sha256_hex(dumps(self))
