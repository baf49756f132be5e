"""Files behind http:// and https://, whole or in parts."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from typing import Any

from trtmodel_contract.jobs import Reason

from trtmodel_worker.storage.errors import Moved, StorageError, Unranged, from_exception, unavailable
from trtmodel_worker.storage.remote import Reader, Version, require_part
from trtmodel_worker.storage.trust import context

READ_TIMEOUT_SECONDS = 20
# A Last-Modified is as good as an ETag once it is older than that: until then the file may change twice in the same
# second (RFC 9110, 8.8.2.2).
SETTLED_SECONDS = 60
_LENGTH = re.compile(r"[0-9]{1,18}")


class _Body:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response

    def read(self, amount: int, /) -> bytes:
        return self._response.read1(amount)


class UrlRemote:
    """One URL. Redirects are followed for each request."""

    def __init__(self, url: str, ca_bundle: str = "") -> None:
        self.what = url
        self._trusted = context(ca_bundle) if url.lower().startswith("https:") else None

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Version, Reader]]:
        with self._answer({}) as response:
            yield _version(self.what, response.headers), _Body(response)

    @contextlib.contextmanager
    def open_part(self, version: Version, start: int, end: int) -> Iterator[Reader]:
        condition = "If-Match" if version.tag.startswith('"') else "If-Unmodified-Since"
        with self._answer({"Range": f"bytes={start}-{end - 1}", condition: version.tag}) as response:
            if response.status != http.client.PARTIAL_CONTENT:
                raise Unranged(self.what)
            require_part(self.what, response.headers.get("Content-Range", ""), version, start, end)
            # Not every server looks at the condition.
            found = response.headers.get("ETag" if version.tag.startswith('"') else "Last-Modified", version.tag)
            if found != version.tag:
                raise Moved(self.what)
            yield _Body(response)

    def look(self) -> Version:
        with self.open() as (version, _):
            return version

    @contextlib.contextmanager
    def _answer(self, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        try:
            address, said = _escaped(self.what), {"User-Agent": "trtmodel", **headers}
            request = urllib.request.Request(address, headers=said)  # noqa: S310
            tls = urllib.request.HTTPSHandler(context=self._trusted)
            opener = urllib.request.build_opener(tls, _Redirects())
            response = opener.open(request, timeout=READ_TIMEOUT_SECONDS)
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise from_exception(e, self.what) from e
        with contextlib.closing(response):
            yield response


class _Redirects(urllib.request.HTTPRedirectHandler):
    """To http(s) only, and not from https:// to what anybody on the way can change."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        allowed = ("https",) if req.type == "https" else ("http", "https")
        if urllib.parse.urlsplit(newurl).scheme not in allowed:
            text = f"it redirects to {newurl[:300]!r}, which is not followed: name the file's own address"
            raise StorageError(Reason.SOURCE_NOT_FOUND, f"{req.full_url}: {text}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _escaped(url: str) -> str:
    """As it may stand in a request: what is escaped already stays as it is."""
    parts = urllib.parse.urlsplit(url)
    if not parts.netloc.isascii():
        url = parts._replace(netloc=parts.netloc.encode("idna").decode()).geturl()
    return urllib.parse.quote(url, safe="%/:?#[]@!$&'()*+,;=~")


def _version(what: str, headers: Message) -> Version:
    length = headers.get("Content-Length")
    if length is not None and not _LENGTH.fullmatch(length):
        raise unavailable(f"{what}: the server says that it is {length[:40]!r} bytes long, which is no length")
    size = None if length is None else int(length)
    tag = _tag(headers)
    served = headers.get("Accept-Ranges", "").strip().lower() == "bytes"
    return Version(size, tag, ranges=bool(served and tag and size is not None))


def _tag(headers: Message) -> str:
    """A strong ETag, else a Last-Modified that is settled, else ''."""
    etag = headers.get("ETag", "")
    if etag.startswith('"'):
        return etag
    modified = headers.get("Last-Modified", "")
    try:
        age = email.utils.parsedate_to_datetime(headers.get("Date", "")) - email.utils.parsedate_to_datetime(modified)
    except (TypeError, ValueError):
        return ""
    return modified if age.total_seconds() >= SETTLED_SECONDS else ""
