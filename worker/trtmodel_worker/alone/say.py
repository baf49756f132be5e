"""What the command says to the person who typed it."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    print(f"trtmodel: {text}", file=sys.stderr, flush=True)
