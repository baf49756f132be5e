"""MLServer with a custom runtime: v2, JSON only. BENCH_WORKERS=0 infers in the front's process, else in workers."""

import json
import os
import sys
from pathlib import Path

import settings
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Onnx(MLModel):
    async def load(self) -> bool:
        self.session = settings.session()
        self.input, self.output = self.session.get_inputs()[0].name, self.session.get_outputs()[0].name
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        array = self.session.run(None, {self.input: NumpyCodec.decode_input(payload.inputs[0])})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output(self.output, array)])


if __name__ == "__main__":
    folder = Path(os.environ["BENCH_FOLDER"])
    server = {
        "host": "127.0.0.1", "http_port": settings.PORT, "grpc_port": int(os.environ["BENCH_PORT_2"]),
        "metrics_port": int(os.environ["BENCH_PORT_3"]),
        "parallel_workers": settings.PARALLEL * int(os.environ["BENCH_WORKERS"]), "debug": False,
    }  # fmt: skip
    (folder / "settings.json").write_text(json.dumps(server))
    model = {"name": settings.NAME, "implementation": "mlserver_server.Onnx"}
    (folder / "model-settings.json").write_text(json.dumps(model))
    os.execv(sys.executable, [sys.executable, "-m", "mlserver.cli.main", "start", str(folder)])
