"""TRTModels as the operator's own rules and conditions make them, and an operator that answers commands."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from decide_scene import Scene, decide
from fakes.api_server import FakeApiServer
from trtmodel_contract.codec import encode
from trtmodel_operator import conditions

Json = dict[str, Any]


@dataclass(frozen=True)
class Typed:
    """What a command answered."""

    code: int
    out: str
    err: str


def as_object(seen: Scene) -> Json:
    """The TRTModel after a pass of the operator over it."""
    decision = decide(seen)
    status = dict(conditions.status(seen, decision, {}))
    status["rollout"] = encode(decision.memory)
    return {
        "apiVersion": "trtmodel.io/v1alpha1",
        "kind": "TRTModel",
        "metadata": {"namespace": "ml", "name": "magika", "uid": "uid-1", "generation": seen.generation},
        "spec": dict(seen.raw),
        "status": status,
    }


def put(server: FakeApiServer, seen: Scene) -> Json:
    """It lies in the cluster, observed in its newest generation."""
    found = as_object(seen)
    stored = server.put(found)
    if stored["metadata"]["generation"] != seen.generation:  # the server counts generations itself
        for entry in (found["status"], *found["status"]["conditions"]):
            entry["observedGeneration"] = stored["metadata"]["generation"]
        stored = server.put(found)
    return stored


def event(reason: str, note: str, at: str = "2026-01-01T00:00:00.000000Z", uid: str = "uid-1") -> Json:
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "ml", "name": f"magika.{abs(hash((reason, note, at, uid))):x}"},
        "eventTime": at,
        "type": "Normal",
        "reason": reason,
        "note": note,
        "regarding": {"kind": "TRTModel", "namespace": "ml", "name": "magika", "uid": uid},
    }


class Operator:
    """Takes each command once, by `answer(model, text)`, which changes the model and says what the event says (reason,
    words); None takes it without an event."""

    def __init__(self, server: FakeApiServer, answer: Callable[[Json, str], tuple[str, str] | None]) -> None:
        self._server, self._answer = server, answer
        self.taken: list[str] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Operator:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._ends.wait(0.01):
            model = self._server.get("trtmodels", "ml", "magika")
            text = ((model or {}).get("metadata", {}).get("annotations") or {}).get("trtmodel.io/command", "")
            if model is None or not text or text in self.taken:
                continue
            self.taken.append(text)
            model["status"]["rollout"]["command"] = text
            said = self._answer(model, text)
            if said is not None:  # before the status, though the operator does it after: so no clock decides a test
                self._server.put(event(said[0], f"command {text}: {said[1]}"))
            self._server.put(model)
