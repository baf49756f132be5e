"""Runtimes by the name that spec.engine.runtime has. Imported by name, so that the front process, which only asks for
a load key, never pulls an inference runtime in."""

from __future__ import annotations

import importlib
from typing import cast

from trtmodel_worker.engines.base import Runtime

_FACTORIES = {"ONNXRuntime": ("trtmodel_worker.engines.onnxruntime", "OnnxRuntime")}


def runtime(name: str) -> Runtime:
    """The runtime. Raises ValueError with the names that exist."""
    if name not in _FACTORIES:
        raise ValueError(f"runtime {name!r} is not in this image: it has {', '.join(_FACTORIES)}")
    module, factory = _FACTORIES[name]
    return cast("Runtime", getattr(importlib.import_module(module), factory)())
