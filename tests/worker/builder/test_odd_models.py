"""Bad and odd files, by the hundred: each gets a reason, none is retried, and what is accepted builds and answers."""

from __future__ import annotations

import dataclasses
import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from forked_jobs import Forge
from job_harness import Jobs, make_jobs, save_npz
from odd_models import Odd, Verdict, all_models, save
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.identity import EngineSettings, Profile, ShapeRange
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_worker.builder.findings import Report, errors
from trtmodel_worker.builder.wanted import Request
from trtmodel_worker.engines.base import DTYPES
from trtmodel_worker.engines.building import Graph

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
PROCESSES = 2
BATCH = 20
SAMPLES = 8
FILES_FAULT = {Reason.MODEL_INVALID, Reason.OPERATOR_UNSUPPORTED}


@dataclasses.dataclass(frozen=True)
class Checked:
    odd: Odd
    path: Path
    code: int
    report: Report | None

    @property
    def log(self) -> str:
        return (self.path.parent / "log").read_text(errors="replace")

    @property
    def accepted(self) -> bool:
        return self.report is not None and not errors(self.report.findings)


@pytest.fixture(scope="module")
def forges() -> Iterator[queue.SimpleQueue[Forge]]:
    made = [Forge() for _ in range(PROCESSES)]
    free: queue.SimpleQueue[Forge] = queue.SimpleQueue()
    for forge in made:
        free.put(forge)
    yield free
    for forge in made:
        forge.close()


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory, forges: queue.SimpleQueue[Forge]) -> Sequence[Checked]:
    folder = tmp_path_factory.mktemp("odd")

    def prepare(odd: Odd) -> Path:
        path = save(odd, folder / odd.name)
        work = folder / odd.name / "work"
        work.mkdir()
        request = Request(str(path), f"source {odd.name}", "ONNXRuntime", str(work))
        (work / "request.json").write_bytes(dumps(request))
        return path

    def check(odds: Sequence[Odd]) -> list[Checked]:
        """All in one process, and one by one what it did not live to answer."""
        paths = [prepare(odd) for odd in odds]
        forge = forges.get()
        try:
            forge.run(["checks", *(argument for path in paths for argument in _documents(path))], folder / "log")
            return [_answer(odd, path, forge) for odd, path in zip(odds, paths, strict=True)]
        finally:
            forges.put(forge)

    made = all_models()
    with ThreadPoolExecutor(PROCESSES) as pool:
        batches = pool.map(check, [made[i : i + BATCH] for i in range(0, len(made), BATCH)])
        return [checked for batch in batches for checked in batch]


def _documents(path: Path) -> list[str]:
    return [str(path.parent / "work" / name) for name in ("request.json", "report.json")]


def _answer(odd: Odd, path: Path, forge: Forge) -> Checked:
    report, code = path.parent / "work/report.json", 0
    if not report.exists():
        code = forge.run(["trtmodel_worker.builder.examine", *_documents(path)], path.parent / "log")
    return Checked(odd, path, code, loads(Report, report.read_bytes()) if report.exists() else None)


def test_hundreds_of_odd_files_are_examined_and_each_gets_an_answer(checked: Sequence[Checked]) -> None:
    crashed = [f"{c.odd.name}: exit {c.code}: {c.log[-500:]}" for c in checked if c.report is None]
    counts = Counter("crashed" if c.report is None else "accepted" if c.accepted else "refused" for c in checked)
    print(f"\n{len(checked)} odd models: {dict(counts)}")
    assert len(checked) >= 200
    assert not crashed, [
        (c.odd.name, c.code, (c.path.parent / "log").read_text()[-500:]) for c in checked if c.report is None
    ]


def test_files_that_no_runtime_can_run_are_refused_and_those_that_are_only_odd_are_not(
    checked: Sequence[Checked],
) -> None:
    wrong = [
        (c.odd.name, [f.text for f in c.report.findings])
        for c in checked
        if c.report is not None and c.odd.verdict is not Verdict.EITHER
        if c.accepted is not (c.odd.verdict is Verdict.ACCEPTED)
    ]
    assert not wrong, "\n".join(map(str, wrong))


