"""Which engine answers: one table, replaced by one assignment between two requests."""

from __future__ import annotations

from dataclasses import dataclass

from trtmodel_contract.control import Routes

from trtmodel_worker.front.engine import Engine

WHOLE = 100


@dataclass(frozen=True)
class Table:
    """`weight` is the percentage of requests that the candidate answers, `shadow` that of stable's answers after which
    it runs the same request for comparison (shadow.py). A candidate that answers alone, for memory
    holds one engine, is in both places."""

    stable: Engine
    candidate: Engine | None = None
    weight: int = 0
    shadow: int = 0

    def engines(self) -> tuple[Engine, ...]:
        return (self.stable,) if self.candidate in (None, self.stable) else (self.stable, self.candidate)


class Router:
    """`loaded` holds every engine that can answer, by manifest digest: a request may name a revision."""

    def __init__(self, fallback: bool = True) -> None:
        self._fallback = fallback
        self.standby: Engine | None = None
        self.table: Table | None = None
        self.loaded: dict[str, Engine] = {}
        self._owed = 0

    def flip(self, table: Table) -> None:
        self._owed = 0
        self.table = table

    def unroute(self) -> None:
        """Nothing answers."""
        for engine in self.table.engines() if self.table else ():
            engine.routed = False
        self.table = None

    def choose(self) -> Engine | None:
        """The engine for the next request: shares are exact over every 100 requests, and spread evenly. A candidate
        without a living host owes the answer all the same: stable gives it, the attempt counts as failed."""
        table = self.table
        if table is None:
            return None
        candidate = table.candidate
        if candidate is not None:
            self._owed += table.weight
            if self._owed >= WHOLE:
                self._owed -= WHOLE
                if candidate.alive:
                    return candidate
                candidate.count_failed("Down")
        return table.stable

    def fallback_of(self, engine: Engine) -> Engine | None:
        """Who answers while no host of `engine` can: stable for a candidate, the standby for stable, if it may."""
        table = self.table
        if table is not None and engine is table.candidate:
            return table.stable
        routed = table is not None and engine is table.stable
        return self.standby if self._fallback and routed and self.standby is not engine else None

    def named(self, revision: str) -> Engine | None:
        """The loaded engine of a revision; if there are two builds of it, the one that is routed to."""
        engines = [e for e in self.loaded.values() if e.revision == revision]
        return next((e for e in engines if e.routed), engines[0] if engines else None)

    def routes(self) -> Routes:
        """What is in force now."""
        if self.table is None:
            return Routes("")
        stable, candidate = self.table.stable, self.table.candidate
        digest = "" if candidate is stable else stable.digest
        return Routes(digest, candidate.digest if candidate else "", self.table.weight, self.table.shadow)
