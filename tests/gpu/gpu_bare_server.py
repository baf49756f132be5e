"""The least that a request from another process can cost: one process with one socket, one copy of the input from the
client's file into pinned memory, one graph, one answer. ``python gpu_bare_server.py file sleep|spin``

Prints its port. One connection after the other; a request has to come in one piece, and one for the server's health is
answered without a run. No bounds, no checks, no queue: nobody would serve so.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

SHAPES = ((1, 3, 224, 224),)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n"


def main(path, how):
    import gpu_models
    import gpu_serving
    from gpu_bare import BareLoop

    file = os.open(path, os.O_RDONLY)
    size = os.fstat(file).st_size
    engine = gpu_serving.load(gpu_models.resnet50())
    bare = BareLoop(engine, SHAPES)
    pinned = memoryview((ctypes.c_char * size).from_address(int(bare.host[0])))
    logits = memoryview((ctypes.c_char * bare.answer_bytes).from_address(int(bare.host[1]))).cast("B")

    def answer():
        os.preadv(file, [pinned], 0)
        bare.run()
        return HEAD % len(logits) + logits.tobytes()

    for _ in range(20):
        answer()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            _serve(listener.accept()[0], answer, how == "spin")


def _serve(connection, answer, spins):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        while True:
            try:
                data = connection.recv(65536, socket.MSG_DONTWAIT if spins else 0)
            except BlockingIOError:
                continue
            except OSError:
                return
            if not data:
                return
            connection.sendall(HEAD % 0 if b"/health/" in data else answer())


if __name__ == "__main__":
    main(*sys.argv[1:])
