"""What a failure is, by what TensorRT and CUDA say of it: the one place that decides it.

TensorRT's error codes decide little by themselves: lack of memory comes as code 1 or 2, an illegal address as code 1,
and code 7 says "retry" although the CUDA error behind it may have cost the process its device. So the status of CUDA
calls and a probe on a fresh stream come first, texts next, codes last.

    CUDA status or probe: the device is gone              DeviceLost       exit 71
    CUDA status or probe: this process has lost it        Sticky           exit 70
    memory                                                OutOfMemory
    shapes or values outside of what the engine takes     InvalidInput
    the plan is none for this version or device           CannotLoad
    INTERNAL_ERROR again on the same engine               Sticky           "any further calls are undefined"
    anything else                                         Recoverable      another lane, or this one rebuilt
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trtmodel_worker.engines.base import (
    CannotLoad,
    DeviceLost,
    EngineError,
    InvalidInput,
    OutOfMemory,
    Recoverable,
    Sticky,
)

LOST_CODES = frozenset({3, 35, 46, 100, 101, 214, 216, 220, 802, 803, 804})
"""No driver or device, one that is not ready or does not fit its driver, uncorrectable memory or link errors."""
STICKY_CODES = frozenset({4, 226, 700, 702, 708, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999})
"""CUDA's text of these says that the process must be ended and started anew; 4, 708 and 709 are contexts that are gone,
999 is what a device that fell off the bus was seen to give."""
_MEMORY_CODE = 2
_NO_KERNEL_CODES = frozenset({98, 200, 209, 222})

_STICKY_TEXT = re.compile(
    r"illegal (memory access|address|instruction)|misaligned address|launch failure|hardware stack error",
    re.IGNORECASE,
)
_MEMORY_TEXT = re.compile(r"out of memory|OutOfMemory|could not be allocated", re.IGNORECASE)
_INPUT_TEXT = re.compile(
    r"does not satisfy any optimization profile|dimension.{0,80}(profile|range)|engine dimension", re.IGNORECASE
)
_FIT_TEXT = re.compile(r"Instruction: CHECK_")  # what of shapes is only seen in a run. The code is FAILED_EXECUTION
_OUR_TEXT = re.compile(r"Address is not set|invalid resource handle", re.IGNORECASE)
_PLAN_TEXT = re.compile(
    r"deserializ\w* failed|Version tag does not match|incompatible device|expecting compute|magicTag|"
    r"different (version|compute capability)|serialized with|Serialization assertion|could not be deserialized",
    re.IGNORECASE,
)
_MOST_TEXT = 1000


@dataclass(frozen=True)
class Evidence:
    """`what` failed, in words. `reported`: (name of the ErrorCodeTRT, text) of what TensorRT reported meanwhile.
    `cuda`: status of the call that failed, or of waiting for the stream, 0 if none did, and its `cuda_text`. `probe`:
    status of the probe on a fresh stream, `probes_failed`: how often in a row. `repeated`: an internal error was seen
    on this engine before. `loading`: a plan was being deserialised. `inputs`: how many the engine has, whose shapes may
    not fit each other; where there is one, what does not fit is the engine's fault."""

    what: str
    reported: tuple[tuple[str, str], ...] = ()
    cuda: int = 0
    cuda_text: str = ""
    probe: int = 0
    probes_failed: int = 0
    repeated: bool = False
    loading: bool = False
    inputs: int = 1

    @property
    def text(self) -> str:
        said = [f"{text} [{code}]" for code, text in self.reported]
        more = [f"the device answers with CUDA error {self.probe}"] if self.probe and self.probe != self.cuda else []
        parts = [self.what, *([self.cuda_text] if self.cuda_text else []), *said, *more]
        return "; ".join(part.strip() for part in parts)[:_MOST_TEXT]

    @property
    def is_internal(self) -> bool:
        return any(code == "INTERNAL_ERROR" for code, _ in self.reported)


def classify(seen: Evidence) -> EngineError:
    """The exception to raise; it carries everything that was said."""
    text = seen.text
    said = " ".join(t for _, t in seen.reported)
    codes = {code for code, _ in seen.reported}
    if {seen.cuda, seen.probe} & LOST_CODES:
        return DeviceLost(text)
    if {seen.cuda, seen.probe} & STICKY_CODES or _is_broken(seen, said):
        return Sticky(text)
    if _MEMORY_CODE in (seen.cuda, seen.probe) or "FAILED_ALLOCATION" in codes or _MEMORY_TEXT.search(said):
        return OutOfMemory(text)
    if seen.loading or seen.cuda in _NO_KERNEL_CODES or _PLAN_TEXT.search(said):
        return CannotLoad(text)
    if _OUR_TEXT.search(said):
        return Recoverable(text)
    if "INVALID_ARGUMENT" in codes or _INPUT_TEXT.search(said) or (seen.inputs > 1 and _FIT_TEXT.search(said)):
        return InvalidInput(text)
    if seen.repeated and seen.is_internal:
        return Sticky(text)
    return Recoverable(text)


def _is_broken(seen: Evidence, said: str) -> bool:
    """A text alone is no proof where the probe is clean; a probe that fails again and again is, whatever its code."""
    return (seen.probe not in (0, _MEMORY_CODE) and seen.probes_failed > 1) or (
        seen.probe not in (0, _MEMORY_CODE) and _STICKY_TEXT.search(said) is not None
    )
