"""Load by wrk: a Lua script is written per request, its JSON line is read back."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from protocols import Request

ANSWER_SECONDS = 5

SCRIPT = """local file = io.open({body}, "rb")
wrk.method = "POST"
wrk.path = {path}
wrk.body = file:read("*a")
file:close()
{headers}
done = function(summary, latency, requests)
  local e = summary.errors
  io.write(string.format(
    '\\n{{"requests":%d,"microseconds":%d,"status":%d,"socket":%d,"timeout":%d,"p50":%d,"p99":%d,"max":%d}}\\n',
    summary.requests, summary.duration, e.status, e.connect + e.read + e.write, e.timeout,
    latency:percentile(50.0), latency:percentile(99.0), latency.max))
end
"""


class LoadError(RuntimeError):
    """wrk could not do its work. The text says why."""


@dataclass(frozen=True)
class Found:
    """Of one cell. `failed`: answers that were not 2xx or 3xx, broken connections, and none within ANSWER_SECONDS."""

    requests_per_second: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    requests: int
    failed: int


def wrk_version() -> str:
    if shutil.which("wrk") is None:
        raise LoadError("wrk is not installed: apt-get install wrk")
    text = subprocess.run(["wrk", "-v"], capture_output=True, text=True, check=False).stdout
    return " ".join(text.split()[:2])


def wrk(port: int, request: Request, concurrency: int, seconds: int, folder: Path) -> Found:
    """Closed loop over `concurrency` kept connections for whole `seconds`, one thread. Raises LoadError."""
    body, script = folder / "body", folder / "request.lua"
    body.write_bytes(request.body)
    headers = "\n".join(f"wrk.headers[{json.dumps(k)}] = {json.dumps(v)}" for k, v in request.headers.items())
    script.write_text(SCRIPT.format(body=json.dumps(str(body)), path=json.dumps(request.path), headers=headers))
    command = ["wrk", "-t", "1", "-c", str(concurrency), "-d", f"{seconds}s", "--timeout", f"{ANSWER_SECONDS}s"]
    command += ["-s", str(script), f"http://127.0.0.1:{port}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=False)
    except subprocess.TimeoutExpired:
        raise LoadError(f"wrk did not end within {seconds + 60} s") from None
    return parse(done.stdout, done.stderr)


def parse(text: str, errors: str = "") -> Found:
    """Raises LoadError if the script's line is missing."""
    line = next((line for line in reversed(text.splitlines()) if line.startswith("{")), None)
    if line is None:
        raise LoadError(f"wrk said: {(errors or text).strip()[-300:]}")
    found = json.loads(line)
    failed = found["status"] + found["socket"] + found["timeout"]
    return Found(
        requests_per_second=(found["requests"] - found["status"]) / (found["microseconds"] / 1e6),
        p50_ms=found["p50"] / 1e3,
        p99_ms=found["p99"] / 1e3,
        max_ms=found["max"] / 1e3,
        requests=found["requests"],
        failed=failed,
    )
