"""The adapter against a real Prometheus on this machine. The binary is that of the environment variable PROMETHEUS, or
of the path; Debian's package `prometheus` has it."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trtmodel_operator.adapters.addresses import Addresses
from trtmodel_operator.adapters.calls import CallError, Calls
from trtmodel_operator.adapters.prometheus import Prometheus

pytestmark = pytest.mark.e2e

START_SECONDS = 60
CONFIG = """\
global: {scrape_interval: 1s}
scrape_configs:
- job_name: itself
  static_configs: [{targets: ["%s"]}]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it has scraped itself."""
    binary = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus on the path: install Debian's package, or name the binary by PROMETHEUS")
    home = tmp_path_factory.mktemp("prometheus")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{s.getsockname()[1]}"
    (home / "config.yaml").write_text(CONFIG % where)
    command = [binary, f"--config.file={home}/config.yaml", f"--storage.tsdb.path={home}/data"]
    with Path(home / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={where}"], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while asked(f"http://{where}", "count(up == 1)") != 1.0:
            assert process.poll() is None, (home / "log").read_text()
            assert time.monotonic() < deadline, (home / "log").read_text()
            time.sleep(0.1)
        yield f"http://{where}"
    finally:
        process.kill()
        process.wait()


def asked(address: str, query: str) -> float | str:
    """The number, or the cause why there is none."""

    async def ask() -> float | str:
        calls = Calls(Addresses([address]))
        try:
            return await Prometheus(calls, address).ask("", query)
        except CallError as e:
            return str(e)
        finally:
            await calls.close()

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("vector(0.93)", 0.93),
        ("scalar(vector(7))", 7.0),
        ("count(up == 1)", 1.0),
        ("sum(up) > bool 5", 0.0),
        ("up{job='nobody'}", "the query gives nothing: no series matches"),
        ("up{job='nobody'} > 1 or vector(0)", 0.0),
        ("0 * vector(0) / vector(0)", "the query gives nan, which cannot be compared: had its divisor any samples?"),
        ("vector(1) / 0", "the query gives inf, which cannot be compared: had its divisor any samples?"),
        ('"text"', "the query gives a string where one number is needed"),
        ("up[1m]", "the query gives a matrix where one number is needed"),
    ],
)
def test_a_real_prometheus_is_understood(server: str, query: str, found: float | str) -> None:
    assert asked(server, query) == found


def test_several_series_are_told_with_their_number(server: str) -> None:
    assert "series where one number is needed: use sum() or max()" in str(asked(server, "{__name__=~'prometheus_.*'}"))


def test_what_it_does_not_understand_is_told_in_its_own_words(server: str) -> None:
    assert "parse error" in str(asked(server, "sum(up"))
