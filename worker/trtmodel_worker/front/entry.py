"""One engine that is wanted, or was: where its preparation stands."""

from __future__ import annotations

import time

from trtmodel_contract.control import NOT_RESIDENT, EngineReport, EngineState, Role, SignedArtifact

from trtmodel_worker.front.engine import Engine

_FIRST_RETRY_SECONDS = 2.0
_SLOWEST_RETRY_SECONDS = 60.0


class Entry:
    """`engine`: None until it is loaded, and again after it was unloaded. `due`: when to try (monotonic); None: not by
    itself. `rests`: it is left unloaded, or was unloaded, since memory holds one engine less than is wanted.
    `outage`: when it failed last, what answered had been unloaded for it."""

    def __init__(self, artifact: SignedArtifact, role: Role) -> None:
        self.artifact = artifact
        self.role = role
        self.state = EngineState.FETCHING
        self.reason = ""
        self.message = ""
        self.load_seconds: float | None = None
        self.engine: Engine | None = None
        self.tries = 0
        self.due: float | None = 0.0
        self.rests = False
        self.outage = False

    @property
    def digest(self) -> str:
        return self.artifact.manifest_digest

    @property
    def waits(self) -> bool:
        """It is to be loaded, now or later."""
        return self.engine is None and self.due is not None

    @property
    def hopeless(self) -> bool:
        """It cannot answer, and nothing is done about it but slow tries."""
        if self.engine is not None:
            return self.engine.state is EngineState.FAILED
        return self.due is None and not self.rests

    def progress(self, state: EngineState) -> None:
        self.state, self.reason, self.message = state, "", ""

    def loaded(self, engine: Engine, seconds: float) -> None:
        self.progress(EngineState.READY)
        self.engine, self.load_seconds, self.due, self.rests = engine, seconds, None, False

    def fail(self, reason: str, message: str, *, again: bool) -> None:
        self.state, self.reason, self.message, self.rests = EngineState.FAILED, reason, message, False
        self.tries += 1
        delay = min(_SLOWEST_RETRY_SECONDS, _FIRST_RETRY_SECONDS * 2.0 ** (self.tries - 1))
        self.due = time.monotonic() + delay if again else None

    def rest(self, why: str, *, again: bool = False) -> None:
        """Not in memory, and no failure. `again`: it comes back when there is room."""
        self.state, self.reason, self.message, self.rests = EngineState.FETCHING, NOT_RESIDENT, why, True
        self.due = 0.0 if again else None

    def asked_anew(self, *, changed: bool) -> None:
        """What failed or rests is tried again at once; not at the cost of another outage, unless what is asked for has
        `changed`."""
        if self.engine is None and (self.rests or (self.state is EngineState.FAILED and (changed or not self.outage))):
            self.tries, self.due = 0, 0.0

    def report(self) -> EngineReport:
        engine = self.engine
        loaded = engine is not None and self.state is EngineState.READY
        return EngineReport(
            revision=self.artifact.revision,
            manifest_digest=self.digest,
            role=self.role,
            state=engine.state if engine is not None and loaded else self.state,
            reason="HostDeath" if engine is not None and loaded and engine.message else self.reason,
            message=engine.message if engine is not None and loaded else self.message,
            load_seconds=self.load_seconds,
            deaths=engine.deaths if engine is not None else 0,
        )
