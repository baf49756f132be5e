"""That nothing was ever routed that had not passed its gate, and that no process fell over a defect: from the bucket,
the answers, the boot pointers and the logs of all pods, when a run is over."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.s3 import ENGINES, Store
from trtmodel_contract.codec import loads
from trtmodel_contract.gate import GateFigures, Thresholds, Verdict, judge

from chaos import sources
from chaos.ledger import Ledger
from chaos.subject import FOLDER, NAMESPACE, SYSTEM, TOP1_DELTA
from chaos.traffic import First

UNVERIFIED = "an unverified engine was routed"
CLOCKS_SECONDS = 2.0  # S3 tells times in whole seconds
ROUTES = re.compile(r" front routes: stable (\w+), candidate (\w+) at ")  # as a worker's log has it
NO_CANDIDATE = "none"
# What is logged where nobody foresaw what happens: no action of chaos may lead there.
DEFECTS = (
    "not foreseen", "Task exception was never retrieved",
    "ends by a defect", "the worker ended by itself", "a defect of the Job itself",
    "could not be admitted", "a request could not be handled", "an answer could not be written",
)  # fmt: skip


@dataclass(frozen=True)
class Passed:
    """Since when engines have figures that pass: by the digest of their manifest, and by revision. Seconds since the
    epoch."""

    digests: Mapping[str, float]
    revisions: Mapping[str, float]


def passed(store: Store) -> Passed:
    root = f"trtmodel/{NAMESPACE}"
    digests: dict[str, float] = {}
    for key in store.keys(ENGINES, f"{root}/gates/"):
        data, written = store.get(ENGINES, key)
        if judge(loads(GateFigures, data), Thresholds(top1_delta=TOP1_DELTA)).verdict is Verdict.PASS:
            digest = key.removeprefix(f"{root}/gates/").split("/")[0]
            digests[digest] = min(written, digests.get(digest, written))
    revisions: dict[str, float] = {}
    for key in store.keys(ENGINES, f"{root}/engines/"):
        name = key.removeprefix(f"{root}/engines/").split("/")[0]
        since = digests.get(hashlib.sha256(store.get(ENGINES, key)[0]).hexdigest())
        if since is not None:
            revisions[name] = min(since, revisions.get(name, since))
    return Passed(digests, revisions)


def check_answers(firsts: Mapping[tuple[str, str], First], found: Passed, ledger: Ledger) -> None:
    for (model, name), first in firsts.items():
        _check(f"{model}: {name} answered", found.revisions.get(name), first.at, ledger)
        if first.gain == sources.BAD_GAIN:
            ledger.violation(UNVERIFIED, f"{model}: {name} is the model of {FOLDER} that fails")


def check_pointers(pointed: Mapping[tuple[str, str], float], found: Passed, ledger: Ledger) -> None:
    """`pointed`: the pointer and a digest in it, and when it was seen there first."""
    for (pointer, digest), at in pointed.items():
        _check(f"{pointer} names {digest[:12]}", found.digests.get(digest), at, ledger)


def check_routes(logs: Path, found: Passed, ledger: Ledger) -> int:
    """What each worker said that it routes to; how often one said so."""
    lines = 0
    for file in _logs(logs, NAMESPACE):
        for at, line in _lines(file):
            for name in _routed(line):
                lines += 1
                _check(f"{_where(logs, file)} routed to {name}", found.revisions.get(name), at, ledger)
    if not lines:
        ledger.violation("workers tell of their routes", "no log of a worker has a line of the form that is looked for")
    return lines


def check_logs(logs: Path, ledger: Ledger) -> None:
    """No pass, request, Job or process failed in a way that nobody foresaw."""
    for namespace in (SYSTEM, NAMESPACE):
        for file in _logs(logs, namespace):
            for line in file.read_text(errors="replace").splitlines():
                if any(words in line for words in DEFECTS):
                    ledger.violation("no defect in a log", f"{_where(logs, file)}: {line[:300]}")


def _check(what: str, since: float | None, at: float, ledger: Ledger) -> None:
    if since is None:
        ledger.violation(UNVERIFIED, f"{what}, and no gate of it passed")
    elif at < since - CLOCKS_SECONDS:
        ledger.violation(UNVERIFIED, f"{what} {since - at:.1f} s before its gate passed")


def _routed(line: str) -> list[str]:
    match = ROUTES.search(line)
    return [name for name in match.groups() if name != NO_CANDIDATE] if match else []


def _logs(root: Path, namespace: str) -> list[Path]:
    return sorted(root.glob(f"{namespace}_*/*/*.log"))


def _where(root: Path, file: Path) -> str:
    return "/".join(file.relative_to(root).parts)


def _lines(file: Path) -> Iterator[tuple[float, str]]:
    """Of a container's log: TIME STREAM TAG TEXT. Seconds since the epoch, and the text."""
    for line in file.read_text(errors="replace").splitlines():
        time, _, text = line.partition(" ")
        try:
            yield datetime.datetime.fromisoformat(time).timestamp(), text
        except ValueError:
            continue
