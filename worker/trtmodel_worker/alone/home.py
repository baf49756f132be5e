"""The directory where one machine keeps sources and engines, and how a source comes into it.

<home>/store/engines/...    a bucket in a directory, laid out as in S3
<home>/files/...            fetched sources and data sets, of which those unused for longest go (TRTMODEL_CACHE_BYTES)
<home>/work-*, run-*        of a command that runs; what a killed one left goes when the next one starts alone
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.identity import ModelRef, Storage
from trtmodel_contract.jobs import Reason

from trtmodel_worker.builder.dataset import SHARD
from trtmodel_worker.storage import ArtifactStore, Fetched, NotFound, Source, StorageError, fetch_source, fetch_uri
from trtmodel_worker.storage.cache import shrink, stated_limit
from trtmodel_worker.storage.shards import fetch_folder

NAMESPACE = "alone"
BUCKET = "engines"
DEFAULT_CACHE_BYTES = 20 << 30


def default_home() -> Path:
    """With a "~" that may be unknown: a container's user need not have a home."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache) / "trtmodel" / NAMESPACE


def _limit() -> int:
    """How many bytes of fetched sources and data sets are kept. Raises StorageError."""
    try:
        limit = stated_limit(os.environ)
    except ValueError as e:
        raise StorageError(Reason.INTERNAL, str(e)) from e
    return DEFAULT_CACHE_BYTES if limit is None else limit


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
                shrink(self.files, _limit())
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
        """A local copy of the file `named`: a path, or an s3://, https:// or file:// URI. Raises StorageError, whose
        message begins with `what`."""
        uri = named if "://" in named else _file_uri(what, named)
        with _said(what, uri):
            return fetch_uri(uri, _as_the_aws_command(), None, self.files)

    def data(self, what: str, named: str) -> tuple[Fetched, str]:
        """A local copy of a data set, and the URI by which it is fetched again: a file as `fetch` takes it, or a folder
        of npz files. Raises StorageError."""
        local = "://" not in named and _is(_path(named).is_dir)
        if not local and not named.endswith("/"):
            fetched = self.fetch(what, named)
            return fetched, f"file://{fetched.path}"
        uri = f"file://{_path(named)}/" if local else named
        with _said(what, uri):
            folder = fetch_folder(uri, _as_the_aws_command(), None, self.files, SHARD)
        return folder, f"file://{folder.path}/"

    def source(self, what: str, named: str) -> Source:
        """The same of a model and its external data. `named` may be a folder, too: one that holds one model."""
        folder = "://" not in named and _is(_path(named).is_dir)
        uri = f"file://{_path(named)}/" if folder else named
        uri = uri if "://" in uri else _file_uri(what, named)
        with _said(what, uri):
            return fetch_source(uri, _as_the_aws_command(), None, self.files)


def _as_the_aws_command() -> Storage:
    """Where s3:// URIs are; the credentials are found by boto3 itself."""
    environment = os.environ.get
    endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL") or ""
    return Storage("", endpoint=endpoint, region=environment("AWS_REGION") or "")


@contextlib.contextmanager
def _said(what: str, uri: str) -> Iterator[None]:
    try:
        yield
    except StorageError as e:
        hint = "; without a cluster, credentials come from the environment (AWS_ACCESS_KEY_ID) or ~/.aws"
        denied = e.reason is Reason.ACCESS_DENIED and uri.startswith("s3://")
        e.message = f"{what}: {e.message}{hint if denied else ''}"
        raise


def _path(named: str) -> Path:
    path = Path(named)
    with contextlib.suppress(RuntimeError):  # nobody's home: a name as any other
        path = path.expanduser()
    return path.absolute()


def _is(question: Callable[[], bool]) -> bool:
    """Of a path that may be one that no disk can hold, or that may not be looked at."""
    try:
        return question()
    except OSError:
        return False


def _file_uri(what: str, named: str) -> str:
    path = _path(named)
    if _is(path.is_dir):
        raise StorageError(Reason.SOURCE_NOT_FOUND, f"{what}: {named} is a directory: name one file")
    if not _is(path.exists):
        raise NotFound(f"{what}: there is no file {named} (looked for {path})")
    return f"file://{path}"
