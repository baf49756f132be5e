"""How fast a model answers: finds it, makes up a request of its shapes, sends it for some seconds, and counts.

Without --url the way to a worker is `kubectl port-forward` to the model's Service: one worker, behind the API server.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import http.client
import json
import math
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, urlsplit

from trtmodel_operator.cli import load, output
from trtmodel_operator.cli.words import Failed, plain, span

if TYPE_CHECKING:  # the client takes its time to load, and with --url nobody needs it
    from trtmodel_operator.cli.connection import Connection

Json = Mapping[str, Any]

FORWARD_SECONDS = 20.0
EXIT_FAILURES = 1
LARGEST_BYTES = 256 << 20  # of a request
WIDTHS = {"BOOL": 1, "INT8": 1, "UINT8": 1, "INT16": 2, "UINT16": 2, "FP16": 2, "BF16": 2,
          "INT32": 4, "UINT32": 4, "FP32": 4, "INT64": 8, "UINT64": 8, "FP64": 8}  # fmt: skip
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:([0-9]+) ")


@dataclass(frozen=True)
class Tensor:
    """An input with all its sizes."""

    name: str
    datatype: str
    shape: tuple[int, ...]


def bench(at: Connection | None, options: argparse.Namespace) -> int:
    """The exit code: 1 if a request failed. Raises Failed."""
    if at is None:
        return _measure(_url(options.url), options.name, {}, options)
    model = at.get(options.name)
    profiles = ((model.get("spec") or {}).get("engine") or {}).get("profiles") or [{}]
    usual = {name: shape.get("opt") or () for name, shape in (profiles[0].get("inputs") or {}).items()}
    with _forwarded(at.namespace, model, options) as url:
        return _measure(url, options.name, usual, options)


def tensors(
    metadata: Json, usual: Mapping[str, Sequence[int]], given: Mapping[str, Sequence[int]], rows: int
) -> list[Tensor]:
    """The model's inputs with sizes: `given` by hand, else fixed ones; a free first dimension is `rows`, others are as
    in `usual`, which the profile names. Raises Failed."""
    found = []
    for one in metadata.get("inputs") or ():
        name, datatype, shape = str(one["name"]), str(one["datatype"]), [int(size) for size in one["shape"]]
        opt = usual.get(name) or ()
        if name in given:
            sizes = tuple(given[name])
        else:
            sizes = tuple(
                size if size >= 0 else rows if i == 0 else opt[i] if i < len(opt) else -1
                for i, size in enumerate(shape)
            )
        if -1 in sizes:
            text = "x".join("?" if size < 0 else str(size) for size in sizes)
            raise Failed(f"input {plain(name)} of {text} has free dimensions: say --shape {plain(name)}:{text}", 2)
        if datatype not in WIDTHS:
            raise Failed(
                f"input {plain(name)} is of {plain(datatype)}, which cannot be made up: name a body with --data", 2
            )
        found.append(Tensor(name, datatype, sizes))
    if sum(math.prod(t.shape) * WIDTHS[t.datatype] for t in found) > LARGEST_BYTES:
        raise Failed(f"a request would have more than {LARGEST_BYTES >> 20} MiB", 2)
    return found


def written(inputs: Sequence[Tensor]) -> tuple[bytes, dict[str, str]]:
    """(body, headers) of a request with zeros in binary, which asks for binary outputs."""
    sizes = [math.prod(t.shape) * WIDTHS[t.datatype] for t in inputs]
    document = {
        "inputs": [
            {"name": t.name, "datatype": t.datatype, "shape": t.shape, "parameters": {"binary_data_size": size}}
            for t, size in zip(inputs, sizes, strict=True)
        ],
        "parameters": {"binary_data_output": True},
    }
    head = json.dumps(document).encode()
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return head + bytes(sum(sizes)), headers


def summary(name: str, found: load.Result, concurrency: int, about: str) -> dict[str, Any]:
    """For programs. Latencies are in milliseconds."""
    latency = {
        f"p{percent}": round(load.percentile(found.latencies, percent) * 1e3, 3) if found.latencies else None
        for percent in load.PERCENTILES
    }
    most = round(max(found.latencies) * 1e3, 3) if found.latencies else None
    return {
        "model": name,
        "request": about,
        "concurrency": concurrency,
        "seconds": round(found.seconds, 3),
        "answered": len(found.latencies),
        "failed": found.failed,
        "perSecond": round(len(found.latencies) / found.seconds, 1) if found.seconds else 0.0,
        "latencyMs": {**latency, "max": most},
        "revisions": dict(found.revisions),
        "failures": dict(found.failures),
    }


def _measure(url: SplitResult, name: str, usual: Mapping[str, Sequence[int]], options: argparse.Namespace) -> int:
    if options.data:
        try:
            body, headers = Path(options.data).read_bytes(), {"Content-Type": "application/json"}
        except OSError as e:
            raise Failed(f"{options.data}: {e.strerror or e}", 2) from e
        about = f"{options.data}, {len(body):,} bytes"
    else:
        inputs = tensors(_metadata(url, name, options.request_timeout), usual, dict(options.shape), options.rows)
        body, headers = written(inputs)
        shapes = ", ".join(f"{plain(t.name)} {t.datatype} {'x'.join(map(str, t.shape))}" for t in inputs)
        about = f"zeros in {shapes}"
    target = url._replace(path=f"{url.path.rstrip('/')}/v2/models/{quote(name, safe='')}/infer")
    request = load.Request(target, body, headers, options.request_timeout)
    if options.output != "json":
        print(f"{options.concurrency} clients for {span(options.duration)}: {about}", file=sys.stderr, flush=True)
    found = summary(name, load.run(request, options.concurrency, options.duration), options.concurrency, about)
    if options.output == "json":
        print(output.as_json(found))
    else:
        print("\n".join(_lines(found)))
    return EXIT_FAILURES if found["failed"] or not found["answered"] else 0


def _lines(found: Json) -> Iterator[str]:
    yield f"answered {found['answered']:,}, {found['perSecond']:,} a second; failed {found['failed']:,}"
    if found["answered"]:
        latency = found["latencyMs"]
        yield "latency " + ", ".join(f"{key} {value:g} ms" for key, value in latency.items())
    for revision, count in sorted(found["revisions"].items()):
        yield plain(f"revision {revision} answered {count:,}")
    for why, count in sorted(found["failures"].items()):
        yield plain(f"{count:,} failed: {why}")


def _metadata(url: SplitResult, name: str, timeout: float) -> Json:
    path = f"{url.path.rstrip('/')}/v2/models/{quote(name, safe='')}"
    try:
        connection = load.connect(url, timeout)
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read(LARGEST_BYTES)
        connection.close()
    except (OSError, http.client.HTTPException) as e:
        raise Failed(f"{url.netloc} cannot be asked: {plain(e)}") from e
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if answer.status != http.client.OK or not isinstance(found, dict):
        said = found.get("error") if isinstance(found, dict) else text[:200].decode(errors="replace")
        raise Failed(f"{url.netloc}{path} answered {answer.status}: {plain(said)}")
    return found


def _url(text: str) -> SplitResult:
    url = urlsplit(text)
    try:
        good = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise Failed(f"--url {plain(text)} is no address: http://host:port", 2)
    return url


@contextlib.contextmanager
def _forwarded(namespace: str, model: Json, options: argparse.Namespace) -> Iterator[SplitResult]:
    """A port of this machine that leads to one worker. Raises Failed."""
    service = (((model.get("spec") or {}).get("serving") or {}).get("service") or {}).get("name") or options.name
    command = [*shlex.split(os.environ.get("KUBECTL") or "kubectl"), "port-forward", "-n", namespace]
    command += ["--kubeconfig", options.kubeconfig] if options.kubeconfig else []
    command += ["--context", options.context] if options.context else []
    try:
        process = subprocess.Popen(
            [*command, f"service/{service}", ":http"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    except OSError as e:
        raise Failed(f"{command[0]} cannot be run: {e.strerror}. Name an address with --url", 2) from e
    timer = threading.Timer(FORWARD_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        timer.cancel()
        match = _FORWARDING.search(line)
        if match is None:
            process.kill()
            raise Failed(f"no way to service/{service}: {plain(process.stderr.read()) or 'no answer of kubectl'}")
        for told in (process.stdout, process.stderr):  # a line a connection: a full pipe would stop the forwarding
            threading.Thread(target=collections.deque, args=(told, 0), daemon=True).start()
        yield urlsplit(f"http://127.0.0.1:{match[1]}")
    finally:
        timer.cancel()
        process.kill()
        process.wait()
