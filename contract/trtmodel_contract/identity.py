"""Who is who: the source, the revision, the load key.

source sha256 --+
engine settings +--> recipe --> revision (which engine is meant)
calibration ----+
runtime and device ---------> load key  (where its bytes can be loaded)
manifest bytes -------------> digest    (which bytes: two builds of one key are not identical)
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trtmodel_contract.codec import LATER, canonical, encode, sha256_hex

REVISION_LENGTH = 10
_DIGEST = re.compile(r"[0-9a-f]{64}")


def require_sha256(name: str, value: str) -> None:
    """Raises ValueError unless `value` is 64 lower-case hex digits."""
    if not _DIGEST.fullmatch(value):
        raise ValueError(f"{name} must be 64 lower-case hex digits, not {value[:80]!r}")


def source_identity(files: Iterable[tuple[str, str]]) -> str:
    """Identity of a source: the content sha256 of its only file, or of all its files.

    `files` are pairs (path relative to the source, sha256 of the content). One file is its own identity, so that
    `sha256sum model.onnx` gives the pin; several are hashed together in the order of their names.
    """
    listed = sorted(files)
    if not listed:
        raise ValueError("a source has at least one file")
    for path, digest in listed:
        require_sha256(f"the digest of {path}", digest)
    if len(listed) == 1:
        return listed[0][1]
    return sha256_hex(canonical([list(pair) for pair in listed]))


@dataclass(frozen=True)
class ShapeRange:
    """The shapes that a profile allows for one input: element-wise min <= opt <= max, batch first."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.min) == len(self.opt) == len(self.max):
            raise ValueError("min, opt and max of a profile must have the same rank")
        for low, best, high in zip(self.min, self.opt, self.max, strict=True):
            if not 1 <= low <= best <= high:
                raise ValueError(
                    f"a profile needs 1 <= min <= opt <= max in every dimension, not {low}, {best}, {high}"
                )


@dataclass(frozen=True)
class Profile:
    """An optimization profile: a range of shapes for every dynamic input."""

    inputs: Mapping[str, ShapeRange]


@dataclass(frozen=True)
class KeepPrecision:
    """Nodes, by name pattern or by operator type (such as "Softmax"), that keep another precision than the engine's."""

    nodes: tuple[str, ...]
    precision: str = "FP32"
    operators: tuple[str, ...] = field(default=(), metadata=LATER)


@dataclass(frozen=True)
class EngineSettings:
    """What the builder is told, after the tier's changes. A field at its default is not part of the revision."""

    runtime: str
    precision: str = "FP32"
    keep_precision: KeepPrecision | None = None
    profiles: tuple[Profile, ...] = ()
    workspace_bytes: int | None = None
    optimization_level: int | None = None
    simplify: bool = False


@dataclass(frozen=True)
class Calibration:
    """How INT8 ranges are found. `digest` is the data set's content, so that moving it changes nothing."""

    digest: str
    samples: int = 500
    method: str = "Entropy"
    per_channel: bool = True


@dataclass(frozen=True)
class Recipe:
    """Everything that decides an engine, and nothing else."""

    source_sha256: str
    engine: EngineSettings
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        require_sha256("the source's sha256", self.source_sha256)


def revision(recipe: Recipe) -> str:
    """10 hex digits that name the engine that `recipe` describes."""
    return sha256_hex(canonical(encode(recipe, omit_defaults=True)))[:REVISION_LENGTH]


@dataclass(frozen=True)
class LoadKey:
    """What decides whether an engine's bytes can be loaded, known before anything is loaded.

    For a GPU: runtime, exact version, device name, compute capability, MIG profile. For the CPU: runtime, version,
    instruction set (ONNX Runtime's optimised graphs use layouts of the machine they were made on). A worker that has
    not looked at its machine yet knows no more than the runtime.
    """

    runtime: str
    version: str
    device: str
    capability: str = ""
    mig: str = ""

    @property
    def known(self) -> bool:
        """Whether it names a machine, so that an engine can be found or built for it."""
        return bool(self.version and self.device)

    def __str__(self) -> str:
        parts = (self.runtime, self.version, self.device, self.capability, self.mig)
        return "-".join(_slug(part) for part in parts if part)


@functools.lru_cache(maxsize=1024)
def _slug(part: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-")


def short_hash(*parts: str, length: int = 10) -> str:
    """A short hex hash for names; parts are delimited, so that ("ab", "c") differs from ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:".encode() + part.encode())
    return digest.hexdigest()[:length]


@dataclass(frozen=True)
class ModelRef:
    """One TRTModel. The uid tells a re-created namesake from the original."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True)
class Storage:
    """Where artifacts live. Credentials are not part of it: they are mounted files or the pod's own identity.
    `ca_bundle`: PEM certificates that are trusted beside those of the image, also for sources behind https://. No part
    of the revision."""

    bucket: str
    prefix: str = "trtmodel"
    endpoint: str = ""
    region: str = ""
    ca_bundle: str = field(default="", metadata=LATER)
