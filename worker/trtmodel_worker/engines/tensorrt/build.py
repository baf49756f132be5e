"""ONNX file -> plan, by TensorRT on the GPU of this machine.

    source --precision--> ONNX file to parse --parser--> network + config --builder--> plan
                                                              |                +-----> timing cache
                                                  profiles, workspace, level,
                                                  timing caches, flags

Called in a process of its own (see builder.stages): a build may take gigabytes and minutes, and cannot be interrupted
in 8.6, so it is cancelled by ending that process.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from trtmodel_contract.identity import EngineSettings
from trtmodel_contract.jobs import Reason

from trtmodel_worker.engines.base import CannotLoad
from trtmodel_worker.engines.building import CalibrationData, Graph, Rejected
from trtmodel_worker.engines.precision.half import TYPES
from trtmodel_worker.engines.precision.reduced import Reduced
from trtmodel_worker.engines.precision.rounded import RoundedGraph
from trtmodel_worker.engines.tensorrt import (
    compat,
    feeding,
    inspect,
    listening,
    messages,
    precision,
    shapes,
    summary,
    tensors,
    timing,
)
from trtmodel_worker.engines.tensorrt.compat import (
    Builder,
    Capabilities,
    IBuilderConfig,
    ICudaEngine,
    IExecutionContext,
    IHostMemory,
    INetworkDefinition,
    OnnxParser,
    Trt,
)
from trtmodel_worker.engines.tensorrt.device import Cuda, CudaError, NoCuda

log = logging.getLogger("trtmodel.tensorrt")


@dataclass(frozen=True)
class Options:
    """What no TRTModel sets. An engine is for one version and one kind of device, and its load key says so: engines
    that run on others are slower and contain code for the host. Auxiliary streams would be shared by contexts that are
    to be apart."""

    version_compatible: bool = False
    hardware_compatible: bool = False
    max_aux_streams: int = 0


class TensorRtBuilder:
    """The Builder of TensorRT's engines."""

    def __init__(self, options: Options | None = None) -> None:
        self._options = options or Options()

    def inspect(self, source: Path) -> Graph:
        return inspect.inspect(source, _version())

    def require(self, settings: EngineSettings, calibration_method: str | None, quantized: bool) -> None:
        precision.require(_version(), settings, calibration_method, quantized=quantized)

    def reduced(
        self, source: Path, settings: EngineSettings, calibration: CalibrationData | None, folder: Path
    ) -> Reduced | None:
        """See ReducingBuilder. Half precision by rounding: ONNX Runtime, which shows what a node does to the error,
        would compute a graph of that type in FP32."""
        if settings.precision in TYPES:
            return RoundedGraph(source, settings, folder)
        return precision.reduced(source, settings, calibration, folder)

    def build(
        self, source: Path, settings: EngineSettings, calibration: CalibrationData | None, plan: Path
    ) -> Mapping[str, str]:
        trt, cuda = _machine()
        quantized = precision.is_quantized(source)
        method = calibration.method if calibration is not None else None
        precision.require(trt.__version__, settings, method, quantized=quantized)
        if quantized:
            calibration = None  # what the graph says goes before what samples would say
        caps = compat.capabilities(trt)
        with precision.scratch(plan) as directory:
            folder = Path(directory)
            if calibration is not None and caps.calibrators:
                calibration = dataclasses.replace(calibration, batches=feeding.Spool(calibration.batches, folder))
            how = precision.plan(caps, source, settings, calibration, folder)
            try:
                return _Build(trt, cuda, self._options, settings, how, calibration).run(plan)
            except _Refused as refused:
                if how.source == source or calibration is None or not caps.calibrators:
                    raise refused.rejected from None
                log.warning("the graph with Q/DQ nodes is refused, so TensorRT calibrates: %s", refused.rejected)
            how = precision.by_calibrator(source, settings)
            try:
                return _Build(trt, cuda, self._options, settings, how, calibration).run(plan)
            except _Refused as refused:
                raise refused.rejected from None


