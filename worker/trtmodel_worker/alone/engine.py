"""What the Jobs do, on one machine: check a model, build its engine into the local store, measure it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.identity import EngineSettings, KeepPrecision, LoadKey
from trtmodel_contract.jobs import BuildTask, CalibrationRequest, DataSet, Reason
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.alone import samples, shapes
from trtmodel_worker.alone.home import Home, model_ref
from trtmodel_worker.builder import check as checks
from trtmodel_worker.builder.build import Ended, build
from trtmodel_worker.builder.dataset import DataSetFile
from trtmodel_worker.builder.examine import check_wanted
from trtmodel_worker.builder.findings import Report, error, require
from trtmodel_worker.builder.sources import Place, revision_of, used_calibration
from trtmodel_worker.builder.wanted import Wanted as Asked
from trtmodel_worker.engines import registry
from trtmodel_worker.engines.building import Graph, Rejected
from trtmodel_worker.storage import Source

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """A model and how its engine is meant, as on the command line. `calibration` is a path or URI, '' for none; `keep`
    are patterns of nodes that keep FP32, `keep_operators` types of operators that do."""

    model: str
    runtime: str
    precision: str
    shapes: tuple[str, ...]
    max_batch: int
    calibration: str = ""
    calibration_samples: int = 500
    keep: tuple[str, ...] = ()
    keep_operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checked:
    """A model that can be built. `sha256` is the source's identity; `report` has warnings at most."""

    source: Source
    sha256: str
    graph: Graph
    report: Report
    settings: EngineSettings
    calibration: CalibrationRequest | None
    revision: str
    load_key: LoadKey


def check(wanted: Wanted, home: Home, task: Task = Task.RAW) -> Checked:
    """Raises Rejected with all findings, StorageError, StageDied, BadShape."""
    try:
        runtime, builder = registry.runtime(wanted.runtime), registry.builder(wanted.runtime)
    except ValueError as e:
        raise Rejected(Reason.PRECISION_UNSUPPORTED, str(e)) from e
    source = home.source("model", wanted.model)
    report = checks.examined(source.path, f"{wanted.model} ({source.size:,} bytes)", home.root, wanted.runtime)
    found, graph = list(report.findings), report.graph
    if graph is None:
        require(found)
    assert graph is not None
    try:
        settings = EngineSettings(
            wanted.runtime,
            wanted.precision,
            _kept(wanted),
            shapes.profiles(graph, wanted.shapes, wanted.max_batch),
        )
    except Rejected as e:
        require([*found, *e.findings])
        raise
    if wanted.precision == "INT8" and not wanted.calibration and not report.quantized:
        text = "INT8 needs data to find ranges with"
        hint = "name an npz with --calibration, or give a graph with Q/DQ nodes"
        require([*found, error(Reason.PRECISION_UNSUPPORTED, text, hint)])
    calibration = used_calibration(settings, _calibration(wanted, home))
    asked = Asked(settings, task, calibration.method if calibration else None)
    require([*found, *check_wanted(graph, report.quantized, builder, asked)])
    digest = calibration.data.digest if calibration else ""
    sha256 = source.digest
    revision = revision_of(sha256, settings, calibration, digest)
    return Checked(source, sha256, graph, report, settings, calibration, revision, runtime.load_key())


def find(checked: Checked, home: Home) -> tuple[str, Manifest] | None:
    """(digest, manifest) of the engine, if it was built on this machine. Raises StorageError."""
    return home.store().find(checked.revision, checked.load_key)


def prepare(checked: Checked, home: Home, progress: Progress) -> str:
    """The digest of the engine's manifest; it is built if it is not there. Without data of the user, golden samples are
    answers to random inputs. Raises Rejected, StorageError, StageDied."""
    found = find(checked, home)
    if found is not None:
        progress(f"revision {checked.revision} was built before")
        return found[0]
    progress("no data of yours is used: the golden samples, by which a worker knows its engine, are of random inputs")
    with tempfile.TemporaryDirectory(dir=home.root, prefix="work-") as work:
        data = samples.write(Path(work) / "random.npz", checked.graph, checked.settings.profiles)
        ended = _build(checked, home, data, Task.RAW, Thresholds(), Path(work), progress)
    if ended.reason is not Reason.DONE:
        progress(f"on random inputs, {ended.message}; your data decides: trtmodel verify --dataset")
    return ended.result.artifact.manifest_digest


def verify(
    checked: Checked, home: Home, dataset: str, count: int, task: Task, limits: Thresholds, progress: Progress
) -> Ended:
    """Build if need be, and measure on the user's data. Raises Rejected, StorageError, StageDied."""
    fetched, uri = home.data("--dataset", dataset)
    opened = DataSetFile(fetched.path, dataset, checked.graph.inputs, checked.settings.profiles)
    opened.check_labels(checked.graph, task)
    data = DataSet(uri, count, fetched.digest)
    with tempfile.TemporaryDirectory(dir=home.root, prefix="work-") as work:
        return _build(checked, home, data, task, limits, Path(work), progress)


def _build(
    checked: Checked, home: Home, data: DataSet, task: Task, limits: Thresholds, work: Path, progress: Progress
) -> Ended:
    folder = work / "stages"
    folder.mkdir()
    order = BuildTask(
        model=model_ref("any"),
        source_uri=checked.source.uri,
        source_sha256=checked.sha256,
        revision=checked.revision,
        storage=home.storage,
        engine=checked.settings,
        calibration=checked.calibration,
        dataset=data,
        verify_task=task,
        thresholds=limits,
    )
    return build(order, Place(home.storage, None, home.files), folder, progress)


def _kept(wanted: Wanted) -> KeepPrecision | None:
    """Another order of operators is the same engine, as in a cluster."""
    if not wanted.keep and not wanted.keep_operators:
        return None
    return KeepPrecision(wanted.keep, operators=tuple(sorted(set(wanted.keep_operators))))


def _calibration(wanted: Wanted, home: Home) -> CalibrationRequest | None:
    if not wanted.calibration:
        return None
    fetched, uri = home.data("--calibration", wanted.calibration)
    return CalibrationRequest(DataSet(uri, wanted.calibration_samples, fetched.digest))
