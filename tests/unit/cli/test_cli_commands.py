"""promote, abort, rollback, retry ...: what is written, the operator's answer, and the effect that is waited for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from cli_scene import Json, Operator, Typed, as_object, put
from decide_scene import A, B, canary, promoted, serving
from fakes.api_server import FakeApiServer
from test_conditions import SITUATIONS
from trtmodel_operator import reasons
from trtmodel_operator.cli import act, orders
from trtmodel_operator.decide.commands import _HANDLERS as UNDERSTOOD
from trtmodel_operator.spec import parse_command

Type = Callable[..., Typed]
TAKEN, IGNORED = reasons.COMMAND_TAKEN, reasons.COMMAND_IGNORED
IS_TRUE = {"Ready": "True", "Stalled": "False"}


def says(reason: str, words: str = "as asked") -> Callable[[Json, str], tuple[str, str]]:
    return lambda *_: (reason, words)


@pytest.mark.parametrize(
    ("verb", "scene", "guarded"),
    [
        ("abort", canary(serving(A)), B),
        ("abort", SITUATIONS["building"][0], B),
        ("promote", canary(serving(A)), B),
        ("skip-step", canary(serving(A)), B),
        ("rollback", canary(serving(A)), A),
        ("rollback", promoted(), A),
        ("retry", SITUATIONS["rolled back"][0], B),
        ("refresh", serving(A), ""),
        ("pause", canary(serving(A)), B),
        ("resume", canary(serving(A)), B),
    ],
)
def test_a_command_carries_the_revision_that_it_is_for(
    verb: str, scene: Any, guarded: str, api_server: FakeApiServer, trtmodel: Type
) -> None:
    put(api_server, scene)
    with Operator(api_server, says(TAKEN)) as operator:
        shown = trtmodel(verb, "magika")
    assert shown.code == 0, shown
    (text,) = operator.taken
    command = parse_command(text)
    assert command is not None
    assert (command.verb, command.revision) == (verb, guarded)
    assert shown.out == f"magika: {text}: as asked\n"


def test_every_command_is_one_that_the_operator_understands() -> None:
    assert {order.verb for order in orders.ORDERS} == set(UNDERSTOOD)


def test_two_commands_are_never_the_same_text(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, canary(serving(A)))
    with Operator(api_server, says(TAKEN)) as operator:
        trtmodel("abort", "magika")
        trtmodel("abort", "magika")
    assert len(set(operator.taken)) == 2


def test_a_revision_of_ones_own_is_sent_and_a_refusal_is_the_exit_code(
    api_server: FakeApiServer, trtmodel: Type
) -> None:
    put(api_server, canary(serving(A)))
    with Operator(api_server, says(IGNORED, "does nothing: the revision on trial is bbbbbbbbbb")) as operator:
        shown = trtmodel("abort", "magika", "--revision", "cccccccccc")
    assert operator.taken[0].startswith("abort@cccccccccc#")
    assert (shown.code, shown.out) == (act.EXIT_IGNORED, "")
    assert "does nothing: the revision on trial is bbbbbbbbbb" in shown.err


def test_without_an_operator_it_says_so(
    api_server: FakeApiServer, trtmodel: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act, "ANSWER_SECONDS", 0.2)
    put(api_server, canary(serving(A)))
    shown = trtmodel("abort", "magika")
    assert shown.code == 124
    assert "no operator has taken it" in shown.err
    again = trtmodel("abort", "magika", "--async")
    assert again.code == 0
    assert "this takes the place of abort@bbbbbbbbbb#" in again.err


def test_a_command_whose_event_was_lost_is_known_by_what_status_remembers(
    api_server: FakeApiServer, trtmodel: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(act, "EVENT_SECONDS", 0.1)
    put(api_server, canary(serving(A)))
    with Operator(api_server, lambda *_: None):
        shown = trtmodel("abort", "magika", "-o", "json")
    assert shown.code == 0
    assert json.loads(shown.out)["message"] == "the operator has taken it; its event was lost"


def test_abort_waits_until_no_worker_answers_with_the_candidate(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, canary(serving(A)))

    def goes_back(model: Json, _: str) -> tuple[str, str]:
        model["status"]["rollout"]["candidate"] = None
        model["status"]["targets"][0]["workers"]["onCandidate"] = 1
        return TAKEN, "going"

    with Operator(api_server, goes_back):
        late = trtmodel("abort", "magika", "--wait", "--timeout", "200ms")
        assert late.code == 124, late
        model = api_server.get("trtmodels", "ml", "magika") or {}
        model["status"]["targets"][0]["workers"]["onCandidate"] = 0
        api_server.put(model)
    assert act.ended("abort", B, model) == act.Outcome(0, f"{B} is on no worker")


def test_rollback_waits_until_every_ready_worker_is_back() -> None:
    model = as_object(promoted())
    assert act.ended("rollback", A, model) is None
    model["status"]["rollout"]["stable"] = {"revision": A}
    model["status"]["targets"][0]["workers"] |= {"ready": 4, "onStable": 3}
    assert act.ended("rollback", A, model) is None
    model["status"]["targets"][0]["workers"]["onStable"] = 4
    assert act.ended("rollback", A, model) == act.Outcome(0, f"{A} serves")


def test_retry_waits_for_the_end_of_the_new_attempt(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, SITUATIONS["rolled back"][0])

    def serves(model: Json, _: str) -> tuple[str, str]:
        for entry in model["status"]["conditions"]:
            entry["status"] = IS_TRUE.get(entry["type"], entry["status"])
        model["status"]["rollout"]["stable"] = {"revision": B}
        return TAKEN, "one new attempt is made"

    with Operator(api_server, serves):
        shown = trtmodel("retry", "magika", "--wait")
    assert shown.code == 0, shown
    assert shown.out.endswith(f": {B} serves\n")
