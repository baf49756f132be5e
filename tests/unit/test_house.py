"""What holds for every file of the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST, LONGEST_TEST = 500, 650  # lines: a file has one purpose, a test file may hold its tables
# Home directories and checkouts of one machine; what is meant inside a container is under /etc, /var, /tmp or /opt.
MACHINE = re.compile(r"(?<![\w.${}~-])/(?:root|home|work|Users|mnt/[a-z]+)/[\w.-]+")
GENERATED = {"uv.lock", "go.sum", "LICENSE"}


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        timeout=30,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]


def text_of(path: Path) -> str:
    data = path.read_bytes()
    return "" if b"\0" in data else data.decode()


def test_no_source_file_is_long() -> None:
    lengths = {p.relative_to(ROOT): text_of(p).count("\n") for p in tracked() if p.suffix in {".py", ".sh", ".mk"}}
    limits = {path: LONGEST_TEST if path.parts[0] == "tests" else LONGEST for path in lengths}
    assert lengths
    assert {str(path): lines for path, lines in lengths.items() if lines > limits[path]} == {}


def test_no_file_names_a_place_of_one_machine() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in tracked()
        if path.name not in GENERATED and path != Path(__file__)
        for match in MACHINE.finditer(text_of(path))
    }
    assert found == set()


def test_no_file_waits_to_be_finished() -> None:
    marks = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
    found = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix in {".py", ".sh", ".yaml", ".md", ".mk"}
        and path != Path(__file__)
        and marks.search(text_of(path))
    ]
    assert found == []


def test_every_python_file_of_the_product_says_what_it_is_for() -> None:
    silent = []
    for path in tracked():
        generated = path.stem.endswith("_pb2")
        product = path.suffix == ".py" and not generated and path.relative_to(ROOT).parts[0] != "tests"
        if product and (text := text_of(path)).strip() and not text.startswith(('"""', "#!", 'r"""')):
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def test_no_file_is_big() -> None:
    """Models, images and data are downloaded or made, never committed. The lock lists every wheel of every package."""
    sizes = {path.relative_to(ROOT): path.stat().st_size for path in tracked() if path.name not in GENERATED}
    big = {str(path): size for path, size in sizes.items() if size > 1_000_000}
    assert big == {}
