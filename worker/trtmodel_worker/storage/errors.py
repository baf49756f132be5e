"""What can go wrong with storage, each with the reason that becomes a condition and a sentence with the way out.

StorageError        reason, message; `transient` tells whether trying again may help
|-- NotFound        the object is not there (the bucket is)
|-- Moved           the object is not the one any more that was being read
`-- Unranged        the store does not serve parts of objects
"""

from __future__ import annotations

import datetime
import email.utils
import errno
import http.client
import ssl
import urllib.error

from trtmodel_contract.jobs import Reason

_CLOCK = {"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthorizationHeaderMalformed"}
_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "403", "401"}
_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "301", "307"}
_MISSING = {"NoSuchKey", "NoSuchVersion", "404", "NotFound"}
_CHANGED = {"PreconditionFailed", "InvalidRange", "412", "416"}
_CHECKSUM = {"MissingContentLength", "411"}
_CLOCKS_AGREE_SECONDS = 60
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
CREDENTIAL_CODES = _KEYS | _EXPIRED


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


class Moved(StorageError):
    """What was being read was replaced meanwhile. What was read of it is of no use."""

    def __init__(self, what: str) -> None:
        text = "it changed while it was read: wait until its upload is done, and give new content a new name"
        super().__init__(Reason.STORAGE_UNAVAILABLE, f"{what}: {text}", transient=True)


class Unranged(StorageError):
    """Parts of this object cannot be had, the whole may."""

    def __init__(self, what: str) -> None:
        super().__init__(Reason.STORAGE_UNAVAILABLE, f"{what}: the store does not serve parts of it")


def no_space(error: BaseException) -> bool:
    """Whether the local disk is full or read-only: no fault of whoever wrote to it."""
    return isinstance(error, OSError) and error.errno in {*_NO_SPACE, errno.EROFS}


def unavailable(message: str) -> StorageError:
    return StorageError(Reason.STORAGE_UNAVAILABLE, message, transient=True)


def no_bucket(what: str) -> StorageError:
    return StorageError(Reason.BUCKET_NOT_FOUND, f"{what}: the bucket does not exist: create it or correct its name")


def s3_code(error: BaseException) -> str:
    """S3's word for what went wrong, '' if S3 did not say anything."""
    response = getattr(error, "response", None)
    detail = response.get("Error") if isinstance(response, dict) else None
    return str(detail.get("Code", "")) if isinstance(detail, dict) else ""


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
        text = (
            "give the CA that signed the server's certificate in spec.storage.caBundle, or check the endpoint's scheme"
        )
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
        return no_bucket(what)
    if (code in _REGION and (region or code != "AuthorizationHeaderMalformed")) or (code == "400" and region):
        where = f"is in region {region}" if region else "belongs to another region or endpoint"
        text = f"{what}: the bucket {where}: set spec.storage.region and spec.storage.endpoint accordingly"
        return StorageError(Reason.BUCKET_NOT_FOUND, text)
    if code in _CLOCK:
        off = _clock_difference(headers.get("date") if isinstance(headers, dict) else None)
        text = f"this node's clock is wrong{off}, correct its NTP"
        return unavailable(f"{what}: refused because of clock skew ({code}): {text}")
    if code in _EXPIRED:
        text = "renew those in the Secret that spec.storage names, which is read again at each try"
        return unavailable(f"{what}: the credentials have expired ({code}): {text}")
    if code in _KEYS:
        text = f"{what}: the credentials are not valid ({code}): correct the Secret that spec.storage names"
        return StorageError(Reason.ACCESS_DENIED, text)
    if code in _DENIED:
        text = f"{what}: access denied ({code} {text}): grant the credentials s3:GetObject, PutObject and ListBucket"
        return StorageError(Reason.ACCESS_DENIED, text)
    if code in _MISSING:
        return NotFound(f"{what}: no such object")
    if code in _CHANGED:
        return Moved(what)
    if code in _CHECKSUM or status == 411:
        text = "the store refuses uploads with checksums: it needs AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
        return StorageError(Reason.STORAGE_UNAVAILABLE, f"{what}: {code} {text}")
    if code == "KeyTooLongError":
        return StorageError(Reason.SOURCE_NOT_FOUND, f"{what}: the key is longer than the store allows")
    return unavailable(f"{what}: the store answered {status} {code}: {text}")


def _clock_difference(date: object) -> str:
    """How far this clock is from that of the server that sent `date`."""
    try:
        theirs = email.utils.parsedate_to_datetime(str(date))
        seconds = (datetime.datetime.now(datetime.timezone.utc) - theirs).total_seconds()
    except (TypeError, ValueError):
        return ""
    if abs(seconds) < _CLOCKS_AGREE_SECONDS:
        return ""
    return f", {abs(seconds):,.0f} s {'ahead of' if seconds > 0 else 'behind'} the store's"


def _from_http(error: urllib.error.HTTPError, what: str) -> StorageError:
    if error.code in (404, 410):
        return NotFound(f"{what}: the server answers {error.code}, no such file")
    if error.code in (401, 403):
        return StorageError(Reason.ACCESS_DENIED, f"{what}: the server answers {error.code}, access denied")
    if error.code in (412, 416):
        return Moved(what)
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
