"""JSON as it comes in requests and leaves in answers: what is refused, and that no number changes on its way."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_worker.front.jsoncodec import (
    MAX_CONTAINERS,
    MAX_TEXTS,
    BadJson,
    check_elements,
    may_hold_booleans,
    numbers_to_json,
    parse_object,
    short,
    strings_to_json,
    values_to_bytes,
)

keys = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
json_objects = st.dictionaries(
    keys,
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
        | keys | st.sampled_from([":", 'a":1,"b', "\\", "\u003a"]),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=20,
    ),
    max_size=4,
)  # fmt: skip


@given(json_objects, st.booleans())
def test_every_json_object_is_understood_as_it_was_meant(document: dict[str, Any], ascii_only: bool) -> None:
    assert parse_object(json.dumps(document, ensure_ascii=ascii_only).encode()) == document


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"x":[{"a":{"b":1,"b":2}}]}',
        b'{"x":[1,{"a":1,"a":2}]}',
        b'{"a":1,"\\u0061":2}',
        b'{"a":1,"a":2,"c":"\\u003a"}',
        b'{"a":{"k":":"},"a":1,"c":"\\u003a\\u003a\\u003a"}',
    ],
)
def test_a_key_that_is_given_twice_is_refused_however_it_is_written(text: bytes) -> None:
    with pytest.raises(BadJson, match="same key twice"):
        parse_object(text)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"{'a':1}", b'{"a":NaN}', b'{"a":Infinity}', b'{"a":1e999}', b'{"a":01}', b'{"a":1,}',
     b'\xef\xbb\xbf{}', b'{"a":"\xff"}', b'{"a":"\\ud800"}', b'{"a":' + b"[" * 5000, b'{"a":"\\n' + b"[" * 5000,
     '{"a":1}'.encode("utf-16"), b'{"a":1}{"a":1}', b'{"a":"\n"}'],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(BadJson):
        parse_object(text)


def test_too_many_arrays_are_refused_before_they_are_made() -> None:
    parse_object(b'{"a":[' + b"[]," * (MAX_CONTAINERS - 10) + b"1]}")
    with pytest.raises(BadJson, match="send the data flat"):
        parse_object(b'{"a":[' + b"[]," * MAX_CONTAINERS + b"1]}")


def test_too_many_keys_or_texts_are_refused_before_they_are_made() -> None:
    parse_object(b'{"a":[' + b'"",' * (MAX_TEXTS - 1) + b"1]}")
    for unit in (b'"",', b'"\\n",'):
        with pytest.raises(BadJson, match="as binary data"):
            parse_object(b'{"a":[' + unit * MAX_TEXTS + b"1]}")


@given(json_objects)
def test_booleans_are_never_overlooked(document: dict[str, Any]) -> None:
    def has(value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(has, value.values()))
        return value is True or value is False or (isinstance(value, list) and any(map(has, value)))

    if has(document):
        assert may_hold_booleans(json.dumps(document).encode())


def test_a_request_of_numbers_is_seen_to_hold_no_booleans() -> None:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [0.25, -1e-9, 3, 4]}]
    assert not may_hold_booleans(json.dumps({"inputs": inputs, "outputs": [{"name": "y"}]}).encode())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("BOOL", [True, False]), ("INT8", [-128, 127]), ("UINT8", [0, 255]), ("INT16", [-(2**15), 2**15 - 1]),
        ("UINT16", [0, 2**16 - 1]), ("INT32", [-(2**31), 2**31 - 1]), ("UINT32", [0, 2**32 - 1]),
        ("INT64", [-(2**63), 2**63 - 1]), ("UINT64", [0, 2**64 - 1]), ("FP32", [0.1, -3.4028235e38]),
        ("FP32", [1, 2]), ("FP32", [5, 0.5]), ("FP64", [1e300, 5e-324]),
    ],
)  # fmt: skip
def test_values_of_each_data_type_arrive_exactly(datatype: str, values: list[Any], nested: bool) -> None:
    dtype = {"BOOL": np.bool_, "FP32": np.float32, "FP64": np.float64}.get(datatype) or np.dtype(datatype.lower())
    found = values_to_bytes(datatype, (2, 1), [[v] for v in values] if nested else values)
    assert bytes(found) == np.array(values, dtype).tobytes()


@pytest.mark.parametrize(
    ("datatype", "shape", "data"),
    [
        ("INT8", (2,), [128, 0]), ("INT8", (2,), [0, -129]), ("UINT8", (2,), [-1, 0]), ("UINT8", (2,), [256, 0]),
        ("INT16", (2,), [2**15, 0]), ("UINT16", (2,), [-1, 0]), ("UINT16", (2,), [2**16, 0]),
        ("INT32", (2,), [2**31, 0]), ("UINT32", (2,), [2**32, 0]), ("UINT32", (2,), [-1, 0]),
        ("INT64", (2,), [2**63, 0]), ("INT64", (2,), [0, -1e19]), ("UINT64", (2,), [-1, 0]),
        ("UINT64", (2,), [1.8446744073709552e19, 0]), ("INT32", (2,), [1.0, 2]), ("INT32", (2,), [1, 2.5]),
        ("INT32", (2,), [True, 2]), ("INT32", (2,), [1, False]), ("FP32", (2,), [True, 0.5]),
        ("FP32", (2,), [0.5, False]), ("FP64", (2,), [1, True]), ("FP32", (2,), [1e39, 0]),
        ("FP32", (2,), [-1e39, 0]), ("FP32", (2,), ["1", "2"]), ("FP32", (2,), [None, 1]), ("FP32", (2,), [{}, 1]),
        ("FP32", (2,), "ab"), ("FP32", (2,), None), ("FP32", (2,), {"0": 1}), ("FP32", (2,), [1]),
        ("FP32", (2,), [1, 2, 3]), ("FP32", (2,), [[1, 2]]), ("FP32", (2,), [[1], [2]]), ("FP32", (2, 2), [[1, 2]]),
        ("FP32", (2, 2), [[1, 2], [3]]), ("FP32", (2, 2), [[1, 2, 3], [4]]), ("FP32", (2, 2), [[1, 2], 3]),
        ("FP32", (2, 2), [1, [2, 3], 4]), ("FP32", (2, 2), [[[1], [2]], [[3], [4]]]), ("FP32", (0, 2), [1]),
        ("BOOL", (2,), [1, 0]), ("BOOL", (2,), [True, 0]), ("BOOL", (2,), ["true", "false"]),
        ("BYTES", (2,), ["a", 1]), ("BYTES", (2,), ["a"]), ("BYTES", (2,), [None, "a"]), ("BYTES", (1,), ["a", "b"]),
    ],
)  # fmt: skip
def test_values_that_are_not_of_their_data_type_range_or_shape_are_refused(
    datatype: str, shape: tuple[int, ...], data: Any
) -> None:
    with pytest.raises(BadJson):
        values_to_bytes(datatype, shape, data)


@pytest.mark.parametrize(
    ("shape", "data"), [((0,), []), ((0, 4), []), ((2, 0), [[], []]), ((2, 0), []), ((), [7.0]), ((1, 1, 1), [[[7]]])]
)
def test_empty_tensors_scalars_and_deep_ones_are_taken(shape: tuple[int, ...], data: Any) -> None:
    assert len(values_to_bytes("FP32", shape, data)) == 4 * math.prod(shape)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=20))
def test_fp32_goes_out_in_few_digits_and_comes_back_the_same(values: list[float]) -> None:
    array = np.array(values, np.float32)
    text = numbers_to_json(array)
    back = np.array(json.loads(text), np.float64).astype(np.float32)
    assert back.tobytes() == array.tobytes()
    assert bytes(values_to_bytes("FP32", array.shape, json.loads(text))) == array.tobytes()
    assert len(text) <= 2 + 18 * len(values)


@pytest.mark.parametrize("name", ["bool", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f8"])
def test_every_other_number_goes_out_exactly(name: str) -> None:
    dtype = np.dtype(name)
    low, high = (0, 1) if dtype.kind == "b" else (5e-324, 1.7e308) if dtype.kind == "f" else (
        np.iinfo(dtype).min, np.iinfo(dtype).max)  # fmt: skip
    array = np.array([low, high], dtype)
    assert np.array(json.loads(numbers_to_json(array)), dtype).tobytes() == array.tobytes()
    assert numbers_to_json(array[:0]) == b"[]"


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=8))
def test_strings_go_through_their_binary_form_unchanged(values: list[str]) -> None:
    binary = values_to_bytes("BYTES", (len(values),), values)
    assert bytes(binary) == b"".join(struct.pack("<I", len(v.encode())) + v.encode() for v in values)
    assert json.loads(strings_to_json(binary, len(values))) == values


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"\1\0\0\0", 1), (b"\1\0\0", 1), (b"", 1), (b"\0\0\0\0", 0), (b"\0\0\0\0x", 1), (b"\2\0\0\0ab\xff\0\0\0a", 2),
        (b"\xff\xff\xff\xffabc", 1), (b"\0\0\0\0" * 3, 2), (b"\0\0\0\0" * 2, 3), (bytes(40_000_000), 1),
    ],
)  # fmt: skip
def test_B06_binary_strings_that_do_not_add_up_are_refused(data: bytes, count: int) -> None:
    with pytest.raises(BadJson):
        check_elements(memoryview(data), count)


def test_bytes_that_are_no_text_have_no_json_form() -> None:
    with pytest.raises(BadJson, match="not UTF-8"):
        strings_to_json(memoryview(b"\1\0\0\0\xff"), 1)


def test_a_message_does_not_grow_with_what_it_is_about() -> None:
    for value in ("x" * 1_000_000, [0] * 1_000_000, [[0] * 1_000_000] * 8, {"k": "x" * 1_000_000}, 10**4000):
        assert len(short(value)) <= 80
