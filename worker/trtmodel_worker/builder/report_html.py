"""The report as one page without script, font or picture from anywhere else. Every name in it is foreign: all text goes
through `escape`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from trtmodel_contract.codec import encode
from trtmodel_contract.gate import Verdict

from trtmodel_worker.builder import report_plots

if TYPE_CHECKING:
    from trtmodel_worker.builder.report import Report

_SHOWN = 120  # characters of a name or setting
_COLOURS = {Verdict.PASS: "good", Verdict.FAIL: "wrong"}
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#667;--paper:#fff;--line:#d8dce2;
--bar:#3b6ea8;--bad:#c0392b;--good:#2e7d4f;--odd:#b7791f}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa;--paper:#15181c;--line:#353b43;
--bar:#6ea3dd;--bad:#ef6f61;--good:#5fbf86;--odd:#e0a84a}}
body{font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}p.what{color:var(--soft);margin:.2rem 0}
.verdict{border-left:.4rem solid var(--odd);padding:.5rem 1rem}
.verdict.good{border-color:var(--good)}.verdict.wrong{border-color:var(--bad)}
table{border-collapse:collapse;width:100%;margin:.5rem 0}
td,th{border-bottom:1px solid var(--line);padding:.25rem .5rem;
text-align:left;vertical-align:top;overflow-wrap:anywhere}
.wide{overflow-x:auto}svg{max-width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
svg line{stroke:var(--line)}.bar{fill:var(--bar)}.bad{fill:var(--bad)}.faint{fill:var(--line)}
"""
_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    '<meta name="viewport" content="width=device-width"><title>Accuracy gate: {title}</title><style>{style}</style>'
    "</head><body>"
)


def page(report: Report) -> bytes:
    parts = [
        _HEAD.format(title=_text(report.subject.model), style=_STYLE),
        f"<h1>Accuracy gate: {_text(report.subject.model)}</h1>",
        _verdict(report),
        _sensitivity(report),
        _figures(report),
        _spreads(report),
        _classes(report),
        _changes(report),
        _worst(report),
        _subject(report),
        "</body></html>",
    ]
    return "".join(parts).encode("utf-8", "replace")


def _verdict(report: Report) -> str:
    limits = report.thresholds
    said = f"top1Delta {limits.top1_delta:g}, rmseIncrease {limits.rmse_increase:g}, cosine {limits.cosine:g}"
    rows = [(check.name, check.verdict.value, check.sentence) for check in report.checks]
    return (
        f'<div class="verdict {_COLOURS.get(report.verdict, "")}"><strong>{report.verdict.value}</strong><br>'
        f"{_text(report.sentence, 4000)}</div>"
        f'<p class="what">By the thresholds of {_text(report.subject.created_at)}: {said}. '
        "Other thresholds make another verdict of the same figures.</p>"
        + _table("Checks", ("check", "verdict", "why"), rows, cut=600)
    )


def _sensitivity(report: Report) -> str:
    found = report.sensitivity
    if found is None:
        return ""
    rows = [("nothing kept", "", "", _share(found.error))]
    rows += [(kept.pattern, kept.node, kept.operator, _share(kept.error)) for kept in found.kept]
    text = f"On {found.samples:,} samples: the error of the worst output with these nodes, and those above them, kept"
    return _table(
        "Where the precision is lost", ("keepPrecision.nodes", "node", "operator", "error then"), rows, what=text
    )


def _figures(report: Report) -> str:
    figures = report.figures
    labels = "with labels" if figures.labelled else "without labels"
    text = f"{figures.samples:,} samples {labels}, task {figures.task.value}. Shapes run: "
    text += "; ".join(report.findings.shapes[:40]) or ", ".join(map(str, figures.shapes_checked))
    rows = [
        (
            name,
            _number(o.cosine_mean, ".6f"),
            _number(o.cosine_worst, ".6f"),
            _share(o.relative_rmse),
            _number(o.max_abs, ".4g"),
            f"{_number(o.truth_rmse_reference, '.4g')} to {_number(o.truth_rmse_engine, '.4g')}"
            if figures.labelled and o.truth_rmse_reference is not None
            else "",
            f"{o.nonfinite:,}",
            "yes" if o.constant else "no",
        )
        for name, o in figures.outputs.items()
    ]
    heads = (
        "output",
        "mean cosine",
        "worst cosine",
        "relative RMSE",
        "largest error",
        "RMSE to truth",
        "NaN",
        "constant",
    )
    found = _table("Figures", heads, rows, what=text)
    top1 = figures.top1
    if top1 is not None:
        counts = [("answers that differ", f"{top1.disagreements:,}")]
        if top1.only_reference_right is not None and top1.only_engine_right is not None:
            counts.append(("original right", f"{top1.reference_right:,}"))
            counts.append(("engine right", f"{top1.engine_right:,}"))
            counts.append(("only the original right", f"{top1.only_reference_right:,}"))
            counts.append(("only the engine right", f"{top1.only_engine_right:,}"))
        found += _table("Classes in all", ("what", "samples"), counts)
    return found


