"""The documentation builds as a site without a warning, with everything that its pages link to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out],
        capture_output=True, text=True, timeout=110, check=False, cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # of what its next major version might be
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return out


def test_links_out_of_the_documentation_lead_to_files_of_the_site(site: Path) -> None:
    page = (site / "operations" / "index.html").read_text()
    assert 'href="../examples/autoscaling/"' in page
    assert (site / "examples" / "autoscaling" / "index.html").is_file()
    assert (site / "examples" / "every-field.yaml").read_bytes() == (ROOT / "examples/every-field.yaml").read_bytes()
    assert (site / "charts" / "trtmodel-operator" / "index.html").is_file()


def test_every_decision_stands_in_their_list_with_its_date(site: Path) -> None:
    page = (site / "decisions" / "index.html").read_text()
    records = list((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
    assert [r.name for r in records if f'href="{r.stem}/"' not in page] == []
    assert [r.name for r in records if not re.search(r"^Date: 20\d\d-\d\d-\d\d", r.read_text(), re.MULTILINE)] == []


def test_nothing_of_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert 'src="http' not in page
    assert '<link rel="stylesheet" href="http' not in page
