"""The worker's settings, from its environment. The operator writes the first group; the second has defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trtmodel_contract.control import CONTROL_PORT, HTTP_PORT, METRICS_PORT

MIB = 1 << 20
N = TypeVar("N", int, float)


class SettingsError(ValueError):
    """A variable of the environment is missing or makes no sense. The text names it."""


@dataclass(frozen=True)
class Settings:
    """`drain_seconds`: how long a worker that was told to end still accepts, since endpoints lag behind.
    `queue_limit`: requests that wait for a lane, per engine. `body_bytes` and `json_bytes`: largest request, and
    largest one in JSON (it is parsed on the loop, so a large one would delay all others). `staging_bytes`: bodies
    held at once. `output_bytes`: room for an output whose shape depends on the data."""

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


def from_environment(env: Mapping[str, str]) -> Settings:
    """Raises SettingsError."""
    return Settings(
        pod=_text(env, "POD_NAME"),
        pod_uid=_text(env, "POD_UID"),
        namespace=_text(env, "POD_NAMESPACE"),
        model=_text(env, "TRTMODEL_MODEL"),
        model_uid=_text(env, "TRTMODEL_MODEL_UID"),
        runtime=_text(env, "TRTMODEL_RUNTIME"),
        lanes=_number(env, "TRTMODEL_CONTEXTS", int, 4, low=1, high=64),
        request_seconds=_number(env, "TRTMODEL_REQUEST_TIMEOUT_SECONDS", float, 5.0, low=0.001, high=3600.0),
        pointer_dir=Path(env.get("TRTMODEL_POINTER_DIR", "/etc/trtmodel/pointer")),
        keys_dir=Path(env.get("TRTMODEL_KEYS_DIR", "/etc/trtmodel/keys")),
        credentials_dir=Path(env.get("TRTMODEL_CREDENTIALS_DIR", "/etc/trtmodel/credentials")),
        cache_dir=Path(env.get("TRTMODEL_CACHE_DIR", "/var/cache/trtmodel")),
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
    )


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
