"""Which nodes keep their precision."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trtmodel_contract.identity import KeepPrecision
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Rejected

_SHOWN = 5
_MOST_PATTERN = 512  # characters


@dataclass(frozen=True)
class NamedNode:
    name: str
    operator: str


def kept(keep: KeepPrecision | None, prepared: Iterable[NamedNode], source: Iterable[NamedNode] = ()) -> frozenset[str]:
    """Names of the nodes of `prepared` that keep theirs. `source` is the graph as it was given: what matches there only
    was folded away, and is no mistake. Raises Rejected for a pattern that is none, or that matches nothing: a guard
    that guards nothing is a mistake."""
    if keep is None:
        return frozenset()
    nodes, before = list(prepared), list(source)
    found: set[str] = set()
    for text in keep.nodes:
        pattern = _compiled(text)
        names = {node.name for node in nodes if node.name and pattern.search(node.name)}
        if not names and not any(node.name and pattern.search(node.name) for node in before):
            known = ", ".join([node.name for node in (before or nodes) if node.name][:_SHOWN]) or "none has a name"
            raise _refused(f"keepPrecision {text!r} matches no node's name; the first are {known}")
        found |= names
    for operator in keep.operators:
        names = {node.name for node in nodes if node.operator == operator}
        if not names and not any(node.operator == operator for node in before):
            known = ", ".join(sorted({node.operator for node in (before or nodes)}))
            raise _refused(f"keepPrecision: the graph has no operator {operator!r}; it has {known[:400]}")
        found |= names
    return frozenset(found)


def _compiled(text: str) -> re.Pattern[str]:
    if len(text) > _MOST_PATTERN:
        raise _refused(f"keepPrecision {text[:40]!r}... is longer than {_MOST_PATTERN} characters")
    try:
        return re.compile(text)
    except re.error as e:
        raise _refused(f"keepPrecision {text!r} is no pattern: {e}") from e


def _refused(text: str) -> Rejected:
    return Rejected(Reason.PRECISION_UNSUPPORTED, text)
