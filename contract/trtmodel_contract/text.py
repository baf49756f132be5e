"""Text that has to fit: into a field, or into the bytes of a message."""

from __future__ import annotations

from trtmodel_contract.codec import canonical


def cut(text: str, limit: int) -> str:
    """`text` in at most `limit` characters, three dots in the place of what is left out."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def cut_json(text: str, limit: int) -> str:
    """As much of `text` as takes `limit` bytes in JSON, where a control character takes six and an emoji four."""
    size = 0
    for i, character in enumerate(text):
        size += len(canonical(character)) - 2
        if size > limit:
            return text[:i]
    return text
