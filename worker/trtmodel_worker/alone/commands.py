"""check, build and verify: results on standard output, progress and errors on standard error."""

from __future__ import annotations

import argparse

from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.jobs import Reason

from trtmodel_worker.alone import engine
from trtmodel_worker.alone.home import Home
from trtmodel_worker.alone.say import say
from trtmodel_worker.alone.shapes import BadShape
from trtmodel_worker.builder.child import StageDied
from trtmodel_worker.engines.building import Rejected

EXIT_USAGE = 2
_GATE_EXITS = {Reason.DONE: JobExit.DONE, Reason.GATE_FAILED: JobExit.REJECTED}


def run(options: argparse.Namespace, home: Home) -> int:
    """The exit code of the command that `options` name. Raises StorageError."""
    wanted = engine.Wanted(
        options.model, options.runtime, options.precision, tuple(options.shape), options.max_batch, options.calibration
    )
    try:
        return {"check": _check, "build": _build, "verify": _verify}[options.command](options, wanted, home)
    except BadShape as e:
        say(str(e))
        return EXIT_USAGE
    except Rejected as e:
        say(e.message)
        return JobExit.REJECTED
    except StageDied as e:
        say(str(e))
        return JobExit.RETRY


def _check(options: argparse.Namespace, wanted: engine.Wanted, home: Home) -> int:
    checked = engine.check(wanted, home)
    there = engine.find(checked, home)
    lines = [f"{options.model}: {checked.source.size:,} bytes, sha256 {checked.sha256}"]
    lines += [f"input  {t.name} {t.datatype} {list(t.dims)}" for t in checked.graph.inputs]
    lines += [f"output {t.name} {t.datatype} {list(t.dims)}" for t in checked.graph.outputs]
    for profile in checked.settings.profiles:
        lines += [f"served {name} from {list(r.min)} to {list(r.max)}" for name, r in profile.inputs.items()]
    built = f"engine {there[0]}" if there else "not built yet"
    lines.append(f"revision {checked.revision} in {checked.settings.precision} for {checked.load_key}: {built}")
    print("\n".join(lines))
    return JobExit.DONE


def _build(_options: argparse.Namespace, wanted: engine.Wanted, home: Home) -> int:
    print(engine.prepare(engine.check(wanted, home), home, say))
    return JobExit.DONE


def _verify(options: argparse.Namespace, wanted: engine.Wanted, home: Home) -> int:
    task = Task(options.task)
    limits = Thresholds(options.top1_delta, options.rmse_increase, options.cosine)
    checked = engine.check(wanted, home, task)
    ended = engine.verify(checked, home, options.dataset, options.samples, task, limits, say)
    print(f"{ended.reason.value}: {ended.message}")
    return _GATE_EXITS.get(ended.reason, JobExit.INCONCLUSIVE)
