"""A gRPC client that costs little: calls whose message was serialized beforehand, over a few connections.

    python bench/grpc_client.py 127.0.0.1:9000 message.bin [--concurrency 16] [--rate 0] [--seconds 3]

Prints one JSON line: calls answered, seconds, latencies in ms, calls that failed. With a rate, calls begin on a fixed
schedule and latency counts from it; without, each caller waits for its answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import grpc
import uvloop

METHOD = "/inference.GRPCInferenceService/ModelInfer"
CONNECTIONS = 4


class Load:
    def __init__(self, target: str, message: bytes) -> None:
        own = [("grpc.use_local_subchannel_pool", 1)]  # else equal targets share one connection
        self.channels = [grpc.aio.insecure_channel(target, options=own) for _ in range(CONNECTIONS)]
        self.calls = [channel.unary_unary(METHOD) for channel in self.channels]
        self.message = message
        self.latencies: list[float] = []
        self.failed = 0

    async def call(self, number: int, due: float) -> None:
        try:
            await self.calls[number % CONNECTIONS](self.message)
        except grpc.aio.AioRpcError:
            self.failed += 1
        else:
            self.latencies.append(time.perf_counter() - due)

    async def closed(self, number: int, end: float) -> None:
        while (now := time.perf_counter()) < end:
            await self.call(number, now)

    async def paced(self, rate: float, end: float) -> None:
        running: set[asyncio.Task[None]] = set()
        number, begun = 0, time.perf_counter()
        while (due := begun + number / rate) < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(self.call(number, due))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1
        await asyncio.gather(*running)


async def run(target: str, message: bytes, concurrency: int, rate: float, seconds: float) -> dict[str, float]:
    load = Load(target, message)
    begun = time.perf_counter()
    if rate:
        await load.paced(rate, begun + seconds)
    else:
        await asyncio.gather(*(load.closed(i, begun + seconds) for i in range(concurrency)))
    took = time.perf_counter() - begun
    for channel in load.channels:
        await channel.close()
    found = sorted(load.latencies)
    at = lambda part: 1e3 * found[min(len(found) - 1, int(part * len(found)))] if found else 0.0  # noqa: E731
    return {"requests": len(found), "seconds": took, "p50_ms": at(0.5), "p99_ms": at(0.99), "bad": load.failed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("message", type=Path)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.0, help="calls per second, 0 for as many as are answered")
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    uvloop.install()
    message = given.message.read_bytes()
    print(json.dumps(asyncio.run(run(given.target, message, given.concurrency, given.rate, given.seconds))))


if __name__ == "__main__":
    main()
