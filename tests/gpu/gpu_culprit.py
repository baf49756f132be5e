"""What another process on the same GPU may notice: ``python gpu_culprit.py what [argument]``.

Prints "ready" when what it needs is there, and begins at a line on its standard input.

    store              stores to address 0; prints what CUDA said and how long that took
    run                runs ResNet-50 as a bare loop, until it is killed
    idle               has that loop, and waits until it is killed
    load DUTY FOLDER   starts an engine host as a front does beside traffic; prints "loaded"
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

SHAPES = ((1, 3, 224, 224),)
HOST_LANES = 2
BUCKETS = (1, 2, 4, 8, 16, 32)
HOST_SECONDS = 60.0


def begin():
    print("ready", flush=True)
    sys.stdin.readline()


def store():
    from cuda.bindings import runtime, utils
    from trtmodel_gpu_faults import store_to_nowhere

    runtime.cudaFree(0)
    error, stream = runtime.cudaStreamCreateWithFlags(runtime.cudaStreamNonBlocking)
    assert not error, error
    begin()
    began = time.perf_counter()
    store_to_nowhere(utils.get_cuda_native_handle(stream))
    (error,) = runtime.cudaStreamSynchronize(stream)
    print(f"{int(error)} after {1e3 * (time.perf_counter() - began):.1f} ms", flush=True)


def run(idle=False):
    import gpu_models
    import gpu_serving
    from gpu_bare import BareLoop

    bare = BareLoop(gpu_serving.load(gpu_models.resnet50()), SHAPES)
    for _ in range(20):
        bare.run()
    begin()
    while not idle:
        bare.run()
    sys.stdin.readline()


def load(duty, folder):
    asyncio.run(_load(float(duty), Path(folder)))


async def _load(duty, folder):
    from trtmodel_contract.codec import loads
    from trtmodel_contract.manifest import Manifest
    from trtmodel_worker.front.hostproc import Hosts, Payload
    from trtmodel_worker.front.regions import Arenas
    from trtmodel_worker.host.arena import sealed_bytes

    manifest = loads(Manifest, (folder / "manifest").read_bytes())
    blobs = [(folder / blob.digest).read_bytes() for blob in (manifest.plan, manifest.golden[0].blob)]
    plan, golden = ((sealed_bytes("gpu", data), len(data)) for data in blobs)
    arena = Arenas(HOST_LANES, 1 << 20).acquire(manifest)
    begin()
    hosts = Hosts("TensorRT")
    host = await hosts.start(manifest, Payload(plan, (golden,)), arena.memory, HOST_LANES, HOST_SECONDS, BUCKETS, duty)
    print("loaded", flush=True)
    sys.stdin.readline()
    await host.end(0.0)
    hosts.close()


if __name__ == "__main__":
    {"store": store, "run": run, "idle": lambda: run(idle=True), "load": load}[sys.argv[1]](*sys.argv[2:])
