"""What leaves or enters the pod as bytes: sources, data sets, artifacts. Verified by sha256 on the way in."""

from trtmodel_worker.storage.artifacts import ArtifactStore
from trtmodel_worker.storage.cache import Fetched, prune
from trtmodel_worker.storage.errors import NotFound, StorageError
from trtmodel_worker.storage.fetch import fetch_uri
from trtmodel_worker.storage.source import Source, fetch_source

__all__ = ["ArtifactStore", "Fetched", "NotFound", "Source", "StorageError", "fetch_source", "fetch_uri", "prune"]
