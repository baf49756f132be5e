"""TensorRT on an NVIDIA GPU. A plan is a serialised engine."""
