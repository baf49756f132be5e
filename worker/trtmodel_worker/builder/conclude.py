"""From what the gate measured to figures that can be kept: with a report beside them, and with a hint where less
precision made the engine fail."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from trtmodel_contract.gate import MOST_HINTS, GateFigures, GateReport, Verdict, judge
from trtmodel_contract.jobs import BuildTask
from trtmodel_contract.manifest import Manifest

from trtmodel_worker.builder import child
from trtmodel_worker.builder.observed import Findings
from trtmodel_worker.builder.publish import now
from trtmodel_worker.builder.report import Report, Sensitivity, Subject, render
from trtmodel_worker.builder.stages import Answer, Request
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.storage import ArtifactStore, StorageError

HINT_LENGTH = 160  # characters of a pattern that goes into messages: the report has it whole

log = logging.getLogger("trtmodel.job")


def conclude(
    task: BuildTask,
    store: ArtifactStore,
    digest: str,
    manifest: Manifest,
    request: Request,
    proof: Answer,
    work: Path,
    progress: Callable[[str], None],
) -> GateFigures:
    """The figures of an engine that is published, with a report in the bucket. Raises StorageError."""
    assert proof.figures is not None
    figures = dataclasses.replace(proof.figures, manifest_digest=digest)
    findings = proof.findings or Findings()
    sensitivity = None
    if judge(figures, task.thresholds).verdict is Verdict.FAIL and task.engine.precision != "FP32":
        progress("the gate failed: looking for the nodes that the reduced precision hurts")
        sensitivity = _explained(request, findings, work)
        figures = dataclasses.replace(figures, keep_hints=_hints(sensitivity))
    document, page = render(_report(task, digest, manifest, figures, findings, sensitivity))
    return dataclasses.replace(figures, report=GateReport(store.put_bytes(document), store.put_bytes(page)))


def _explained(request: Request, findings: Findings, work: Path) -> Sensitivity | None:
    """A hint is a help: that there is none changes no verdict."""
    worst = tuple(sample.index for sample in findings.worst)
    try:
        return child.run("explain", dataclasses.replace(request, worst=worst), work).sensitivity
    except (child.StageDied, Rejected, StorageError) as e:
        log.warning("no hint: %s", e)
        return None


def _hints(found: Sensitivity | None) -> tuple[str, ...]:
    patterns = () if found is None else tuple(kept.pattern for kept in found.kept)
    return tuple(pattern for pattern in patterns if len(pattern) <= HINT_LENGTH)[:MOST_HINTS]


def _report(
    task: BuildTask,
    digest: str,
    manifest: Manifest,
    figures: GateFigures,
    findings: Findings,
    sensitivity: Sensitivity | None,
) -> Report:
    verdict = judge(figures, task.thresholds)
    subject = Subject(
        model=f"{task.model.namespace}/{task.model.name}",
        source=task.source_uri,
        source_sha256=task.source_sha256,
        revision=task.revision,
        load_key=str(manifest.load_key),
        manifest_digest=digest,
        engine=task.engine,
        built=manifest.build,
        dataset=task.dataset.uri,
        dataset_digest=figures.dataset_digest,
        created_at=now(),
    )
    return Report(
        subject, task.thresholds, verdict.verdict, verdict.sentence, verdict.checks, figures, findings, sensitivity
    )
