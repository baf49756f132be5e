"""Every reason is explained, and the pages about the API say what the code says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from trtmodel_contract.control import DEVICE_LOST
from trtmodel_contract.jobs import Reason
from trtmodel_operator import adapters, conditions, reasons
from trtmodel_operator.cli import advice, dispatch
from trtmodel_operator.decide import jobs, safety
from trtmodel_operator.model import Stage

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import generate  # noqa: E402 - found by the line above

STAGES = {Stage.RESOLVING.value, Stage.BUILDING.value}  # of a Job that runs: its stage is the reason
OWN = STAGES | {value for name, value in vars(reasons).items() if name.isupper()}
JOBS = {reason.value for reason in Reason}
CLUSTER = {"Unschedulable", "ImagePullBackOff", "OOMKilled", "DeadlineExceeded", "CrashLoopBackOff", "Evicted",
           "FailedCreate"}  # fmt: skip
WORKERS = {"SignatureInvalid", "NotStarted", "HostNotStarted", "FetchTimeout", "StorageStuck", DEVICE_LOST}
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *#*$", re.MULTILINE)


def test_each_reason_of_operator_and_jobs_is_explained_and_no_other() -> None:
    told = [reason for section in advice.SECTIONS.values() for reason in section]
    assert len(told) == len(set(told))
    assert set(told) == OWN | JOBS | CLUSTER | WORKERS


def test_the_words_of_cluster_and_workers_are_those_that_the_operator_knows() -> None:
    files = [*Path(adapters.__file__).parent.glob("*.py"), Path(jobs.__file__), Path(safety.__file__)]
    source = "".join(file.read_text() for file in files)
    known = {word for word in (CLUSTER | WORKERS) - {DEVICE_LOST} if f'"{word}"' in source}
    assert known == (CLUSTER | WORKERS) - {DEVICE_LOST}


def test_each_phase_is_explained() -> None:
    assert set(advice.PHASES) == {stage.value for stage in Stage} | {conditions.DEGRADED}


def test_each_condition_is_explained() -> None:
    assert list(advice.CONDITIONS) == [
        conditions.AVAILABLE, conditions.READY, conditions.RECONCILING, conditions.STALLED,
        conditions.BUILT, conditions.VERIFIED, conditions.PROGRESSING, conditions.DEGRADED,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["reference.md", "conditions.md"])
def test_a_page_that_is_made_is_in_step_with_what_it_is_made_of(name: str) -> None:
    assert (DOCS / name).read_text() == generate.pages()[name], "run: python docs/generate.py"


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in LINK.findall(outside_of_code(page.read_text())):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, waiting = set(), [ROOT / "README.md", DOCS / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for target in LINK.findall(outside_of_code(page.read_text())):
            path = target.partition("#")[0]
            file = (page.parent / path).resolve()
            if path and file.is_dir():
                waiting += file.glob("*.md")
            elif file.suffix == ".md" and file.is_file():
                waiting.append(file)
    assert {str(p.relative_to(ROOT)) for p in DOCS.rglob("*.md") if p not in seen} == set()


def test_the_page_about_the_command_has_every_command() -> None:
    page = (DOCS / "kubectl.md").read_text()
    commands = [*dispatch.CLUSTER, *dispatch.OTHERS, *dispatch.CACHE]
    assert [name for name in commands if f"`{name}" not in page and f" {name}" not in page] == []


def test_every_line_of_the_threat_table_names_tests_that_exist() -> None:
    table = (DOCS / "security.md").read_text().partition("## Threats")[2].partition("## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "shown by" not in line]
    tests = "\n".join(f.read_text() for f in (ROOT / "tests").rglob("test_*.py"))
    assert len(rows) > 10
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert [name for name in named if f"def {name}(" not in tests] == [], row


def outside_of_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    found = HEADING.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", h)).strip().lower().replace(" ", "-") for h in found}
