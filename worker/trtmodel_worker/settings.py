"""The worker's settings, from its environment. The operator writes the first group; the second has defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trtmodel_contract.control import CONTROL_PORT, HTTP_PORT, METRICS_PORT

MIB = 1 << 20
N = TypeVar("N", int, float)
_CORES = {"Auto": None, "Own": True, "Any": False}


class SettingsError(ValueError):
    """A variable of the environment is missing or makes no sense. The text names it."""


@dataclass(frozen=True)
class Settings:
    """`hosts`: engine hosts per engine. `lanes`: per host, 0 for Auto: as many as were measured to be worth it.
    `buckets`: sizes that batches are padded to; without any, batches are as large as they come, up to the size that was
    measured to be worth it. `batch_delay_seconds`: how long a free lane waits for a fuller batch; with 0 a batch is
    what came while lanes were busy. `retry_attempts` per request, and `retry_budget_percent` of all requests: more
    would make an overload of a fault. `hedge_seconds`: a batch that runs so long is also run elsewhere; 0 for Auto,
    five times the bucket's p99. `fallback`: the standby answers while every host of the routed engine is down.
    `health_seconds`: how often an idle lane proves itself again. `memory_policy`: Auto, Availability or Resource.
    `grpc_port`: 0 for none. `shared_memory_prefix`: local clients may name regions that begin so; '' for none.
    `drain_seconds`: how long a worker that was told to end still accepts, since endpoints lag behind. `queue_limit`:
    requests that wait for a lane, per engine. `body_bytes` and `json_bytes`: largest request, and largest one in JSON
    (it is parsed on the loop, so a large one would delay all others). `staging_bytes`: bodies held at once.
    `output_bytes`: room for an output whose shape depends on the data. `spin_seconds`: how long front and host look for
    a lone client's next message before they sleep: lower latency, for up to two busy CPUs while it asks without pause;
    0 for never, None for Auto: 0.2 ms, or 1 ms with a GPU, and never below 2 CPUs. `own_core`: the front's loop has a
    core for itself; None for Auto, where the processors are this container's alone: see placement.py."""

    pod: str
    pod_uid: str
    namespace: str
    model: str
    model_uid: str
    runtime: str
    lanes: int
    request_seconds: float
    pointer_dir: Path
    keys_dir: Path
    credentials_dir: Path
    cache_dir: Path
    hosts: int = 1
    buckets: tuple[int, ...] = ()
    batch_delay_seconds: float = 0.0
    retry_attempts: int = 3
    retry_budget_percent: float = 10.0
    hedge_seconds: float = 0.0
    fallback: bool = True
    health_seconds: float = 30.0
    memory_policy: str = "Auto"
    allow_downtime: bool = False
    grpc_port: int = 0
    shared_memory_prefix: str = ""
    bind: str = ""
    http_port: int = HTTP_PORT
    control_port: int = CONTROL_PORT
    metrics_port: int = METRICS_PORT
    drain_seconds: float = 5.0
    queue_limit: int = 512
    body_bytes: int = 64 * MIB
    json_bytes: int = 4 * MIB
    staging_bytes: int = 512 * MIB
    output_bytes: int = 16 * MIB
    prepare_seconds: float = 600.0
    hang_seconds: float = 5.0
    spin_seconds: float | None = None
    own_core: bool | None = None


