"""What TensorRT says while it reads and builds, in words that name the cause and the way out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.base import EngineError, OutOfMemory, Sticky
from trtmodel_worker.engines.building import Finding, Rejected, Severity

SHOWN = 5  # errors in a message: the first have the cause, and a condition holds 700 bytes
_TEXT = 200
_MOST_FINDINGS = 200
_WAYS_OUT = {
    Reason.OPERATOR_UNSUPPORTED: "export these operators as others, with another opset, or use another TensorRT",
    Reason.MODEL_INVALID: "check the file with `trtmodel check`, or export it anew",
}
_MEMORY = re.compile(r"out of memory|OutOfMemory|could not be allocated|insufficient (device )?memory", re.IGNORECASE)
_DEVICE = re.compile(
    r"illegal (memory access|address|instruction)|misaligned address|unspecified launch failure|launch timed out|"
    r"uncorrectable ECC",
    re.IGNORECASE,
)
# While it times kernels TensorRT logs each that it cannot use as an error, of code 9 or 10: no reason for anything.
_SKIPPED = re.compile(r"skipping tactic|tactic .{0,80}(failed|skipped)", re.IGNORECASE | re.DOTALL)
_NO_KERNEL = re.compile(r"could not find any implementation for node ([^\n]+?)(?:\)?\.?\)?$|\s*due to)", re.IGNORECASE)
_NO_RUNNER = re.compile(r"(\S+) has no runners that implement it", re.IGNORECASE)
_PROFILE = re.compile(r"optimization profile|dynamic (input|or shape)|kMIN|kOPT|kMAX", re.IGNORECASE)
_UNSUPPORTED = re.compile(r"unsupported|no importer|not supported|only .{0,60}(allowed|supported)", re.IGNORECASE)


@dataclass(frozen=True)
class ParserProblem:
    """One error of the ONNX parser. `code` by name, `node` and `operator` '' where it is about no node."""

    code: str
    text: str
    node: str = ""
    operator: str = ""

    def __str__(self) -> str:
        where = f"node {self.node!r} ({self.operator or 'of unknown type'}): " if self.node or self.operator else ""
        return f"{where}{_brief(self.text)} [{self.code}]"


def parser_refuses(problems: Sequence[ParserProblem], version: str) -> Rejected:
    """A file that TensorRT's parser does not take. Each problem is a finding, the message has the first ones."""
    listed = "; ".join(str(problem) for problem in problems[:SHOWN]) or "it gives no reason"
    more = f" and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    reason = Reason.OPERATOR_UNSUPPORTED if any(map(_is_unsupported, problems)) else Reason.MODEL_INVALID
    out = _WAYS_OUT[reason]
    what = f"the ONNX parser of TensorRT {version} refuses the model"
    findings = tuple(
        Finding(Severity.ERROR, reason, f"{what}: {problem}", out, problem.node, problem.operator)
        for problem in problems[:_MOST_FINDINGS]
    )
    return Rejected(reason, f"{what}: {listed}{more}: {out}", findings)


def data_shaped(outputs: Sequence[str], version: str) -> str:
    """Why an engine with these outputs is refused, and the ways out."""
    what = f"only the data tells the shape of outputs {list(outputs)}, and TensorRT {version} was seen to answer such"
    out = "use the runtime ONNXRuntime, an image with TensorRT 10 or newer, or give these outputs a fixed size"
    return f"{what} outputs in the shape of an earlier run: {out}"


def _is_unsupported(problem: ParserProblem) -> bool:
    return problem.code.startswith("UNSUPPORTED") or _UNSUPPORTED.search(problem.text) is not None


def build_failed(said: Iterable[str], version: str) -> EngineError | Rejected:
    """TensorRT gave no engine. `said`: its errors, in order."""
    errors = list(dict.fromkeys(text.strip() for text in said if text.strip()))
    causes = [text for text in errors if not _SKIPPED.search(text)] or errors
    whole = "\n".join(causes)
    listed = "; ".join(_brief(text) for text in causes[-SHOWN:]) or "it gives no reason"
    what = f"TensorRT {version} gives no engine: {listed}"
    if _MEMORY.search(whole):
        return OutOfMemory(what)
    if _DEVICE.search(whole):
        return Sticky(f"the device failed during the build, which says nothing about the model. {what}")
    found = (_NO_RUNNER.search(text) or _NO_KERNEL.search(text) for text in causes)
    if match := next(filter(None, found), None):
        text = f"TensorRT {version} has no kernel on this GPU for {_brief(match.group(1))}"
        out = (
            "raise spec.engine.workspace, keep the node in FP32 (keepPrecision), or use an image with a newer TensorRT"
        )
        return Rejected(Reason.OPERATOR_UNSUPPORTED, f"{text}: {out}. It says: {listed}")
    if _PROFILE.search(whole):
        return Rejected(Reason.PROFILE_MISMATCH, f"{what}: spec.engine.profiles and the graph's shapes do not fit")
    return Rejected(Reason.BUILD_FAILED, what)


def _brief(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= _TEXT else f"{words[: _TEXT - 3]}..."