def _spreads(report: Report) -> str:
    drawn = [
        f'<p class="what">{_text(spread.output)}</p><div class="wide">{report_plots.errors(spread)}</div>'
        for spread in report.findings.spreads
    ]
    if not drawn:
        return ""
    text = "Length of the difference to the original's answer, relative to that answer, sample by sample."
    return f'<h2>Errors</h2><p class="what">{text}</p>{"".join(drawn)}'


def _classes(report: Report) -> str:
    found = report.findings
    if not found.classes:
        return ""
    more = f" of {found.class_count:,}: those that lost most, then the largest" if found.class_count else ""
    rows = [
        (
            str(row.number),
            f"{row.samples:,}",
            f"{row.agree:,}",
            "" if row.reference_right is None else f"{row.reference_right:,}",
            "" if row.engine_right is None else f"{row.engine_right:,}",
        )
        for row in found.classes
    ]
    heads = ("class", "samples", "same answer", "original right", "engine right")
    plot = f'<div class="wide">{report_plots.classes(found.classes)}</div>'
    return _table("Classes", heads, rows, what=f"{len(rows)}{more}", after=plot)


def _changes(report: Report) -> str:
    found = report.findings
    if not found.changes:
        return ""
    text = f"{len(found.changes)} of {found.change_count:,} pairs of classes, the most frequent"
    rows = [(str(c.reference), str(c.engine), f"{c.samples:,}") for c in found.changes]
    plot = f'<div class="wide">{report_plots.changes(found.changes)}</div>'
    return _table("Changed answers", ("original", "engine", "samples"), rows, what=text, after=plot)


def _worst(report: Report) -> str:
    rows = []
    for sample in report.findings.worst:
        for answer in sample.answers:
            index = f"{sample.index}{' (changed)' if sample.changed else ''}"
            rows.append((index, sample.label, answer.output, answer.reference, answer.engine, _share(answer.error)))
    if not rows:
        return ""
    heads = ("sample", "label", "output", "original", "engine", "error")
    return _table("Worst samples", heads, rows, what="Samples count from 0 in the data set.", cut=240)


def _subject(report: Report) -> str:
    subject = report.subject
    rows = [
        ("source", subject.source),
        ("source sha256", subject.source_sha256),
        ("revision", subject.revision),
        ("load key", subject.load_key),
        ("artifact digest", subject.manifest_digest),
        ("data set", subject.dataset),
        ("data set digest", subject.dataset_digest),
        ("measured", subject.created_at),
    ]
    settings = [(name, str(value)) for name, value in sorted(encode(subject.engine, omit_defaults=True).items())]
    built = [(f"built: {name}", value) for name, value in sorted(subject.built.items())]
    return _table("Engine and data", ("what", "value"), [*rows, *settings, *built], cut=600)


def _table(
    title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], what: str = "", cut: int = _SHOWN, after: str = ""
) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{_text(cell, cut)}</td>" for cell in row) + "</tr>" for row in rows)
    said = f'<p class="what">{_text(what, 2000)}</p>' if what else ""
    table = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f"<h2>{escape(title)}</h2>{said}{table}{after}"


def _text(text: str, cut: int = _SHOWN) -> str:
    return escape(text if len(text) <= cut else f"{text[:cut]}...")


def _share(value: float | None) -> str:
    return "no number" if value is None else f"{value:.3%}"


def _number(value: float | None, form: str) -> str:
    return "no number" if value is None else format(value, form)
