"""Who is measured, and what each one offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from models import BenchModel
from protocols import V2_PATH


class Running(Protocol):
    """A server under measurement, on 127.0.0.1."""

    port: int

    def start(self) -> None: ...
    def alive(self) -> bool: ...
    def pids(self) -> list[int]: ...
    def tail(self) -> str: ...
    def stop(self) -> None: ...
    def new_version(self) -> None:
        """The model's second version takes over. Returns when the server says that it did, or was started again."""


@dataclass(frozen=True)
class Setup:
    """What one start needs. `body`: json or binary, for servers that have a stage for one of them only."""

    model: BenchModel
    body: str
    parallel: int
    deadline_seconds: float
    folder: Path


@dataclass(frozen=True)
class Peer:
    """`formats`: json and binary -> (protocol, path); a missing one is not offered. `per_format`: is started anew for
    each. `swap`: how a new version comes: control (ours), reload (the repository extension of v2), signal (the server's
    script deploys again) or restart, where the framework offers nothing."""

    name: str
    title: str
    venv: str
    formats: Mapping[str, tuple[str, str]]
    environment: Mapping[str, str] = field(default_factory=dict)
    per_format: bool = False
    swap: str = "restart"


V2 = {"json": ("v2-json", V2_PATH), "binary": ("v2-binary", V2_PATH)}
RAW = {"json": ("json", "/json"), "binary": ("raw", "/infer")}
MOSEC = {"json": ("json", "/infer"), "binary": ("raw", "/infer")}

US = Peer("us", "this worker", "", V2, swap="control")
PEERS = (
    US,
    Peer("kserve", "KServe", "kserve", V2, swap="reload"),
    Peer("pytriton", "PyTriton", "pytriton", V2),
    Peer("mlserver", "MLServer, in process", "mlserver", {"json": V2["json"]}, {"BENCH_WORKERS": "0"}, swap="reload"),
    Peer(
        "mlserver-worker", "MLServer, worker", "mlserver", {"json": V2["json"]}, {"BENCH_WORKERS": "1"}, swap="reload"
    ),
    Peer("litserve", "LitServe", "litserve", {"json": ("json", "/predict")}),
    Peer("bentoml", "BentoML", "bentoml", {"json": ("json", "/infer")}, {"BENTOML_DO_NOT_TRACK": "True"}),
    Peer("mosec", "mosec", "mosec", MOSEC, {"BENCH_BATCH": "1"}, per_format=True),
    Peer("mosec-batch", "mosec, batches up to 32", "mosec", MOSEC, {"BENCH_BATCH": "32"}, per_format=True),
    Peer("asgi", "raw ASGI on uvicorn", "asgi", RAW),
    Peer("ray", "Ray Serve", "ray", RAW, {"RAY_USAGE_STATS_ENABLED": "0"}, swap="signal"),
)
