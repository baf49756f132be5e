"""Is the source a model that the runtime can run, as the settings want it?

The examination runs in a process of its own (see `examine`): this one holds neither ONNX nor a runtime, and a file that
crashes a parser is that file's fault, not the Job's.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.jobs import BuildTask, Reason, ResolveTask

from trtmodel_worker.builder.findings import Report, error, require
from trtmodel_worker.builder.process import StageDied, run_module
from trtmodel_worker.builder.sources import used_calibration
from trtmodel_worker.builder.wanted import Request, Wanted
from trtmodel_worker.engines.building import Graph
from trtmodel_worker.storage import Source

MOST_SECONDS = 1800.0  # a model of 100 GB is read in that time


def check(task: ResolveTask | BuildTask, source: Source, work: Path) -> Graph:
    """The graph of the source, if it can be built and verified as the task says. `work` is a directory with room for
    the graph without its weights. Raises Rejected, StageDied."""
    calibration = used_calibration(task.engine, task.calibration)
    wanted = Wanted(task.engine, task.verify_task, calibration.method if calibration else None)
    what = f"source {task.source_uri} ({source.size:,} bytes, sha256 {source.digest[:12]})"
    report = examined(source.path, what, work, task.engine.runtime, wanted)
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
