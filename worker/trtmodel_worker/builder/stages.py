"""What runs in a process of its own: a crash, a leak or an out-of-memory kill there leaves the Job able to speak.

    build     source, calibration -> plan
    prove     load the plan; golden samples; memory; gate
    reload    load it again with another number of threads: how far do its answers differ?

Request and answer are JSON files, named on the command line. The exit code says only whether there is an answer.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.gate import GateFigures, Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import CalibrationRequest, DataSet, Reason

from trtmodel_worker.builder import gate, golden
from trtmodel_worker.builder.dataset import DataSetFile, calibration_batches
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.base import CannotLoad, Engine, EngineError, OutOfMemory
from trtmodel_worker.engines.building import CalibrationData, Graph, Rejected
from trtmodel_worker.engines.onnxruntime.machine import cpu_quota
from trtmodel_worker.lifetime import end_with_parent

CALIBRATION_ROWS = 4  # small: a calibrator holds every activation of a batch
LANES = 2
_MORE = (
    "If that comes again: raise spec.build.resources.limits.memory, with TensorRT also spec.engine.workspace, or build "
    "where nothing else uses the device"
)

log = logging.getLogger("trtmodel.stage")


@dataclass(frozen=True)
class LocalData:
    """A fetched data set."""

    path: str
    data: DataSet

    def open(self, graph: Graph, engine: EngineSettings) -> DataSetFile:
        return DataSetFile(Path(self.path), self.data.uri, graph.inputs, engine.profiles)


@dataclass(frozen=True)
class Request:
    """`plan` is written by `build` and read by the others. Golden sample sets are files of `folder`."""

    SCHEMA: ClassVar[str] = "trtmodel.io/stage-request/v1"

    source: str
    plan: str
    folder: str
    graph: Graph
    engine: EngineSettings
    task: Task
    dataset: LocalData
    calibration: LocalData | None = None
    calibration_settings: CalibrationRequest | None = None


@dataclass(frozen=True)
class GoldenAnswer:
    """One golden sample set: a file of the folder."""

    file: str
    rows: int
    tolerances: Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """With `rejected`, nothing else but `message`."""

    SCHEMA: ClassVar[str] = "trtmodel.io/stage-answer/v1"

    rejected: Reason | None = None
    message: str = ""
    built: Mapping[str, str] | None = None
    figures: GateFigures | None = None
    gate_seconds: float = 0.0
    golden: tuple[GoldenAnswer, ...] = ()
    host_bytes: int = 0


def build(request: Request) -> Answer:
    calibration = None
    if request.calibration is not None and request.calibration_settings is not None:
        settings = request.calibration_settings
        data = request.calibration.open(request.graph, request.engine)
        rows, _ = gate.batch_sizes(request.graph, data.profiles, CALIBRATION_ROWS)
        batches = calibration_batches(data, rows, settings.data.samples)
        calibration = CalibrationData(batches, settings.method, settings.per_channel)
    builder = registry.builder(request.engine.runtime)
    built = builder.build(Path(request.source), request.engine, calibration, Path(request.plan))
    return Answer(built=dict(built))


def prove(request: Request) -> Answer:
    engine = _load(request, LANES)
    lanes = [engine.create_lane() for _ in range(LANES)]
    data = request.dataset.open(request.graph, request.engine)
    for lane in lanes:
        for rows in gate.batch_sizes(request.graph, data.profiles)[1]:
            golden.run(lane, data.head(rows))
    host_bytes = _peak_bytes()  # before the reference is loaded, which no worker does
    answers = []
    for number, found in enumerate(golden.record(request.graph, data, lanes)):
        file = f"golden-{number}.npz"
        (Path(request.folder) / file).write_bytes(found.encode(request.graph))
        answers.append(_golden_answer(request, file, found))
    started = time.monotonic()
    reference = gate.Reference(Path(request.source), cpu_quota())
    figures = gate.measure(reference, lanes[0], request.graph, data, request.dataset.data, request.task)
    seconds = time.monotonic() - started
    return Answer(figures=figures, gate_seconds=seconds, golden=tuple(answers), host_bytes=host_bytes)


def reload(request: Request) -> Answer:
    """Tolerances of the same golden samples after another load."""
    lane = _load(request, lanes=1).create_lane()
    answers = []
    for path in sorted(Path(request.folder).glob("golden-*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            inputs = {tensor.name: arrays[f"i{n}"] for n, tensor in enumerate(request.graph.inputs)}
            outputs = {tensor.name: arrays[f"o{n}"] for n, tensor in enumerate(request.graph.outputs)}
        spread = golden.differences(outputs, golden.run(lane, inputs))
        rows = len(next(iter(inputs.values())))
        answers.append(_golden_answer(request, path.name, golden.GoldenSet(rows, inputs, outputs, spread)))
    return Answer(golden=tuple(answers))


def _golden_answer(request: Request, file: str, found: golden.GoldenSet) -> GoldenAnswer:
    for name, spread in found.spread.items():
        if not np.isfinite(spread):
            text = f"the built engine does not answer the same twice: output {name!r} changes shape or turns NaN"
            raise Rejected(Reason.BUILD_FAILED, text)
    return GoldenAnswer(file, found.rows, golden.tolerances(found, request.engine.precision))


def _load(request: Request, lanes: int) -> Engine:
    plan = memoryview(Path(request.plan).read_bytes())
    return registry.runtime(request.engine.runtime).load(plan, request.engine.profiles, lanes)


def _peak_bytes() -> int:
    """Greatest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


STAGES = {"build": build, "prove": prove, "reload": reload}


def main(arguments: list[str]) -> int:
    """``stage request.json answer.json``."""
    stage, request_path, answer_path = arguments
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s %(levelname)s {stage} %(message)s")
    # Libraries print progress to standard output, which nobody reads.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    end_with_parent()
    request = loads(Request, Path(request_path).read_bytes())
    try:
        answer = STAGES[stage](request)
    except Rejected as e:
        answer = Answer(rejected=e.reason, message=e.message)
    except (OutOfMemory, MemoryError) as e:
        answer = Answer(
            rejected=Reason.BUILD_FAILED, message=f"memory ran out in stage {stage}: {e or 'no details'}. {_MORE}"
        )
    except (CannotLoad, EngineError) as e:
        what = "the engine could not be built" if stage == "build" else f"the engine was built but fails to {stage}"
        answer = Answer(rejected=Reason.BUILD_FAILED, message=f"{what}: {e}")
    partial = Path(f"{answer_path}.part")
    partial.write_bytes(dumps(replace(answer, message=answer.message.encode("utf-8", "replace").decode())))
    partial.replace(answer_path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
