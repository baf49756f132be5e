"""The report: what is in it, that it is whole in itself, and that no name breaks out of it."""

from __future__ import annotations

import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest
from trtmodel_contract.codec import loads
from trtmodel_contract.gate import GateFigures, OutputFigures, Task, Thresholds, Top1Figures, Verdict, judge
from trtmodel_contract.identity import EngineSettings, KeepPrecision
from trtmodel_worker.builder.figures import OutputSums
from trtmodel_worker.builder.observed import WORST, Findings, Observer
from trtmodel_worker.builder.report import MOST_BYTES, Kept, Report, Sensitivity, Subject, render

HOSTILE = "</td></table><script>alert('x')</script>\"'><img src=//evil.example/x onerror=y> имя 🙂"
VOID = {"meta", "br", "img"}
CLASSES, SAMPLES = 5, 300


def observed(scores: str = "y", labelled: bool = True) -> tuple[Findings, Top1Figures]:
    """300 samples of 5 classes; the engine turns every tenth answer, which are of class 0, and says NaN once."""
    random = np.random.default_rng(3)
    labels = np.arange(SAMPLES) % CLASSES
    reference = np.eye(CLASSES, dtype=np.float32)[labels] + random.normal(0, 0.01, (SAMPLES, CLASSES)).astype("f")
    engine = reference.copy()
    engine[::10] = np.roll(engine[::10], 1, axis=1)
    engine[5, 0] = np.nan
    observer, sums = Observer((scores, "other"), scores if scores == "y" else ""), OutputSums()
    for start in range(0, SAMPLES, 32):
        part = slice(start, start + 32)
        count = len(reference[part])
        errors = sums.add(reference[part], engine[part], count)
        both = (
            {scores: reference[part], "other": np.zeros((count, 2))},
            {scores: engine[part], "other": np.zeros((count, 2))},
        )
        observer.add(*both, {scores: errors, "other": np.zeros(count)}, labels[part] if labelled else None, count)
    observer.shapes.append("x 1x4")
    changed = len(range(0, SAMPLES, 10))
    return observer.findings(), Top1Figures(changed, SAMPLES, SAMPLES - changed, changed, 0)


def report(name: str = "y", findings: Findings | None = None, outputs: int = 1) -> Report:
    found, top1 = observed()
    output = OutputFigures(0.9, 0.1, 0.2, 1.5, 1, False, vectors=SAMPLES, cosine_error=0.1, rmse_error=0.1)
    figures = GateFigures(
        "a" * 64, "b" * 64, Task.CLASSIFICATION, SAMPLES, True,
        {f"{name}{i or ''}": output for i in range(outputs)}, top1, (1, 2),
    )  # fmt: skip
    limits = Thresholds()
    judged = judge(figures, limits)
    settings = EngineSettings("ONNXRuntime", "INT8", KeepPrecision((name,)))
    built = {"quantizedNodes": "3 of 4", "note": name}
    subject = Subject(
        f"ml/{name}", f"s3://models/{name}", "c" * 64, "0123456789", "onnxruntime-1", "a" * 64, settings, built,
        f"s3://data/{name}", "b" * 64, "2026-01-01T00:00:00Z",
    )  # fmt: skip
    sensitivity = Sensitivity(16, 0.4, (Kept("^a$", name, "MatMul", 0.01),))
    return Report(
        subject, limits, judged.verdict, judged.sentence, judged.checks, figures, findings or found, sensitivity
    )


class Page(HTMLParser):
    """Which elements a page has, each closed where it should be, and its text."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page.decode())
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_what_was_compared_and_why_it_failed() -> None:
    made = report()
    text = Page(render(made)[1]).text
    assert made.verdict is Verdict.FAIL
    for words in (
        made.sentence, "a" * 64, "b" * 64, "c" * 64, "0123456789", "s3://data/y", "3 of 4", "Worst samples",
        "Changed answers", "300 samples with labels", "x 1x4", "^a$", "top1Delta 0.005",
    ):  # fmt: skip
        assert words in text, words


def test_the_document_is_read_back_as_it_was() -> None:
    made = report()
    assert loads(Report, render(made)[0]) == made


def test_foreign_names_are_text_and_nothing_else() -> None:
    page = Page(render(report(HOSTILE))[1])
    assert page.tags <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "strong", "br", "table", "thead",
        "tbody", "tr", "th", "td", "svg", "rect", "line", "text",
    }  # fmt: skip
    assert not {name for name in page.attributes if name.startswith("on")} | {"src", "href"} & page.attributes
    assert "alert('x')" in page.text


def test_the_page_fetches_nothing() -> None:
    page = render(report())[1].decode()
    assert "default-src 'none'" in page
    assert not re.search(r"(src|href)\s*=|url\(|@import|<script|<link", page)


def test_plots_are_well_formed_and_show_every_bin() -> None:
    page = render(report())[1].decode()
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) == 4  # the errors of two outputs, classes, changes
    for plot in plots:
        ElementTree.fromstring(plot)


def test_the_worst_samples_are_those_that_changed_most_and_both_answers_stand_side_by_side() -> None:
    found, _ = observed()
    assert len(found.worst) == WORST
    assert found.worst[0].index == 5  # no number is worse than any
    assert all(sample.changed and sample.index % 10 == 0 for sample in found.worst[1:])
    first = next(sample for sample in found.worst if sample.index == 10)
    assert (first.label, first.answers[0].output) == ("0", "y")
    assert first.answers[0].reference.startswith("0 (")
    assert first.answers[0].engine.startswith("1 (")
    assert len({sample.index for sample in found.worst}) == WORST


def test_classes_and_changes_are_counted() -> None:
    found, _ = observed()
    turned = {0: 30}  # every tenth sample is of class 0
    assert found.class_count == CLASSES
    assert {row.number: row.loss() for row in found.classes if row.loss()} == turned
    worst = found.classes[0]
    assert (worst.number, worst.samples, worst.agree, worst.reference_right, worst.engine_right) == (0, 60, 30, 60, 30)
    assert [(c.reference, c.engine, c.samples) for c in found.changes] == [(0, 1, 30)]


def test_without_labels_classes_are_those_of_the_original() -> None:
    found, _ = observed(labelled=False)
    assert {row.number: row.loss() for row in found.classes if row.loss()} == {0: 30}
    assert all(row.reference_right is None for row in found.classes)


def test_every_sample_is_in_one_bin() -> None:
    found, _ = observed()
    spreads = {spread.output: spread for spread in found.spreads}
    assert spreads["other"].exact == SAMPLES
    y = spreads["y"]
    assert (y.broken, sum(y.counts), y.exact) == (1, 30, SAMPLES - 31)


def test_a_task_without_classes_shows_none() -> None:
    found, _ = observed(scores="z")
    assert (found.classes, found.changes) == ((), ())
    assert found.worst[0].answers[0].output == "z"


@pytest.mark.parametrize(("outputs", "name"), [(3_000, "/encoder/layer/attention/output"), (300, "🙂" * 4_000)])
def test_a_report_is_bounded_whatever_the_model_holds(outputs: int, name: str) -> None:
    made = report(name, outputs=outputs)
    made = dataclasses.replace(made, sentence=made.sentence[:2_000])
    for data in render(made):
        assert len(data) <= MOST_BYTES
    assert "Fail" in Page(render(made)[1]).text
