"""A client in a process of its own: ``python gpu_client.py port request concurrency seconds pause how``.

Prints JSON: when each request was sent (by the monotonic clock, which all processes share), what it took in ms, which
of them were the first that another revision answered, and the statuses other than 200. SIGTERM ends it before its time.
A connection that the server closes counts as a failed request and is made anew. `how`: "spin" never sleeps while it
waits for an answer, and asks nobody but its one socket, so that what is measured is the server; "warm" asks for the
server's health on the same connections before, so that neither it nor they are new; "" neither.
"""

from __future__ import annotations

import json
import select
import signal
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from client import Connection

HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: m\r\n\r\n"
WARM_REQUESTS = 200


class Spinning(Connection):
    def receive(self):
        while True:
            try:
                data = self.socket.recv(65536, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            if not data:
                raise ConnectionError("the server closed the connection")
            self.got += data
            end = self.got.find(b"\r\n\r\n")
            if end < 0:
                continue
            at = self.got.lower().find(b"\r\ncontent-length:", 0, end) + 17
            if len(self.got) >= end + 4 + int(self.got[at : self.got.find(b"\r\n", at)]):
                return int(self.got[9:12])


def main(port, request, concurrency, seconds, pause, how):
    poll = select.epoll()
    connections = {}

    def connect():
        connection = (Spinning if how == "spin" else Connection)(port, request)
        if how == "warm":
            _warm(connection, request)
        connections[connection.socket.fileno()] = connection
        poll.register(connection.socket, select.EPOLLIN)
        connection.send()
        connection.sent = time.monotonic()

    for _ in range(concurrency):
        connect()
    sent, took, bad, turns, revision = [], [], [], [], b""
    end, asked = time.monotonic() + seconds, []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    while time.monotonic() < end and not asked:
        for fd in list(connections) if how == "spin" else [fd for fd, _ in poll.poll(0.5)]:
            connection = connections[fd]
            try:
                status = connection.receive()
            except OSError as e:
                bad.append(f"{type(e).__name__}: {e}")
                poll.unregister(fd)
                connections.pop(fd).socket.close()
                connect()
                continue
            if not status:
                continue
            now = time.monotonic()
            sent.append(connection.sent)
            took.append(1e3 * (now - connection.sent))
            answered = _revision(connection.got)
            if answered != revision:
                turns.append(len(took) - 1)
                revision = answered
            if status != 200:
                bad.append(f"{status}: {connection.got[-300:]!r}")
            if pause:
                time.sleep(pause)
            connection.send()
            connection.sent = time.monotonic()
    late = [time.monotonic() - c.sent for c in connections.values() if time.monotonic() - c.sent > 5.0]
    bad += [f"no answer for {seconds:.1f} s" for seconds in late]
    json.dump({"sent": sent, "ms": took, "bad": bad, "turns": turns}, sys.stdout)


def _warm(connection, request):
    connection.request = HEALTH
    for _ in range(WARM_REQUESTS):
        connection.send()
        while not connection.receive():
            pass
    connection.request = request


def _revision(answer):
    at = answer.find(b"x-trtmodel-revision: ", 0, 2000)
    return answer[at + 21 : answer.find(b"\r\n", at)] if at > 0 else b""


if __name__ == "__main__":
    port, path, concurrency, seconds, pause, how = sys.argv[1:]
    main(int(port), Path(path).read_bytes(), int(concurrency), float(seconds), float(pause), how)
