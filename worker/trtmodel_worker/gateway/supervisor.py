"""The front's side: start the gateway, start it again when it dies, end it. HTTP takes no notice of any of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from trtmodel_worker.environment import scrubbed
from trtmodel_worker.placement import others
from trtmodel_worker.settings import Settings

log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 10.0
_LIVED_SECONDS = 60.0  # who lived so long starts again without a pause
_KILL_SECONDS = 5.0  # beyond its own time to finish


class Gateway:
    """`path`: where the front must listen for it, in a directory that nobody else may enter. The process is started
    from the loop's thread, which lives as long as the front: the kernel ends the one with the other. `settled`: it has
    served once, or failed to; until then a Service must not send calls here."""

    def __init__(self, settings: Settings, finish_seconds: float) -> None:
        self._directory = tempfile.mkdtemp(prefix="trtmodel-grpc-")
        self.path = str(Path(self._directory) / "front.sock")
        self._end_seconds = settings.drain_seconds + finish_seconds + _KILL_SECONDS
        host = settings.bind or "[::]"
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        config = {
            "address": f"{host}:{settings.grpc_port}",
            "front": self.path,
            "body_bytes": settings.body_bytes,
            "request_seconds": settings.request_seconds,
            "drain_seconds": settings.drain_seconds,
            "finish_seconds": finish_seconds,
            "parent_pid": os.getpid(),
            "cpus": sorted(others()),
        }
        self._command = (sys.executable, "-m", "trtmodel_worker.gateway", json.dumps(config))
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self.settled = False

    def start(self) -> None:
        self._keeper = asyncio.create_task(self._keep(), name="gateway")

    async def end(self) -> None:
        """Let it drain and finish. Returns when it has answered what it had, or was killed."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        process = self._process
        if process is not None and process.returncode is None:
            self._signal(process, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), self._end_seconds)
            except asyncio.TimeoutError:
                self._signal(process, signal.SIGKILL)
                await process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _keep(self) -> None:
        pause = 0.0
        while True:
            started = time.monotonic()
            try:
                await self._start()
                why = f"ended with code {await self._watch()}"
            except OSError as e:
                why = f"could not be started: {e}"
            self.settled = True
            lived = time.monotonic() - started > _LIVED_SECONDS
            pause = 0.0 if lived else min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            log.error("the gRPC gateway %s: again in %.1f s", why, pause)
            await asyncio.sleep(pause)

    async def _watch(self) -> int:
        """Until its end. The first line that it prints says that it serves."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        if await process.stdout.readline():
            self.settled = True
        return await process.wait()

    async def _start(self) -> None:
        starting = asyncio.create_task(
            asyncio.create_subprocess_exec(
                *self._command,
                env=scrubbed(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        )
        try:
            self._process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._process = await starting  # nobody may forget it: `end` ends it
            raise

    def _signal(self, process: asyncio.subprocess.Process, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
