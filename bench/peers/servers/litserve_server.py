"""LitServe: a FastAPI front, inference worker processes behind queues. JSON only."""

import litserve
import numpy as np
import settings


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002
        self.session = settings.session()
        node = self.session.get_inputs()[0]
        self.name, self.dtype = node.name, np.dtype(settings.numpy_type(node))

    def decode_request(self, request: dict) -> np.ndarray:
        return np.array(request["input"], self.dtype)

    def predict(self, array: np.ndarray) -> np.ndarray:
        return self.session.run(None, {self.name: array})[0]

    def encode_response(self, output: np.ndarray) -> dict:
        return {"output": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(
        Api(), accelerator="cpu", workers_per_device=settings.PARALLEL, timeout=settings.DEADLINE_SECONDS
    )
    server.run(host="127.0.0.1", port=settings.PORT, generate_client_file=False, log_level="warning")
