"""What chaos itself did, and what must be forgiven for it: nothing else is. Also the story as it is told. Thread-safe.

Times are seconds since the epoch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

# Declared limits. A request has LIFETIME seconds and may try again, as clients do that meet a dead server; then it must
# have its answer, always. That its first try fails is allowed in these times after an action, and never otherwise.
BROKEN_SECONDS = 20.0  # after a worker or its host was killed: until its address is out of the Service
THAW_SECONDS = 45.0  # after a worker stood still
GRACE_SECONDS = 60.0  # a worker that chaos hit may be missing for so long, after its requests are forgiven
SCALED_SECONDS = 90.0  # until more workers that are asked for are promised
BLIND_SECONDS = 30.0  # after kubelet or API server came back: until what the API tells of pods is true again
CATCH_UP_SECONDS = 10.0  # that kubelet and controllers take to do what they missed
MOST_TOLD = 100  # violations of one kind in the story; the rest is counted


@dataclass(frozen=True)
class Span:
    begin: float
    end: float
    model: str = ""  # "" for all
    subject: str = ""

    def covers(self, model: str, at: float) -> bool:
        return self.model in ("", model) and self.begin <= at <= self.end


class Ledger:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.time()
        self._excused: list[Span] = []
        self._hit: list[Span] = []
        self._blind: list[Span] = []
        self._done: list[Span] = []
        self.packets: Counter[str] = Counter()  # that did not arrive, by the kind of the cut
        self.broken: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # of each kind of violation, the first

    # -------------------------------------------------------------------------------------------------- the story

    def tell(self, what: str, text: str = "") -> None:
        with self._lock:
            print(f"{time.time() - self._began:7.1f} s  {what:<16} {text}", flush=True)

    def violation(self, invariant: str, text: str) -> None:
        with self._lock:
            self.broken[invariant] += 1
            self.first.setdefault(invariant, f"{time.time() - self._began:.1f} s: {_short(text)}")
            told = self.broken[invariant] <= MOST_TOLD
        if told:
            self.tell("!! BROKEN", f"{invariant}: {text}")

    # ------------------------------------------------------------------------------------------------ what was done

    def did(self, kind: str, model: str, begin: float) -> None:
        """An action of this kind was done from `begin` until now; to the model, or to all if it is ""."""
        with self._lock:
            self._done.append(Span(begin, time.time(), model, kind))

    def lost(self, kind: str, packets: int) -> None:
        with self._lock:
            self.packets[kind] += packets

    def done_since(self, kinds: Collection[str], model: str, begin: float) -> bool:
        """Whether one of these was done to the model, or to all, and had not ended before `begin`."""
        with self._lock:
            return any(s.subject in kinds and s.model in ("", model) and s.end >= begin for s in self._done)

    # ----------------------------------------------------------------------------------------------- what is forgiven

    def excuse(self, model: str, seconds: float) -> None:
        """First tries of requests to this model may fail from now on."""
        with self._lock:
            self._excused.append(Span(time.time() - 1, time.time() + seconds, model))

    def hit(self, model: str, uid: str, seconds: float = GRACE_SECONDS) -> None:
        """This worker may be missing."""
        with self._lock:
            self._hit.append(Span(time.time() - 1, time.time() + seconds, model, uid))

    def blind(self, seconds: float) -> None:
        """Kubelet or API server is gone for so long. A dead worker stays in its Service meanwhile, and no other one
        comes: what is forgiven now is forgiven longer."""
        now, more = time.time(), seconds + CATCH_UP_SECONDS
        with self._lock:
            self._blind.append(Span(now, now + seconds))
            for spans in (self._excused, self._hit):
                spans[:] = [replace(s, end=s.end + more) if s.covers(s.model, now) else s for s in spans]

    def excused(self, model: str, at: float) -> bool:
        with self._lock:
            return any(span.covers(model, at) for span in self._excused)

    def missing(self, model: str, at: float) -> dict[str, float]:
        """The workers of the model that chaos hit lately, and since when."""
        with self._lock:
            spans = [span for span in self._hit if span.covers(model, at)]
        return {span.subject: span.begin for span in sorted(spans, key=lambda s: -s.begin)}

    def ever_hit(self, model: str) -> set[str]:
        """All workers of the model that chaos hit so far."""
        with self._lock:
            return {span.subject for span in self._hit if span.model == model}

    def hit_lately(self, model: str, at: float, seconds: float) -> set[str]:
        """The workers of the model that chaos hit less than `seconds` before."""
        with self._lock:
            return {span.subject for span in self._hit if span.model == model and span.begin > at - seconds}

    def saw_since(self, begin: float) -> bool:
        """Whether neither kubelet nor API server was gone since then."""
        with self._lock:
            return not any(span.end >= begin for span in self._blind)

    def sees(self, at: float, after: float = BLIND_SECONDS) -> bool:
        """Whether what the API told of pods at that time is true: neither kubelet nor API server was gone, or had come
        back less than `after` seconds before."""
        with self._lock:
            return not any(span.begin <= at <= span.end + after for span in self._blind)


def _short(text: str) -> str:
    """Of a traceback, what was done and what came of it."""
    lines = text.strip().splitlines()
    return text.strip() if len(lines) < 2 else f"{lines[0]} ... {lines[-1]}"
