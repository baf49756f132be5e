"""Twenty thousand bad requests in each run of the tests; `run.py` beside this file sends a million.

TRTMODEL_FUZZ_REQUESTS and TRTMODEL_FUZZ_SEED say how many and which ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fuzz_harness import fuzzed

REQUESTS = int(os.environ.get("TRTMODEL_FUZZ_REQUESTS", "20000"))
SECONDS = float(os.environ.get("TRTMODEL_FUZZ_SECONDS", "25"))  # on a busy machine fewer are sent


def test_bad_bytes_on_the_http_port_get_no_error_of_ours_and_disturb_no_good_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = fuzzed(tmp_path, int(os.environ.get("TRTMODEL_FUZZ_SEED", "1")), REQUESTS, SECONDS)
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.bad > 0
    assert tally.good > 0
    assert tally.statuses[400] > tally.bad // 4  # they reach what they are meant for
    assert set(tally.statuses) <= {100, 200, 400, 404, 405, 408, 413, 415, 431, 500, 503}, tally
