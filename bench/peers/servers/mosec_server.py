"""mosec: a Rust front, one Python worker process per stage. Raw bytes at /infer, JSON at /json."""

import os
from typing import Any

import numpy as np
import settings
from mosec import Runtime, Server, Worker

BATCH = int(os.environ.get("BENCH_BATCH", "1"))  # 1: no batching, mosec's default


class Binary(Worker):
    def __init__(self) -> None:
        self.session = settings.session()
        node = self.session.get_inputs()[0]
        self.name, self.columns, self.dtype = node.name, node.shape[1], np.dtype(settings.numpy_type(node))

    def deserialize(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, self.dtype).reshape(-1, self.columns)

    def serialize(self, data: np.ndarray) -> bytes:
        return data.tobytes()

    def forward(self, data: Any) -> Any:
        if BATCH == 1:
            return self.session.run(None, {self.name: data})[0]
        answer = self.session.run(None, {self.name: np.concatenate(data)})[0]
        return np.split(answer, np.cumsum([len(rows) for rows in data])[:-1])


class Json(Binary):
    def deserialize(self, data: bytes) -> np.ndarray:
        return np.array(Worker.deserialize(self, data)["input"], self.dtype)

    def serialize(self, data: np.ndarray) -> bytes:
        return Worker.serialize(self, {"output": data.tolist()})


if __name__ == "__main__":
    server = Server()
    more = {"max_batch_size": BATCH, "max_wait_time": 1} if BATCH > 1 else {}  # ms, the smallest that it takes
    body = os.environ["BENCH_BODY"]  # one stage only: the other would cost memory and be idle
    server.register_runtime({"/infer": [Runtime(Binary if body == "binary" else Json, num=settings.PARALLEL, **more)]})
    server.run()
