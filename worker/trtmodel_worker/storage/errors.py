"""What can go wrong with storage, each with the reason that becomes a condition and a sentence with the way out.

StorageError        reason, message; `transient` tells whether trying again may help
`-- NotFound        the object is not there (the bucket is)
"""

from __future__ import annotations

import errno
import http.client
import ssl
import urllib.error

from trtmodel_contract.jobs import Reason

_CLOCK = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "AuthorizationHeaderMalformed"}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "403", "401"}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
_MISSING = {"NoSuchKey", "404", "NotFound"}
_CHECKSUM = {"MissingContentLength", "411"}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


class StorageError(Exception):
    """Storage did not do what was asked."""

    def __init__(self, reason: Reason, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.transient = transient


class NotFound(StorageError):
    """The object does not exist."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.SOURCE_NOT_FOUND, message)


def unavailable(message: str) -> StorageError:
    return StorageError(Reason.STORAGE_UNAVAILABLE, message, transient=True)


def from_exception(error: Exception, what: str) -> StorageError:
    """The StorageError for whatever boto3, urllib or the file system raised while reading or writing `what`."""
    if isinstance(error, StorageError):
        return error
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return _from_s3(response, what)
    if isinstance(error, urllib.error.HTTPError):
        return _from_http(error, what)
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, OSError) and not isinstance(cause, (ssl.SSLError, ConnectionError, TimeoutError)):
        found = _from_os(cause, what)
        if found is not None:
            return found
    name = type(error).__name__
    if name in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
        text = "no credentials: name a Secret in spec.storage.credentialsSecret, or give the pod an identity"
        return StorageError(Reason.ACCESS_DENIED, f"{what}: {text}")
    if name == "ParamValidationError" or (name == "ValueError" and "endpoint" in str(error).lower()):
        return StorageError(Reason.BUCKET_NOT_FOUND, f"{what}: {error}: correct the bucket, key or endpoint")
    if isinstance(cause, ssl.SSLError) or name == "SSLError":
        text = "the server's certificate is not trusted by this image: check the endpoint's scheme and its CA"
        return unavailable(f"{what}: TLS failed: {error}: {text}")
    if isinstance(cause, (OSError, http.client.HTTPException)) or type(error).__module__.startswith(
        ("botocore", "urllib3", "boto3", "s3transfer")
    ):
        return unavailable(f"{what}: the storage cannot be reached: {error}: check the endpoint and the network")
    return StorageError(Reason.INTERNAL, f"{what}: {name}: {error}", transient=True)


def _from_s3(response: dict[str, object], what: str) -> StorageError:
    detail = response.get("Error")
    detail = detail if isinstance(detail, dict) else {}
    meta = response.get("ResponseMetadata")
    meta = meta if isinstance(meta, dict) else {}
    code, text, status = str(detail.get("Code", "")), str(detail.get("Message", "")), meta.get("HTTPStatusCode")
    headers = meta.get("HTTPHeaders")
    region = detail.get("Region") or (headers.get("x-amz-bucket-region") if isinstance(headers, dict) else None)
    if code == "NoSuchBucket":
        return StorageError(
            Reason.BUCKET_NOT_FOUND, f"{what}: the bucket does not exist: create it or correct its name"
        )
    if (code in _REGION and (region or code != "AuthorizationHeaderMalformed")) or (code == "400" and region):
        where = f"is in region {region}" if region else "belongs to another region or endpoint"
        text = f"{what}: the bucket {where}: set spec.storage.region and spec.storage.endpoint accordingly"
        return StorageError(Reason.BUCKET_NOT_FOUND, text)
    if code in _CLOCK:
        return unavailable(
            f"{what}: refused because of clock skew ({code}): this node's clock is wrong, correct its NTP"
        )
    if code in _KEYS:
        text = f"{what}: the credentials are not valid ({code}): correct the Secret that spec.storage names"
        return StorageError(Reason.ACCESS_DENIED, text)
    if code in _DENIED:
        text = f"{what}: access denied ({code} {text}): grant the credentials s3:GetObject, PutObject and ListBucket"
        return StorageError(Reason.ACCESS_DENIED, text)
    if code in _MISSING:
        return NotFound(f"{what}: no such object")
    if code in _CHECKSUM or status == 411:
        text = "the store refuses uploads with checksums: it needs AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
        return StorageError(Reason.STORAGE_UNAVAILABLE, f"{what}: {code} {text}")
    if code == "KeyTooLongError":
        return StorageError(Reason.SOURCE_NOT_FOUND, f"{what}: the key is longer than the store allows")
    return unavailable(f"{what}: the store answered {status} {code}: {text}")


def _from_http(error: urllib.error.HTTPError, what: str) -> StorageError:
    if error.code in (404, 410):
        return NotFound(f"{what}: the server answers {error.code}, no such file")
    if error.code in (401, 403):
        return StorageError(Reason.ACCESS_DENIED, f"{what}: the server answers {error.code}, access denied")
    if error.code < 500 and error.code not in (408, 425, 429):
        return StorageError(Reason.SOURCE_NOT_FOUND, f"{what}: the server answers {error.code} {error.reason}")
    return unavailable(f"{what}: the server answers {error.code} {error.reason}")


def _from_os(error: OSError, what: str) -> StorageError | None:
    if error.errno in _NO_SPACE:
        text = f"{what}: no space left on the local disk: give the pod more ephemeral storage"
        return StorageError(Reason.NO_SPACE, text, transient=True)
    if error.errno == errno.EROFS:
        text = f"{what}: the local disk is read-only ({error.filename}): the cache directory must be writable"
        return StorageError(Reason.NO_SPACE, text, transient=True)
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return NotFound(f"{what}: no such file")
    if isinstance(error, PermissionError):
        return StorageError(Reason.ACCESS_DENIED, f"{what}: the file may not be read or written: {error.strerror}")
    return None
