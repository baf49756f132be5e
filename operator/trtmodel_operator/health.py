"""Probes: /livez says that the process makes progress, /readyz that it can be counted on as leader or standby.

A process that hangs is ended by the kubelet, whose probe of /livez fails: since nothing answers (the event loop is
blocked), or since one of the watchers says what is wrong (passes that never end, a queue that nobody empties, a watch
that is silent, a lease that nobody renews).

A right that the operator lacks is no matter of life: another process would not have it either, and one that is ended
again and again is begun ever more seldom. Such an operator is not ready, and goes on when it has the right again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiohttp import web

LACKS = "the API server refuses what the chart's roles allow (have they been changed? `helm upgrade` brings them back)"


class Health:
    """`waiting_for` is what it has not got yet."""

    def __init__(self) -> None:
        self._watchers: tuple[Callable[[], str], ...] = ()
        self._refusals: tuple[Callable[[], Mapping[str, str]], ...] = ()
        self.waiting_for = "the CRD of TRTModels"
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Raises OSError if the port is taken."""
        app = web.Application()
        app.add_routes([web.get("/livez", self._livez), web.get("/readyz", self._readyz)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, host or None, port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def watch_over(self, *watchers: Callable[[], str]) -> None:
        """Each says why the process makes no progress; '' if it does."""
        self._watchers = watchers

    def needs(self, *refusals: Callable[[], Mapping[str, str]]) -> None:
        """Each names the kinds that the API server keeps from this operator, and what it says; empty if none."""
        self._refusals = refusals

    def refused(self) -> dict[str, str]:
        return {kind: said for refusals in self._refusals for kind, said in refusals().items()}

    async def _livez(self, _: web.Request) -> web.Response:
        return _answer("; ".join(filter(None, (watcher() for watcher in self._watchers))))

    async def _readyz(self, _: web.Request) -> web.Response:
        waiting = [f"waiting for {self.waiting_for}"] if self.waiting_for else []
        lacks = [f"{LACKS}: {said}" for said in self.refused().values()]
        return _answer("; ".join([*waiting, *lacks]))


def _answer(trouble: str) -> web.Response:
    return web.Response(status=503 if trouble else 200, text=f"{trouble or 'ok'}\n")
