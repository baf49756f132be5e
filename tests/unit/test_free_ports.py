"""A port of a test's server is its own from when it is given until it listens."""

from __future__ import annotations

import socket

import pytest
from free_ports import HELD, free_port


def test_a_port_is_given_once_and_no_connection_is_given_it() -> None:
    given = [free_port() for _ in range(HELD)]
    assert len(set(given)) == HELD
    with socket.socket() as somebody, pytest.raises(OSError, match="in use"):
        somebody.bind(("127.0.0.1", given[0]))


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_its_server_can_listen_and_be_started_again(address: str) -> None:
    port = free_port()
    for _ in range(2):
        with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port)) as client:
            assert client.getpeername() == ("127.0.0.1", port)
