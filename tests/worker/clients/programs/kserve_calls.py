"""Calls with KServe's client: python kserve_calls.py http|grpc <address>. Ends with 0 if all is as it must be."""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def request(raw):
    tensor = InferInput("tx", [2, 4], "FP32")
    if raw:
        tensor.set_data_from_numpy(ROWS, binary_data=True)
    else:
        tensor.set_data_from_numpy(ROWS, binary_data=False)
    return InferRequest("m", [tensor], request_id="k-1")


def check(response):
    assert (response.outputs[0].as_numpy() == 2 * ROWS).all(), response
    assert response.id == "k-1"


async def rest(address):
    url = f"http://{address}"
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, "m")
    for raw in (False, True):
        check(await client.infer(url, request(raw), model_name="m"))


async def grpc(address):
    client = InferenceGRPCClient(address)
    deadline = time.monotonic() + 30
    while True:
        try:
            assert await client.is_server_live()
            break
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)
    assert await client.is_server_ready()
    assert await client.is_model_ready("m")
    for raw in (False, True):
        check(await client.infer(request(raw)))
    await client.close()


asyncio.run({"http": rest, "grpc": grpc}[sys.argv[1]](sys.argv[2]))
