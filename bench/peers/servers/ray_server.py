"""Ray Serve: one deployment behind its HTTP proxy. Raw bytes at /infer, JSON at /json.

SIGUSR1 deploys the file again.
"""

import signal

import numpy as np
import ray
import settings
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=settings.PARALLEL, max_ongoing_requests=100)
class Onnx:
    def __init__(self) -> None:
        self.session = settings.session()
        node = self.session.get_inputs()[0]
        self.name, self.columns, self.dtype = node.name, node.shape[1], np.dtype(settings.numpy_type(node))

    async def __call__(self, request: Request) -> Response | dict:
        if request.url.path == "/json":
            array = np.array((await request.json())["input"], self.dtype)
        else:
            array = np.frombuffer(await request.body(), self.dtype).reshape(-1, self.columns)
        output = self.session.run(None, {self.name: array})[0]
        return {"output": output.tolist()} if request.url.path == "/json" else Response(output.tobytes())


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ray.init(include_dashboard=False, configure_logging=False, _node_ip_address="127.0.0.1")
    options = {"host": "127.0.0.1", "port": settings.PORT, "request_timeout_s": settings.DEADLINE_SECONDS}
    serve.start(http_options=options)
    version = 1
    while True:
        serve.run(Onnx.bind(), name=settings.NAME, route_prefix="/")
        print(f"version {version} is deployed", flush=True)
        signal.sigwait([signal.SIGUSR1])
        version += 1
