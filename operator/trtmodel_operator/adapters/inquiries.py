"""What decisions want to know, asked beside the passes: a task for each lookup, and the next pass finds its answer.

decision.lookups --follow--> task: ask, keep the answer, wait `every` (longer after failures) --answers--> Observed
                             a lookup that no decision names any more ends, and so does one that was answered yes
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence

from trtmodel_operator.adapters.calls import CallError
from trtmodel_operator.adapters.prometheus import Prometheus
from trtmodel_operator.adapters.webhooks import Webhooks
from trtmodel_operator.model import Answer, Lookup, Query, WebhookSpec
from trtmodel_operator.ports import Clock, Key
from trtmodel_operator.text import cut

LOOKUPS_MOST = 4096  # of all models; the others wait, and are told so
EVENTS_WAITING = 512
EVENTS_PER_RECEIVER = 32  # that wait for one address
EVENT_TRIES = 5
BACKOFF_FIRST = 1.0  # seconds between two tries of an event; doubled each time
SLOWEST = 60.0  # seconds between two tries of a lookup that fails, or `every` if that is longer
ERROR_LENGTH = 300

log = logging.getLogger(__name__)


class _Asked:
    """A lookup on its way. `lookup` is replaced by later decisions; its key stays."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self.answer: Answer | None = None
        self.task: asyncio.Task[None] | None = None


class HttpInquiries:
    """Implements `ports.Inquiries`. `changed` is called with the key of a model when an answer says something else than
    the one before. Open it in the event loop that uses it; close it."""

    def __init__(
        self, prometheus: Prometheus, webhooks: Webhooks, clock: Clock, changed: Callable[[Key], None]
    ) -> None:
        self._prometheus, self._webhooks, self._clock, self._changed = prometheus, webhooks, clock, changed
        self._asked: dict[Key, dict[str, _Asked]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._waiting: Counter[str] = Counter()

    async def close(self) -> None:
        """What is not told by now is not told."""
        tasks = [a.task for asked in self._asked.values() for a in asked.values() if a.task is not None]
        self._asked.clear()
        tasks += self._telling
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def following(self) -> int:
        """Lookups that are being asked, or were answered yes."""
        return sum(a.task is not None for asked in self._asked.values() for a in asked.values())

    def answers(self, key: Key) -> tuple[Answer, ...]:
        return tuple(a.answer for a in self._asked.get(key, {}).values() if a.answer is not None)

    def follow(self, key: Key, lookups: Sequence[Lookup]) -> None:
        wanted = {lookup.key: lookup for lookup in lookups}
        held = self._asked.setdefault(key, {})
        for name in [n for n in held if n not in wanted]:
            if (task := held.pop(name).task) is not None:
                task.cancel()
        for name, lookup in wanted.items():
            if name in held:
                held[name].lookup = lookup
            else:
                held[name] = _Asked(lookup)
            asked = held[name]
            if asked.task is None and self.following < LOOKUPS_MOST:
                asked.task = asyncio.create_task(self._ask_again(key, asked), name=f"ask {key[0]}/{key[1]} {name}")
            elif asked.task is None:
                text = f"the operator asks {LOOKUPS_MOST} questions at once already: this one waits for its turn"
                asked.answer = Answer(lookup.key, self._clock.now(), error=text)
        if not held:
            del self._asked[key]

    async def _ask_again(self, key: Key, asked: _Asked) -> None:
        """Ends when it was answered yes, or by being cancelled."""
        failures = 0
        while True:
            before, asked.answer = asked.answer, await self._ask(asked.lookup)
            failures = failures + 1 if asked.answer.error else 0
            if before is None or (before.yes, before.error) != (asked.answer.yes, asked.answer.error):
                if asked.answer.error:
                    log.info("%s/%s: %s: %s", *key, asked.lookup.key, asked.answer.error)
                self._changed(key)
            if asked.answer.yes:
                return
            every = asked.lookup.every
            pause = every if failures < 2 else min(every * 2.0 ** min(failures - 1, 10), max(SLOWEST, every))
            await asyncio.sleep(pause * random.uniform(0.9, 1.0))  # noqa: S311 - spreads load

    async def _ask(self, lookup: Lookup) -> Answer:
        at = self._clock.now()
        try:
            if isinstance(lookup, Query):
                value = await self._prometheus.ask(lookup.address, lookup.query)
                return Answer(lookup.key, at, value=value)
            await self._webhooks.call(lookup.url, lookup.key, lookup.body, lookup.timeout)
            return Answer(lookup.key, at, yes=True)
        except CallError as e:
            return Answer(lookup.key, at, error=cut(str(e), ERROR_LENGTH))
        except Exception as e:
            log.exception("a lookup failed in a way that was not foreseen")
            return Answer(lookup.key, at, error=f"{type(e).__name__}: {cut(str(e), ERROR_LENGTH)}")

    def tell(self, hook: WebhookSpec, key: str, body: str) -> None:
        """Returns at once. A receiver that is not there gets what waits for it later, or not at all."""
        if len(self._telling) >= EVENTS_WAITING or self._waiting[hook.url] >= EVENTS_PER_RECEIVER:
            log.warning("webhook %s is not told of an event: too many wait already", hook.name)
            return
        self._waiting[hook.url] += 1
        task = asyncio.create_task(self._tell(hook, key, body), name=f"tell {hook.name}")
        self._telling.add(task)
        task.add_done_callback(lambda done: self._told(hook.url, done))

    def _told(self, url: str, task: asyncio.Task[None]) -> None:
        self._telling.discard(task)
        self._waiting[url] -= 1
        if self._waiting[url] <= 0:
            del self._waiting[url]

    async def _tell(self, hook: WebhookSpec, key: str, body: str) -> None:
        for attempt in range(EVENT_TRIES):
            try:
                await self._webhooks.call(hook.url, key, body, hook.timeout)
                return
            except CallError as e:
                log.info("webhook %s, try %d of %d: %s", hook.name, attempt + 1, EVENT_TRIES, e)
            except Exception:
                log.exception("webhook %s failed in a way that was not foreseen", hook.name)
                return
            if attempt + 1 < EVENT_TRIES:
                await asyncio.sleep(BACKOFF_FIRST * 2.0**attempt)
        log.warning("webhook %s was not told of an event: %d tries failed", hook.name, EVENT_TRIES)
