"""The gate's page: found by status, fetched from the bucket with the caller's own credentials, and opened.

The operator reads no bucket and this cluster's Secrets are nobody's business, so who wants the page needs to be
allowed to read it. The storage client is the worker's (the extra `worker`), loaded by name: the packages stay apart.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import webbrowser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmodel_operator.cli import output
from trtmodel_operator.cli.connection import Connection
from trtmodel_operator.cli.outcome import listed, memory
from trtmodel_operator.cli.words import Failed, plain

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Page:
    """A report in the bucket."""

    revision: str
    target: str
    digest: str
    size: int


def pages(model: Json) -> list[Page]:
    """Of the engines that status remembers, newest first."""
    found = []
    for built in listed(memory(model).get("built")):
        report = (((built.get("artifact") or {}).get("figures") or {}).get("report") or {}).get("html") or {}
        if report.get("digest"):
            found.append(
                Page(str(built.get("revision")), str(built.get("target")), str(report["digest"]), int(report["size"]))
            )
    return found


def fetch(at: Connection, options: argparse.Namespace) -> int:
    """Raises Failed."""
    model = at.get(options.name)
    found = [
        p
        for p in pages(model)
        if options.revision in ("", p.revision) and options.target in ("", p.target)
    ]  # fmt: skip
    if not found:
        raise Failed(f"{options.name}: status names no such report: nothing was measured, or by an older version")
    page = found[0]
    file = Path(options.file or f"{options.name}-{page.revision}.html")
    _download(model, page, file, options)
    if options.output == "json":
        print(output.as_json({"revision": page.revision, "target": page.target, "file": str(file)}))
    else:
        print(f"{file}: gate of {page.revision} on target {plain(page.target)}")
    if options.open and not webbrowser.open(file.absolute().as_uri()):
        raise Failed(f"no browser was found: open {file} yourself")
    return 0


def _download(model: Json, page: Page, file: Path, options: argparse.Namespace) -> None:
    try:
        artifacts = importlib.import_module("trtmodel_worker.alone.artifacts")
        storage_error = importlib.import_module("trtmodel_worker.storage").StorageError
    except ModuleNotFoundError as e:
        text = f"{e.name} is not installed, which reads the bucket: pip install '.[cli,worker]' in a clone"
        raise Failed(text, 2) from e
    storage = (model.get("spec") or {}).get("storage") or {}
    prefix = storage.get("prefix") or "trtmodel"
    where = f"s3://{storage.get('bucket')}/{prefix}/{model['metadata']['namespace']}"
    endpoint = options.endpoint or str(storage.get("endpoint") or "")
    try:
        region, ca_bundle = str(storage.get("region") or ""), str(storage.get("caBundle") or "")
        store = artifacts.open_at(where, endpoint, region, options.credentials, ca_bundle)
        with tempfile.TemporaryDirectory() as work:
            data = store.fetch_blob(page.digest, page.size, work).read_bytes()
    except storage_error as e:
        text = "" if options.endpoint or not endpoint else f" ({endpoint} may be an address of the cluster: --endpoint)"
        raise Failed(f"{where}: {e.message}{text}") from e
    try:
        file.write_bytes(data)
    except OSError as e:
        raise Failed(f"{file} cannot be written: {e.strerror or e}") from e
