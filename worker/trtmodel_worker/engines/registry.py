"""Runtimes by the name that spec.engine.runtime has. Imported by name, so that the front process, which only asks for
a load key, never pulls an inference runtime in.

Another package can bring a runtime of its own: an entry point of the group ``trtmodel.runtimes`` whose object, called
without arguments, gives a `Runtime`. A name of ours cannot be replaced that way.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # NumPy, which takes longer to import than a look at the machine
    from trtmodel_worker.engines.base import Runtime
    from trtmodel_worker.engines.building import Builder

ENTRY_POINTS = "trtmodel.runtimes"
_FACTORIES = {
    "ONNXRuntime": ("trtmodel_worker.engines.onnxruntime", "OnnxRuntime"),
    "TensorRT": ("trtmodel_worker.engines.tensorrt.runtime", "TensorRtRuntime"),
}
_BUILDERS = {
    "ONNXRuntime": ("trtmodel_worker.engines.onnxruntime.build", "OnnxBuilder"),
    "TensorRT": ("trtmodel_worker.engines.tensorrt.build", "TensorRtBuilder"),
}


def runtime(name: str) -> Runtime:
    """The runtime. Raises ValueError with the names that exist."""
    if name in _FACTORIES:
        module, factory = _FACTORIES[name]
        return cast("Runtime", getattr(importlib.import_module(module), factory)())
    from importlib.metadata import entry_points  # 40 of the 250 ms in which a host comes up: few need it

    others = entry_points(group=ENTRY_POINTS)
    for entry in others:
        if entry.name == name:
            return cast("Runtime", entry.load()())
    known = sorted({*_FACTORIES, *others.names})
    raise ValueError(f"runtime {name!r} is not in this image: it has {', '.join(known)}")


def builder(name: str) -> Builder:
    """The builder of a runtime's plans. Raises ValueError with the names that exist."""
    if name not in _BUILDERS:
        raise ValueError(f"this image builds no engines for runtime {name!r}, only for {', '.join(_BUILDERS)}")
    module, factory = _BUILDERS[name]
    return cast("Builder", getattr(importlib.import_module(module), factory)())
