"""Asking and telling webhooks. Each call is signed with the operator's key, so that the receiver needs no secret: the
public keys lie in the ConfigMap beside each model's boot pointer.

    POST <url>                          2xx: yes. Anything else: not yet, asked again until the deadline
    idempotency-key: <id>               the same for every try of one question, and of one event
    x-trtmodel-key-id, -signature, -expires
"""

from __future__ import annotations

from trtmodel_contract.signing import (
    HEADER_EXPIRES,
    HEADER_KEY_ID,
    HEADER_SIGNATURE,
    REQUEST_LIFETIME_SECONDS,
    webhook_payload,
)

from trtmodel_operator.adapters.calls import CallError, Calls, shown
from trtmodel_operator.ports import Clock, Signer


class Webhooks:
    def __init__(self, calls: Calls, signer: Signer, clock: Clock) -> None:
        self._calls, self._signer, self._clock = calls, signer, clock

    async def call(self, url: str, key: str, body: str, timeout: float) -> None:
        """Returns if the answer is yes. Raises CallError with what it was."""
        data, expires = body.encode(), int(self._clock.now()) + REQUEST_LIFETIME_SECONDS
        signature = self._signer.sign(webhook_payload(url, data, expires))
        headers = {
            "content-type": "application/json",
            "idempotency-key": key,
            HEADER_KEY_ID: signature.key_id,
            HEADER_SIGNATURE: signature.value,
            HEADER_EXPIRES: str(expires),
        }
        status, answer = await self._calls.post(url, data, headers, timeout)
        if not 200 <= status < 300:
            said = shown(answer)
            raise CallError(f"it says no ({status}{': ' + said if said else ''})")
