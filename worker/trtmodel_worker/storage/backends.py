"""Where objects are: S3, or a directory (a volume; for one machine without S3). One small protocol for both."""

from __future__ import annotations

import contextlib
import email.utils
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.cache import Reader
from trtmodel_worker.storage.errors import NotFound, StorageError, from_exception, unavailable

CONNECT_TIMEOUT_SECONDS = 3
READ_TIMEOUT_SECONDS = 20
MULTIPART_BYTES = 64 << 20


@dataclass(frozen=True)
class Entry:
    """An object as the store lists it. `modified`: when it was last written, in seconds since 1970 by the store's own
    clock, to be compared with `ObjectStore.now` only."""

    key: str
    size: int
    modified: float


class ObjectStore(Protocol):
    """Objects by key in one bucket. Everything raises StorageError."""

    def where(self, key: str) -> str:
        """How a message names the object."""
        ...

    def open(self, key: str) -> contextlib.AbstractContextManager[Reader]: ...

    def list(self, prefix: str) -> Iterator[str]: ...

    def entries(self, prefix: str) -> Iterator[Entry]: ...

    def stat(self, key: str) -> Entry | None:
        """None: there is no such object."""
        ...

    def now(self) -> float:
        """The store's clock: that of this machine may be off by hours (field case D-12)."""
        ...

    def delete(self, key: str) -> None:
        """Remove one object; that it is gone already is no error. There is no way to remove many at once: stores
        demand different checksums for it (field case D-03)."""
        ...

    def copy(self, key: str, to: str) -> None:
        """Within the bucket, by the store itself."""
        ...

    def drop_unfinished(self, prefix: str, before: float, /) -> int:
        """Abort uploads in pieces that began before that time: nobody sees their parts, and they are billed (field case
        D-15). Returns how many."""
        ...

    def put(self, key: str, content: Path | bytes) -> None:
        """Write a file or bytes; what was there is replaced in one step."""
        ...

    def put_new(self, key: str, data: bytes) -> bool:
        """Write if nothing is there. False: somebody was first."""
        ...


