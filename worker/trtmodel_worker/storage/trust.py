"""Which certificates are trusted: those of the image, and the user's own (spec.storage.caBundle) beside them.

Both, since one model may have its source at a public https:// address and its bucket behind a private CA.
"""

from __future__ import annotations

import functools
import ssl
import tempfile
from pathlib import Path

from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.errors import StorageError


@functools.lru_cache(maxsize=8)
def context(ca_bundle: str) -> ssl.SSLContext:
    """For Python's own HTTP client. Raises StorageError if `ca_bundle` (PEM, '' for none) holds no certificate."""
    trusted = ssl.create_default_context()
    if ca_bundle:
        _add(trusted, ca_bundle)
    return trusted


@functools.lru_cache(maxsize=8)
def bundle_file(ca_bundle: str) -> str:
    """For boto3, which takes a path: a file with the certificates of its own and `ca_bundle`. It is kept until the
    process ends, since boto3 reads it again for each new pool of connections. Raises StorageError."""
    from botocore.httpsession import get_cert_path

    _add(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ca_bundle)
    public = Path(get_cert_path(True)).read_text(encoding="utf-8")
    path = Path(_folder().name) / f"{abs(hash(ca_bundle)):x}.pem"
    path.write_text(f"{public}\n{ca_bundle}\n", encoding="utf-8")
    return str(path)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="trtmodel-ca-")


def _add(trusted: ssl.SSLContext, ca_bundle: str) -> None:
    try:
        trusted.load_verify_locations(cadata=ca_bundle)
    except (ssl.SSLError, ValueError) as e:
        text = "spec.storage.caBundle is no list of PEM certificates (-----BEGIN CERTIFICATE-----)"
        raise StorageError(Reason.STORAGE_UNAVAILABLE, f"{text}: {e}: correct it") from e
