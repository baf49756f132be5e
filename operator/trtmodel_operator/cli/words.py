"""Text for a terminal: nothing that it would obey, durations and ages as people write them."""

from __future__ import annotations

import datetime

from trtmodel_operator.fields import duration


class Failed(Exception):
    """Ends the command. `code` is its exit code; the text names the cause and the way out. `passing`: it may be gone at
    the next try, so that who waits goes on."""

    def __init__(self, text: str, code: int = 1, *, passing: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.passing = passing


def plain(text: object) -> str:
    """In one line, without what a terminal obeys: messages quote names in models and buckets, which are anybody's."""
    return "".join(c if c.isprintable() else " " if c in "\n\t" else ascii(c)[1:-1] for c in str(text)).strip()


def seconds_of(text: str) -> float:
    """Of a duration as the API has it, such as 1h30m, 90s or 500ms; a bare number is seconds. Raises ValueError."""
    return float(text) if text.isascii() and text.isdigit() else duration(text, "time")


def age(since: str, now: float) -> str:
    """How long ago an RFC 3339 time was, as kubectl has it; '' if it cannot be read."""
    try:
        seconds = now - datetime.datetime.fromisoformat(since.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return ""
    return span(max(0.0, seconds))


def span(seconds: float) -> str:
    """The two largest units that say something."""
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours}h" if days < 10 and hours else f"{days}d"
    if hours:
        return f"{hours}h{minutes}m" if minutes else f"{hours}h"
    if minutes:
        return f"{minutes}m{whole % 60}s" if minutes < 10 and whole % 60 else f"{minutes}m"
    return f"{whole}s"
