"""S3, and what speaks its protocol."""

from __future__ import annotations

import contextlib
import email.utils
import functools
import io
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from trtmodel_contract.identity import Storage

from trtmodel_worker.storage import credentials
from trtmodel_worker.storage.backends import Entry
from trtmodel_worker.storage.errors import (
    CREDENTIAL_CODES,
    Moved,
    NotFound,
    StorageError,
    from_exception,
    no_bucket,
    s3_code,
    unavailable,
)
from trtmodel_worker.storage.remote import Reader, Remote, Version, require_part
from trtmodel_worker.storage.trust import bundle_file

CONNECT_TIMEOUT_SECONDS = 3
READ_TIMEOUT_SECONDS = 20
MULTIPART_BYTES = 64 << 20
UPLOAD_PART_BYTES = 16 << 20
UPLOAD_CONNECTIONS = 4
ATTEMPTS = 3
PAUSES_SECONDS = (0.5, 2.0)
# Parts of an upload that was never completed cost money and are seen by nobody. Those that are older than any build
# may last belong to a dead process.
LEFT_OVER_SECONDS = 24 * 3600

T = TypeVar("T")
log = logging.getLogger("trtmodel.storage")


class S3Client:
    """A boto3 client that follows its credential files: they are re-read on each use, since a mounted Secret changes
    in place when keys are rotated."""

    def __init__(self, storage: Storage, credentials_dir: str | Path | None) -> None:
        self._endpoint, self._region, self._ca_bundle = storage.endpoint, storage.region, storage.ca_bundle
        self._directory = Path(credentials_dir) if credentials_dir else None
        self._lock = threading.Lock()
        self._held: tuple[credentials.Keys | None, Any] | None = None

    def call(self, action: Callable[[Any], T]) -> T:
        """`action` with the client; again if its keys are refused and the files hold others by now (they are replaced
        one after the other, and an old key may be withdrawn in the middle of a download)."""
        keys = credentials.read(self._directory)
        try:
            return action(self._client(keys))
        except Exception as e:
            now = credentials.read(self._directory)
            if s3_code(e) not in CREDENTIAL_CODES or now == keys:
                raise
        return action(self._client(now))

    def _client(self, keys: credentials.Keys | None) -> Any:
        with self._lock:
            if self._held is None or self._held[0] != keys:
                self._held = (keys, self._create(keys))
            return self._held[1]

    def _create(self, keys: credentials.Keys | None) -> Any:
        import boto3  # heavy, and not needed for other backends
        import botocore.session
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
        core = botocore.session.Session()
        core.register_component("data_loader", _descriptions())
        session = boto3.session.Session(
            botocore_session=core,
            aws_access_key_id=keys.access if keys else None,
            aws_secret_access_key=keys.secret if keys else None,
            aws_session_token=keys.token or None if keys else None,
        )
        return session.client(
            "s3",
            endpoint_url=self._endpoint or None,
            region_name=self._region or session.region_name or "us-east-1",
            verify=bundle_file(self._ca_bundle) if self._ca_bundle else None,
            config=config,
        )


@functools.cache
def _descriptions() -> Any:
    """Amazon's descriptions of its services: a megabyte of JSON, which every client of a process reads but once."""
    import botocore.loaders

    return botocore.loaders.create_loader()


