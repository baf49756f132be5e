"""What is signed: one purpose per payload, and every part of it counts."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from documents import instances
from hypothesis import assume, given
from hypothesis import strategies as st
from trtmodel_contract.control import BootPointer, DesiredState, Fence
from trtmodel_contract.identity import ModelRef
from trtmodel_contract.signing import artifact_payload, key_id, pointer_payload, request_payload

MODEL = ModelRef("ml", "magika", "3f5b")
REQUEST = ("PUT", "/control/v1/desired", "7c1d", b"{}", 1_700_000_000)


@given(st.binary(max_size=200), st.text(max_size=20), st.binary(max_size=50))
def test_no_payload_of_one_purpose_is_one_of_another(pointer: bytes, digest: str, body: bytes) -> None:
    payloads = [
        artifact_payload(MODEL, digest),
        pointer_payload(pointer),
        request_payload("PUT", digest, "uid", body, 1),
    ]
    assert len({payload.split(b"\n", 1)[0] for payload in payloads}) == 3
    for one, other in itertools.combinations(payloads, 2):
        assert not one.startswith(other)
        assert not other.startswith(one)


def test_a_pointer_that_looks_like_another_payload_is_still_a_pointer() -> None:
    inner = artifact_payload(MODEL, "a" * 64)
    assert pointer_payload(inner) != inner
    assert pointer_payload(inner).startswith(b"trtmodel.io/pointer/v1\n")


@pytest.mark.parametrize("field", ["namespace", "name", "uid"])
def test_an_engine_is_signed_for_one_model_only(field: str) -> None:
    other = dataclasses.replace(MODEL, **{field: "other"})
    assert artifact_payload(other, "a" * 64) != artifact_payload(MODEL, "a" * 64)


@pytest.mark.parametrize(
    ("part", "value"),
    [(0, "GET"), (1, "/control/v1/desired?x=1"), (2, "another"), (3, b"{ }"), (4, 1_700_000_001)],
)
def test_every_part_of_a_request_is_signed(part: int, value: Any) -> None:
    changed = list(REQUEST)
    changed[part] = value
    assert request_payload(*changed) != request_payload(*REQUEST)


@given(st.lists(st.text(max_size=6), min_size=4, max_size=4), st.lists(st.text(max_size=6), min_size=4, max_size=4))
def test_parts_cannot_be_shifted_into_each_other(one: list[str], other: list[str]) -> None:
    assume(one != other)
    payloads = [artifact_payload(ModelRef(*parts[:3]), parts[3]) for parts in (one, other)]
    assert payloads[0] != payloads[1]


def test_a_key_is_named_by_its_own_bytes() -> None:
    assert key_id(b"\x00" * 32) == "66687aadf862bd77"
    assert key_id(b"\x01" * 32) != key_id(b"\x00" * 32)


@given(instances(BootPointer))
def test_the_text_of_a_pointer_is_what_is_signed(pointer: BootPointer) -> None:
    assert pointer_payload(pointer.text()).endswith(pointer.text())


@given(instances(DesiredState), instances(Fence))
def test_the_fence_is_no_part_of_what_is_asked(desired: DesiredState, fence: Fence) -> None:
    assert dataclasses.replace(desired, fence=fence).content_hash() == desired.content_hash()


@given(instances(DesiredState), instances(DesiredState))
def test_another_wish_has_another_hash(one: DesiredState, other: DesiredState) -> None:
    assert (one.content_hash() == other.content_hash()) == (one.models == other.models)
