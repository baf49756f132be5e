"""The adapter against a real Prometheus on this machine, Debian's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from debian_prometheus import Missing, programs
from prometheus_server import Prometheus as Server
from trtmodel_operator.adapters.addresses import Addresses
from trtmodel_operator.adapters.calls import CallError, Calls
from trtmodel_operator.adapters.prometheus import Prometheus

pytestmark = pytest.mark.e2e

START_SECONDS = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address, once it has scraped itself."""
    try:
        program = programs()["prometheus"]
    except Missing as e:
        pytest.fail(str(e))
    folder = tmp_path_factory.mktemp("prometheus")
    itself = {"job_name": "itself", "file_sd_configs": [{"files": [str(folder / "itself.json")]}]}
    found = Server(program, {"global": {"scrape_interval": "1s"}, "scrape_configs": [itself]}, folder)
    try:
        address = found.url.removeprefix("http://")
        (folder / "itself.json").write_text(f'[{{"targets": ["{address}"]}}]')
        deadline = time.monotonic() + START_SECONDS
        while asked(found.url, "count(up == 1)") != 1.0:
            assert time.monotonic() < deadline, found.log()
            time.sleep(0.1)
        yield found.url
    finally:
        found.close()


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
