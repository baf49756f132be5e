"""A run's result as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from catalogue import Peer
from measure import Cell, Visit

BUSY_LOAD = 1.0


@dataclass
class Result:
    """`about`: date, machine, versions, command, load. `scenarios`: name -> peer -> figures."""

    about: dict[str, Any]
    peers: Sequence[Peer]
    cells: Sequence[Cell]
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    scenarios: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, peer: Peer, visit: Visit) -> None:
        self.visits.setdefault(peer.name, []).append(visit)

    def figures(self, peer: Peer, cell: Cell) -> dict[str, float] | None:
        """Medians of the repetitions; failed requests are added up."""
        samples = [v.samples[cell] for v in self.visits.get(peer.name, []) if cell in v.samples]
        if not samples:
            return None
        found = [s.found for s in samples]
        return {
            "requests_per_second": median(f.requests_per_second for f in found),
            "p50_ms": median(f.p50_ms for f in found),
            "p99_ms": median(f.p99_ms for f in found),
            "cpu_us": median(s.cpu_us for s in samples),
            "failed": sum(f.failed for f in found),
            "repetitions": len(found),
        }

    def document(self) -> dict[str, Any]:
        return {
            **self.about,
            "problems": self.problems,
            "cells": {
                peer.name: {str(c): figures for c in self.cells if (figures := self.figures(peer, c)) is not None}
                for peer in self.peers
            },
            "starts": {
                p.name: {m: found for m in self._models() if (found := self._starts(p, m)) is not None}
                for p in self.peers
            },
            "every_repetition": {
                name: [{str(cell): asdict(sample) for cell, sample in visit.samples.items()} for visit in visits]
                for name, visits in self.visits.items()
            },
            "scenarios": self.scenarios,
        }

    def _models(self) -> list[str]:
        return list(dict.fromkeys(c.model for c in self.cells))

    def _starts(self, peer: Peer, model: str) -> dict[str, float] | None:
        visits = [v for v in self.visits.get(peer.name, []) if v.model == model]
        if not visits:
            return None
        return {
            "start_seconds": round(median(v.start_seconds for v in visits), 2),
            "pss_mib": round(median(v.pss_mib for v in visits), 1),
        }

    def markdown(self) -> str:
        about = self.about
        lines = ["# Beside other servers", "", f"`{about['command']}`", ""]
        lines += [
            f"{key}: {value}  " for key, value in about.items() if key not in ("command", "versions", "bare_p50_ms")
        ]
        lines += ["versions: " + ", ".join(f"{k} {v}" for k, v in about["versions"].items()) + "  "]
        lines += ["bare inference, p50 ms: " + ", ".join(f"{k} {v:.3f}" for k, v in about["bare_p50_ms"].items())]
        if about["load_before"] > BUSY_LOAD:
            lines += [
                "",
                f"**The machine was busy before the run (load {about['load_before']:.1f}): no figure counts.**",
            ]
        for model, body in dict.fromkeys((c.model, c.body) for c in self.cells):
            lines += ["", f"## {model}, {body}", "", *self._cells(model, body)]
        lines += ["", "## Starts", "", *self._start_table()]
        for name, found in self.scenarios.items():
            lines += ["", f"## {name}", "", *_table(found, {p.name: p.title for p in self.peers})]
        lines += ["", *_notes(), ""]
        if self.problems:
            lines += ["## Problems", "", *(f"- {p}" for p in self.problems), ""]
        return "\n".join(lines)

    def _cells(self, model: str, body: str) -> Iterable[str]:
        clients = [c.clients for c in self.cells if (c.model, c.body) == (model, body)]
        yield "| server |" + "".join(f" c={n}: req/s | p50 ms | p99 ms | CPU us | failed |" for n in clients)
        yield "|---|" + "---|" * 5 * len(clients)
        for peer in self.peers:
            if body not in peer.formats:
                yield f"| {peer.title} |" + f" no {body} | | | | |" * len(clients)
                continue
            row = f"| {peer.title} |"
            for n in clients:
                found = self.figures(peer, Cell(model, body, n))
                row += (
                    " not measured | | | | |"
                    if found is None
                    else f" {found['requests_per_second']:,.0f} | {found['p50_ms']:.2f} | {found['p99_ms']:.2f} |"
                    f" {found['cpu_us']:,.0f} | {found['failed']:.0f} |"
                )
            yield row

    def _start_table(self) -> Iterable[str]:
        """Until the first right answer, and memory after the load, shared pages divided by who shares them."""
        yield "| server |" + "".join(f" {m}: first answer, s | {m}: memory, MiB (PSS) |" for m in self._models())
        yield "|---|" + "---|---|" * len(self._models())
        for peer in self.peers:
            row = f"| {peer.title} |"
            for model in self._models():
                found = self._starts(peer, model)
                row += " | |" if found is None else f" {found['start_seconds']:.1f} | {found['pss_mib']:.0f} |"
            yield row

    def write(self, path: Path) -> None:
        """`path` without its suffix: .json and .md."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(self.document(), indent=1) + "\n")
        path.with_suffix(".md").write_text(self.markdown())


def _table(found: dict[str, dict[str, Any]], titles: dict[str, str]) -> Iterable[str]:
    columns = list(dict.fromkeys(column for figures in found.values() for column in figures))
    yield "| server |" + "".join(f" {column} |" for column in columns)
    yield "|---|" + "---|" * len(columns)
    for name, figures in found.items():
        yield f"| {titles[name]} |" + "".join(f" {_cell(figures.get(column))} |" for column in columns)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}" if isinstance(
        value, (int, float)
    ) else str(value)  # fmt: skip


def _notes() -> Iterable[str]:
    yield (
        "One server runs at a time, on the cores that it shares with the client; every round goes through all "
        "servers. Figures are medians of the rounds, failed requests their sum. The client is wrk with "
        "one thread; every server's answer is compared with ONNX Runtime's before and after each cell. CPU: processor "
        "time of all the server's processes per request. JSON and binary are what each server offers: the v2 protocol "
        "where it speaks it, else rows in JSON and the row's raw bytes, which is less work than v2. Batches: "
        "ours and PyTriton form them as they start by default; mosec stands there twice."
    )
