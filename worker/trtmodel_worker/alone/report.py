"""The gate's report as a file, with the verdict that the thresholds of the command line make."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from trtmodel_contract.codec import loads
from trtmodel_contract.gate import GateFigures, Thresholds, judge

from trtmodel_worker.alone.home import Home
from trtmodel_worker.builder.report import Report, render


class Unwritable(Exception):
    """The file cannot be written. The text says why."""


def require_writable(target: Path) -> None:
    """Raises Unwritable where `write` could not."""
    folder = target.parent
    if target.is_dir() or not folder.is_dir():
        why = "it is a directory" if target.is_dir() else f"there is no directory {folder}"
        raise Unwritable(f"--report {target} cannot be written: {why}")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise Unwritable(f"--report {target} cannot be written: permission denied")


def write(figures: GateFigures, limits: Thresholds, home: Home, target: Path) -> None:
    """JSON where the name ends so, else a page. Raises StorageError, Unwritable."""
    assert figures.report is not None  # a gate of this version writes one with its figures
    blob = figures.report.json
    stored = loads(Report, home.store().fetch_blob(blob.digest, blob.size, home.files).read_bytes())
    judged = judge(figures, limits)
    document, page = render(
        dataclasses.replace(
            stored, thresholds=limits, verdict=judged.verdict, sentence=judged.sentence, checks=judged.checks
        )
    )
    try:
        target.write_bytes(document if target.suffix == ".json" else page)
    except OSError as e:
        raise Unwritable(f"--report {target} cannot be written: {e.strerror}") from e
