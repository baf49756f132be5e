"""Requests that nobody asked, before an engine serves."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from trtmodel_contract.identity import LoadKey, Profile, ShapeRange
from trtmodel_contract.manifest import Blob, Manifest, MemoryNeed, TensorSpec
from trtmodel_worker.front.calls import Call, Failed
from trtmodel_worker.front.models import Admission
from trtmodel_worker.front.rehearsal import ROUNDS, rehearse
from trtmodel_worker.front.v2 import Codec

LANES = 3


class Engine:
    """What a rehearsal needs of one. `end`: what becomes of a call."""

    revision = "r"

    def __init__(self, end: Callable[[Call], None], datatype: str = "FP32", width: int = 4) -> None:
        profile = Profile({"x": ShapeRange((2, width), (2, width), (8, width))})
        self.manifest = Manifest(
            "r", LoadKey("Test", "1", "cpu"), 1, "", {}, "0" * 64, Blob("1" * 64, 1),
            (TensorSpec("x", datatype, (-1, width)),), (TensorSpec("y", "FP32", (-1, width)),), (profile,),
            MemoryNeed(0, 0), (), {}, "2026-01-01T00:00:00Z",
        )  # fmt: skip
        self.codec = Codec("m", "r", Admission(self.manifest))
        self.calls: list[Call] = []
        self._end = end

    def submit(self, call: Call) -> None:
        self.calls.append(call)
        self._end(call)


def rehearsed(engine: Any, seconds: float = 30.0) -> list[Call]:
    asyncio.run(asyncio.wait_for(rehearse(engine, LANES, seconds), 30))
    calls: list[Call] = engine.calls
    return calls


def answer(call: Call) -> None:
    values = np.zeros(call.shapes[0], np.float32)
    call.on_answer([(call.shapes[0], memoryview(values).cast("B"))], types.SimpleNamespace())  # type: ignore[arg-type]


def test_each_lane_gets_zeros_in_the_smallest_shape_some_times_over_and_nobody_counts_them() -> None:
    calls = rehearsed(Engine(answer))
    assert len(calls) == ROUNDS * LANES
    assert all(call.alone and call.rehearsed and call.mirror is not None for call in calls)
    assert {tuple(call.shapes) for call in calls} == {((2, 4),)}
    assert {bytes(call.bodies[0]) for call in calls} == {bytes(32)}


def test_requests_that_fail_end_it_as_well() -> None:
    assert len(rehearsed(Engine(lambda call: call.on_failure(Failed(500, "no"))))) == ROUNDS * LANES


def test_an_engine_that_does_not_answer_is_not_waited_for() -> None:
    assert len(rehearsed(Engine(lambda _: None), 0.05)) == LANES


@pytest.mark.parametrize(("datatype", "width"), [("BYTES", 4), ("FP32", 1 << 20)])
def test_texts_and_large_requests_are_left_out(datatype: str, width: int) -> None:
    assert rehearsed(Engine(answer, datatype, width)) == []
