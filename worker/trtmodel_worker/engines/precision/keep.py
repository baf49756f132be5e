"""Which nodes keep their precision."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trtmodel_contract.identity import KeepPrecision
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.building import Rejected

_SHOWN = 5
_MOST_PATTERN = 512  # characters
_MOST_SECONDS = 10.0  # of a processor, for one pattern


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
        with _in_time(text):
            names = {node.name for node in nodes if node.name and pattern.search(node.name)}
            elsewhere = not names and any(node.name and pattern.search(node.name) for node in before)
        if not names and not elsewhere:
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


class _TooSlow(Exception):
    pass


@contextlib.contextmanager
def _in_time(text: str) -> Iterator[None]:
    """Refuses a pattern that backtracks for ever, as (a+)+$ does: without this it would take the Job's whole deadline.
    Python's `re` acts on signals while it searches; only a main thread may ask for them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: Any) -> None:
        raise _TooSlow

    former = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_SECONDS)
    try:
        yield
    except _TooSlow:
        why = f"takes more than {_MOST_SECONDS:.0f} s to search the nodes' names"
        raise _refused(f"keepPrecision {text!r} {why}: repeat nothing that repeats") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)


def _refused(text: str) -> Rejected:
    return Rejected(Reason.PRECISION_UNSUPPORTED, text)
