"""Is the source a model that the runtime can run, as the settings want it?

The examination runs in a process of its own (see `examine`): this one holds neither ONNX nor a runtime, and a file that
crashes a parser is that file's fault, not the Job's.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.builder.findings import Report, error, require
from trtmodel_worker.builder.process import StageDied, run_module
from trtmodel_worker.builder.wanted import Request, Wanted
from trtmodel_worker.engines.building import Graph

MOST_SECONDS = 1800.0  # a model of 100 GB is read in that time


def check(
    source: Path, what: str, work: Path, settings: EngineSettings, task: Task, calibration_method: str | None
) -> Graph:
    """The graph of a model that can be built. `what` names the file in messages: URI, size and digest; `work` is a
    directory with room for the graph without its weights. Raises Rejected, StageDied."""
    report = examined(source, what, work, settings.runtime, Wanted(settings, task, calibration_method))
    require(report.findings)
    assert report.graph is not None
    return report.graph


def examined(source: Path, what: str, work: Path, runtime: str, wanted: Wanted | None = None) -> Report:
    """All findings about the model at `source`, with its external data beside it. Raises StageDied where the machine is
    at fault, or may be."""
    with tempfile.TemporaryDirectory(dir=work, prefix="work-") as directory:
        folder = Path(directory)
        request = Request(str(source), _text(what), runtime, str(folder), wanted)
        (folder / "request.json").write_bytes(dumps(request))
        arguments = ["trtmodel_worker.builder.examine", str(folder / "request.json"), str(folder / "report.json")]
        ended = run_module(arguments, MOST_SECONDS)
        if (folder / "report.json").exists():
            return loads(Report, (folder / "report.json").read_bytes())
    if ended.code >= 0 or -ended.code in (signal.SIGKILL, signal.SIGTERM):
        raise StageDied(f"the check {ended}")
    text = f"{request.what} crashes the libraries that read it (the check {ended})"
    return Report((error(Reason.MODEL_INVALID, text, "export it again; if it runs elsewhere, please report it"),))


def _text(text: str) -> str:
    """Without halves of surrogate pairs, which paths that are no UTF-8 have and documents cannot hold."""
    return text.encode("utf-8", "replace").decode()
