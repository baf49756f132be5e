"""A closed-loop HTTP client that costs little: one process, one epoll, requests made beforehand.

Prints one JSON line: requests answered, seconds, latencies in ms, answers that were not 200.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import time
from pathlib import Path


class Connection:
    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.request = request
        self.started = 0.0
        self.missing = -1  # bytes of the answer, known once its head was read
        self.got = b""

    def send(self) -> None:
        self.started = time.perf_counter()
        self.got, self.missing = b"", -1
        self.socket.sendall(self.request)

    def receive(self) -> int:
        """Status of the answer, 0 while it is not complete."""
        data = self.socket.recv(262144)
        if not data:
            raise ConnectionError("the server closed the connection")
        self.got += data
        if self.missing < 0:
            end = self.got.find(b"\r\n\r\n")
            if end < 0:
                return 0
            at = self.got.lower().find(b"\r\ncontent-length:", 0, end) + 17  # inference-header-... ends so, too
            length = int(self.got[at : self.got.find(b"\r\n", at)])
            self.missing = end + 4 + length
        return int(self.got[9:12]) if len(self.got) >= self.missing else 0


def run(port: int, request: bytes, concurrency: int, seconds: float) -> dict[str, float]:
    poll = select.epoll()
    connections: dict[int, Connection] = {}
    for _ in range(concurrency):
        connection = Connection(port, request)
        connections[connection.socket.fileno()] = connection
        poll.register(connection.socket, select.EPOLLIN)
        connection.send()
    latencies: list[float] = []
    bad = 0
    begun = time.perf_counter()
    end = begun + seconds
    now = begun
    while now < end:
        for fd, _ in poll.poll(1.0):
            connection = connections[fd]
            status = connection.receive()
            if status:
                now = time.perf_counter()
                latencies.append(now - connection.started)
                bad += status != 200
                connection.send()
        now = time.perf_counter()
    latencies.sort()
    return {
        "requests": len(latencies),
        "seconds": now - begun,
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)],
        "bad": bad,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("request", type=Path, help="file with the whole request, head and body")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    json.dump(run(given.port, given.request.read_bytes(), given.concurrency, given.seconds), sys.stdout)


if __name__ == "__main__":
    main()
