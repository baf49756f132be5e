"""Timing caches: how long each kernel took on this device, so that a build need not measure it again.

    <folder of the plan>/timing/*.cache       read by a build, one or several, each under a header
    <folder of the plan>/timing/built.cache   written by it: all that was read and what it measured itself

A cache of another version or device makes wrong choices or errors, so each file says first whose it is, and TensorRT
is never told to ignore a mismatch. What cannot be used is left out: the build is slower, not wrong.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from trtmodel_worker.engines.tensorrt.compat import IBuilderConfig, IHostMemory, ITimingCache

FOLDER = "timing"
BUILT = "built.cache"
_MAGIC = b"trtmodel timing cache 1\n"
_MOST_HEADER = 4096

log = logging.getLogger("trtmodel.tensorrt")


def pack(key: str, data: bytes) -> bytes:
    """A file's content. `key`: runtime version, device, compute capability and driver."""
    return _MAGIC + json.dumps({"key": key}).encode() + b"\n" + data


def unpack(content: bytes, key: str) -> bytes | None:
    """The cache in a file; None if it is another's, or none at all."""
    if not content.startswith(_MAGIC):
        return None
    header, separator, data = content[len(_MAGIC) :].partition(b"\n")
    try:
        found = json.loads(header[:_MOST_HEADER])
    except ValueError:
        return None
    return data if separator and isinstance(found, dict) and found.get("key") == key else None


def usable(folder: Path, key: str) -> Iterator[tuple[str, bytes]]:
    """(file name, cache) of those of this version and device."""
    for path in sorted(folder.glob("*.cache")):
        data = unpack(path.read_bytes(), key)
        if data is None:
            log.info("timing cache %s is of another TensorRT or device: not used", path.name)
        else:
            yield path.name, data


def attach(config: IBuilderConfig, folder: Path, key: str) -> int:
    """Give the builder all that is known. How many files it took something of: 8.6 was seen to report a failed merge
    of a cache (its compiler's part, of a build that had none), so what is merged is measured, not believed."""
    whole: ITimingCache = config.create_timing_cache(b"")
    used = 0
    for name, data in usable(folder, key):
        part: ITimingCache = config.create_timing_cache(data)
        before = len(_content(whole))
        merged = part is not None and whole.combine(part, False)
        if merged or len(_content(whole)) > before:
            used += 1
        if not merged:
            log.warning("TensorRT does not take timing cache %s whole: the rest of it is left out", name)
    if not config.set_timing_cache(whole, False):
        log.warning("TensorRT does not take the timing caches: this build measures everything itself")
        config.set_timing_cache(config.create_timing_cache(b""), False)
        return 0
    return used


def keep(config: IBuilderConfig, folder: Path, key: str) -> int:
    """Write what the builder knows now. Bytes, 0 if it gives nothing."""
    cache: ITimingCache = config.get_timing_cache()
    data = _content(cache) if cache is not None else b""
    if data:
        folder.mkdir(exist_ok=True)
        partial = folder / f"{BUILT}.part"
        partial.write_bytes(pack(key, data))
        partial.replace(folder / BUILT)
    return len(data)


def _content(cache: ITimingCache) -> bytes:
    memory: IHostMemory = cache.serialize()
    return bytes(memory) if memory is not None else b""
