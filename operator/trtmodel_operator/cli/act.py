"""promote, abort, rollback, retry, skip-step, pause, resume and refresh: write the command, hear the answer, wait."""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from trtmodel_operator.cli import orders, output, show
from trtmodel_operator.cli.connection import Connection
from trtmodel_operator.cli.outcome import EXIT_DONE, EXIT_LATE, Outcome, listed, memory, outcome, revision
from trtmodel_operator.cli.words import Failed, plain

Json = Mapping[str, Any]

ANSWER_SECONDS = 20.0  # until the operator has taken a command or not; it needs a fraction of one
EVENT_SECONDS = 5.0  # an event may be lost: then what status remembers is the answer
EXIT_IGNORED = 1


def act(at: Connection, options: argparse.Namespace) -> int:
    order = next(o for o in orders.ORDERS if o.verb == options.command)
    model = at.get(options.name)
    guarded = options.revision or orders.guard(order, model)
    text = orders.written(order.verb, guarded, secrets.token_hex(4))
    if waiting := orders.untaken(model):
        print(f"this takes the place of {plain(waiting)}, which no operator has taken", file=sys.stderr)
    at.command(options.name, text)
    if options.detached:
        return _end(options, EXIT_DONE, text, "written")
    answer = _answer(at, options.name, model["metadata"]["uid"], text)
    if answer is None:
        late = f"no operator has taken it within {ANSWER_SECONDS:g} s. Does one run, and may it see this namespace?"
        return _end(options, EXIT_LATE, text, late)
    if not answer.taken or not options.wait:
        return _end(options, EXIT_DONE if answer.taken else EXIT_IGNORED, text, answer.sentence)
    effect = _until(at, options.name, time.monotonic() + options.timeout, lambda m: ended(order.verb, guarded, m))
    if effect is None:
        return _end(options, EXIT_LATE, text, "it was taken, and had no effect in time")
    return _end(options, effect.code, text, effect.sentence)


def ended(verb: str, guarded: str, model: Json) -> Outcome | None:
    """Whether the command has had its effect, and which; None while it has not."""
    targets = [t.get("workers") or {} for t in listed((model.get("status") or {}).get("targets"))]
    on_trial = sum(int(t.get("onCandidate") or 0) for t in targets)
    if verb in ("pause", "skip-step"):
        return Outcome(EXIT_DONE, "it was taken")
    if verb == "abort":
        gone = revision(model, "candidate") == "" or revision(model, "candidate") != guarded
        return Outcome(EXIT_DONE, f"{guarded} is on no worker") if gone and not on_trial else None
    if verb == "rollback":
        ready = sum(int(t.get("ready") or 0) for t in targets)
        back = revision(model, "stable") == guarded and not revision(model, "candidate") and not on_trial
        arrived = back and sum(int(t.get("onStable") or 0) for t in targets) >= ready
        return Outcome(EXIT_DONE, f"{guarded} serves") if arrived else None
    return outcome(model)


def _answer(at: Connection, name: str, uid: str, text: str) -> orders.Answer | None:
    """From the event, which follows the status that it is about; else from what status remembers."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while memory(show.patiently(at, name, deadline)).get("command") != text:
        if time.monotonic() >= deadline:
            return None
        time.sleep(min(show.POLL_SECONDS, 0.3))
    deadline = time.monotonic() + EVENT_SECONDS
    while (found := orders.answer(at.events(uid), text)) is None:
        if time.monotonic() >= deadline:
            return orders.Answer(True, "the operator has taken it; its event was lost")
        time.sleep(min(show.POLL_SECONDS, 0.3))
    return found


def _until(at: Connection, name: str, deadline: float, done: Callable[[Json], Outcome | None]) -> Outcome | None:
    told = ""
    while True:
        model = show.patiently(at, name, deadline)
        if (found := done(model)) is not None:
            return found
        if time.monotonic() >= deadline:
            return None
        told = show.progress(model, told)
        time.sleep(show.POLL_SECONDS)


def _end(options: argparse.Namespace, code: int, text: str, sentence: str) -> int:
    if options.output == "json":
        print(output.as_json({"command": text, "exitCode": code, "message": sentence}))
    elif code == EXIT_DONE:
        print(f"{options.name}: {text}: {plain(sentence)}")
    else:
        raise Failed(f"{options.name}: {text}: {plain(sentence)}", code)
    return code
