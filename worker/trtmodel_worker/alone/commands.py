"""check, build and verify: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import argparse
import json

from trtmodel_contract.codec import encode
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.jobs import Reason

from trtmodel_worker.alone import engine, report, tell
from trtmodel_worker.alone.home import Home
from trtmodel_worker.alone.say import name, say
from trtmodel_worker.alone.shapes import BadShape
from trtmodel_worker.builder.process import StageDied
from trtmodel_worker.engines.building import Rejected

EXIT_USAGE = 2
_GATE_EXITS = {Reason.DONE: JobExit.DONE, Reason.GATE_FAILED: JobExit.REJECTED}


def run(options: argparse.Namespace, home: Home) -> int:
    """The exit code of the command that `options` name. Raises StorageError."""
    wanted = engine.Wanted(
        options.model,
        options.runtime,
        options.precision,
        tuple(options.shape),
        options.max_batch,
        options.calibration,
        keep=tuple(options.keep),
        keep_operators=tuple(options.keep_operator),
    )
    try:
        return {"check": _check, "build": _build, "verify": _verify}[options.command](options, wanted, home)
    except (BadShape, report.Unwritable) as e:
        say(str(e))
        return EXIT_USAGE
    except Rejected as e:
        say(e.message)
        return JobExit.REJECTED
    except StageDied as e:
        say(str(e))
        return JobExit.RETRY


def _check(options: argparse.Namespace, wanted: engine.Wanted, home: Home) -> int:
    try:
        checked = engine.check(wanted, home, Task(options.task))
    except Rejected as e:
        print(tell.refused_as_json(options.model, e) if options.output == "json" else tell.findings(e.findings))
        return JobExit.REJECTED  # the findings say it all
    there = engine.find(checked, home)
    tell_it = tell.as_json if options.output == "json" else tell.as_text
    print(tell_it(options.model, checked, there[0] if there else None))
    return JobExit.DONE


def _build(options: argparse.Namespace, wanted: engine.Wanted, home: Home) -> int:
    checked = engine.check(wanted, home)
    digest = engine.prepare(checked, home, say)
    document = {"revision": checked.revision, "loadKey": str(checked.load_key), "engine": digest}
    print(json.dumps(document, indent=2) if options.output == "json" else digest)
    return JobExit.DONE


def _verify(options: argparse.Namespace, wanted: engine.Wanted, home: Home) -> int:
    task = Task(options.task)
    limits = Thresholds(options.top1_delta, options.rmse_increase, options.cosine)
    if options.report is not None:
        report.require_writable(options.report)  # before an hour of work
    checked = engine.check(wanted, home, task)
    ended = engine.verify(checked, home, options.dataset, options.samples, task, limits, say)
    code = _GATE_EXITS.get(ended.reason, JobExit.INCONCLUSIVE)
    if options.output == "json":
        document = {
            "reason": ended.reason.value,
            "message": ended.message,
            "exitCode": code,
            "revision": checked.revision,
        }
        print(json.dumps(document | {"figures": encode(ended.result.artifact.figures)}, indent=2))
    else:
        print(f"{ended.reason.value}: {name(ended.message)}")
    if options.report is not None and ended.result.artifact.figures is not None:
        report.write(ended.result.artifact.figures, limits, home, options.report)
    return code
