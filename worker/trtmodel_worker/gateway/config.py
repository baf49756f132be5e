"""What the front tells its gateway. Imports nothing that takes long: see __main__."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtmodel_worker.slices import ask_for_slices


@dataclass(frozen=True)
class GatewayConfig:
    """`address`: as gRPC writes it. `drain_seconds`: how long it accepts after it was told to end,
    since endpoints lag. `finish_seconds`: after that, for clients to leave and calls to be answered. `cpus` that it may
    run on, if not all."""

    address: str
    front: str
    body_bytes: int
    request_seconds: float
    drain_seconds: float
    finish_seconds: float
    parent_pid: int
    cpus: Sequence[int] = ()

    def make_way(self) -> None:
        """This process costs more than the front: it has neither its slices nor its core."""
        ask_for_slices(0.0)
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)


def read_config(text: str) -> GatewayConfig:
    """As the front wrote it."""
    document: Mapping[str, Any] = json.loads(text)
    return GatewayConfig(**document)
