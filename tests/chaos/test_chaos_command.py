"""Many seeds by one command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from chaos import __main__ as command
from chaos import run


class Stage:
    """Where nothing happens."""

    healed = closed = 0

    def heal(self) -> None:
        type(self).healed += 1

    def close(self) -> None:
        type(self).closed += 1


def result(seed: int, minutes: float, **broken: int) -> run.Result:
    return run.Result(seed, minutes, "2026-11-30", "abc", "a machine", broken=broken)


def test_a_bad_seed_is_recorded_and_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def play(stage: Stage, seed: int, minutes: float, logs: Path) -> run.Result:
        return result(seed, minutes, oops=1) if seed == 2 else result(seed, minutes)

    monkeypatch.setattr(run, "Stage", Stage)
    monkeypatch.setattr(run, "run_seed", play)
    file = tmp_path / "new" / "chaos.jsonl"
    assert command.main(["--seeds", "1-3,9", "--minutes", "2", "--results", str(file)]) == 1
    assert command.main(["--seed", "4", "--results", str(file)]) == 0
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(w["seed"], w["minutes"], w["broken"]) for w in written] == [
        (1, 2.0, {}),
        (2, 2.0, {"oops": 1}),
        (3, 2.0, {}),
        (9, 2.0, {}),
        (4, 10.0, {}),
    ]
    assert (Stage.healed, Stage.closed) == (2, 2)


def test_a_plan_is_shown_without_a_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Stage", None)
    assert command.main(["--seed", "7", "--minutes", "1", "--plan"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3
