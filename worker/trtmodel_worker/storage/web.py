"""Files behind http:// and https://, whole or in parts."""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message

from trtmodel_worker.storage.errors import Moved, Unranged, from_exception
from trtmodel_worker.storage.remote import Reader, Version, require_part
from trtmodel_worker.storage.trust import context

READ_TIMEOUT_SECONDS = 20
# A Last-Modified is as good as an ETag once it is older than that: until then the file may change twice in the same
# second (RFC 9110, 8.8.2.2).
SETTLED_SECONDS = 60


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
            yield _version(response.headers), _Body(response)

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
            request = urllib.request.Request(self.what, headers={"User-Agent": "trtmodel", **headers})  # noqa: S310
            response = urllib.request.urlopen(  # noqa: S310 - uris.parse() allows http(s) only
                request, timeout=READ_TIMEOUT_SECONDS, context=self._trusted
            )
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise from_exception(e, self.what) from e
        with contextlib.closing(response):
            yield response


def _version(headers: Message) -> Version:
    length = headers.get("Content-Length", "")
    size = int(length) if length.isdigit() else None
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
