"""Which nodes keep their precision: by pattern, by operator, and what is no guard."""

from __future__ import annotations

import signal

import pytest
from trtmodel_contract.identity import EngineSettings, KeepPrecision, Recipe, revision
from trtmodel_contract.jobs import Reason
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.engines.precision import keep
from trtmodel_worker.engines.precision.keep import NamedNode, kept

PREPARED = [NamedNode("/a/MatMul", "MatMul"), NamedNode("/a/Softmax", "Softmax"), NamedNode("/b/MatMul", "MatMul")]
SOURCE = [*PREPARED, NamedNode("/b/Identity", "Identity")]


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (None, set()),
        (KeepPrecision(("^/a/",)), {"/a/MatMul", "/a/Softmax"}),
        (KeepPrecision((), operators=("MatMul",)), {"/a/MatMul", "/b/MatMul"}),
        (KeepPrecision(("^/b/",), operators=("Softmax",)), {"/b/MatMul", "/a/Softmax"}),
        (KeepPrecision(("Identity", "/a/M")), {"/a/MatMul"}),  # what was folded away needs no guard, and is no mistake
        (KeepPrecision((), operators=("Identity",)), set()),
    ],
)
def test_nodes_are_kept_by_pattern_and_by_operator(wanted: KeepPrecision | None, names: set[str]) -> None:
    assert kept(wanted, PREPARED, SOURCE) == names


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (KeepPrecision(("nothing-like-it",)), "matches no node's name; the first are /a/MatMul"),
        (KeepPrecision(("(",)), "is no pattern"),
        (KeepPrecision(("x" * 600,)), "longer than 512"),
        (KeepPrecision((), operators=("LayerNormalization",)), "no operator 'LayerNormalization'; it has Identity"),
        (KeepPrecision(("",), operators=("softmax",)), "no operator 'softmax'"),
    ],
)
def test_a_guard_that_guards_nothing_is_refused(wanted: KeepPrecision, words: str) -> None:
    with pytest.raises(Rejected, match=words.replace("(", r"\(")) as e:
        kept(wanted, PREPARED, SOURCE)
    assert e.value.reason is Reason.PRECISION_UNSUPPORTED


def test_a_pattern_that_would_search_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep, "_MOST_SECONDS", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(Rejected, match="repeat nothing that repeats"):
        kept(KeepPrecision(("(a+)+$",)), [NamedNode("a" * 60 + "!", "MatMul")])
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_operators_change_the_revision_only_if_there_are_any() -> None:
    def named(wanted: KeepPrecision) -> str:
        return revision(Recipe("a" * 64, EngineSettings("TensorRT", "FP16", wanted)))

    assert named(KeepPrecision(("^/a/",), operators=("Softmax",))) != named(KeepPrecision(("^/a/",)))
    assert named(KeepPrecision(("^/a/",), operators=())) == named(KeepPrecision(("^/a/",)))