class S3Store:
    """One bucket."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client, self._bucket = client, bucket

    def where(self, key: str) -> str:
        return f"s3://{self._bucket}/{key}"

    def remote(self, key: str) -> Remote:
        return S3Remote(self._client, self._bucket, key)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        with self.remote(key).open() as (_, reader):
            yield reader

    def list(self, prefix: str) -> Iterator[str]:
        return (entry.key for entry in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[Entry]:
        for page in self._pages("list_objects_v2", prefix):
            for item in page.get("Contents", ()):
                yield _entry(item["Key"], item["Size"], item)

    def stat(self, key: str) -> Entry | None:
        try:
            with self._mapped(key):
                found = self._client.call(lambda s3: s3.head_object(Bucket=self._bucket, Key=key))
        except NotFound:
            return None
        return _entry(key, found["ContentLength"], found)

    def now(self) -> float:
        try:
            with self._mapped(""):
                answer = self._client.call(lambda s3: s3.head_bucket(Bucket=self._bucket))
                date: str = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
        except NotFound as e:  # the answer to HEAD has no body, and so no word for what it is that is missing
            raise no_bucket(self.where("")) from e
        return email.utils.parsedate_to_datetime(date).timestamp()

    def delete(self, key: str) -> None:
        with self._mapped(key):
            self._client.call(lambda s3: s3.delete_object(Bucket=self._bucket, Key=key))

    def copy(self, key: str, to: str) -> None:
        source = {"Bucket": self._bucket, "Key": key}
        with self._mapped(key):
            self._client.call(lambda s3: s3.copy(source, self._bucket, to))

    def drop_unfinished(self, prefix: str, before: float, /) -> int:
        dropped = 0
        for page in self._pages("list_multipart_uploads", prefix):
            for upload in page.get("Uploads", ()):
                if upload["Initiated"].timestamp() < before:
                    self._abort(upload["Key"], upload["UploadId"])
                    dropped += 1
        return dropped

    def put(self, key: str, content: Path | bytes) -> None:
        for pause in (*PAUSES_SECONDS, None):
            try:
                return self._put(key, content)
            except StorageError as e:
                if not e.transient or pause is None:
                    raise
                log.warning("%s: trying again in %.1f s", e.message, pause)
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def put_new(self, key: str, data: bytes) -> bool:
        with self._mapped(key):
            try:
                self._client.call(lambda s3: s3.put_object(Bucket=self._bucket, Key=key, Body=data, IfNoneMatch="*"))
            except Exception as e:
                status = getattr(e, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
                if status == 412:
                    return False
                if status == 409:  # ConditionalRequestConflict: another writer of this key is under way
                    raise unavailable(f"{self.where(key)}: another writer is under way, try again") from e
                raise
        return True

    def _pages(self, what: str, prefix: str) -> Iterator[dict[str, Any]]:
        with self._mapped(prefix):
            yield from self._client.call(lambda s3: s3.get_paginator(what).paginate(Bucket=self._bucket, Prefix=prefix))

    def _abort(self, key: str, upload: str) -> None:
        with self._mapped(key):
            self._client.call(lambda s3: s3.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload))

    def _drop_left_overs(self, prefix: str) -> None:
        """Of writers that were killed. Without the right to do that it is left to the bucket's lifecycle rule."""
        try:
            dropped = self.drop_unfinished(prefix, self.now() - LEFT_OVER_SECONDS)
        except StorageError as e:
            log.warning("uploads that were never completed could not be removed: %s", e.message)
            return
        if dropped:
            log.info("%s: removed %d uploads that were never completed", self.where(prefix), dropped)

    def _put(self, key: str, content: Path | bytes) -> None:
        with self._mapped(key):
            if not isinstance(content, bytes) and content.stat().st_size >= MULTIPART_BYTES:
                self._drop_left_overs(key.rpartition("/")[0] + "/")
                self._client.call(lambda s3: self._upload(s3, key, content))
                return
            self._client.call(lambda s3: self._put_whole(s3, key, content))

    def _put_whole(self, s3: Any, key: str, content: Path | bytes) -> None:
        with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as body:
            s3.put_object(Bucket=self._bucket, Key=key, Body=body)

    def _upload(self, s3: Any, key: str, path: Path) -> None:
        """In parts; boto3 ends the upload when one fails, so that nothing is left."""
        from boto3.exceptions import S3UploadFailedError
        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(
            multipart_threshold=MULTIPART_BYTES,
            multipart_chunksize=UPLOAD_PART_BYTES,
            max_concurrency=UPLOAD_CONNECTIONS,
        )
        try:
            s3.upload_file(str(path), self._bucket, key, Config=config)
        except S3UploadFailedError as e:
            cause = e.__context__ if isinstance(e.__context__, Exception) else e
            # boto3 asks again when the answer to "complete" is lost, and then there is no such upload any more.
            if s3_code(cause) == "NoSuchUpload" and self._has(key, path.stat().st_size):
                return
            raise cause from e

    def _has(self, key: str, size: int) -> bool:
        try:
            return self.remote(key).look().size == size
        except StorageError:
            return False

    @contextlib.contextmanager
    def _mapped(self, key: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            raise from_exception(e, self.where(key)) from e


class S3Remote:
    """One object."""

    def __init__(self, client: S3Client, bucket: str, key: str) -> None:
        self._client, self._bucket, self._key = client, bucket, key
        self.what = f"s3://{bucket}/{key}"

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Version, Reader]]:
        with self._answer({}) as answer:
            yield _version(answer), _Body(answer["Body"])

    @contextlib.contextmanager
    def open_part(self, version: Version, start: int, end: int) -> Iterator[Reader]:
        wanted = {"Range": f"bytes={start}-{end - 1}", "IfMatch": version.tag}
        if version.id:
            wanted["VersionId"] = version.id
        with self._answer(wanted) as answer:
            require_part(self.what, answer.get("ContentRange", ""), version, start, end)
            if answer.get("ETag", version.tag) != version.tag:  # not every store looks at the condition
                raise Moved(self.what)
            yield _Body(answer["Body"])

    def look(self) -> Version:
        with self._mapped():
            return _version(self._client.call(lambda s3: s3.head_object(Bucket=self._bucket, Key=self._key)))

    @contextlib.contextmanager
    def _answer(self, wanted: dict[str, str]) -> Iterator[dict[str, Any]]:
        with self._mapped():
            answer = self._client.call(lambda s3: s3.get_object(Bucket=self._bucket, Key=self._key, **wanted))
        with contextlib.closing(answer["Body"]), self._mapped():
            yield answer

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            raise from_exception(e, self.what) from e


class _Body:
    def __init__(self, body: Any) -> None:
        # StreamingBody.read waits until all that was asked for is there, however long that takes; the stream below it
        # gives what has come, which is what tells a slow connection from a dead one.
        read1 = getattr(getattr(body, "_raw_stream", None), "read1", None)
        self._read: Callable[[int], bytes] = functools.partial(read1, decode_content=False) if read1 else body.read

    def read(self, amount: int, /) -> bytes:
        return self._read(amount)


def _version(answer: dict[str, Any]) -> Version:
    tag, version = answer.get("ETag", ""), answer.get("VersionId", "")
    return Version(answer.get("ContentLength"), tag, "" if version == "null" else version, ranges=bool(tag))


def _entry(key: str, size: int, found: dict[str, Any]) -> Entry:
    modified: float = found["LastModified"].timestamp()
    return Entry(key, size, modified, f"{found.get('ETag', '')} {modified}")
