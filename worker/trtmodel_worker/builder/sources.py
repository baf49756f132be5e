"""What both Jobs fetch: the source, the data set, the calibration data; each with what a message calls it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.identity import Calibration, Recipe, Storage, revision
from trtmodel_contract.identity import EngineSettings as Engine
from trtmodel_contract.jobs import CalibrationRequest, DataSet

from trtmodel_worker.storage import Fetched, Source, StorageError, fetch_source, fetch_uri
from trtmodel_worker.storage.shards import fetch_folder


@dataclass(frozen=True)
class Place:
    """Where fetched files go, and with which rights they are fetched."""

    storage: Storage
    credentials_dir: Path | None
    cache: Path

    def fetch(self, what: str, uri: str) -> Fetched:
        """A file, or a folder of npz files. Raises StorageError whose message starts with `what`, the field that named
        the URI."""
        try:
            if uri.endswith("/"):
                from trtmodel_worker.builder.dataset import SHARD  # NumPy

                return fetch_folder(uri, self.storage, self.credentials_dir, self.cache, SHARD)
            return fetch_uri(uri, self.storage, self.credentials_dir, self.cache)
        except StorageError as e:
            e.message = f"{what}: {e.message}"
            raise

    def source(self, uri: str, known: str = "") -> Source:
        """The model with all its files. One of identity `known` is taken from the cache, if it is there. Raises
        StorageError."""
        try:
            return fetch_source(uri, self.storage, self.credentials_dir, self.cache, known)
        except StorageError as e:
            e.message = f"source: {e.message}"
            raise

    def dataset(self, data: DataSet) -> Fetched:
        return self.fetch("verify.dataset", data.uri)

    def calibration(self, request: CalibrationRequest) -> Fetched:
        return self.fetch("engine.calibration", request.data.uri)


def used_calibration(engine: Engine, calibration: CalibrationRequest | None) -> CalibrationRequest | None:
    """Only INT8 is calibrated; for other precisions the field has no meaning and decides nothing."""
    return calibration if engine.precision == "INT8" else None


def revision_of(
    source_sha256: str, engine: Engine, calibration: CalibrationRequest | None, calibration_digest: str
) -> str:
    used = None
    if calibration is not None:
        used = Calibration(calibration_digest, calibration.data.samples, calibration.method, calibration.per_channel)
    return revision(Recipe(source_sha256, engine, used))
