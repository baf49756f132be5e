"""Argo CD's view of a TRTModel: the health check among the examples, run in Lua as Argo CD runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from lupa import lua51  # Argo CD's gopher-lua speaks Lua 5.1

HEALTH = Path(__file__).parents[1] / "examples" / "argo-cd" / "health.yaml"
KEY = "resource.customizations.health.trtmodel.io_TRTModel"


def script() -> str:
    """What stands in Argo CD's ConfigMap."""
    found: str = yaml.safe_load(HEALTH.read_text())["data"][KEY]
    return found


def health(model: dict[str, Any]) -> tuple[str, str]:
    """Status and message. Argo CD gives the object as the global `obj`."""
    runtime = lua51.LuaRuntime(unpack_returned_tuples=True)
    runtime.globals().obj = _as_lua(runtime, model)
    found = runtime.execute(script())
    return found.status, found.message


def _as_lua(runtime: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return runtime.table_from({k: _as_lua(runtime, v) for k, v in value.items() if v is not None})
    if isinstance(value, list):
        return runtime.table_from([_as_lua(runtime, v) for v in value])
    return value
