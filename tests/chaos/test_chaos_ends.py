"""When chaos is over: what does not converge, does not serve a last good spec or leaves something behind is seen."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import run, watch
from chaos.ledger import Ledger
from chaos.subject import Applied
from chaos.traffic import First

Json = dict[str, Any]
NAME = "one"


def model(*, ready: str = "True", stalled: str = "False", reconciling: str = "False", stable: str = "aaa") -> Json:
    told = {"Ready": ready, "Stalled": stalled, "Reconciling": reconciling, "Available": "True"}
    conditions = [
        {"type": kind, "status": status, "reason": "Serving", "message": "", "observedGeneration": 1}
        for kind, status in told.items()
    ]
    return {
        "metadata": {"generation": 1},
        "spec": {"source": {"uri": "s3://e2e-models/chaos/g3.onnx"}},
        "status": {"conditions": conditions, "rollout": {"stable": {"revision": stable}}},
    }


class Stands:
    """A TRTModel that stays as it is, with these children."""

    name = NAME

    def __init__(self, found: Json, children: Sequence[Json] = ()) -> None:
        self._found = found
        self.trusted = {3: 0.0}
        self.world = SimpleNamespace(
            describe=lambda _: "",
            kubectl=lambda *_: "",
            children=lambda kind, _: list(children) if kind == "Job" else [],
        )

    def model(self) -> Json:
        return self._found

    def change(self, kind: str) -> Applied:
        return Applied(kind, 3)

    def scale(self, pick: float) -> int:
        return 2


class Answered:
    """Requests that were answered by these revisions, each as gain 3."""

    def __init__(self, *revisions: str) -> None:
        self._revisions = revisions

    def firsts(self) -> dict[tuple[str, str], First]:
        return {(NAME, revision): First(3, 0.0) for revision in self._revisions}

    def since(self, model: str, begin: float) -> list[tuple[str, int]]:
        return [(revision, 3) for revision in self._revisions]


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONVERGED_SECONDS", "FINAL_SECONDS", "GONE_SECONDS", "SETTLED_SECONDS"):
        monkeypatch.setattr(run, name, 0.0)


def a_result() -> run.Result:
    return run.Result(7, 1, "2026-11-30", "abc", "a machine")


def converged(found: Json, *answers: str) -> dict[str, int]:
    ledger = Ledger()
    run._converge({NAME: Stands(found)}, Answered(*answers), a_result(), ledger)  # type: ignore[arg-type, dict-item]
    return dict(ledger.broken)


def test_what_is_ready_or_stalled_and_rests_has_settled() -> None:
    assert watch.settled(model())
    assert watch.settled(model(ready="False", stalled="True"))
    assert not watch.settled(model(reconciling="True"))
    assert not watch.settled(model(ready="False"))
    newer = model()
    newer["metadata"]["generation"] = 2
    assert not watch.settled(newer)


def test_a_model_that_goes_on_moving_is_seen() -> None:
    assert converged(model(), "aaa") == {}
    assert converged(model(ready="False"), "aaa") == {"everything converges": 1}


def test_a_revision_that_answers_though_it_was_taken_back_is_seen() -> None:
    assert converged(model(), "aaa", "zzz") == {"at the end stable or standby answers": 1}


def test_a_last_good_spec_that_is_not_served_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(found: Json) -> dict[str, int]:
        ledger = Ledger()
        run._end_well({NAME: Stands(found)}, Answered("aaa"), a_result(), ledger)  # type: ignore[arg-type, dict-item]
        return dict(ledger.broken)

    assert ended(model(ready="False")) == {"a good spec is served after chaos": 1}
    monkeypatch.setattr(run, "FINAL_SECONDS", 60.0)
    assert ended(model()) == {"nothing is left over": 1}  # its workers are missing
    monkeypatch.setattr(run, "_wait_answer", lambda *_: None)
    assert ended(model(stable="zzz")) == {"a good spec is served after chaos": 1, "nothing is left over": 1}


def test_what_a_deleted_model_leaves_is_seen() -> None:
    for children, wrong in (([], {}), ([{"metadata": {"name": "build-1"}}], {"a deleted model leaves nothing": 1})):
        ledger = Ledger()
        run._delete({NAME: Stands(model(), children)}, ledger)  # type: ignore[dict-item]
        assert dict(ledger.broken) == wrong
