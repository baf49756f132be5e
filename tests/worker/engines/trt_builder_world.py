"""A TensorRT that builds nothing: it records what it is asked, and answers as a version does. `tests/gpu` has the real
one; whether the names are right, the conformance tests say."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import onnx
import pytest
from trtmodel_worker.engines.tensorrt import build


def members(*names: str) -> Any:
    return SimpleNamespace(**{name: SimpleNamespace(name=name) for name in names})


class Code:
    """The parser's, whose `name` is a method in 8.6."""

    def __init__(self, name: str, old: bool) -> None:
        self._name = name
        self.name = (lambda: name) if old else name

    def __str__(self) -> str:
        return f"ErrorCode.{self._name}"


class Engine:
    """Of one input. `only_data_tells`: its output has no shape whatever the input's is."""

    num_io_tensors, num_optimization_profiles, device_memory_size = 2, 1, 0

    def __init__(self, trt: Any, inspector: Any, only_data_tells: bool) -> None:
        self._trt, self._only_data_tells = trt, only_data_tells
        self.create_engine_inspector = lambda: inspector

    def get_tensor_name(self, index: int) -> str:
        return "xy"[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self._trt.TensorIOMode.INPUT if name == "x" else self._trt.TensorIOMode.OUTPUT

    def get_tensor_dtype(self, _name: str) -> Any:
        return self._trt.DataType.FLOAT

    def get_tensor_location(self, _name: str) -> Any:
        return self._trt.TensorLocation.DEVICE

    def is_shape_inference_io(self, _name: str) -> bool:
        return False

    def get_tensor_shape(self, _name: str) -> tuple[int, ...]:
        return (-1, 8)

    def get_tensor_profile_shape(self, _name: str, _profile: int) -> Any:
        return ((1, 8), (4, 8), (32, 8))

    def create_execution_context_without_device_memory(self) -> Any:
        shapes: dict[str, tuple[int, ...]] = {}

        def set_input_shape(name: str, shape: tuple[int, ...]) -> bool:
            shapes[name] = shape
            return True

        def get_tensor_shape(_name: str) -> tuple[int, ...]:
            return (-1, 8) if self._only_data_tells else shapes["x"]

        return SimpleNamespace(set_input_shape=set_input_shape, get_tensor_shape=get_tensor_shape)


class Heir:
    def __init__(self) -> None:
        pass


class Config:
    def __init__(self) -> None:
        self.flags, self.cleared, self.limits, self.features = [], [], {}, []
        self.builder_optimization_level = 3
        self.profiles: list[Any] = []
        self.calibration_profile: Any = None
        self.int8_calibrator: Any = None
        self.cache = b""

    def set_flag(self, flag: Any) -> None:
        self.flags.append(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self.cleared.append(flag.name)

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.limits[pool.name] = size

    def set_preview_feature(self, feature: Any, on: bool) -> None:
        self.features.append((feature.name, on))

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile.shapes)
        return len(self.profiles) - 1

    def set_calibration_profile(self, profile: Any) -> bool:
        self.calibration_profile = profile.shapes
        return True

    def create_timing_cache(self, data: bytes) -> Any:
        return SimpleNamespace(data=data, combine=lambda _other, _ignore: True, serialize=lambda: data)

    def set_timing_cache(self, cache: Any, _ignore: bool) -> bool:
        self.cache = cache.data
        return True

    def get_timing_cache(self) -> Any:
        return SimpleNamespace(serialize=lambda: b"timed")


class Network:
    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.num_layers = 0
        self.inputs: list[Any] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    def get_input(self, index: int) -> Any:
        return self.inputs[index]


class World(ModuleType):
    """The module. `refuse(nodes)` gives the parser's errors: (number of the node, code, text)."""

    def __init__(self, version: str) -> None:
        super().__init__("tensorrt")
        self.__version__ = version
        self.old = old = version.startswith("8.")
        self.said: Any = None
        self.errors: list[str] = []
        self.refuse: Any = lambda _nodes: []
        self.plans: list[bytes | None] = []  # of the next builds; afterwards all are well
        self.config = Config()
        self.batches = 0
        self.only_data_tells = False
        self.ILogger = type("ILogger", (Heir,), {"ERROR": SimpleNamespace(name="ERROR")})
        self.IProgressMonitor = self.IInt8EntropyCalibrator2 = self.IInt8MinMaxCalibrator = Heir
        self.BuilderFlag = members("TF32", *(() if version.startswith("11.") else ("FP16", "INT8")))
        self.BuilderFlag.OBEY_PRECISION_CONSTRAINTS = SimpleNamespace(name="OBEY")
        config = ({} if version.startswith("11.") else {"int8_calibrator": 0}) | (
            {} if old else {"progress_monitor": 0}
        )
        self.IBuilderConfig = type("IBuilderConfig", (), config)
        self.IExecutionContext = type("IExecutionContext", (), {})
        self.ParserError = type("ParserError", (), {} if old else {"node_name": 0})
        self.DataType = members("FLOAT", "HALF", *(() if old else ("INT64",)))
        self.TensorIOMode = members("INPUT", "OUTPUT")
        self.TensorLocation = members("DEVICE", "HOST")
        self.LayerType = members("CONSTANT")
        self.NetworkDefinitionCreationFlag = SimpleNamespace(EXPLICIT_BATCH=0, STRONGLY_TYPED=1)
        self.PreviewFeature = members("PROFILE_SHARING_0806")
        self.MemoryPoolType = members("WORKSPACE")
        self.ProfilingVerbosity = members("DETAILED")
        self.LayerInformationFormat = members("JSON")
        self.networks: list[Network] = []

    def Builder(self, logger: Any) -> Any:  # the module's name for it
        self.said = logger
        return SimpleNamespace(
            create_network=self._network,
            create_builder_config=self._config,
            create_optimization_profile=self._profile,
            build_serialized_network=self._build,
        )

    def OnnxParser(self, network: Network, _logger: Any) -> Any:
        found: list[Any] = []

        def parse(path: str) -> bool:
            graph = onnx.load(path).graph
            for node, code, text in self.refuse(graph.node):
                name, operator = graph.node[node].name, graph.node[node].op_type
                found.append(
                    SimpleNamespace(
                        node=lambda node=node: node, code=lambda code=code: Code(code, self.old),
                        desc=lambda text=text: text, node_name=lambda name=name: f"named {name}",
                        node_operator=lambda operator=operator: operator,
                    )
                )  # fmt: skip
            parser.num_errors = len(found)
            for value in graph.input:
                shape = tuple(d.dim_value or -1 for d in value.type.tensor_type.shape.dim)
                network.inputs.append(SimpleNamespace(name=value.name, shape=shape, is_shape_tensor=False))
            return not found

        parser = SimpleNamespace(parse_from_file=parse, num_errors=0, get_error=lambda i: found[i])
        return parser

    def Runtime(self, _logger: Any) -> Any:
        layers = '{"Layers": [{"LayerType": "gemm", "Inputs": [{"Format/Datatype": "Row major linear FP32"}]}]}'
        inspector = SimpleNamespace(get_engine_information=lambda _format: layers)
        return SimpleNamespace(deserialize_cuda_engine=lambda _data: Engine(self, inspector, self.only_data_tells))

    def _network(self, flags: int) -> Network:
        self.networks.append(Network(flags))
        return self.networks[-1]

    def _config(self) -> Config:
        self.config = Config()
        return self.config

    def _profile(self) -> Any:
        shapes: dict[str, Any] = {}
        return SimpleNamespace(shapes=shapes, set_shape=lambda name, *three: shapes.__setitem__(name, three))

    def _build(self, _network: Network, config: Config) -> bytes | None:
        if config.int8_calibrator is not None:
            while config.int8_calibrator.get_batch(["x"]) is not None:
                self.batches += 1
        for text in self.errors:
            self.said.log(self.ILogger.ERROR, text)
        return self.plans.pop(0) if self.plans else b"plan"


class Device:
    """CUDA whose device memory is host memory."""

    def __init__(self) -> None:
        self.runtime = SimpleNamespace(cudaMemcpyKind=SimpleNamespace(cudaMemcpyHostToDevice=1))
        self.memory: dict[int, Any] = {}

    def count(self) -> int:
        return 1

    def identity(self) -> Any:
        return SimpleNamespace(name="NVIDIA H200", capability="9.0", mig="")

    def driver(self) -> str:
        return "580.1"

    def allocate(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(size)
        self.memory[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def call(self, function: str, target: int, source: int, size: int, _kind: int) -> None:
        assert function == "cudaMemcpy"
        ctypes.memmove(target, source, size)

    def free(self, address: int) -> None:
        del self.memory[address]


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> World:
    world = World(version)
    monkeypatch.setitem(sys.modules, "tensorrt", world)
    monkeypatch.setattr(build, "Cuda", Device)
    return world
