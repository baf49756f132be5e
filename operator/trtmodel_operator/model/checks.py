"""What is looked up outside the cluster: queries of Prometheus and webhooks. Asked for in a decision, answered in a
later pass: nobody waits for an answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class NoData(str, enum.Enum):
    """What happens when too few requests reach a candidate in the time that it is held for."""

    HOLD = "Hold"  # it waits, until the deadline
    SYNTHETIC = "Synthetic"  # its workers run golden samples until there are enough
    PROMOTE = "Promote"  # it passes, unless what there is speaks against it


class WebhookStage(str, enum.Enum):
    CONFIRM_ROLLOUT = "ConfirmRollout"  # before any worker is told to load the candidate
    CONFIRM_PROMOTION = "ConfirmPromotion"  # when every step was passed, before all workers answer with it
    EVENT = "Event"  # is told, and has no say


@dataclass(frozen=True)
class QuerySpec:
    """A query of Prometheus whose one number must lie within `low` and `high` (None: no bound). `address`: '' for the
    operator's own."""

    name: str
    query: str
    address: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class WebhookSpec:
    """`timeout` of one call, in seconds."""

    name: str
    stage: WebhookStage
    url: str
    timeout: float = 10.0


@dataclass(frozen=True)
class Query:
    """A question to Prometheus, asked again `every` seconds for as long as decisions name it. `key` tells it from any
    other: of another window, or another text."""

    key: str
    address: str
    query: str
    every: float


@dataclass(frozen=True)
class Confirmation:
    """A question to a webhook, asked again `every` seconds until the answer is yes. `key` is the same as long as the
    question is; `body` is JSON."""

    key: str
    url: str
    timeout: float
    every: float
    body: str


Lookup = Query | Confirmation


@dataclass(frozen=True)
class Answer:
    """What the newest try of a lookup came to. `at` is when it was asked (seconds since the epoch). `value` is the one
    number of a query, `yes` a webhook's; `error` is the cause in words where there is neither."""

    key: str
    at: float
    value: float | None = None
    yes: bool = False
    error: str = ""


@dataclass(frozen=True)
class Check:
    """How one query stands: kept from look to look. `verdict` is a gate's verdict by its value. `answered` is when the
    answer was asked for that it rests on, `fails` how many such answers in a row lay outside the bounds."""

    name: str
    verdict: str
    sentence: str
    value: float | None = None
    answered: float = 0.0
    fails: int = 0
