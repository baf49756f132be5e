"""The gate's report: what was measured, on what, and what the verdict was by the thresholds of that day.

Two blobs of the same content, a document for programs and a page for people. A report never decides anything: the
verdict that counts is computed from the figures with the thresholds of the day that it is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from trtmodel_contract.codec import dumps
from trtmodel_contract.gate import Check, GateFigures, Thresholds, Verdict
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.text import cut

from trtmodel_worker.builder import report_html
from trtmodel_worker.builder.observed import Findings

MOST_BYTES = 1 << 20  # of each of the two
_MOST_OUTPUTS = 64
_MOST_CHECKS = 200
_SHORT = 1000  # characters of a text, where little fits


@dataclass(frozen=True)
class Kept:
    """What keeping some nodes would do, on a few samples: `error` is the greatest relative error of any output with
    these and all earlier patterns kept."""

    pattern: str
    node: str
    operator: str
    error: float | None


@dataclass(frozen=True)
class Sensitivity:
    """Where a reduced precision goes wrong. `error` is before anything is kept."""

    samples: int
    error: float | None
    kept: tuple[Kept, ...]


@dataclass(frozen=True)
class Subject:
    """Which engine was compared with which file on which data. `built` is the builder's account of what it did."""

    model: str
    source: str
    source_sha256: str
    revision: str
    load_key: str
    manifest_digest: str
    engine: EngineSettings
    built: Mapping[str, str]
    dataset: str
    dataset_digest: str
    created_at: str


@dataclass(frozen=True)
class Report:
    SCHEMA: ClassVar[str] = "trtmodel.io/gate-report/v1"

    subject: Subject
    thresholds: Thresholds
    verdict: Verdict
    sentence: str
    checks: tuple[Check, ...]
    figures: GateFigures
    findings: Findings
    sensitivity: Sensitivity | None = None


def render(report: Report) -> tuple[bytes, bytes]:
    """(JSON, HTML), each of at most MOST_BYTES: of a model with very many outputs, or with very long names, only the
    worst outputs are kept, then none."""
    for candidate in _ever_smaller(report):
        document, page = dumps(candidate), report_html.page(candidate)
        if max(len(document), len(page)) <= MOST_BYTES:
            return document, page
    raise AssertionError("the last candidate has no names of the model in it")


def _ever_smaller(report: Report) -> Iterator[Report]:
    if len(report.figures.outputs) <= _MOST_OUTPUTS:
        yield report
    few = dataclasses.replace(report, figures=report.figures.worst(), checks=report.checks[:_MOST_CHECKS])
    yield few
    yield dataclasses.replace(few, findings=Findings(), sensitivity=None)
    short = {f.name: cut(getattr(few.subject, f.name), _SHORT) for f in dataclasses.fields(Subject) if f.type == "str"}
    yield dataclasses.replace(
        few,
        subject=dataclasses.replace(few.subject, built={}, engine=EngineSettings(few.subject.engine.runtime), **short),
        sentence=cut(few.sentence, _SHORT),
        checks=(),
        figures=dataclasses.replace(few.figures, outputs={}, keep_hints=()),
        findings=Findings(),
        sensitivity=None,
    )
