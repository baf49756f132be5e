"""KServe's Python server: v2, JSON and binary. A new version is loaded by a hand-written `load`, as users do."""

import argparse
import asyncio

import settings
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server
from kserve.model_repository import ModelRepository
from kserve.utils.utils import from_np_dtype, generate_uuid, get_predict_input


class Onnx(Model):
    def __init__(self) -> None:
        super().__init__(settings.NAME)
        self.load()

    def load(self) -> bool:
        self.session = settings.session()
        self.input, self.output = self.session.get_inputs()[0].name, self.session.get_outputs()[0].name
        self.ready = True
        return True

    def __getstate__(self) -> dict:  # several workers get the model by pickle: each loads its own session
        return {k: v for k, v in self.__dict__.items() if k != "session"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self.load()

    def predict(self, payload: InferRequest, headers=None) -> InferResponse:  # noqa: ARG002
        array = self.session.run(None, {self.input: get_predict_input(payload)})[0]
        output = InferOutput(self.output, list(array.shape), from_np_dtype(array.dtype))
        output.set_data_from_numpy(array, binary_data=payload.use_binary_outputs)
        return InferResponse(
            payload.id or generate_uuid(), self.name, [output], use_binary_outputs=payload.use_binary_outputs,
            requested_outputs=payload.request_outputs,
        )  # fmt: skip


class Repository(ModelRepository):
    async def load(self, name: str) -> bool:  # noqa: ARG002
        model = await asyncio.to_thread(Onnx)  # beside the old one, then in its place
        self.update(model)
        return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(parents=[model_server.parser], conflict_handler="resolve")
    parser.parse_known_args()
    ModelServer(
        http_port=settings.PORT, workers=settings.PARALLEL, enable_grpc=False, enable_docs_url=False,
        registered_models=Repository(),
    ).start([Onnx()])  # fmt: skip