class _Refused(Exception):
    """The graph as it was written for TensorRT: its parser does not take it, or it has no kernel for a node."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.message)
        self.rejected = rejected


class _Build:
    """One build."""

    def __init__(
        self,
        trt: Trt,
        cuda: Cuda,
        options: Options,
        settings: EngineSettings,
        how: precision.Plan,
        calibration: CalibrationData | None,
    ) -> None:
        self._trt: Trt = trt
        self._cuda, self._options, self._settings, self._how, self._calibration = (
            cuda, options, settings, how, calibration,
        )  # fmt: skip
        self._caps: Capabilities = compat.capabilities(trt)
        self._logger, self._said = listening.logger(trt)

    def run(self, plan: Path) -> dict[str, str]:
        """Raises Rejected, EngineError, _Refused."""
        self._said.errors.clear()
        started = time.monotonic()
        builder: Builder = self._trt.Builder(self._logger)
        network = compat.create_network(self._trt, builder, strongly_typed=self._how.strongly_typed)
        parser: OnnxParser = self._trt.OnnxParser(network, self._logger)  # the network uses its weights: it has to stay
        self._parse(parser)
        config: IBuilderConfig = builder.create_builder_config()
        kept = self._configure(builder, config, network)
        folder, key = plan.parent / timing.FOLDER, self._key()
        caches = timing.attach(config, folder, key)
        feed = self._calibrator(builder, config) if self._how.calibrate else None
        monitor = self._watch(config)
        log.info("build: timing caches used: %d, parsed after %.1f s", caches, time.monotonic() - started)
        prepared = time.monotonic()
        memory: IHostMemory = builder.build_serialized_network(network, config)
        engine_seconds = time.monotonic() - prepared
        self._said.listen = None
        if feed is not None and feed.failure is not None:
            raise feed.failure
        if memory is None:
            failure = messages.build_failed(self._said.errors, self._trt.__version__)
            if isinstance(failure, Rejected) and failure.reason is Reason.OPERATOR_UNSUPPORTED:
                raise _Refused(failure)
            raise failure
        data = bytes(memory)
        told = self._inspect(data)
        plan.write_bytes(data)
        del monitor
        done: dict[str, str] = {
            "runtime": "TensorRT",
            "version": self._trt.__version__,
            "precision": self._settings.precision,
            "precisionPath": self._how.path,
            **self._how.done,
            "timingCaches": str(caches),
            "timingCacheBytes": str(timing.keep(config, folder, key)),
            "optimizationLevel": str(config.builder_optimization_level),
            "engineSeconds": f"{engine_seconds:.1f}",  # without TensorRT's start, which takes about 10 s
            "buildSeconds": f"{time.monotonic() - started:.1f}",
        }
        if kept:
            done["keptLayers"] = str(kept)
        if feed is not None:
            done |= {"calibrationMethod": self._method(), "calibrationBatches": str(feed.given)}
            feed.release()
        return {**done, **told}

    def _parse(self, parser: OnnxParser) -> None:
        """From the file, not from its bytes: weights may lie in files beside it."""
        if parser.parse_from_file(str(self._how.source)):
            return
        nodes = onnx.load(self._how.source, load_external_data=False).graph.node
        problems = []
        for index in range(parser.num_errors):
            error = parser.get_error(index)
            number = error.node()
            if self._caps.parser_names_nodes:
                name, operator = error.node_name(), error.node_operator()
            elif 0 <= number < len(nodes):
                name, operator = nodes[number].name or f"number {number}", nodes[number].op_type
            else:
                name, operator = "", ""
            problems.append(messages.ParserProblem(compat.parser_code(error), error.desc(), name, operator))
        raise _Refused(messages.parser_refuses(problems, self._trt.__version__))

    def _configure(self, builder: Builder, config: IBuilderConfig, network: INetworkDefinition) -> int:
        """How many layers are kept in FP32."""
        trt, settings, options = self._trt, self._settings, self._options
        precision.set_flags(trt, self._caps, config, self._how.flags)
        kept = precision.keep_layers(trt, self._caps, config, network, self._how.keep)
        shapes.add_profiles(builder, config, network, settings.profiles)
        compat.share_profiles(trt, config)
        if settings.workspace_bytes is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, settings.workspace_bytes)
        if settings.optimization_level is not None:
            config.builder_optimization_level = settings.optimization_level
        config.max_aux_streams = options.max_aux_streams
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else the inspector knows names only
        if options.version_compatible:
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        if options.hardware_compatible:
            config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
        return kept

    def _calibrator(self, builder: Builder, config: IBuilderConfig) -> feeding.Feed:
        assert self._calibration is not None
        assert self._caps.calibrators
        feed = feeding.Feed(self._cuda, self._calibration.batches)
        profile = builder.create_optimization_profile()
        for name, shape in feed.shapes.items():
            profile.set_shape(name, shape, shape, shape)
        config.set_calibration_profile(profile)
        config.int8_calibrator = listening.calibrator(self._trt, self._method(), feed.rows, feed.next)
        return feed

    def _method(self) -> str:
        return self._calibration.method if self._calibration is not None else ""

    def _watch(self, config: IBuilderConfig) -> Any:
        """Tell of the phases. What is returned has to live as long as the build."""
        if self._caps.progress_monitor:
            monitor = listening.progress_monitor(self._trt, lambda phase: log.info("build: %s", phase))
            config.progress_monitor = monitor
            return monitor
        self._said.listen = listening.Phases(lambda phase: log.info("build: %s", phase)).take
        return None

    def _inspect(self, data: bytes) -> Mapping[str, str]:
        """Of what the engine consists. It is loaded for that, while nothing else of the build is needed any more."""
        runtime = self._trt.Runtime(self._logger)
        engine: ICudaEngine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise messages.build_failed(self._said.errors, self._trt.__version__)
        if not self._caps.data_shaped_outputs:
            self._refuse_data_shaped(engine)
        text = engine.create_engine_inspector().get_engine_information(self._trt.LayerInformationFormat.JSON)
        return summary.summary(text)

    def _refuse_data_shaped(self, engine: ICudaEngine) -> None:
        """Raises Rejected for outputs that have no shape although all inputs have one. Where that cannot be told, the
        gate's load refuses the engine."""
        signature = tensors.read(self._trt, engine)
        if all(-1 not in tensor.shape for tensor in signature.outputs):
            return
        context: IExecutionContext = compat.create_context_without_memory(self._trt, engine)
        if context is None:
            raise messages.build_failed(self._said.errors, self._trt.__version__)
        ranges = zip(signature.inputs, signature.profiles[0].high, strict=True)  # a first context is at profile 0
        if not all(context.set_input_shape(tensor.name, shape) for tensor, shape in ranges):
            return
        found = [tensor.name for tensor in signature.outputs if -1 in tuple(context.get_tensor_shape(tensor.name))]
        if found:
            raise Rejected(Reason.OPERATOR_UNSUPPORTED, messages.data_shaped(found, self._trt.__version__))

    def _key(self) -> str:
        identity = self._cuda.identity()
        parts = (self._trt.__version__, identity.name, identity.mig, identity.capability, self._cuda.driver())
        return " ".join(part for part in parts if part)


def _version() -> str:
    """Raises Rejected: what this image lacks, no retry of its Job brings."""
    try:
        return compat.installed_version()
    except compat.NotInstalled as e:
        raise Rejected(Reason.BUILD_FAILED, str(e)) from e


def _machine() -> tuple[Trt, Cuda]:
    """TensorRT crashes where there is no driver: CUDA is asked first. Raises CannotLoad."""
    try:
        cuda = Cuda()
        if cuda.count() < 1:
            raise CannotLoad("this machine has no GPU: engines are built where they will run")
        return compat.load(), cuda
    except CudaError as e:
        raise CannotLoad(f"this machine has no GPU that can be used ({e}): build on a node that has one") from e
    except (NoCuda, compat.NotInstalled) as e:
        raise CannotLoad(str(e)) from e
