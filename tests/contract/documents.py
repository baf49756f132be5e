"""Every document of the contract, and a hypothesis strategy for each, made from its type hints."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from trtmodel_contract.control import BootPointer, ControlError, DesiredRequest, Report
from trtmodel_contract.gate import GateFigures
from trtmodel_contract.identity import ModelRef, Recipe, ShapeRange
from trtmodel_contract.jobs import BuildTask, CollectTask, JobResult, ResolveTask
from trtmodel_contract.keeping import Pin, Revocation
from trtmodel_contract.manifest import Blob, Manifest
from trtmodel_contract.signing import KeySet

DOCUMENTS = (
    BootPointer,
    BuildTask,
    CollectTask,
    ControlError,
    DesiredRequest,
    GateFigures,
    JobResult,
    KeySet,
    Manifest,
    Pin,
    Report,
    ResolveTask,
    Revocation,
)

# Half a surrogate pair is no Unicode; everything else may be in a name, a path or a message.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SHA256 = st.text("0123456789abcdef", min_size=64, max_size=64)
WHOLE = st.integers(-(2**53), 2**53)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    int: WHOLE,
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False) | WHOLE.map(float),
}
DIGEST_FIELDS = {(Blob, "digest"), (Recipe, "source_sha256")}


@st.composite
def shape_ranges(draw: st.DrawFn) -> ShapeRange:
    triples = draw(st.lists(st.lists(st.integers(1, 4096), min_size=3, max_size=3).map(sorted), max_size=4))
    return ShapeRange(*(tuple(triple[i] for triple in triples) for i in range(3)))


@st.composite
def pins(draw: st.DrawFn) -> Pin:
    return Pin(draw(instances(ModelRef)), tuple(draw(st.lists(SHA256, max_size=3))), draw(instances(tuple[str, ...])))


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of the type `kind`: a document, a part of one, or a scalar."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is ShapeRange:
        return shape_ranges()
    if kind is Pin:
        return pins()
    if kind in SCALARS:
        return SCALARS[kind]
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if arg is type(None) else instances(arg) for arg in args))
    if origin is tuple:
        return st.lists(instances(args[0]), max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(instances(args[0]), instances(args[1]), max_size=3)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    hints = typing.get_type_hints(kind)
    fields = {
        f.name: SHA256 if (kind, f.name) in DIGEST_FIELDS else instances(hints[f.name])
        for f in dataclasses.fields(kind)
    }
    return st.builds(kind, **fields)
