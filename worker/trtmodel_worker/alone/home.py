"""The directory where one machine keeps sources and engines, and how a source comes into it.

<home>/store/engines/...    a bucket in a directory, laid out as in S3
<home>/files/sha256/...     fetched sources and data sets
<home>/work-*, run-*        of a command that runs; what a killed one left goes when the next one starts alone
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.identity import ModelRef, Storage
from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage import ArtifactStore, Fetched, NotFound, StorageError, fetch_uri

NAMESPACE = "alone"
BUCKET = "engines"


def default_home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "trtmodel" / NAMESPACE


def model_ref(name: str) -> ModelRef:
    return ModelRef(NAMESPACE, name, NAMESPACE)


@dataclass(frozen=True)
class Home:
    root: Path

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Every command is in here while it runs. Raises StorageError."""
        try:
            for folder in (self.root / "store" / BUCKET, self.files):
                folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as e:
            text = f"{self.root} cannot be used: {e.strerror}: name a directory that you may write to with --cache"
            raise StorageError(Reason.ACCESS_DENIED, text) from e
        try:
            with contextlib.suppress(OSError):  # another command runs, or the file system knows no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for left in (*self.root.glob("work-*"), *self.root.glob("run-*")):
                    shutil.rmtree(left, ignore_errors=True)
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield
        finally:
            os.close(descriptor)

    @property
    def storage(self) -> Storage:
        return Storage(BUCKET, endpoint=f"file://{self.root / 'store'}")

    @property
    def files(self) -> Path:
        return self.root / "files"

    def store(self) -> ArtifactStore:
        return ArtifactStore(self.storage, NAMESPACE, None)

    def fetch(self, what: str, named: str) -> Fetched:
        """A local copy of `named`: a path, or an s3://, https:// or file:// URI. Raises StorageError, beginning with
        `what`."""
        uri = named if "://" in named else _file_uri(what, named)
        environment = os.environ.get
        # As the aws command has it; the credentials are found by boto3 itself.
        endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL") or ""
        source = Storage("", endpoint=endpoint, region=environment("AWS_REGION") or "")
        try:
            return fetch_uri(uri, source, None, self.files)
        except StorageError as e:
            hint = "; without a cluster, credentials come from the environment (AWS_ACCESS_KEY_ID) or ~/.aws"
            denied = e.reason is Reason.ACCESS_DENIED and uri.startswith("s3://")
            e.message = f"{what}: {e.message}{hint if denied else ''}"
            raise


def _file_uri(what: str, named: str) -> str:
    path = Path(named).expanduser().absolute()
    if path.is_dir():
        raise StorageError(Reason.SOURCE_NOT_FOUND, f"{what}: {named} is a directory: name one file")
    if not path.exists():
        raise NotFound(f"{what}: there is no file {named} (looked for {path})")
    return f"file://{path}"