class DirectoryStore:
    """A directory as a bucket."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def where(self, key: str) -> str:
        return f"file://{self._root / key}"

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        try:
            f = (self._root / key).open("rb")
        except OSError as e:
            raise from_exception(e, self.where(key)) from e
        with f:
            yield f

    def list(self, prefix: str) -> Iterator[str]:
        base = self._root / prefix
        try:
            yield from sorted(str(p.relative_to(self._root)) for p in base.rglob("*") if p.is_file())
        except OSError as e:
            raise from_exception(e, self.where(prefix)) from e

    def entries(self, prefix: str) -> Iterator[Entry]:
        for key in self.list(prefix):
            entry = self.stat(key)
            if entry is not None:  # removed since it was listed
                yield entry

    def stat(self, key: str) -> Entry | None:
        try:
            found = (self._root / key).stat()
        except FileNotFoundError:
            return None
        except OSError as e:
            raise from_exception(e, self.where(key)) from e
        return Entry(key, found.st_size, found.st_mtime)

    def now(self) -> float:
        return time.time()

    def delete(self, key: str) -> None:
        try:
            (self._root / key).unlink(missing_ok=True)
        except OSError as e:
            raise from_exception(e, self.where(key)) from e

    def copy(self, key: str, to: str) -> None:
        self.put(to, self._root / key)

    def drop_unfinished(self, _prefix: str, _before: float, /) -> int:
        return 0  # what a killed writer leaves here is a file like others

    def put(self, key: str, content: Path | bytes) -> None:
        with self._written(key, content) as temporary:
            temporary.replace(self._root / key)

    def put_new(self, key: str, data: bytes) -> bool:
        with self._written(key, data) as temporary:
            try:
                os.link(temporary, self._root / key)
            except FileExistsError:
                return False
        return True

    @contextlib.contextmanager
    def _written(self, key: str, content: Path | bytes) -> Iterator[Path]:
        target = self._root / key
        temporary = target.parent / f".{uuid.uuid4().hex}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                shutil.copyfile(content, temporary)
            yield temporary
        except OSError as e:
            raise from_exception(e, self.where(key)) from e
        finally:
            temporary.unlink(missing_ok=True)


class S3Client:
    """A boto3 client that follows its credential files: they are re-read on each use, since a mounted Secret changes
    in place when keys are rotated."""

    def __init__(self, endpoint: str, region: str, credentials_dir: str | Path | None) -> None:
        self._endpoint, self._region = endpoint, region
        self._directory = Path(credentials_dir) if credentials_dir else None
        self._lock = threading.Lock()
        self._held: tuple[tuple[str, str] | None, Any] | None = None

    def get(self) -> Any:
        keys = _read_keys(self._directory)
        with self._lock:
            if self._held is None or self._held[0] != keys:
                self._held = (keys, self._create(keys))
            return self._held[1]

    def _create(self, keys: tuple[str, str] | None) -> Any:
        import boto3  # heavy, and not needed for other backends
        from botocore.config import Config

        config = Config(
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            read_timeout=READ_TIMEOUT_SECONDS,
            retries={"mode": "standard", "total_max_attempts": 3},
            # Since boto3 1.36 the default sends trailing checksums, which S3-compatible stores refuse with 411.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path"} if self._endpoint else {},
        )
        access, secret = keys or (None, None)
        session = boto3.session.Session(aws_access_key_id=access, aws_secret_access_key=secret)
        region = self._region or session.region_name or "us-east-1"
        return session.client("s3", endpoint_url=self._endpoint or None, region_name=region, config=config)


class S3Store:
    """One bucket."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def where(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        with self._mapped(key):
            body = self._client.get().get_object(Bucket=self._bucket, Key=key)["Body"]
        with contextlib.closing(body), self._mapped(key):
            yield body

    def list(self, prefix: str) -> Iterator[str]:
        return (entry.key for entry in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._mapped(prefix):
            pages = self._client.get().get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                for item in page.get("Contents", ()):
                    yield Entry(item["Key"], item["Size"], item["LastModified"].timestamp())

    def stat(self, key: str) -> Entry | None:
        try:
            with self._mapped(key):
                found = self._client.get().head_object(Bucket=self._bucket, Key=key)
        except NotFound:
            return None
        return Entry(key, found["ContentLength"], found["LastModified"].timestamp())

    def now(self) -> float:
        with self._mapped(""):
            answer = self._client.get().head_bucket(Bucket=self._bucket)
            date: str = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
        return email.utils.parsedate_to_datetime(date).timestamp()

    def delete(self, key: str) -> None:
        with self._mapped(key):
            self._client.get().delete_object(Bucket=self._bucket, Key=key)

    def copy(self, key: str, to: str) -> None:
        with self._mapped(key):
            self._client.get().copy({"Bucket": self._bucket, "Key": key}, self._bucket, to)

    def drop_unfinished(self, prefix: str, before: float, /) -> int:
        dropped = 0
        with self._mapped(prefix):
            client = self._client.get()
            pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            for page in pages:
                for upload in page.get("Uploads", ()):
                    if upload["Initiated"].timestamp() < before:
                        client.abort_multipart_upload(
                            Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        dropped += 1
        return dropped

    def put(self, key: str, content: Path | bytes) -> None:
        with self._mapped(key):
            client = self._client.get()
            if isinstance(content, bytes):
                client.put_object(Bucket=self._bucket, Key=key, Body=content)
            elif content.stat().st_size < MULTIPART_BYTES:
                with content.open("rb") as f:
                    client.put_object(Bucket=self._bucket, Key=key, Body=f)
            else:
                client.upload_file(str(content), self._bucket, key)

    def put_new(self, key: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        with self._mapped(key):
            try:
                self._client.get().put_object(Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*")
            except ClientError as e:
                status = e.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
                if status == 412:
                    return False
                if status == 409:  # ConditionalRequestConflict: another writer of this key is under way
                    raise unavailable(f"{self.where(key)}: another writer is under way, try again") from e
                raise
        return True

    @contextlib.contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            raise from_exception(e, self.where(key)) from e


def open_store(storage: Storage, bucket: str, credentials_dir: str | Path | None) -> ObjectStore:
    """The store of `bucket` at `storage.endpoint`. An endpoint ``file:///dir`` is a directory with buckets in it."""
    if storage.endpoint.startswith("file://"):
        root = Path(storage.endpoint.removeprefix("file://")) / bucket
        if not root.is_dir():
            text = f"{storage.endpoint}: there is no directory {bucket!r}: create it or correct spec.storage.bucket"
            raise StorageError(Reason.BUCKET_NOT_FOUND, text)
        return DirectoryStore(root)
    return S3Store(S3Client(storage.endpoint, storage.region, credentials_dir), bucket)


def _read_keys(directory: Path | None) -> tuple[str, str] | None:
    """None without both files: the pod's own identity is then used."""
    if directory is None:
        return None
    access, secret = directory / "AWS_ACCESS_KEY_ID", directory / "AWS_SECRET_ACCESS_KEY"
    if not access.is_file() or not secret.is_file():
        return None
    return access.read_text().strip(), secret.read_text().strip()
