"""Messages between the front and a host. Both ends are the same release, so there is no version.

On a lane every message is one datagram of 64-bit integers (the socket keeps boundaries):

    run      [generation, output offset, output bytes, (input offset, dim, dim ...) per input]
             bit 62 of the first word: the next message comes soon after the answer
             bit 61: behind it [(number of a file, offset in it, offset in the arena, bytes) ...]: to be read first
    file     bit 60, number, 0       the next datagram has the descriptor of the file that has this number on this lane
    forget   bit 60, number, 1       it has no more
    answer   [generation, 0, compute ns, (output offset, rank, dim ...) per output]
    failure  [generation, class, compute ns] + text in UTF-8
    probe    [generation, 0, 0]      run the golden samples on this lane; the answer has no outputs
    wake     bit 62, 0, 0            a run comes soon
    rested   [0, 0, ns]              unasked, some time after RECOVERABLE: the lane was rebuilt and can run again

Inputs and outputs are in the manifest's order. Offsets are from the start of the arena. On the control socket a host's
message is one JSON object; the front's, with the descriptor of a client's file, say whether requests may lie there from
now on:

    share    b"share"                see sharing.py
    forget   b"forget"
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT_BYTES = 2000
MAX_RANK = 32
_HEAD = struct.Struct("<3q")
_NOWHERE = bytes(16)
SHARE, FORGET = b"share", b"forget"
WAKE = _HEAD.pack(1 << 62, 0, 0)
_SOON = 1 << 62
_READS = 1 << 61
_FILE = 1 << 60
_FLAGS = _SOON | _READS


class FailureClass(enum.IntEnum):
    """What kind of failure an attempt met in the host."""

    INVALID_INPUT = 1
    RECOVERABLE = 2
    OUT_OF_MEMORY = 3
    OUTPUT_TOO_LARGE = 4
    INTERNAL = 5
    WRONG_OUTPUT = 6  # of a probe: the engine does not answer any more what it answered when it was built


class MessageError(ValueError):
    """The bytes are no message of this protocol."""


@dataclass(frozen=True)
class HostConfig:
    """What a host is told, as JSON in a sealed memory file. `*_fd` are inherited descriptors. `buckets`: batch sizes
    that are to be warm and measured. `duty`: share of the time that the warm-up may compute: less than 1 beside
    traffic. `pulsed`: it is stopped most of the time until it is ready, so that only processor time says how long a run
    takes. `auto`: no more lanes are wanted than are worth it. `spin_seconds`: how long a lane looks for a message that
    is said to come soon before it sleeps."""

    SCHEMA: ClassVar[str] = "trtmodel.io/host/v1"

    name: str
    runtime: str
    manifest: str
    plan_fd: int
    plan_size: int
    golden_fds: tuple[int, ...]
    golden_sizes: tuple[int, ...]
    arena_fd: int
    arena_size: int
    lane_fds: tuple[int, ...]
    control_fd: int
    parent_pid: int
    buckets: tuple[int, ...] = ()
    duty: float = 1.0
    pulsed: bool = False
    auto: bool = False
    spin_seconds: float = 0.0


@dataclass(frozen=True)
class Ready:
    """Every lane is warm and passed the self-test. `slowest_seconds` is the longest single run of the warm-up,
    `bucket_seconds` the time of the fastest run by batch size (as text). `batchable`: rows do not see each other, so
    that those of different requests may be run together; `why` not otherwise. `lanes`: the first so many serve. `pins`:
    its device reads files of clients by itself, if it is told of them."""

    SCHEMA: ClassVar[str] = "trtmodel.io/host-ready/v1"

    slowest_seconds: float
    bucket_seconds: Mapping[str, float] = field(default_factory=dict)
    batchable: bool = False
    why: str = ""
    lanes: int = 0
    pins: bool = False


@dataclass(frozen=True)
class Refused:
    """The engine was refused before it served."""

    SCHEMA: ClassVar[str] = "trtmodel.io/host-refused/v1"

    reason: str
    message: str


def run_message(
    generation: int,
    output_offset: int,
    output_bytes: int,
    input_offsets: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    soon: bool = False,
    reads: bool = False,
) -> bytes:
    flags = (_SOON if soon else 0) | (_READS if reads else 0)
    words = [generation | flags, output_offset, output_bytes]
    for offset, shape in zip(input_offsets, shapes, strict=True):
        words.append(offset)
        words += shape
    return struct.pack(f"<{len(words)}q", *words)


def run_bytes(ranks: Sequence[int]) -> int:
    """Of a run's message without what is to be read."""
    return 8 * (3 + len(ranks) + sum(ranks))


def probe_message(generation: int) -> bytes:
    return _HEAD.pack(generation, 0, 0)


def is_probe(data: bytes) -> bool:
    """Whether a message from the front is no run: a run has a region for its outputs, and inputs."""
    return len(data) == _HEAD.size and data[8:] == _NOWHERE


