"""Ports for servers of a test."""

from __future__ import annotations

import collections
import socket

HELD = 256
"""Sockets; by the time that so many ports were given after it, a port's server listens or has ended."""

_held: collections.deque[socket.socket] = collections.deque(maxlen=HELD)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody else is given until its server listens: not another test, not a connection.

    It stays bound by a socket that does not listen. Linux lets a server bind the same port nevertheless, if both
    sockets have SO_REUSEADDR (servers set it: asyncio, Go, gRPC, http.server), while whoever looks for any free port
    passes over it. Chance did not do: of the three ports of each of a thousand workers, two were once the same.
    """
    holder = socket.socket()
    holder.bind(("127.0.0.1", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now: the kernel chose a port that is unused
    _held.append(holder)
    return int(holder.getsockname()[1])
