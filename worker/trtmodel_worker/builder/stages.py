"""What runs in a process of its own: a crash, a leak or an out-of-memory kill there leaves the Job able to speak.

    build     source, calibration -> plan
    prove     load the plan; golden samples; memory; gate
    reload    load it again with another number of threads: how far do its answers differ?
    explain   after a gate that failed: which nodes does the reduced precision hurt?

Request and answer are JSON files, named on the command line. The exit code says only whether there is an answer.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.gate import GateFigures, Task
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import CalibrationRequest, DataSet, Reason
from trtmodel_contract.manifest import MEASURED_LANES

from trtmodel_worker.builder import gate, golden
from trtmodel_worker.builder.dataset import DataSetFile, calibration_batches
from trtmodel_worker.builder.gate_shapes import batch_sizes
from trtmodel_worker.builder.observed import Findings
from trtmodel_worker.builder.process import telling_no_space
from trtmodel_worker.builder.report import Sensitivity
from trtmodel_worker.devicememory import DeviceMemory, device_memory, taken
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.base import (
    Array,
    BindingLane,
    CannotLoad,
    DeviceLost,
    Engine,
    EngineError,
    Lane,
    OutOfMemory,
    Sticky,
    allocate_anew,
)
from trtmodel_worker.engines.building import CalibrationData, Graph, Rejected
from trtmodel_worker.engines.onnxruntime.machine import cpu_quota
from trtmodel_worker.engines.precision.reduced import ReducingBuilder
from trtmodel_worker.lifetime import end_with_parent

CALIBRATION_ROWS = 4  # small: a calibrator holds every activation of a batch
EXPLAIN_CALIBRATION = 64  # samples: ranges that are nearly those of the engine, in a fraction of the time
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
    """`plan` is written by `build` and read by the others. Golden sample sets are files of `folder`. `worst` are the
    samples that `explain` looks at, beside the first ones."""

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
    worst: tuple[int, ...] = ()


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
    findings: Findings | None = None
    sensitivity: Sensitivity | None = None
    gate_seconds: float = 0.0
    golden: tuple[GoldenAnswer, ...] = ()
    host_bytes: int = 0
    device_bytes: int = 0
    lane_bytes: int = 0


def build(request: Request) -> Answer:
    from trtmodel_worker.builder import simplify  # onnx: `prove` measures what a worker needs, which is without it

    builder = registry.builder(request.engine.runtime)
    calibration = _calibration(request)
    data = request.dataset.open(request.graph, request.engine)
    source, said = simplify.source(Path(request.source), request.engine, request.graph, data, Path(request.folder))
    built = builder.build(source, request.engine, calibration, Path(request.plan))
    return Answer(built={**built, **said})


def _calibration(request: Request, most: int = sys.maxsize) -> CalibrationData | None:
    if request.calibration is None or request.calibration_settings is None:
        return None
    settings = request.calibration_settings
    data = request.calibration.open(request.graph, request.engine)
    rows, _ = batch_sizes(request.graph, data.profiles, CALIBRATION_ROWS)
    batches = calibration_batches(data, rows, min(most, settings.data.samples))
    return CalibrationData(batches, settings.method, settings.per_channel)


def prove(request: Request) -> Answer:
    device_before = device_memory()  # before anything of the device was initialised in this process
    engine = _load(request, MEASURED_LANES)
    data = request.dataset.open(request.graph, request.engine)
    sizes = batch_sizes(request.graph, data.profiles)[1]
    lanes, device_bytes, lane_bytes = measured_lanes(engine, sizes, data.head, device_before)
    host_bytes = _peak_bytes()  # before the reference is loaded, which no worker does
    answers = []
    for number, found in enumerate(golden.record(request.graph, data, lanes)):
        file = f"golden-{number}.npz"
        (Path(request.folder) / file).write_bytes(found.encode(request.graph))
        answers.append(_golden_answer(request, file, found))
    started = time.monotonic()
    reference = gate.Reference(Path(request.source), cpu_quota())
    measured = gate.measure(
        reference, lanes[0], request.graph, data, request.dataset.data, request.task, request.engine.profiles
    )
    return Answer(
        figures=measured.figures,
        findings=measured.findings,
        gate_seconds=time.monotonic() - started,
        golden=tuple(answers),
        host_bytes=host_bytes,
        device_bytes=device_bytes,
        lane_bytes=lane_bytes,
    )


def measured_lanes(
    engine: Engine, sizes: Sequence[int], batch: Callable[[int], Mapping[str, Array]], before: DeviceMemory | None
) -> tuple[list[Lane], int, int]:
    """Lanes that ran a batch of each size; the bytes of the device that were taken since `before`, and those by the
    last of them, which loads nothing for others: more than by all before it were somebody else's. Raises
    EngineError."""
    lanes, seen = list[Lane](), [before]
    for _ in range(MEASURED_LANES):
        lane = engine.create_lane()
        for rows in sizes:
            golden.run(lane, batch(rows))
            if isinstance(lane, BindingLane):
                lane.bind(batch(rows), allocate_anew)  # what a worker prepares takes memory too
        lanes.append(lane)
        seen.append(device_memory())
    return lanes, taken(before, seen[-1]), min(taken(seen[-2], seen[-1]), taken(before, seen[-2]))


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


def explain(request: Request) -> Answer:
    """Nothing where the builder does not write precision into the graph, or where nothing was reduced."""
    from trtmodel_worker.builder import sensitivity  # onnx, as in `build`

    builder = registry.builder(request.engine.runtime)
    if not isinstance(builder, ReducingBuilder):
        return Answer()
    folder = Path(request.folder)
    graph = builder.reduced(Path(request.source), request.engine, _calibration(request, EXPLAIN_CALIBRATION), folder)
    if graph is None:
        return Answer()
    data = request.dataset.open(request.graph, request.engine)
    rows, _ = batch_sizes(request.graph, data.profiles, CALIBRATION_ROWS)
    wanted = sorted({*request.worst, *range(sensitivity.SAMPLES)})
    samples = list(data.chosen(wanted, rows))
    return Answer(sensitivity=sensitivity.find(graph, samples, folder))


def _golden_answer(request: Request, file: str, found: golden.GoldenSet) -> GoldenAnswer:
    for name, spread in found.spread.items():
        if not np.isfinite(spread):
            text = f"the built engine does not answer the same twice: output {name!r} changes shape or turns NaN"
            raise Rejected(Reason.BUILD_FAILED, text)
    return GoldenAnswer(file, found.rows, golden.tolerances(found, request.engine.precision))


def _fault_of_model(request: Request) -> str:
    """A sentence if the model fails without an engine, too."""
    from trtmodel_worker.builder import blame  # onnx, as in `build`

    data = request.dataset.open(request.graph, request.engine)
    sizes = batch_sizes(request.graph, data.profiles)[1]
    words = blame.model_fails(Path(request.source), data, sizes)
    return f"the model itself fails on the data set's first samples, in batches of {sizes}: {words}" if words else ""


def _load(request: Request, lanes: int) -> Engine:
    with Path(request.plan).open("rb") as f:  # as a host does
        plan = memoryview(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ))
    return registry.runtime(request.engine.runtime).load(plan, request.engine.profiles, lanes)


def _peak_bytes() -> int:
    """Greatest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


STAGES = {"build": build, "prove": prove, "reload": reload, "explain": explain}


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
    except (Sticky, DeviceLost):
        raise  # the device failed, not the model: without an answer the Job is tried again, maybe elsewhere
    except (CannotLoad, EngineError) as e:
        what = "the engine could not be built" if stage == "build" else f"the engine was built but fails to {stage}"
        answer = Answer(rejected=Reason.BUILD_FAILED, message=f"{what}: {e}")
        if stage == "prove" and (fault := _fault_of_model(request)):
            answer = Answer(rejected=Reason.MODEL_INVALID, message=fault)
    partial = Path(f"{answer_path}.part")
    partial.write_bytes(dumps(replace(answer, message=answer.message.encode("utf-8", "replace").decode())))
    partial.replace(answer_path)
    return 0


if __name__ == "__main__":
    with telling_no_space():
        sys.exit(main(sys.argv[1:]))
