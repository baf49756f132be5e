"""What the command says to the person who typed it."""

from __future__ import annotations

import sys

_LINES = "\n\t"


def say(text: str) -> None:
    print(f"trtmodel: {plain(text)}", file=sys.stderr, flush=True)


def plain(text: str, keep: str = _LINES) -> str:
    """Without what a terminal obeys: names in a model or a bucket are anybody's, and an escape sequence in one could
    clear the screen or forge what stands there."""
    safe = "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)
    return safe.encode("utf-8", "backslashreplace").decode()


def name(text: str) -> str:
    """In one line, so that it cannot look like a line of ours."""
    return plain(text, "")
