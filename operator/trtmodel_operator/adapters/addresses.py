"""Where the operator may call to. A TRTModel's author chooses addresses, and the operator stands where its author may
not: only what its administrator listed is ever called.

An entry is an origin, as in ``https://hooks.example.com`` or ``http://prometheus.monitoring.svc:9090``, or one with any
sub-domain, as in ``https://*.example.com``. Scheme, host and port must be the same; the path is the author's.
"""

from __future__ import annotations

from collections.abc import Iterable

from yarl import URL

SETTING = "TRTMODEL_ALLOWED_ADDRESSES"
_ANY = "*."
SCHEMES = ("http", "https")


class NotAllowed(Exception):
    """This address is not called. The text says why, and what would help."""


class Addresses:
    """Raises ValueError for an entry that is no origin."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._origins = frozenset(_origin_of_entry(entry) for entry in entries)

    def check(self, text: str) -> URL:
        """The address as it will be called: what was checked and what is called are one object, so no two parsers can
        differ about it. Raises NotAllowed."""
        try:
            url = URL(text)
            scheme, host, port = _origin(url)
        except ValueError as e:
            raise NotAllowed(f"{text.partition('?')[0][:100]!r} is no address: {e}") from e
        parents = [_ANY + host.split(".", i)[i] for i in range(1, host.count(".") + 1)]
        if any((scheme, name, port) in self._origins for name in (host, *parents)):
            return url
        raise NotAllowed(
            f"{scheme}://{url.host}:{port} is not on the operator's list of addresses: its administrator can add it to "
            f"{SETTING}"
        )


def origins(address: str) -> list[str]:
    """The entry that allows an address of the operator's own settings; none for ''."""
    return [str(URL(address).origin())] if address else []


def _origin(url: URL) -> tuple[str, str, int]:
    """Raises ValueError."""
    if url.scheme not in SCHEMES:
        raise ValueError("it must begin with http:// or https://")
    if url.raw_user is not None or url.raw_password is not None:
        raise ValueError("a user or a password does not belong there")
    if not url.raw_host or url.port is None:
        raise ValueError("it names no host")
    return url.scheme, url.raw_host.lower().rstrip("."), url.port


def _origin_of_entry(entry: str) -> tuple[str, str, int]:
    wild = f"://{_ANY}" in entry
    url = URL(entry.replace(f"://{_ANY}", "://", 1) if wild else entry)
    scheme, host, port = _origin(url)
    if url.raw_path not in ("", "/") or url.raw_query_string or url.raw_fragment or "*" in host:
        raise ValueError(f"{entry!r} is no origin: give scheme://host[:port] without a path")
    return scheme, _ANY + host if wild else host, port
