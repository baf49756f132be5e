"""One object that can be read: whole, or a part of the very version that was seen first."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from trtmodel_worker.storage.errors import Moved, Unranged, unavailable


class Reader(Protocol):
    def read(self, amount: int, /) -> bytes:
        """What has arrived, at most `amount` bytes; b"" at the end, also at an early one. Raises at a time-out."""
        ...


@dataclass(frozen=True)
class Version:
    """What a store says of an object. `tag` stands for this very content in conditional requests: it ties the parts of
    one download together, and is never taken for the identity of the content. `id` is S3's version of a versioned
    bucket. `size` is None where the store does not tell it. Without `ranges` the object can be read only whole."""

    size: int | None
    tag: str = ""
    id: str = ""
    ranges: bool = False


class Remote(Protocol):
    """Everything raises StorageError: Moved when the object is no more the version that was asked for."""

    @property
    def what(self) -> str:
        """How a message names the object."""
        ...

    def open(self) -> AbstractContextManager[tuple[Version, Reader]]:
        """The whole object as it is now."""
        ...

    def open_part(self, version: Version, start: int, end: int, /) -> AbstractContextManager[Reader]:
        """Bytes `start` to `end` (exclusive) of `version`. Raises Unranged if the store sends something else."""
        ...

    def look(self) -> Version:
        """The version that is there now."""
        ...


def require_part(what: str, content_range: str, version: Version, start: int, end: int) -> None:
    """The Content-Range of an answer is what was asked for. Raises Unranged, Moved."""
    if not content_range:
        raise Unranged(what)
    span, _, total = content_range.removeprefix("bytes").strip().partition("/")
    if total not in ("*", str(version.size)):
        raise Moved(what)
    if span != f"{start}-{end - 1}":
        raise unavailable(f"{what}: asked for bytes {start}-{end - 1}, the server sent {span[:40]!r}")
