"""URIs of sources and data sets: s3://bucket/key, http(s)://..., file:///path; with a "/" at the end all files below.

Keys and paths are taken byte for byte: '%20', '#', '?', '+', '//' and '..' in an s3:// or file:// URI mean themselves,
as they do for the aws command line. The local copy is named by its content, so no key can lead a path astray.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.errors import StorageError

_QUERY = re.compile(r"(https?://[^\s?#'\"]+)\?[^\s'\"]*[^\s'\":,;.)]", re.IGNORECASE)


def without_queries(text: str) -> str:
    """`text` for a log or a status: what follows the "?" of an address may be a signature or a token that lets its
    reader in, as that of a presigned URL."""
    return _QUERY.sub(r"\1?...", text)


@dataclass(frozen=True)
class Location:
    """A parsed URI. `bucket` is empty but for s3. `key` is the key, the path without its first "/" or the whole URL; of
    a folder it ends in "/"."""

    uri: str
    scheme: str
    bucket: str
    key: str

    @property
    def folder(self) -> bool:
        return self.key.endswith("/")


def parse(uri: str) -> Location:
    """Raises StorageError (SourceNotFound) with what is wrong with the URI."""
    scheme, separator, rest = uri.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in ("s3", "http", "https", "file"):
        raise _bad(uri, "it must start with s3://, https://, http:// or file:///")
    if scheme == "s3":
        bucket, _, key = rest.partition("/")
        if not bucket or not key:
            raise _bad(uri, "it must be s3://<bucket>/<key>")
        return Location(uri, scheme, bucket, key)
    if scheme == "file":
        if not rest.startswith("/"):
            raise _bad(uri, "it must be file:// and an absolute path, so with three slashes")
        return Location(uri, scheme, "", rest.lstrip("/"))
    if rest.endswith("/"):
        raise _bad(uri, "a folder behind https:// cannot be listed: name the .onnx file, or use s3:// or file:///")
    return Location(uri, scheme, "", uri)


def _bad(uri: str, why: str) -> StorageError:
    return StorageError(Reason.SOURCE_NOT_FOUND, f"{uri[:300]!r}: {why}")
