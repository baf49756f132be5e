"""What differs between TensorRT 8.6, 10 and 11, said once.

All else in this package uses what the three have in common, or what it asked the capabilities for first:

    caps = compat.capabilities(trt)
    if caps.calibrators:
        config.int8_calibrator = ...

The conformance tests read this package and hold every use of a TensorRT object against the real bindings of each
version, less the branches that the capabilities close there. They know what an object is by its annotation: a
parameter, attribute or variable that holds one is annotated with a name from below. Where none is known and none can
be followed, but the attribute is TensorRT's, they fail.

Enumerations are never stored by number: REFIT is 5 in 8.6 and 4 in 10.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from dataclasses import dataclass
from typing import Any

Trt = Any  # the module `tensorrt`
Builder = Any
IBuilderConfig = Any
ICudaEngine = Any
IExecutionContext = Any
IHostMemory = Any
INetworkDefinition = Any
ITensor = Any
ITimingCache = Any
OnnxParser = Any
ParserError = Any
Runtime = Any

OLDEST = (8, 6)
_DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu13-bindings", "tensorrt-cu12-bindings")


class NotInstalled(Exception):
    """There is no TensorRT here, or one that cannot be used. The text has the way out."""


@dataclass(frozen=True)
class Capabilities:
    """What one version of TensorRT can do and wants to be told."""

    version: str
    release: tuple[int, ...]
    explicit_batch: bool
    """A network has to be asked for with the flag EXPLICIT_BATCH."""
    strong_typing_by_flag: bool
    """A network whose types the graph decides exists, and has to be asked for. In 11 there is no other."""
    weak_types: bool
    """FP16 and INT8 flags, and the precision of a layer."""
    calibrators: bool
    """INT8 ranges can be found by TensorRT itself."""
    profile_sharing_by_feature: bool
    """Contexts of one engine can use one profile only if it was built so. Later versions always can."""
    allocation_strategies: bool
    """`create_execution_context` takes a strategy, and contexts with scratch memory of the caller's are one."""
    sized_device_memory: bool
    """Scratch memory is given with its size, and asked for profile by profile."""
    progress_monitor: bool
    parser_names_nodes: bool
    """An error of the ONNX parser names its node. Before that it has only the node's number in the graph."""
    data_shaped_outputs: bool
    """Outputs whose shape only the data tells are served. 8.6.0 was seen, on a GPU, to answer a run in the shape of an
    earlier one, with nothing said; 9 was never seen."""
    contexts_beside_serving: bool
    """Creating a context releases the interpreter lock. Before 9 it stops every thread for as long as it takes."""


def installed_version() -> str:
    """Without importing it. Raises NotInstalled."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(load().__version__)


def load() -> Trt:
    """The module. Raises NotInstalled."""
    try:
        trt: Trt = importlib.import_module("tensorrt")
    except (ImportError, OSError) as e:  # OSError: a library that it links is missing
        text = (
            f"this image has no TensorRT that can be imported ({e}): use a worker image with TensorRT, or the runtime"
        )
        raise NotInstalled(f"{text} ONNXRuntime") from e
    if capabilities(trt).release < OLDEST:
        text = f"TensorRT {trt.__version__} is too old: 8.6 is the first with the interfaces that are needed"
        raise NotInstalled(f"{text}: use a newer worker image")
    return trt


@functools.cache
def capabilities(trt: Trt) -> Capabilities:
    """Found by looking, where looking can tell, since minor versions add and remove too."""
    release = parse(trt.__version__)
    return Capabilities(
        version=trt.__version__,
        release=release,
        explicit_batch=release < (10,),
        strong_typing_by_flag=(10,) <= release < (11,),
        weak_types=hasattr(trt.BuilderFlag, "FP16"),
        calibrators=hasattr(trt.IBuilderConfig, "int8_calibrator"),
        profile_sharing_by_feature=release < (10,),
        allocation_strategies=hasattr(trt, "ExecutionContextAllocationStrategy"),
        sized_device_memory=hasattr(trt.IExecutionContext, "set_device_memory"),
        progress_monitor=hasattr(trt.IBuilderConfig, "progress_monitor"),
        parser_names_nodes=hasattr(trt.ParserError, "node_name"),
        data_shaped_outputs=release >= (10,),
        contexts_beside_serving=release >= (9,),
    )


def parse(version: str) -> tuple[int, ...]:
    """'10.16.1.11' -> (10, 16, 1, 11)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


def parser_code(error: ParserError) -> str:
    """'UNSUPPORTED_NODE'. In 8.6 alone, and of this enumeration alone, `name` is a method, and one that fails."""
    return str(error.code()).rpartition(".")[2]


def create_network(trt: Trt, builder: Builder, *, strongly_typed: bool) -> INetworkDefinition:
    """An empty network. `strongly_typed`: the graph decides every type; in 11 that is always so."""
    caps = capabilities(trt)
    if caps.explicit_batch:
        return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))
    if caps.strong_typing_by_flag and strongly_typed:
        return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    return builder.create_network(0)


def share_profiles(trt: Trt, config: IBuilderConfig) -> None:
    """Let contexts that run side by side use the same profile."""
    if capabilities(trt).profile_sharing_by_feature:
        config.set_preview_feature(trt.PreviewFeature.PROFILE_SHARING_0806, True)


def create_context_without_memory(trt: Trt, engine: ICudaEngine) -> IExecutionContext | None:
    """A context that runs in scratch memory of the caller's: see `give_memory`. None on failure."""
    if capabilities(trt).allocation_strategies:
        return engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
    return engine.create_execution_context_without_device_memory()


def scratch_bytes(trt: Trt, engine: ICudaEngine) -> int:
    """Scratch memory that a context needs, whatever its profile."""
    if capabilities(trt).sized_device_memory:
        return int(engine.device_memory_size_v2)
    return int(engine.device_memory_size)


def give_memory(trt: Trt, context: IExecutionContext, address: int, size: int) -> None:
    """`address`: 256-byte aligned, for this context alone while it runs. `size` >= `scratch_bytes`."""
    if capabilities(trt).sized_device_memory:
        context.set_device_memory(address, size)
    else:
        context.device_memory = address
