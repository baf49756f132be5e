"""BentoML: a service with one API. JSON only: its binary form is a pickle, which it refuses from outside."""

import os
import sys

import bentoml
import numpy as np
import settings


@bentoml.service(workers=settings.PARALLEL, traffic={"timeout": settings.DEADLINE_SECONDS})
class Onnx:
    def __init__(self) -> None:
        self.session = settings.session()
        node = self.session.get_inputs()[0]
        self.name, self.dtype = node.name, np.dtype(settings.numpy_type(node))

    @bentoml.api
    def infer(self, input: np.ndarray) -> np.ndarray:  # noqa: A002
        return self.session.run(None, {self.name: input.astype(self.dtype)})[0]


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    os.execv(
        sys.executable,
        [sys.executable, "-m", "bentoml", "serve", "bentoml_server:Onnx", "--working-dir", here,
         "--host", "127.0.0.1", "--port", str(settings.PORT)],
    )  # fmt: skip
