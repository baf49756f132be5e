"""What of a Job's task decides which engine is meant, which figures, and which of neither: every field is one of these.

The fields are found in the types. One that is added must be put into the table, so that nobody forgets to think of it.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from trtmodel_contract.gate import GATE_VERSION
from trtmodel_contract.identity import LoadKey, ShapeRange
from trtmodel_contract.jobs import BuildTask
from trtmodel_contract.storelayout import gate_key
from trtmodel_worker.builder.sources import revision_of, used_calibration

ENGINE, FIGURES, NEITHER = (True, False), (False, True), (False, False)
DECIDES = {
    "source_sha256": ENGINE,
    "engine": ENGINE,
    "calibration.data.digest": ENGINE,
    "calibration.data.samples": ENGINE,
    "calibration.method": ENGINE,
    "calibration.per_channel": ENGINE,
    "dataset.digest": FIGURES,
    "dataset.samples": FIGURES,
    "verify_task": FIGURES,
    "model": NEITHER,  # its namespace is the beginning of every key
    "source_uri": NEITHER,
    "revision": NEITHER,  # it is what the rest must come to
    "storage": NEITHER,
    "calibration.data.uri": NEITHER,
    "dataset.uri": NEITHER,
    "thresholds": NEITHER,
    "cluster": NEITHER,
}


def filled(kind: Any, name: str = "") -> Any:
    """A value of a type in which nothing is left out and nothing at its default."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return filled(next(arg for arg in args if arg is not type(None)), name)
    if origin is tuple:
        return (filled(args[0], name),)
    if origin is Mapping:
        return {filled(args[0], name): filled(args[1], name)}
    if kind is ShapeRange:
        return ShapeRange((3,), (5,), (9,))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{f.name: filled(hints[f.name], f.name) for f in dataclasses.fields(kind)})  # type: ignore[operator]
    values: dict[Any, Any] = {str: "a" * 64 if name.endswith(("digest", "sha256")) else "text", int: 7, float: 0.5}
    return values[kind] if kind is not bool else True


def others(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, the same with that one field changed) for every field of every dataclass inside."""
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, ShapeRange)):
        for f in dataclasses.fields(value):
            inner = f"{path}.{f.name}" if path else f.name
            for name, changed in others(getattr(value, f.name), inner):
                yield name, dataclasses.replace(value, **{f.name: changed})
    elif isinstance(value, ShapeRange):
        for f, bound in zip(dataclasses.fields(value), ((4,), (6,), (8,)), strict=True):
            yield f"{path}.{f.name}", dataclasses.replace(value, **{f.name: bound})
    elif isinstance(value, tuple):
        yield path, (*value, *value)
        for name, changed in others(value[0], path):
            yield name, (changed,)
    elif isinstance(value, Mapping):
        ((key, held),) = value.items()
        yield path, {f"{key}2": held}
        for name, changed in others(held, path):
            yield name, {key: changed}
    elif isinstance(value, enum.Enum):
        yield path, list(type(value))[-1]
    elif isinstance(value, bool):
        yield path, not value
    elif isinstance(value, str):
        yield path, "b" * 64 if len(value) == 64 else f"{value}2"
    else:
        yield path, value + 1


TASK = dataclasses.replace(filled(BuildTask), engine=dataclasses.replace(filled(BuildTask).engine, precision="INT8"))
CHANGED = list(others(TASK))


def keys(task: BuildTask) -> tuple[str, str]:
    calibration = used_calibration(task.engine, task.calibration)
    engine = revision_of(
        task.source_sha256, task.engine, calibration, calibration.data.digest if calibration is not None else ""
    )
    data = task.dataset
    return engine, gate_key("root", "c" * 64, data.digest, task.verify_task.value, data.samples, GATE_VERSION)


@pytest.mark.parametrize(("path", "task"), CHANGED, ids=[path for path, _ in CHANGED])
def test_each_field_of_a_task_changes_the_keys_that_it_decides_and_no_others(path: str, task: BuildTask) -> None:
    parts = path.split(".")
    named = next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in DECIDES), None)
    assert named is not None, f"{path} is new: does it decide an engine, its figures, or neither?"
    assert tuple(one != other for one, other in zip(keys(TASK), keys(task), strict=True)) == DECIDES[named]


def test_the_table_names_no_field_that_is_gone() -> None:
    paths = [path for path, _ in CHANGED]
    assert not [named for named in DECIDES if not any(p == named or p.startswith(f"{named}.") for p in paths)]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LoadKey)])
def test_each_field_of_a_load_key_changes_its_name(field: str) -> None:
    key = LoadKey("TensorRT", "10.16.0", "NVIDIA A10", "8.6", "1g.10gb")
    assert str(dataclasses.replace(key, **{field: f"{getattr(key, field)}1"})) != str(key)
