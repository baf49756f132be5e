"""What operator and worker register, and the tables of it in docs/metrics.md:

python tests/observability/catalogue.py    writes them anew, after a metric was added or its text changed
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client.metrics import MetricWrapperBase
from trtmodel_contract.identity import ModelRef
from trtmodel_operator import metrics as of_operator
from trtmodel_worker.front.metrics import WorkerCollector
from trtmodel_worker.front.worker import Worker
from trtmodel_worker.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "gauge": ("",), "info": ("_info",)}


@dataclass(frozen=True)
class Known:
    """A metric as a query names it: with _total or _info where it has that."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series."""
        return tuple(f"{self.name}{s}" for s in SUFFIXES["histogram"]) if self.kind == "histogram" else (self.name,)


def operator() -> list[Known]:
    metrics = of_operator.OperatorMetrics()
    found = [
        _known(value._name, value._type, value._labelnames, value._documentation)
        for value in vars(metrics).values()
        if isinstance(value, MetricWrapperBase)
    ]
    own = of_operator._Models({}).collect()
    return sorted([*found, *map(_family, own)], key=lambda m: m.name)


def worker(tmp: Path) -> list[Known]:
    """`tmp` is an empty folder."""
    model = ModelRef("ml", "m", "uid")
    settings = Settings(
        namespace=model.namespace, model=model.name, model_uid=model.uid, pod="p", pod_uid="u",
        runtime="ONNXRuntime", lanes=1, request_seconds=1.0,
        pointer_dir=tmp, keys_dir=tmp, credentials_dir=tmp, cache_dir=tmp,
    )  # fmt: skip
    endpoints, server = SimpleNamespace(unrouted={}), SimpleNamespace(staged=0, connections=())
    collector = WorkerCollector(Worker(settings), cast("Any", endpoints), cast("Any", server))
    return sorted(map(_family, collector.collect()), key=lambda m: m.name)


def table(metrics: Iterable[Known]) -> str:
    rows = [f"| `{m.name}` | {m.kind} | {', '.join(m.labels)} | {m.text} |" for m in metrics]
    return "\n".join(["| metric | type | labels | what |", "|---|---|---|---|", *rows])


def page(text: str, tables: dict[str, str]) -> str:
    """`text` with each table between its two markers."""
    for name, found in tables.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        _, marker, tail = rest.partition(end)
        assert marker, f"the page has no place for the table {name}"
        text = f"{head}{begin}{found}{end}{tail}"
    return text


def _family(family: Any) -> Known:
    return _known(family.name, family.type, getattr(family, "_labelnames", ()), family.documentation)


def _known(name: str, kind: str, labels: Iterable[str], text: str) -> Known:
    return Known(name + ("" if kind == "histogram" else SUFFIXES[kind][0]), kind, tuple(labels), text)


def main() -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as tmp:
        tables = {"operator": table(operator()), "worker": table(worker(Path(tmp)))}
    PAGE.write_text(page(PAGE.read_text(), tables))


if __name__ == "__main__":
    main()
