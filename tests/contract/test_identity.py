"""Sources, revisions and load keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from documents import SHA256, instances
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract.codec import encode
from trtmodel_contract.identity import (
    Calibration,
    EngineSettings,
    KeepPrecision,
    LoadKey,
    Profile,
    Recipe,
    ShapeRange,
    revision,
    short_hash,
    source_identity,
)

ONE, TWO = "1" * 64, "2" * 64
PROFILE = Profile({"x": ShapeRange((1, 8), (4, 8), (8, 8))})
FULL = Recipe(
    ONE,
    EngineSettings(
        runtime="TensorRT",
        precision="INT8",
        keep_precision=KeepPrecision(("^/head/.*",), "FP16", ("Softmax",)),
        profiles=(PROFILE,),
        workspace_bytes=1 << 30,
        optimization_level=4,
        simplify=True,
    ),
    Calibration(TWO, 64, "MinMax", False),
)


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Paths of all fields, dataclasses inside dataclasses included."""
    found = []
    for f in dataclasses.fields(value):
        inner = getattr(value, f.name)
        found += _leaves(inner, (*path, f.name)) if dataclasses.is_dataclass(inner) else [(*path, f.name)]
    return found


def _changed(value: Any, path: tuple[str, ...]) -> Any:
    """The same with one field changed to another legal value."""
    name, *rest = path
    old = getattr(value, name)
    if rest:
        new = _changed(old, tuple(rest))
    elif isinstance(old, bool):
        new = not old
    elif isinstance(old, int):
        new = old + 1
    elif isinstance(old, str):
        new = TWO if old == ONE else ONE if old == TWO else old + "x"
    else:
        new = old[:-1]
    return dataclasses.replace(value, **{name: new})


@pytest.mark.parametrize("path", _leaves(FULL), ids=".".join)
def test_every_field_of_the_recipe_changes_the_revision(path: tuple[str, ...]) -> None:
    assert revision(_changed(FULL, path)) != revision(FULL)


def test_the_recipe_holds_what_decides_an_engine_and_nothing_else() -> None:
    """A field that is added here changes which engines exist: think of replicas, thresholds, routing and images."""
    assert {".".join(path) for path in _leaves(FULL)} == {
        "source_sha256",
        "engine.runtime",
        "engine.precision",
        "engine.keep_precision.nodes",
        "engine.keep_precision.precision",
        "engine.keep_precision.operators",
        "engine.profiles",
        "engine.workspace_bytes",
        "engine.optimization_level",
        "engine.simplify",
        "calibration.digest",
        "calibration.samples",
        "calibration.method",
        "calibration.per_channel",
    }


@pytest.mark.parametrize("bound", ["min", "opt", "max"])
def test_every_bound_of_a_profile_changes_the_revision(bound: str) -> None:
    old = PROFILE.inputs["x"]
    shape = tuple(n + (1 if bound == "max" else 0) for n in getattr(old, bound))
    shape = shape if bound == "max" else (shape[0] + 1, *shape[1:])
    other = Profile({"x": dataclasses.replace(old, **{bound: shape})})
    engine = dataclasses.replace(FULL.engine, profiles=(other,))
    assert revision(dataclasses.replace(FULL, engine=engine)) != revision(FULL)


@given(instances(Recipe), instances(Recipe))
def test_two_recipes_share_a_revision_only_if_they_are_equal(one: Recipe, other: Recipe) -> None:
    assert (revision(one) == revision(other)) == (one == other)


def test_a_field_at_its_default_is_no_part_of_the_revision() -> None:
    """So that a version that adds a field with a default rebuilds nothing."""
    plain = Recipe(ONE, EngineSettings("TensorRT"))
    assert encode(plain, omit_defaults=True) == {"sourceSha256": ONE, "engine": {"runtime": "TensorRT"}}
    spelled_out = Recipe(ONE, EngineSettings("TensorRT", "FP32", None, (), None, None, False), None)
    assert revision(spelled_out) == revision(plain)


def test_the_order_in_which_inputs_are_listed_changes_no_revision() -> None:
    a, b = ShapeRange((1,), (2,), (3,)), ShapeRange((4,), (5,), (6,))
    one, other = (Profile(inputs) for inputs in ({"a": a, "b": b}, {"b": b, "a": a}))
    recipes = [Recipe(ONE, EngineSettings("TensorRT", profiles=(p,))) for p in (one, other)]
    assert revision(recipes[0]) == revision(recipes[1])


@given(instances(Recipe))
def test_a_revision_is_ten_hex_digits(recipe: Recipe) -> None:
    assert len(revision(recipe)) == 10
    assert set(revision(recipe)) <= set("0123456789abcdef")


def test_one_file_is_its_own_identity() -> None:
    assert source_identity([("model.onnx", ONE)]) == ONE


@given(st.dictionaries(st.text(max_size=9), SHA256, min_size=2, max_size=4), st.randoms())
def test_several_files_are_one_identity_whatever_their_order(files: dict[str, str], random: Any) -> None:
    pairs = list(files.items())
    random.shuffle(pairs)
    assert source_identity(pairs) == source_identity(files.items())
    renamed = [(pairs[0][0] + "x", pairs[0][1]), *pairs[1:]]
    assert source_identity(renamed) != source_identity(pairs)


def test_a_source_without_files_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one file"):
        source_identity([])


@pytest.mark.parametrize("digest", ["", "1" * 63, "1" * 65, "G" * 64, "A" * 64, "1" * 64 + "\n"])
def test_what_is_no_digest_is_refused(digest: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        Recipe(digest, EngineSettings("TensorRT"))


@pytest.mark.parametrize(
    ("low", "best", "high"), [((1,), (1, 2), (1, 2)), ((0,), (1,), (1,)), ((2,), (1,), (3,)), ((1,), (4,), (3,))]
)
def test_a_profile_that_is_no_range_is_refused(low: Any, best: Any, high: Any) -> None:
    with pytest.raises(ValueError, match="profile"):
        ShapeRange(low, best, high)


@given(st.lists(st.text(max_size=5), max_size=4), st.lists(st.text(max_size=5), max_size=4))
def test_short_hashes_keep_their_parts_apart(one: list[str], other: list[str]) -> None:
    assert (short_hash(*one) == short_hash(*other)) == (one == other)


def test_a_load_key_reads_as_a_name() -> None:
    key = LoadKey("TensorRT", "10.16.0.72", "NVIDIA A10", "8.6", "1g.5gb")
    assert str(key) == "tensorrt-10.16.0.72-nvidia-a10-8.6-1g.5gb"
