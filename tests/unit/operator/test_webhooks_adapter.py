"""Asking and telling webhooks, over real HTTP."""

from __future__ import annotations

import base64
import json
import time

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from outside import Outside, beside, hanging, saying
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.signing import HEADER_EXPIRES, HEADER_KEY_ID, HEADER_SIGNATURE, webhook_payload
from trtmodel_operator.adapters.calls import CallError, Calls
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys
from trtmodel_operator.adapters.webhooks import Webhooks
from trtmodel_operator.envelope import event
from trtmodel_operator.model import Notice, WebhookSpec, WebhookStage

SIGNER = Ed25519Signer(Keys.made())


class Clock:
    def now(self) -> float:
        return time.time()


def called(outside: Outside, calls: Calls) -> Webhooks:
    return Webhooks(calls, SIGNER, Clock())


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_status_2xx_means_yes(status: int) -> None:
    async def scene(outside: Outside, calls: Calls) -> None:
        await called(outside, calls).call(outside.address + "/ask", "k1", "{}", 5)

    beside(saying(status=status), scene)


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (403, b"not on a\nFriday \x00\x1b[31m", r"it says no \(403: not on a Friday \[31m\)"),
        (404, b"", r"it says no \(404\)"),
        (500, b"x" * 5000, r"it says no \(500: x{200}\)"),
        (302, b"", "redirects are not followed"),
    ],
)
def test_anything_else_means_no_with_what_was_said(status: int, body: bytes, says: str) -> None:
    async def scene(outside: Outside, calls: Calls) -> None:
        with pytest.raises(CallError, match=says):
            await called(outside, calls).call(outside.address, "k1", "{}", 5)

    beside(saying(body, status), scene)


def test_one_that_does_not_answer_is_given_up_after_its_timeout() -> None:
    async def scene(outside: Outside, calls: Calls) -> None:
        with pytest.raises(CallError, match=r"within 0\.2 s"):
            await called(outside, calls).call(outside.address, "k1", "{}", 0.2)

    beside(hanging, scene)


def test_a_call_carries_its_key_and_a_signature_of_exactly_what_is_said() -> None:
    async def scene(outside: Outside, calls: Calls) -> Outside:
        await called(outside, calls).call(outside.address + "/ask?x=1", "k1", '{"a":1}', 5)
        return outside

    outside = beside(saying(), scene)
    (asked,) = outside.asked
    assert (asked.path, asked.body) == ("/ask?x=1", b'{"a":1}')
    assert asked.headers["idempotency-key"] == "k1"
    assert asked.headers["content-type"] == "application/json"
    public = SIGNER.public_keys()[asked.headers[HEADER_KEY_ID]]
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public))
    expires = int(asked.headers[HEADER_EXPIRES])
    assert time.time() < expires < time.time() + 120
    signature = base64.b64decode(asked.headers[HEADER_SIGNATURE])
    url = outside.address + "/ask?x=1"
    key.verify(signature, webhook_payload(url, asked.body, expires))
    for payload in (
        webhook_payload(url + "2", asked.body, expires),
        webhook_payload(url, b'{"a":2}', expires),
        webhook_payload(url, asked.body, expires + 1),
    ):
        with pytest.raises(InvalidSignature):
            key.verify(signature, payload)


def test_an_event_is_told_with_who_what_and_when() -> None:
    hook = WebhookSpec("chat", WebhookStage.EVENT, "https://chat.example.com/")
    notice = Notice("TooSlow", "it was too slow", warning=True)
    key, body = event(ModelRef("ml", "magika", "u1"), hook, notice, 1_760_000_000.0)
    told = json.loads(body)
    assert (told["namespace"], told["name"], told["stage"], told["id"]) == ("ml", "magika", "Event", key)
    assert told["event"] == {
        "reason": "TooSlow", "message": "it was too slow", "warning": True, "at": "2025-10-09T08:53:20Z",
    }  # fmt: skip
    other, _ = event(ModelRef("ml", "magika", "u1"), hook, Notice("TooSlow", "again"), 1_760_000_000.0)
    assert other != key
