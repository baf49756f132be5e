"""Makes every object that TensorRT calls, and calls it as TensorRT would. Prints what it got, as a JSON document."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

from trtmodel_worker.engines.tensorrt import callbacks, compat, listening


def main() -> None:
    logging.disable(logging.CRITICAL)
    try:
        trt = importlib.import_module("tensorrt")
    except ImportError:
        trt = importlib.import_module("tensorrt_bindings")
    caps = compat.capabilities(trt)
    got: dict[str, Any] = {"logger": _logger(trt), "recorder": _recorder(trt), "place": _place(trt)}
    got["code"] = compat.parser_code(SimpleNamespace(code=lambda: trt.ErrorCode.UNSUPPORTED_NODE))
    if caps.progress_monitor:
        phases: list[str] = []
        monitor = listening.progress_monitor(trt, phases.append)
        monitor.phase_start("Building", None, 7)
        monitor.phase_start("Tactics", "Building", 3)
        got["progress"] = [phases, monitor.step_complete("Tactics", 0)]
    if caps.calibrators:
        batches = iter([[4096]])
        for method in ("Entropy", "MinMax"):
            one = listening.calibrator(trt, method, 8, lambda names: next(batches, None))
            got[method] = [one.get_algorithm().name, one.get_batch_size(), one.get_batch(["x"])]
    json.dump(got, sys.stdout)


def _logger(trt: Any) -> Any:
    logger, messages = listening.logger(trt)
    logger.log(trt.ILogger.ERROR, "no memory")
    logger.log(trt.ILogger.INFO, "all well")
    return list(messages.errors)


def _recorder(trt: Any) -> Any:
    recorder: Any = callbacks.recorder(trt)
    recorder.report_error(trt.ErrorCodeTRT.FAILED_EXECUTION, "lost")
    first = [recorder.get_num_errors(), recorder.get_error_desc(0), recorder.reported()]
    recorder.clear()
    return [*first, recorder.get_num_errors()]


def _place(trt: Any) -> Any:
    place: Any = callbacks.output_place(trt, lambda size: 4096 * size)
    address = place.reallocate_output_async("y", 0, 2, 256, 0)
    place.notify_shape("y", trt.Dims([2, 3]))
    return [address, place.shape]


if __name__ == "__main__":
    main()
