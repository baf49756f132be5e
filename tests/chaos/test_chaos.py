"""One seed on the real cluster. Further ones by command: python -m tests.chaos --seeds 1-6 --minutes 10."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from chaos.run import Stage, run_seed

SEED = os.environ.get(
    "TRTMODEL_CHAOS_SEED", "12"
)  # has all kinds in 5 minutes; a number, or "date" for one of its own each day
MINUTES = float(os.environ.get("TRTMODEL_CHAOS_MINUTES", "5"))
AROUND_SECONDS = 900  # set-up, convergence, deletion

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.night,
    pytest.mark.timeout(int(MINUTES * 60 + AROUND_SECONDS)),
]


@pytest.fixture(scope="module")
def stage(cluster_environment: Mapping[str, str]) -> Iterator[Stage]:
    found = Stage()
    yield found
    found.close()


def test_whatever_is_killed_cut_or_changed_the_product_keeps_its_promises_and_converges(
    stage: Stage, tmp_path: Path
) -> None:
    seed = datetime.datetime.now(datetime.UTC).date().toordinal() if SEED == "date" else int(SEED)
    logs = Path(os.environ.get("TRTMODEL_CHAOS_LOGS", tmp_path))
    result = run_seed(stage, seed, MINUTES, logs)
    if file := os.environ.get("TRTMODEL_CHAOS_RESULTS"):
        with Path(file).open("a") as out:
            out.write(json.dumps(asdict(result)) + "\n")
    assert result.broken == {}, result.first
    assert result.requests > 0
    assert result.looks > 0
