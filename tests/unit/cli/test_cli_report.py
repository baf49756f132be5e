"""The gate's page: which one status names, and that it comes from the bucket with its bytes proven."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_scene import Json, Typed, as_object
from decide_scene import A, B, has_built, serving
from fakes.api_server import FakeApiServer
from trtmodel_operator.cli import report
from trtmodel_worker.alone import artifacts

Type = Callable[..., Typed]
PAGE = b"<html>what was measured</html>"


def reported(model: Json) -> Json:
    """With the page of each engine that status remembers; the newest one is the one in the bucket."""
    for n, built in enumerate(model["status"]["rollout"]["built"]):
        data = PAGE if n == 0 else b"of an older one"
        blob = {"digest": hashlib.sha256(data).hexdigest(), "size": len(data)}
        built["artifact"]["figures"]["report"] = {"json": blob, "html": blob}
    return model


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A directory in place of S3, and what was asked of it."""
    place = tmp_path / "engines" / "trtmodel" / "ml"
    blobs = place / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    (blobs / hashlib.sha256(PAGE).hexdigest()).write_bytes(PAGE)
    asked: dict[str, Any] = {"blobs": blobs}
    open_at = artifacts.open_at

    def opened(where: str, *more: str) -> Any:
        asked["where"] = (where, *more)
        return open_at(str(place), "", "", "")

    monkeypatch.setattr(artifacts, "open_at", opened)
    return asked


def test_the_newest_page_is_fetched_and_written(
    api_server: FakeApiServer, trtmodel: Type, bucket: dict[str, Any], tmp_path: Path
) -> None:
    model = reported(as_object(has_built(serving(A), B)))
    model["spec"]["storage"]["caBundle"] = "PEM"
    api_server.put(model)
    file = tmp_path / "gate.html"
    shown = trtmodel("report", "magika", "-f", str(file), "--endpoint", "http://localhost:1", "--credentials", "keys")
    assert shown == Typed(0, f"{file}: gate of {B} on target default\n", "")
    assert file.read_bytes() == PAGE
    assert bucket["where"] == ("s3://engines/trtmodel/ml", "http://localhost:1", "", "keys", "PEM")
    told = json.loads(trtmodel("report", "magika", "-f", str(file), "-o", "json").out)
    assert told == {"revision": B, "target": "default", "file": str(file)}


def test_a_revision_is_chosen_by_name_and_one_that_was_not_measured_is_told(
    api_server: FakeApiServer, trtmodel: Type, bucket: dict[str, Any], tmp_path: Path
) -> None:
    model = reported(as_object(has_built(serving(A), B)))
    assert [page.revision for page in report.pages(model)] == [B, A]
    api_server.put(model)
    shown = trtmodel("report", "magika", "--revision", "cccccccccc", "-f", str(tmp_path / "x"))
    assert shown.code == 1
    assert "status names no such report" in shown.err
    api_server.put(as_object(serving(A)))
    assert "status names no such report" in trtmodel("report", "magika").err


def test_bytes_that_are_not_those_of_the_digest_are_no_report(
    api_server: FakeApiServer, trtmodel: Type, bucket: dict[str, Any], tmp_path: Path
) -> None:
    api_server.put(reported(as_object(has_built(serving(A), B))))
    for blob in bucket["blobs"].iterdir():
        blob.write_bytes(PAGE[::-1])
    shown = trtmodel("report", "magika", "-f", str(tmp_path / "gate.html"))
    assert (shown.code, (tmp_path / "gate.html").exists()) == (1, False)
    assert shown.err.startswith("trtmodel: s3://engines/trtmodel/ml: ")
