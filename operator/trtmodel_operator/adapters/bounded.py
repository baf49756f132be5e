"""Answers of bounded length: whoever sends one may be broken, or mean harm."""

from __future__ import annotations

import aiohttp

_CHUNK_BYTES = 1 << 16


class TooLong(Exception):
    """An answer is longer than was allowed."""


async def read(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body, of `most` bytes at most. Raises TooLong, and what aiohttp raises."""
    parts, size = [], 0
    async for part in answer.content.iter_chunked(_CHUNK_BYTES):
        size += len(part)
        if size > most:
            raise TooLong
        parts.append(part)
    return b"".join(parts)
