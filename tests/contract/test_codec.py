"""Documents: one JSON form, strict reading, errors that name the place."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from documents import DOCUMENTS, instances
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmodel_contract import codec
from trtmodel_contract.codec import LATER, DocumentError, canonical, decode, dumps, encode, loads
from trtmodel_contract.control import BootPointer, DesiredRequest, Report
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import ShapeRange
from trtmodel_contract.manifest import Manifest


@dataclass(frozen=True)
class Inner:
    count: int
    share: float = 0.5


@dataclass(frozen=True)
class Sample:
    SCHEMA: ClassVar[str] = "trtmodel.io/sample/v1"

    a_name: str
    inners: tuple[Inner, ...] = ()
    by_number: Mapping[int, float] = field(default_factory=dict)
    task: Task | None = None
    flag: bool = False


@dataclass(frozen=True)
class Grown(Inner):
    """`Inner` as a later version of the product has it."""

    words: tuple[str, ...] = field(default=(), metadata=LATER)


GOOD: dict[str, Any] = {"schema": Sample.SCHEMA, "aName": "x"}


@pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_document_survives_the_way_through_json(kind: Any, data: st.DataObject) -> None:
    document = data.draw(instances(kind))
    assert loads(kind, dumps(document)) == document


@pytest.mark.parametrize("kind", DOCUMENTS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_a_document_that_was_read_is_written_with_the_same_bytes(kind: Any, data: st.DataObject) -> None:
    written = dumps(data.draw(instances(kind)))
    assert dumps(loads(kind, written)) == written


@given(instances(Manifest))
def test_the_order_of_keys_changes_no_byte(manifest: Manifest) -> None:
    def turned(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: turned(v) for k, v in reversed(value.items())}
        return [turned(v) for v in value] if isinstance(value, list) else value

    upside_down = json.dumps(turned(json.loads(dumps(manifest))), indent=2)
    assert dumps(loads(Manifest, upside_down)) == dumps(manifest)
    assert loads(Manifest, upside_down).digest() == manifest.digest()


def test_whole_numbers_have_one_form_whether_they_were_written_as_floats_or_not() -> None:
    assert dumps(Sample("x", (Inner(1, 1),))) == dumps(Sample("x", (Inner(1, 1.0),)))
    assert b'"share":1}' in dumps(Sample("x", (Inner(1, 1.0),)))
    assert b'"share":1e+300}' in dumps(Sample("x", (Inner(1, 1e300),)))
    assert dumps(Sample("x", (Inner(1, -0.0),))) == dumps(Sample("x", (Inner(1, 0.0),)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_bytes_are_made_of_what_json_does_not_have(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical([value])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"aName": 3}, "Sample.aName: expected str, found int"),
        ({"aName": None}, "Sample.aName: expected str, found null"),
        ({"inners": {}}, "Sample.inners: expected a list, found dict"),
        ({"inners": [{"count": 1}, {"count": "2"}]}, "Sample.inners[1].count: expected int, found str"),
        ({"inners": [{"count": True}]}, "Sample.inners[0].count: expected int, found bool"),
        ({"inners": [{"count": 1.0}]}, "Sample.inners[0].count: expected int, found float"),
        ({"inners": [{}]}, "Sample.inners[0].count is missing"),
        ({"inners": [3]}, "Sample.inners[0]: expected an object, found int"),
        ({"inners": [{"count": 1, "share": math.nan}]}, "Sample.inners[0].share: nan is not a finite number"),
        ({"inners": [{"count": 1, "share": 10**400}]}, "Sample.inners[0].share: inf is not a finite number"),
        ({"byNumber": []}, "Sample.byNumber: expected an object, found list"),
        ({"byNumber": {"1": "x"}}, "Sample.byNumber.1: expected float, found str"),
        ({"byNumber": {"x": 1}}, "Sample.byNumber: the key 'x' is not a whole number"),
        ({"byNumber": {"1_0": 1}}, "Sample.byNumber: the key '1_0' is not a whole number"),
        ({"byNumber": {" 1": 1}}, "Sample.byNumber: the key ' 1' is not a whole number"),
        ({"task": "Guess"}, "Sample.task: 'Guess' is none of Classification, Regression, Embedding, Raw"),
        ({"flag": 1}, "Sample.flag: expected bool, found int"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_does_not_fit_is_named_with_its_path(change: dict[str, Any], error: str) -> None:
    with pytest.raises(DocumentError) as caught:
        loads(Sample, json.dumps({**GOOD, **change}))
    assert str(caught.value) == error


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"1" * 5_000, "nonsense"])
def test_bytes_that_are_no_json_are_refused_as_such(raw: bytes | str) -> None:
    with pytest.raises(DocumentError, match=r"Sample is not JSON|expected a document of schema"):
        loads(Sample, raw)


@pytest.mark.parametrize("schema", [None, 7, "trtmodel.io/sample/v2", "x" * 10_000])
def test_another_schema_is_refused_with_both_names_and_without_repeating_much(schema: Any) -> None:
    with pytest.raises(DocumentError, match=r"of schema trtmodel\.io/sample/v1, found") as caught:
        loads(Sample, json.dumps({**GOOD, "schema": schema}))
    assert len(str(caught.value)) < 250


def test_something_that_is_no_object_is_refused() -> None:
    with pytest.raises(DocumentError, match="expected a document of schema"):
        loads(Sample, "[1, 2]")


def test_fields_of_a_newer_writer_are_ignored_at_every_depth() -> None:
    newer = {**GOOD, "inners": [{"count": 1, "later": {"deep": []}}], "laterToo": 1}
    assert loads(Sample, json.dumps(newer)) == Sample("x", (Inner(1),))


@pytest.mark.parametrize("kind", [BootPointer, DesiredRequest, Report, Manifest], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_field_without_a_default_is_required(kind: Any, data: st.DataObject) -> None:
    raw = json.loads(dumps(data.draw(instances(kind))))
    for f in dataclasses.fields(kind):
        if f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING:
            continue
        key = next(key for key in raw if key.lower() == f.name.replace("_", ""))
        with pytest.raises(DocumentError, match=rf"{kind.__name__}\.{key} is missing"):
            loads(kind, json.dumps({k: v for k, v in raw.items() if k != key}))


def test_a_value_that_its_own_class_refuses_is_reported_with_its_path() -> None:
    with pytest.raises(DocumentError, match=r"profile: a profile needs 1 <= min <= opt <= max"):
        decode(ShapeRange, {"min": [2], "opt": [1], "max": [3]}, "profile")


def test_fields_at_their_default_are_left_out_only_where_asked() -> None:
    assert encode(Inner(1), omit_defaults=True) == {"count": 1}
    assert encode(Inner(1)) == {"count": 1, "share": 0.5}
    assert encode(Sample("x", (Inner(1, 0.25),)), omit_defaults=True) == {
        "aName": "x",
        "inners": [{"count": 1, "share": 0.25}],
    }


@given(instances(Inner), st.lists(st.text("ab"), max_size=2).map(tuple))
def test_a_field_that_came_later_changes_no_byte_of_documents_without_it(inner: Inner, words: tuple[str, ...]) -> None:
    assert encode(Grown(inner.count, inner.share)) == encode(inner)
    assert decode(Grown, encode(inner)) == Grown(inner.count, inner.share)
    grown = Grown(inner.count, inner.share, words)
    assert decode(Grown, encode(grown)) == grown
    assert decode(Inner, encode(grown)) == inner, "an older reader takes what it knows"


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.just([]), st.just({}))


@pytest.mark.parametrize("kind", DOCUMENTS)
@settings(max_examples=25)
@given(data=st.data())
def test_what_is_read_fast_is_what_is_read_with_care_also_where_something_does_not_fit(
    kind: Any, data: st.DataObject
) -> None:
    raw = encode(data.draw(instances(kind)))
    node = raw
    while True:
        if not node:
            return
        at = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[at], (dict, list)) or data.draw(st.booleans()):
            break
        node = node[at]
    node[at] = data.draw(SCALARS)

    def outcome(read: Any) -> str:
        try:
            return repr(read(kind, raw, "it"))  # NaN is no equal of itself
        except DocumentError as e:
            return f"refused: {e}"

    assert outcome(decode) == outcome(codec._decode)
