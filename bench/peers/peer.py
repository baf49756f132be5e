"""A peer's server as a process, and how a new version comes to it."""

from __future__ import annotations

import http.client
import os
import signal
import time
from pathlib import Path

import venvs
from catalogue import Peer, Setup
from processes import Server, free_port

SERVERS = Path(__file__).resolve().parent / "servers"
RELOAD_SECONDS = 60.0
# What a tool or a user set for their own processes must not steer a server: only these go on.
PASSED = ("LANG",)


class PeerServer:
    """Made per start. The server reads its model from a link that is pointed at the version in force."""

    def __init__(self, peer: Peer, setup: Setup) -> None:
        self.peer, self.setup = peer, setup
        self.port = free_port()
        setup.folder.mkdir(parents=True, exist_ok=True)
        self.link = setup.folder / "model.onnx"
        self._point(1)
        self.server = self._server()

    def _point(self, version: int) -> None:
        temporary = self.setup.folder / "next.onnx"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.setup.model.versions[version - 1])
        temporary.replace(self.link)

    def _server(self) -> Server:
        setup = self.setup
        script = SERVERS / f"{self.peer.venv}_server.py"
        python = venvs.ensure(self.peer.venv)
        environment = {key: os.environ[key] for key in PASSED if key in os.environ} | {
            "PATH": f"{python.parent}:{os.environ['PATH']}", "VIRTUAL_ENV": str(python.parent.parent),
            "HOME": str(setup.folder), "TMPDIR": str(setup.folder),
            "PYTHONPATH": str(SERVERS), "BENCH_MODEL": str(self.link), "BENCH_PORT": str(self.port),
            "BENCH_PORT_2": str(free_port()), "BENCH_PORT_3": str(free_port()), "BENCH_BODY": setup.body,
            "BENCH_PARALLEL": str(setup.parallel), "BENCH_DEADLINE": f"{setup.deadline_seconds:g}",
            "BENCH_FOLDER": str(setup.folder), "MOSEC_ADDRESS": "127.0.0.1", "MOSEC_PORT": str(self.port),
            "MOSEC_TIMEOUT": str(int(1000 * setup.deadline_seconds)), "MOSEC_LOG_LEVEL": "warning",
            **self.peer.environment,
        }  # fmt: skip
        return Server([str(python), str(script)], environment, setup.folder, setup.folder / "server.log")

    def start(self) -> None:
        self.server.start()

    def alive(self) -> bool:
        return self.server.alive()

    def pids(self) -> list[int]:
        return self.server.pids()

    def tail(self) -> str:
        return self.server.tail()

    def stop(self) -> None:
        self.server.stop()

    def new_version(self) -> None:
        self._point(2)
        if self.peer.swap == "restart":
            self.stop()
            self.start()
        elif self.peer.swap == "signal":
            before = self.server.log.read_text().count("is deployed")
            os.kill(self.server.pid, signal.SIGUSR1)
            deadline = time.monotonic() + RELOAD_SECONDS
            while self.server.log.read_text().count("is deployed") == before:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.peer.name} did not deploy within {RELOAD_SECONDS:g} s: {self.tail()}")
                time.sleep(0.05)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=RELOAD_SECONDS)
            try:
                connection.request("POST", "/v2/repository/models/m/load")
                answer = connection.getresponse()
                if answer.status != 200:
                    raise RuntimeError(f"{self.peer.name} did not load: {answer.status} {answer.read(200)!r}")
            finally:
                connection.close()