def test_each_refusal_names_the_fault_and_none_is_one_that_is_tried_again(checked: Sequence[Checked]) -> None:
    for c in checked:
        assert c.report is not None
        found = errors(c.report.findings)
        for finding in found:
            assert finding.reason in FILES_FAULT, (c.odd.name, finding)
            assert finding.message.strip(), c.odd.name
        assert not c.odd.words or c.odd.words in "\n".join(f.text for f in found), (c.odd.name, found)


def test_what_is_accepted_is_built_and_answers(
    tmp_path: Path, checked: Sequence[Checked], forges: queue.SimpleQueue[Forge]
) -> None:
    """Or is refused for good by the Job, where only running it tells."""

    def build(c: Checked) -> tuple[str, int, JobResult]:
        assert c.report is not None
        assert c.report.graph is not None
        forge = forges.get()
        try:
            jobs = _jobs(tmp_path / c.odd.name, c.path, c.report.graph, forge)
            code, result = jobs.resolve()
            if code == 0:
                code, result = jobs.build(result.resolve)
            return c.odd.name, code, result
        finally:
            forges.put(forge)

    accepted = [c for c in checked if c.accepted]
    with ThreadPoolExecutor(PROCESSES) as pool:
        ended = list(pool.map(build, accepted))
    print(f"\n{len(ended)} accepted models built: {dict(Counter(code for _, code, _ in ended))}")
    must = {c.odd.name for c in accepted if c.odd.verdict is Verdict.ACCEPTED}
    good = {JobExit.DONE, JobExit.INCONCLUSIVE}
    wrong = [e for e in ended if e[1] not in (good if e[0] in must else {*good, JobExit.REJECTED})]
    assert not wrong, "\n".join(
        f"{name}: exit {code}, {result.reason}: {result.message}" for name, code, result in wrong
    )


@dataclasses.dataclass
class _Forked(Jobs):
    """Jobs in forked processes."""

    forge: Forge | None = None

    def run(self, kind: str, task: object, **environment: str) -> tuple[int, JobResult]:
        assert self.forge is not None
        self.runs += 1
        log = self.folder / f"termination-{self.runs}"
        code = self.forge.run(
            ["job", kind],
            self.folder / "log",
            TRTMODEL_TASK=dumps(task).decode(),
            TRTMODEL_CACHE_DIR=str(self.folder / "cache"),
            TRTMODEL_TERMINATION_LOG=str(log),
        )
        if not log.exists():
            return code, JobResult(Reason.INTERNAL, f"no message: {(self.folder / 'log').read_text()[-800:]}")
        return code, loads(JobResult, log.read_bytes())


def _jobs(folder: Path, source: Path, graph: Graph, forge: Forge) -> _Forked:
    folder.mkdir()
    leading = {t.dims[0] for t in graph.inputs if t.dims}
    profile = {
        t.name: ShapeRange(
            *(
                tuple(
                    d if isinstance(d, int) else size if d in leading and (d != "?" or i == 0) else 4
                    for i, d in enumerate(t.dims)
                )
                for size in (1, 2, 4)
            )
        )
        for t in graph.inputs
        if not all(isinstance(d, int) for d in t.dims)
    }
    chance = np.random.default_rng(0)
    arrays = {}
    for t in graph.inputs:
        sizes = profile[t.name].opt[1:] if t.name in profile else t.dims[1:]
        dtype = DTYPES[t.datatype]
        values = chance.random((SAMPLES, *sizes)) if dtype.kind == "f" else chance.integers(0, 2, (SAMPLES, *sizes))
        arrays[t.name] = values.astype(dtype)
    engine = EngineSettings("ONNXRuntime", profiles=(Profile(profile),) if profile else ())
    made = make_jobs(folder, source, save_npz(folder / "data.npz", **arrays), engine=engine)
    return _Forked(**{f.name: getattr(made, f.name) for f in dataclasses.fields(made)}, forge=forge)
