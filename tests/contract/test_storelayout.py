"""Keys in the bucket: each in its place, whatever a name holds."""

from __future__ import annotations

import dataclasses
import posixpath

import pytest
from documents import SHA256, instances
from hypothesis import given
from hypothesis import strategies as st
from trtmodel_contract import storelayout
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.identity import LoadKey, Storage
from trtmodel_contract.manifest import Manifest, TensorSpec

DIGEST = "a" * 64
KEY = LoadKey("ONNXRuntime", "1.23.0", "x86-64-v3")
ROOT = storelayout.root(Storage("engines"), "ml")

ODD = st.text(st.sampled_from("aA0./\\-_ %\n\x00é:?#"), max_size=8)
LOAD_KEYS = st.builds(LoadKey, ODD, ODD, ODD, ODD, ODD)


def test_keys_are_where_the_design_says() -> None:
    assert ROOT == "trtmodel/ml"
    assert storelayout.blob_key(ROOT, DIGEST) == f"trtmodel/ml/blobs/sha256/{DIGEST}"
    assert storelayout.engine_prefix(ROOT, "0123456789") == "trtmodel/ml/engines/0123456789/"
    build = "trtmodel/ml/engines/0123456789/onnxruntime-1.23.0-x86-64-v3/7"
    assert storelayout.manifest_key(ROOT, "0123456789", KEY, 7) == f"{build}/manifest.json"
    assert storelayout.revoked_key(ROOT, "0123456789", KEY, 7) == f"{build}/revoked"
    gate = storelayout.gate_key(ROOT, DIGEST, "b" * 64, "Raw", 100, 1)
    assert posixpath.dirname(gate) == f"trtmodel/ml/gates/{DIGEST}"


@pytest.mark.parametrize("prefix", ["trtmodel", "/trtmodel/", "trtmodel//"])
def test_slashes_around_the_prefix_make_no_empty_names(prefix: str) -> None:
    assert storelayout.root(Storage("engines", prefix), "ml") == "trtmodel/ml"


def test_an_empty_prefix_still_keeps_namespaces_apart() -> None:
    assert storelayout.root(Storage("engines", ""), "ml") == "ml"


@given(LOAD_KEYS | ODD, ODD, st.integers(0, 10**6))
def test_no_odd_name_leads_out_of_the_engines(load_key: LoadKey | str, revision: str, number: int) -> None:
    """A store on a file system would follow '..', and another tenant's plan is code."""
    for make in (storelayout.manifest_key, storelayout.revoked_key):
        try:
            key = make(ROOT, revision, load_key, number)
        except ValueError:
            continue
        assert key == posixpath.normpath(key)
        assert key.startswith(f"{ROOT}/engines/{revision}/")
        assert key.count("/") == 6
        assert key.isascii()
        assert key.isprintable()


@given(instances(LoadKey))
def test_a_load_key_is_always_one_name(key: LoadKey) -> None:
    assert "/" not in str(key)
    assert str(key) == str(key).lower()


@pytest.mark.parametrize("prefix", ["..", "a/../..", ".", "a b", "a\nb", "é"])
def test_a_prefix_that_leads_elsewhere_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="must be one name"):
        storelayout.root(Storage("engines", prefix), "ml")


@pytest.mark.parametrize("namespace", ["", "..", "a/b"])
def test_a_namespace_that_is_none_is_refused(namespace: str) -> None:
    with pytest.raises(ValueError, match="must be one name"):
        storelayout.root(Storage("engines"), namespace)


@pytest.mark.parametrize("digest", ["", "..", "../../x", "a" * 63, "A" * 64])
def test_what_is_no_digest_is_no_key(digest: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        storelayout.blob_key(ROOT, digest)
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        storelayout.gate_key(ROOT, digest, DIGEST, "Raw", 1, 1)


def test_a_load_key_of_odd_characters_alone_is_refused_and_not_taken_for_none() -> None:
    with pytest.raises(ValueError, match="has a load key"):
        storelayout.manifest_key(ROOT, "0123456789", LoadKey("", "", ""), 1)
    with pytest.raises(ValueError, match="the load key must be one name"):
        storelayout.engine_prefix(ROOT, "0123456789", LoadKey("", "", ""))


@given(SHA256, SHA256, st.sampled_from(["Raw", "Regression"]), st.integers(1, 9), st.integers(1, 9))
def test_other_figures_have_another_key(one: str, other: str, task: str, samples: int, version: int) -> None:
    base = storelayout.gate_key(ROOT, DIGEST, one, task, samples, version)
    changes = [(other, task, samples, version)] if one != other else []
    changes += [
        (one, task + "x", samples, version),
        (one, task, samples + 1, version),
        (one, task, samples, version + 1),
    ]
    assert all(storelayout.gate_key(ROOT, DIGEST, *change) != base for change in changes)


@given(instances(Manifest), st.text(st.characters(exclude_categories=["Cs"])))
def test_tensor_names_of_any_kind_are_only_text_in_a_document(manifest: Manifest, name: str) -> None:
    odd = dataclasses.replace(manifest, inputs=(TensorSpec(name, "FP32", (-1,)), TensorSpec("../../etc", "FP32", ())))
    assert loads(Manifest, dumps(odd)) == odd
