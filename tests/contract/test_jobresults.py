"""Termination messages: whole JSON of at most 4,096 bytes, whatever a Job found out."""

from __future__ import annotations

import dataclasses
import json

import pytest
from documents import instances
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.codec import loads
from trtmodel_contract.gate import GateFigures, OutputFigures, Task, Thresholds, Top1Figures, judge
from trtmodel_contract.identity import LoadKey
from trtmodel_contract.jobs import BuildResult, FoundArtifact, JobResult, Reason, ResolveResult
from trtmodel_contract.manifest import TensorSpec

MOST = 4096
KEY = LoadKey("ONNXRuntime", "1.23.0", "x86-64-v3")


def figures(names: list[str], bad: int = 0) -> GateFigures:
    outputs = {
        name: OutputFigures(0.5 if i == bad else 1 - i * 1e-6, 0.1, 0.001 * i, 0.25, 0, False)
        for i, name in enumerate(names)
    }
    top1 = Top1Figures(3, 900, 897, 5, 2)
    return GateFigures("a" * 64, "b" * 64, Task.CLASSIFICATION, 1000, True, outputs, top1, tuple(range(1, 40)))


def built(gate: GateFigures) -> JobResult:
    artifact = FoundArtifact(KEY, "c" * 64, 1, "", gate)
    build = BuildResult("0123456789", artifact, False, 3_000_000, 12.5, 7.25, "2026-01-01T00:00:00Z")
    return JobResult(Reason.DONE, "engine built and proved", build=build)


def resolved(tensors: int, artifacts: int, message: str = "found") -> JobResult:
    specs = tuple(TensorSpec(f"/encoder/layer.{i}/attention/output", "FP32", (-1, 128, 768)) for i in range(tensors))
    found = tuple(
        FoundArtifact(dataclasses.replace(KEY, device=f"device {i}"), "c" * 64, i, "", figures([f"o{i}"]))
        for i in range(artifacts)
    )
    result = ResolveResult("d" * 64, 1 << 30, "0123456789", "e" * 64, "f" * 64, specs, specs, found)
    return JobResult(Reason.DONE, message, resolve=result)


# A path that is no UTF-8 (os.fsdecode gives half surrogates), control characters and emoji are what messages hold.
MESSAGES = st.text(min_size=1, max_size=40).map(lambda text: text * 200) | st.text(st.characters())


@given(instances(JobResult), MESSAGES, st.integers(0, 40), st.integers(0, 40))
def test_a_message_always_fits_and_is_whole(result: JobResult, message: str, tensors: int, artifacts: int) -> None:
    for candidate in (result, resolved(tensors, artifacts)):
        data = dataclasses.replace(candidate, message=message).to_termination_message()
        assert len(data) <= MOST
        assert loads(JobResult, data).reason is candidate.reason


@pytest.mark.parametrize("character", ["x", "é", "漢", "🙂", "\x00", '"', "\\", "\udcff"])
def test_a_long_message_of_any_characters_is_cut_between_two(character: str) -> None:
    result = JobResult(Reason.MODEL_INVALID, character * 5_000)
    back = loads(JobResult, result.to_termination_message())
    assert set(back.message) == {character if character != "\udcff" else "?"}
    assert len(back.to_termination_message()) <= MOST


def test_what_fits_is_left_as_it_is() -> None:
    result = built(figures(["scores"]))
    assert loads(JobResult, result.to_termination_message()) == result


def test_the_message_goes_first_then_tensors_then_artifacts() -> None:
    def back(tensors: int, artifacts: int) -> JobResult:
        return loads(JobResult, resolved(tensors, artifacts, "because " * 1_000).to_termination_message())

    few, wide, many = back(3, 1), back(60, 2), back(60, 30)
    assert few.resolve
    assert len(few.resolve.inputs) == 3
    assert len(few.message) < 1_000
    assert wide.resolve
    assert wide.resolve.inputs == ()
    assert len(wide.resolve.found) == 2
    assert many.resolve
    assert len(many.resolve.found) == 3
    assert many.resolve.source_sha256 == "d" * 64


@pytest.mark.parametrize("bad", [0, 17, 39])
def test_a_model_with_forty_outputs_keeps_the_one_that_decides(bad: int) -> None:
    names = [f"/decoder/{'block/' * 12}{i}" for i in range(40)]
    result = built(figures(names, bad))
    back = loads(JobResult, result.to_termination_message())
    assert result.build
    assert result.build.artifact.figures
    assert back.build
    assert back.build.artifact.figures
    before, after = (judge(f, Thresholds()) for f in (result.build.artifact.figures, back.build.artifact.figures))
    assert (before.verdict.value, after.verdict.value) == ("Fail", "Fail")
    assert f"{'block/' * 3}{bad}:" in after.sentence


def test_a_name_that_can_never_fit_is_said_instead_of_cut_json() -> None:
    result = dataclasses.replace(built(figures(["scores"])), message="all is well")
    assert result.build
    artifact = dataclasses.replace(result.build.artifact, driver="x" * 5_000)
    result = dataclasses.replace(result, build=dataclasses.replace(result.build, artifact=artifact))
    back = json.loads(result.to_termination_message())
    assert back["reason"] == "InternalError"
    assert "does not fit" in back["message"]
    assert back["message"].endswith("all is well")
