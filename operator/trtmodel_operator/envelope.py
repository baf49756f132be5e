"""What webhooks are sent: a question, or the news of an event, in JSON with one head (docs/analysis.md)."""

from __future__ import annotations

from collections.abc import Mapping

from trtmodel_contract.codec import canonical
from trtmodel_contract.identity import ModelRef, short_hash

from trtmodel_operator.model import Notice, WebhookSpec
from trtmodel_operator.text import timestamp

SCHEMA = "trtmodel.io/webhook/v1"


def envelope(model: ModelRef, hook: WebhookSpec, key: str, said: Mapping[str, object]) -> str:
    """`key` is the same for each try of one question, and of one event."""
    head = {
        "schema": SCHEMA,
        "id": key,
        "stage": hook.stage.value,
        "webhook": hook.name,
        "namespace": model.namespace,
        "name": model.name,
        "uid": model.uid,
    }
    return canonical({**head, **said}).decode()


def event(model: ModelRef, hook: WebhookSpec, notice: Notice, now: float) -> tuple[str, str]:
    """Key and body of what is told of an event."""
    key = short_hash(model.uid, hook.name, hook.url, notice.reason, notice.message, str(now), length=32)
    told = {"reason": notice.reason, "message": notice.message, "warning": notice.warning, "at": timestamp(now)}
    return key, envelope(model, hook, key, {"event": told})