def from_environment(env: Mapping[str, str]) -> Settings:
    """Raises SettingsError."""
    return Settings(
        pod=_text(env, "POD_NAME"),
        pod_uid=_text(env, "POD_UID"),
        namespace=_text(env, "POD_NAMESPACE"),
        model=_text(env, "TRTMODEL_MODEL"),
        model_uid=_text(env, "TRTMODEL_MODEL_UID"),
        runtime=_text(env, "TRTMODEL_RUNTIME"),
        lanes=_lanes(env),
        request_seconds=_number(env, "TRTMODEL_REQUEST_TIMEOUT_SECONDS", float, 5.0, low=0.001, high=3600.0),
        pointer_dir=Path(env.get("TRTMODEL_POINTER_DIR", "/etc/trtmodel/pointer")),
        keys_dir=Path(env.get("TRTMODEL_KEYS_DIR", "/etc/trtmodel/keys")),
        credentials_dir=Path(env.get("TRTMODEL_CREDENTIALS_DIR", "/etc/trtmodel/credentials")),
        cache_dir=Path(env.get("TRTMODEL_CACHE_DIR", "/var/cache/trtmodel")),
        hosts=_number(env, "TRTMODEL_HOSTS", int, 1, low=1, high=8),
        buckets=_buckets(env.get("TRTMODEL_BATCH_BUCKETS", "")),
        batch_delay_seconds=_number(env, "TRTMODEL_BATCH_DELAY_SECONDS", float, 0.0, low=0.0, high=10.0),
        retry_attempts=_number(env, "TRTMODEL_RETRY_ATTEMPTS", int, 3, low=1, high=10),
        retry_budget_percent=_number(env, "TRTMODEL_RETRY_BUDGET_PERCENT", float, 10.0, low=0.0, high=100.0),
        hedge_seconds=_number(env, "TRTMODEL_HEDGE_AFTER_SECONDS", float, 0.0, low=0.0, high=3600.0),
        fallback=_choice(env, "TRTMODEL_FALLBACK", ("Standby", "Error")) == "Standby",
        health_seconds=_number(env, "TRTMODEL_HEALTH_INTERVAL_SECONDS", float, 30.0, low=0.1, high=86400.0),
        memory_policy=_choice(env, "TRTMODEL_MEMORY_POLICY", ("Auto", "Availability", "Resource")),
        allow_downtime=_choice(env, "TRTMODEL_ALLOW_DOWNTIME", ("false", "true")) == "true",
        grpc_port=_number(env, "TRTMODEL_GRPC_PORT", int, 0, low=0, high=65535),
        shared_memory_prefix=env.get("TRTMODEL_SHARED_MEMORY_PREFIX", ""),
        bind=env.get("TRTMODEL_BIND", ""),
        http_port=_number(env, "TRTMODEL_HTTP_PORT", int, HTTP_PORT, low=1, high=65535),
        control_port=_number(env, "TRTMODEL_CONTROL_PORT", int, CONTROL_PORT, low=1, high=65535),
        metrics_port=_number(env, "TRTMODEL_METRICS_PORT", int, METRICS_PORT, low=1, high=65535),
        drain_seconds=_number(env, "TRTMODEL_DRAIN_SECONDS", float, 5.0, low=0.0, high=3600.0),
        queue_limit=_number(env, "TRTMODEL_QUEUE_LIMIT", int, 512, low=1, high=1_000_000),
        body_bytes=_number(env, "TRTMODEL_MAX_BODY_BYTES", int, 64 * MIB, low=1024, high=1 << 40),
        json_bytes=_number(env, "TRTMODEL_MAX_JSON_BYTES", int, 4 * MIB, low=1024, high=1 << 40),
        staging_bytes=_number(env, "TRTMODEL_STAGING_BYTES", int, 512 * MIB, low=1024, high=1 << 40),
        output_bytes=_number(env, "TRTMODEL_MAX_OUTPUT_BYTES", int, 16 * MIB, low=64, high=1 << 40),
        prepare_seconds=_number(env, "TRTMODEL_PREPARE_SECONDS", float, 600.0, low=1.0, high=86400.0),
        hang_seconds=_number(env, "TRTMODEL_HANG_SECONDS", float, 5.0, low=0.1, high=3600.0),
        spin_seconds=_spin(env),
        own_core=_CORES[_choice(env, "TRTMODEL_FRONT_CORE", tuple(_CORES))],
    )


def _lanes(env: Mapping[str, str]) -> int:
    """0 for Auto."""
    return 0 if env.get("TRTMODEL_CONTEXTS") == "Auto" else _number(env, "TRTMODEL_CONTEXTS", int, 4, low=1, high=64)


def _spin(env: Mapping[str, str]) -> float | None:
    name = "TRTMODEL_SPIN_MICROSECONDS"
    return None if env.get(name, "Auto") == "Auto" else _number(env, name, float, 0.0, low=0.0, high=10_000.0) / 1e6


def _buckets(text: str) -> tuple[int, ...]:
    """Batch sizes, ascending."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() and len(word) < 5 and 1 <= int(word) <= 4096 for word in words):
        raise SettingsError(f"TRTMODEL_BATCH_BUCKETS={text!r} must be numbers from 1 to 4096, separated by commas")
    return tuple(sorted({int(word) for word in words}))


def _choice(env: Mapping[str, str], name: str, values: tuple[str, ...]) -> str:
    """One of `values`, the first by default."""
    value = env.get(name, "") or values[0]
    if value not in values:
        raise SettingsError(f"{name}={value!r} must be one of {', '.join(values)}")
    return value


def _text(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise SettingsError(f"{name} is not set: the operator's Deployment sets it")
    return value


def _number(env: Mapping[str, str], name: str, kind: Callable[[str], N], default: N, *, low: N, high: N) -> N:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError as e:
        raise SettingsError(f"{name}={text!r} is not a number") from e
    if not low <= value <= high:
        raise SettingsError(f"{name}={text} is outside {low} to {high}")
    return value
