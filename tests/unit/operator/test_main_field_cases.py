"""Field cases of the operator's process: watches that break, and an installation that may see some namespaces only."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections import defaultdict

from aiohttp import web
from fakes.api_server import FakeApiServer, Seen, refusal
from test_main import Start, put_model, start

__all__ = ["start"]  # a fixture

CLOSED = 5  # times that a watch closes at once
TOO_OLD = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
DISCOVERY = re.compile(r"/version|/api(/v1)?|/apis(/[^/]+/[^/]+)?")  # for everybody who is known
FORBIDDEN = (
    'jobs.batch is forbidden: User "system:serviceaccount:ops:operator" cannot list resource "jobs" in API group '
    '"batch" in the namespace "ml"'
)


def test_C11_a_watch_that_says_410_lists_again_and_one_that_closes_at_once_is_no_busy_loop(
    api_server: FakeApiServer, start: Start
) -> None:
    opened: dict[str, list[float]] = defaultdict(list)
    changed = threading.Event()

    async def fault(seen: Seen) -> web.Response | None:
        times = opened[seen.path] if "watch" in seen.query else None
        if times is None or len(times) > CLOSED:
            return None
        times.append(time.monotonic())
        if len(times) > 1:
            return web.Response(content_type="application/json")
        while not changed.is_set():  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.01)
        return web.Response(text=json.dumps({"type": "ERROR", "object": TOO_OLD}) + "\n")

    api_server.fault = fault
    put_model(api_server, "magika")
    operator = start()
    operator.until(lambda: any("trtmodels" in path for path in opened))
    api_server.put(
        {
            **(api_server.get("trtmodels", "ml", "magika") or {}),
            "metadata": {"namespace": "ml", "name": "in-the-gap"},
        },
        silently=True,
    )
    changed.set()
    operator.until(lambda: len(api_server.all("jobs")) == 2)
    operator.until(lambda: all(len(times) > CLOSED for times in opened.values()))
    for path, times in opened.items():
        assert times[-1] - times[1] > 0.05 * (CLOSED - 1), path
    put_model(api_server, "afterwards")
    operator.until(lambda: len(api_server.all("jobs")) == 3)


def test_C13_with_roles_in_its_namespaces_alone_it_asks_for_nothing_outside_of_them(
    api_server: FakeApiServer, start: Start
) -> None:
    refused: list[str] = []

    def only_roles(seen: Seen) -> web.Response | None:
        inside = DISCOVERY.fullmatch(seen.path) or any(f"/namespaces/{n}/" in seen.path for n in ("ml", "ops"))
        if inside:
            return None
        refused.append(f"{seen.method} {seen.path}")
        return refusal(403, "forbidden at the cluster scope")

    api_server.fault = only_roles
    put_model(api_server)
    operator = start(TRTMODEL_WATCH_NAMESPACES="ml")
    operator.until(lambda: len(api_server.all("jobs")) == 1)
    assert refused == []
    assert operator.get("/readyz")[0] == 200


def test_C13_a_verb_that_is_missing_is_told_with_its_resource_and_namespace(
    api_server: FakeApiServer, start: Start
) -> None:
    jobs = "/apis/batch/v1/namespaces/ml/jobs"
    api_server.fault = lambda seen: refusal(403, FORBIDDEN) if (seen.method, seen.path) == ("GET", jobs) else None
    put_model(api_server)
    operator = start(TRTMODEL_WATCH_NAMESPACES="ml")
    told = json.dumps(FORBIDDEN)[1:-1]
    operator.until(lambda: told in operator.log)
    assert operator.get("/livez")[0] == 200
