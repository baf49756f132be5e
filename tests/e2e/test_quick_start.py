"""The quick start, typed as its page has it: from nothing to a revision that was promoted, and back to nothing.

Each block ```sh of the page runs in one shell, in a directory that has what a clone has; each block ```python is
written to the file that its first line names. Only what is for another cluster, whose addresses are examples, is left
out.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from .cluster import Cluster
from .install import ROOT, Operator
from .s3 import Store
from .world import CHILDREN, World, revision, until

SECONDS = 780
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.night, pytest.mark.timeout(SECONDS + 120)]

PAGE = ROOT / "docs" / "quickstart.md"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = "example.com"
SYSTEM, BUCKET = "trtmodel", "quickstart"
PROMOTED = re.compile(r"^([0-9a-f]{10}) +Promoted", re.MULTILINE)


def commands() -> list[str]:
    """What the page has a reader type, in its order."""
    found = []
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            name = text.split()[1].removesuffix(":")
            found.append(f"cat > {name} <<'PYTHON'\n{text}PYTHON\n")
        elif ELSEWHERE not in text:
            found.append(text)
    return found


def typed(parts: Sequence[str], where: Path, cluster: Cluster) -> str:
    """What a shell prints that runs them one after the other, with what it was told and when; it stops at a failure."""
    (where / "typed.sh").write_text("PS4='+ $SECONDS s: '\nset -exo pipefail\n" + "\n".join(parts))
    done = subprocess.run(
        ["timeout", "--kill-after=5", str(SECONDS), "bash", "typed.sh"], cwd=where, env=cluster.environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture
def world(cluster: Cluster, operator: Operator) -> Iterator[World]:
    """The namespace that kubectl means without -n. The definition of TRTModel is there, as after the demo."""

    def clear() -> None:
        cluster.kubectl("delete", "trtmodel/digits", "secret/s3-credentials", "-n", "default", "--ignore-not-found")
        cluster.kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--timeout=50s")
        with contextlib.suppress(ClientError):  # there is no such bucket
            Store(cluster.environment).delete(BUCKET, "")

    clear()
    yield World(cluster, "default", (SYSTEM, "trtmodel-operator"))
    clear()


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Path]:
    """A directory with the files of the repository and nothing that was installed or made."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (tmp_path / entry.name).symlink_to(entry)
    yield tmp_path
    shutil.rmtree(tmp_path / "venv", ignore_errors=True)  # pytest keeps directories, and this one is large


def test_its_commands_lead_from_nothing_to_a_promoted_revision_and_back(
    world: World, cluster: Cluster, clone: Path
) -> None:
    *steps, removal = commands()
    said = typed(steps, clone, cluster)
    assert '"model_name":"digits"' in said, "it answered"
    second, first = PROMOTED.findall(said)
    assert second != first
    assert revision(world.model("digits"), "stable") == first, "its last command went back"

    typed([removal], clone, cluster)
    kinds = [*(path.format("default") for path in CHILDREN.values()), f"/apis/apps/v1/namespaces/{SYSTEM}/deployments"]
    selectors = ["trtmodel.io/model=digits"] * len(CHILDREN) + [""]
    until(
        "nothing is left",
        120,
        lambda: not any(cluster.items(path, selector) for path, selector in zip(kinds, selectors, strict=True)),
        lambda: world.kubectl("get", "all"),
    )
