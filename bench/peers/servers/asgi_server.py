"""The reference: raw ASGI on uvicorn, uvloop and httptools, inference in the process's own threads. No framework."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
import settings
import uvicorn

SESSION = settings.session()
NAME = SESSION.get_inputs()[0].name
DTYPE = np.dtype(settings.numpy_type(SESSION.get_inputs()[0]))
COLUMNS = SESSION.get_inputs()[0].shape[1]
THREADS = ThreadPoolExecutor(settings.PARALLEL)


def infer(array: np.ndarray) -> np.ndarray:
    return SESSION.run(None, {NAME: array})[0]


async def app(scope, receive, send):  # type: ignore[no-untyped-def]
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message.get("more_body"):
            break
    loop = asyncio.get_running_loop()
    if scope["path"] == "/json":
        array = np.array(orjson.loads(body)["input"], DTYPE)
        output = await loop.run_in_executor(THREADS, infer, array)
        answer = orjson.dumps({"output": output}, option=orjson.OPT_SERIALIZE_NUMPY)
    else:
        array = np.frombuffer(body, DTYPE).reshape(-1, COLUMNS)
        answer = (await loop.run_in_executor(THREADS, infer, array)).tobytes()
    headers = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


if __name__ == "__main__":
    uvicorn.run(
        app, host="127.0.0.1", port=settings.PORT, loop="uvloop", http="httptools", lifespan="off", access_log=False,
        log_level="warning",
    )  # fmt: skip
