"""PyTriton: NVIDIA's Triton with a Python backend in this process. v2, JSON and binary, dynamic batching."""

import os

import numpy as np
import settings
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def main() -> None:
    session = settings.session()
    (node,), (output,) = session.get_inputs(), session.get_outputs()

    @batch
    def infer(**inputs: np.ndarray) -> list[np.ndarray]:
        return session.run(None, {node.name: inputs[node.name]})

    config = TritonConfig(
        http_address="127.0.0.1", http_port=settings.PORT, grpc_address="127.0.0.1",
        grpc_port=int(os.environ["BENCH_PORT_2"]), metrics_port=int(os.environ["BENCH_PORT_3"]),
    )  # fmt: skip
    with Triton(config=config) as triton:
        triton.bind(
            settings.NAME,
            [infer] * settings.PARALLEL,
            inputs=[Tensor(name=node.name, dtype=np.dtype(settings.numpy_type(node)), shape=node.shape[1:])],
            outputs=[Tensor(name=output.name, dtype=np.dtype(settings.numpy_type(output)), shape=output.shape[1:])],
            config=ModelConfig(max_batch_size=settings.MAX_BATCH),
        )
        triton.serve()


if __name__ == "__main__":
    main()
