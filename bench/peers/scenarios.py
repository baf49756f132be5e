"""What happens to clients when something happens to the server. Magika, a few clients, every answer compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ALL: dict[str, Callable[..., dict[str, Any]]] = {}