def parse_generation(data: bytes) -> int:
    """Of any message. Raises MessageError."""
    if len(data) < _HEAD.size:
        raise MessageError(f"a message of {len(data)} bytes is too short")
    return int(_HEAD.unpack_from(data)[0]) & ~_FLAGS


def is_followed_soon(data: bytes) -> bool:
    """Whether the front expects to send another run soon after the answer to this one."""
    return len(data) >= _HEAD.size and bool(data[7] & 0x40)


def has_reads(data: bytes) -> bool:
    """Whether there are things to be read for this run."""
    return len(data) >= _HEAD.size and bool(data[7] & 0x20)


def file_message(number: int, *, forget: bool = False) -> bytes:
    return _HEAD.pack(_FILE, number, forget)


def parse_file(data: bytes) -> tuple[int, bool] | None:
    """The number of a file, and whether it is to be forgotten; None if the message is another one."""
    if len(data) != _HEAD.size or not data[7] & 0x10:
        return None
    _, number, forget = _HEAD.unpack(data)
    return number, bool(forget)


def reads_part(reads: Iterable[tuple[int, int, int, int]]) -> bytes:
    words = [word for read in reads for word in read]
    return struct.pack(f"<{len(words)}q", *words)


def parse_reads(data: bytes) -> list[tuple[int, int, int, int]]:
    """Raises MessageError."""
    if len(data) % 32:
        raise MessageError(f"{len(data)} bytes do not tell what is to be read")
    found = list(struct.iter_unpack("<4q", data))
    if any(min(read) < 0 for read in found):
        raise MessageError("what is to be read lies nowhere")
    return found


def parse_run(data: bytes, ranks: Sequence[int]) -> tuple[int, int, int, list[tuple[int, tuple[int, ...]]]]:
    """(generation, output offset, output bytes, [(input offset, shape)]). Raises MessageError."""
    words = _words(data)
    if len(words) != 3 + len(ranks) + sum(ranks):
        raise MessageError(f"a run message of {len(words)} words does not fit inputs of ranks {list(ranks)}")
    at, inputs = 3, []
    for rank in ranks:
        inputs.append((words[at], words[at + 1 : at + 1 + rank]))
        at += 1 + rank
    return words[0] & ~_FLAGS, words[1], words[2], inputs


def answer_message(generation: int, nanoseconds: int, outputs: Iterable[tuple[int, tuple[int, ...]]]) -> bytes:
    words = [generation, 0, nanoseconds]
    for offset, shape in outputs:
        words.append(offset)
        words.append(len(shape))
        words += shape
    return struct.pack(f"<{len(words)}q", *words)


def failure_message(generation: int, failure: FailureClass, nanoseconds: int, text: str) -> bytes:
    return _HEAD.pack(generation, failure, nanoseconds) + text.encode()[:MAX_TEXT_BYTES]


def rested_message(nanoseconds: int) -> bytes:
    """`nanoseconds`: what making the lane anew took. Read by `parse_answer` as an answer to generation 0, which no
    attempt has."""
    return _HEAD.pack(0, 0, nanoseconds)


@dataclass(frozen=True)
class Answer:
    """`failure` is None for a result; then `outputs` are (offset in the arena, shape)."""

    generation: int
    nanoseconds: int
    outputs: tuple[tuple[int, tuple[int, ...]], ...] = ()
    failure: FailureClass | None = None
    text: str = ""


def parse_answer(data: bytes, outputs: int) -> Answer:
    """Raises MessageError. Offsets and dimensions are what the host said: not yet believed."""
    if len(data) < _HEAD.size:
        raise MessageError(f"an answer of {len(data)} bytes is too short")
    generation, status, nanoseconds = _HEAD.unpack_from(data)
    if status:
        try:
            failure = FailureClass(status)
        except ValueError as e:
            raise MessageError(f"{status} is no class of failure") from e
        return Answer(generation, nanoseconds, (), failure, data[_HEAD.size :].decode(errors="replace"))
    words, at, found = _words(data), 3, []
    while at < len(words):
        rank = words[at + 1] if at + 1 < len(words) else -1
        shape = words[at + 2 : at + 2 + rank] if 0 <= rank <= MAX_RANK else ()
        if rank != len(shape):
            raise MessageError("an answer ends within an output's shape")
        found.append((words[at], shape))
        at += 2 + rank
    if len(found) != outputs:
        raise MessageError(f"an answer has {len(found)} outputs where {outputs} were expected")
    return Answer(generation, nanoseconds, tuple(found))


def _words(data: bytes) -> tuple[int, ...]:
    if len(data) % 8 or len(data) < _HEAD.size:
        raise MessageError(f"a message of {len(data)} bytes is no sequence of words")
    return struct.unpack(f"<{len(data) // 8}q", data)
