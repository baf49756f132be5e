"""Lookups beside the passes: asked again and again, kept, given up; and events that are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from outside import Outside, beside, hanging, saying, until
from test_prometheus_adapter import vector
from test_webhooks_adapter import SIGNER, Clock
from trtmodel_operator.adapters import inquiries
from trtmodel_operator.adapters.calls import Calls
from trtmodel_operator.adapters.inquiries import HttpInquiries
from trtmodel_operator.adapters.prometheus import Prometheus
from trtmodel_operator.adapters.webhooks import Webhooks
from trtmodel_operator.model import Confirmation, Query, WebhookSpec, WebhookStage
from trtmodel_operator.ports import Key

KEY: Key = ("ml", "magika")
Scene = Callable[[Outside, HttpInquiries, list[Key]], Awaitable[Any]]


def asking(reply: Any, scene: Scene) -> Any:
    async def with_inquiries(outside: Outside, calls: Calls) -> Any:
        changed: list[Key] = []
        webhooks = Webhooks(calls, SIGNER, Clock())
        made = HttpInquiries(Prometheus(calls, outside.address), webhooks, Clock(), changed.append)
        try:
            return await scene(outside, made, changed)
        finally:
            await made.close()

    return beside(reply, with_inquiries)


def question(outside: Outside, key: str = "q1", every: float = 0.01, body: str = "{}") -> Confirmation:
    return Confirmation(key, outside.address + "/ask", 5.0, every, body)


def test_a_query_is_answered_for_a_later_pass_and_asked_again() -> None:
    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        assert asks.answers(KEY) == ()
        asks.follow(KEY, [Query("k", "", "up", 0.01)])
        assert asks.answers(KEY) == ()  # nobody waits for it
        await until(lambda: len(outside.asked) >= 3)
        (answer,) = asks.answers(KEY)
        assert (answer.key, answer.value, answer.error) == ("k", 0.5, "")
        assert changed == [KEY]  # by the first answer: the others say the same

    asking(saying(vector("0.5")), scene)


def test_a_failing_query_tells_its_cause_and_heals() -> None:
    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        asks.follow(KEY, [Query("k", "", "up", 0.01)])
        await until(lambda: asks.answers(KEY))
        assert "no series matches" in asks.answers(KEY)[0].error
        outside.reply = saying(vector("1"))
        await until(lambda: asks.answers(KEY)[0].value == 1.0)
        assert changed == [KEY, KEY]

    asking(saying(vector()), scene)


def test_failures_are_asked_again_more_and_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    real = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await real(0)

    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        monkeypatch.setattr(inquiries.asyncio, "sleep", noted)
        asks.follow(KEY, [Query("k", "", "up", 5.0)])
        async with asyncio.timeout(20):
            while len(pauses) < 9:
                await real(0.005)
        monkeypatch.setattr(inquiries.asyncio, "sleep", real)

    asking(saying(status=500), scene)
    assert 4.5 <= pauses[0] <= 5.0
    assert 9.0 <= pauses[1] <= 10.0
    assert all(54.0 <= pause <= 60.0 for pause in pauses[5:9])


def test_a_webhook_is_asked_until_it_says_yes_and_no_more() -> None:
    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        asks.follow(KEY, [question(outside)])
        await until(lambda: len(outside.asked) >= 2)
        assert "it says no (403: not yet)" in asks.answers(KEY)[0].error
        outside.reply = saying()
        await until(lambda: asks.answers(KEY)[0].yes)
        asks.follow(KEY, [question(outside, body='{"later":1}')])
        asked = len(outside.asked)
        await asyncio.sleep(0.1)
        assert len(outside.asked) == asked
        assert asks.answers(KEY)[0].yes
        assert {a.headers["idempotency-key"] for a in outside.asked} == {"q1"}

    asking(saying(b"not yet", 403), scene)


def test_a_question_is_asked_with_its_newest_figures() -> None:
    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        asks.follow(KEY, [question(outside, body="1")])
        await until(lambda: outside.asked)
        asks.follow(KEY, [question(outside, body="2")])
        await until(lambda: outside.asked[-1].body == b"2")

    asking(saying(status=403), scene)


def test_what_no_decision_names_any_more_is_given_up_and_forgotten() -> None:
    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        asks.follow(KEY, [question(outside, "q1"), question(outside, "q2")])
        await until(lambda: len(asks.answers(KEY)) == 2)
        asks.follow(KEY, [question(outside, "q2")])
        assert [a.key for a in asks.answers(KEY)] == ["q2"]
        asks.follow(KEY, ())
        assert (asks.answers(KEY), asks.following) == ((), 0)
        await until(lambda: outside.under_way == 0)

    asking(saying(status=403), scene)


def test_models_do_not_see_each_others_answers() -> None:
    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        asks.follow(KEY, [question(outside)])
        await until(lambda: asks.answers(KEY))
        assert asks.answers(("ml", "other")) == ()

    asking(saying(), scene)


def test_a_receiver_that_hangs_holds_up_no_pass_and_no_end() -> None:
    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        asks.follow(KEY, [question(outside)])
        asks.tell(WebhookSpec("chat", WebhookStage.EVENT, outside.address), "e1", "{}")
        await until(lambda: outside.under_way == 2)
        assert asks.answers(KEY) == ()

    asking(hanging, scene)


def test_an_event_is_told_again_until_somebody_took_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "BACKOFF_FIRST", 0.01)

    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        asks.tell(WebhookSpec("chat", WebhookStage.EVENT, outside.address), "e1", '{"event":1}')
        await until(lambda: len(outside.asked) == 2)
        outside.reply = saying()
        await until(lambda: not asks._telling)
        assert {(a.body, a.headers["idempotency-key"]) for a in outside.asked} == {(b'{"event":1}', "e1")}
        assert 3 <= len(outside.asked) <= inquiries.EVENT_TRIES

    asking(saying(status=500), scene)


def test_tries_and_waiting_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "BACKOFF_FIRST", 0.001)

    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> int:
        hook = WebhookSpec("chat", WebhookStage.EVENT, outside.address)
        for i in range(3 * inquiries.EVENTS_PER_RECEIVER):
            asks.tell(hook, f"e{i}", "{}")
        assert len(asks._telling) == inquiries.EVENTS_PER_RECEIVER
        await until(lambda: not asks._telling)
        asks.tell(hook, "later", "{}")
        await until(lambda: not asks._telling)
        return len(outside.asked)

    told = asking(saying(status=500), scene)
    assert told == inquiries.EVENT_TRIES * (inquiries.EVENTS_PER_RECEIVER + 1)


def test_a_question_too_many_says_that_it_waits_and_gets_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiries, "LOOKUPS_MOST", 2)

    async def scene(outside: Outside, asks: HttpInquiries, changed: list[Key]) -> None:
        other = ("ml", "other")
        asks.follow(KEY, [question(outside, "q1"), question(outside, "q2")])
        asks.follow(other, [question(outside, "q3")])
        (answer,) = asks.answers(other)
        assert "waits for its turn" in answer.error
        await until(lambda: len(asks.answers(KEY)) == 2)
        assert {a.headers["idempotency-key"] for a in outside.asked} == {"q1", "q2"}
        asks.follow(KEY, ())
        asks.follow(other, [question(outside, "q3")])  # as its next pass does
        await until(lambda: "it says no" in asks.answers(other)[0].error)

    asking(saying(status=403), scene)
