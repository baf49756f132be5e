"""Build a plan in a process of its own: ``python gpu_build.py request.json``. As little as shows what the worker makes
of a plan; how plans are built for models is the builder's to test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "contract"), str(ROOT / "worker")]


def main(request):
    from trtmodel_worker.engines.tensorrt import compat

    trt = compat.load()
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = compat.create_network(trt, builder, strongly_typed=False)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(Path(request["onnx"]).read_bytes()):
        sys.exit("; ".join(str(parser.get_error(i)) for i in range(parser.num_errors)))
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 4 << 30)
    config.builder_optimization_level = request["level"]
    config.max_aux_streams = 0
    if request["fp16"]:
        config.set_flag(trt.BuilderFlag.FP16)
    compat.share_profiles(trt, config)
    for bounds in request["profiles"]:
        profile = builder.create_optimization_profile()
        for name, (low, best, high) in bounds.items():
            profile.set_shape(name, tuple(low), tuple(best), tuple(high))
        config.add_optimization_profile(profile)
    timings = Path(request["timings"])
    cache = config.create_timing_cache(timings.read_bytes() if timings.exists() else b"")
    config.set_timing_cache(cache, False)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        sys.exit("TensorRT gives no plan")
    timings.write_bytes(bytes(config.get_timing_cache().serialize()))
    Path(request["plan"]).write_bytes(bytes(plan))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
