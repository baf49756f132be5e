"""Which nodes keep their precision: by pattern, by operator, and what is no guard."""

from __future__ import annotations

import pytest
from trtmodel_contract.identity import EngineSettings, KeepPrecision, Recipe, revision
from trtmodel_contract.jobs import Reason
from trtmodel_worker.engines.building import Rejected
from trtmodel_worker.engines.precision.keep import NamedNode, kept

PREPARED = [NamedNode("/a/MatMul", "MatMul"), NamedNode("/a/Softmax", "Softmax"), NamedNode("/b/MatMul", "MatMul")]
SOURCE = [*PREPARED, NamedNode("/b/Identity", "Identity")]


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        (None, set()),
        (KeepPrecision(("^/a/",)), {"/a/MatMul", "/a/Softmax"}),
        (KeepPrecision((), operators=("MatMul",)), {"/a/MatMul", "/b/MatMul"}),
        (KeepPrecision(("^/b/",), operators=("Softmax",)), {"/b/MatMul", "/a/Softmax"}),
        (KeepPrecision(("Identity", "/a/M")), {"/a/MatMul"}),  # what was folded away needs no guard, and is no mistake
        (KeepPrecision((), operators=("Identity",)), set()),
    ],
)
def test_nodes_are_kept_by_pattern_and_by_operator(keep: KeepPrecision | None, names: set[str]) -> None:
    assert kept(keep, PREPARED, SOURCE) == names


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (KeepPrecision(("nothing-like-it",)), "matches no node's name; the first are /a/MatMul"),
        (KeepPrecision(("(",)), "is no pattern"),
        (KeepPrecision(("x" * 600,)), "longer than 512"),
        (KeepPrecision((), operators=("LayerNormalization",)), "no operator 'LayerNormalization'; it has Identity"),
        (KeepPrecision(("",), operators=("softmax",)), "no operator 'softmax'"),
    ],
)
def test_a_guard_that_guards_nothing_is_refused(keep: KeepPrecision, words: str) -> None:
    with pytest.raises(Rejected, match=words.replace("(", r"\(")) as e:
        kept(keep, PREPARED, SOURCE)
    assert e.value.reason is Reason.PRECISION_UNSUPPORTED


def test_operators_change_the_revision_only_if_there_are_any() -> None:
    def named(keep: KeepPrecision) -> str:
        return revision(Recipe("a" * 64, EngineSettings("TensorRT", "FP16", keep)))

    assert named(KeepPrecision(("^/a/",), operators=("Softmax",))) != named(KeepPrecision(("^/a/",)))
    assert named(KeepPrecision(("^/a/",), operators=())) == named(KeepPrecision(("^/a/",)))
