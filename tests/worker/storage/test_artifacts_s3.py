"""Collecting and copying in a real S3, where clocks, listings and removals are the store's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from bucket_fill import KEY, MODEL, figures, keys, publish, revoked
from storage_servers import Gateway
from trtmodel_contract import storelayout as layout
from trtmodel_contract.gate import Task
from trtmodel_contract.identity import short_hash
from trtmodel_worker.builder import pins
from trtmodel_worker.builder.collect import Rules, Summary, collect
from trtmodel_worker.builder.copying import copy
from trtmodel_worker.storage import ArtifactStore
from trtmodel_worker.storage.s3 import S3Store

AT_ONCE = Rules(grace=-10.0, settle=-10.0, delete=True)  # below zero: times of S3 are whole seconds


@pytest.fixture
def store(gateway: Gateway, credentials: Path, request: pytest.FixtureRequest) -> ArtifactStore:
    """A namespace of its own: the gateway is shared."""
    return ArtifactStore(gateway.storage(), short_hash(request.node.name), credentials)


def run(store: ArtifactStore, rules: Rules = AT_ONCE) -> Summary:
    return collect(store, rules, lambda _: None)


def s3_calls(store: ArtifactStore) -> list[str]:
    """Filled with the names of the operations that the store is asked for."""
    called: list[str] = []
    objects = store.objects
    assert isinstance(objects, S3Store)
    objects._client.call(
        lambda s3: s3.meta.events.register("before-call.s3", lambda model, **_: called.append(model.name))
    )
    return called


def test_D03_objects_are_removed_one_by_one_since_stores_differ_in_what_they_demand_for_many(
    store: ArtifactStore,
) -> None:
    kept, _ = publish(store, "1111111111", b"one"), publish(store, "2222222222", b"two")
    pins.pin(store, "c", MODEL, [kept])
    called = s3_calls(store)
    assert (run(store).waiting, run(store).deleted) == (1, 1)
    assert called.count("DeleteObject") >= 4
    assert "DeleteObjects" not in called
    assert not [key for key in keys(store) if "2222222222" in key or key.startswith("trash")]
    assert store.missing(kept, store.get_manifest(kept)) == ""


def test_young_ones_stay_by_the_clock_of_the_store(store: ArtifactStore) -> None:
    publish(store)
    before = keys(store)
    assert run(store, dataclasses.replace(AT_ONCE, grace=60.0, without_pins=True)).kept == 1
    assert (keys(store), revoked(store)) == (before, [False])


def test_D15_parts_of_an_upload_that_nobody_finished_go_with_the_rest(store: ArtifactStore) -> None:
    objects = store.objects
    assert isinstance(objects, S3Store)
    kept = publish(store)
    pins.pin(store, "c", MODEL, [kept])
    key = layout.blob_key(store.root, "a" * 64)
    objects._client.call(lambda s3: s3.create_multipart_upload(Bucket="engines", Key=key))
    assert run(store, dataclasses.replace(AT_ONCE, grace=60.0)).unfinished_uploads == 0
    assert run(store).unfinished_uploads == 1
    assert run(store).unfinished_uploads == 0
    assert objects.stat(key) is None


def test_an_engine_is_copied_from_one_bucket_to_another(
    store: ArtifactStore, gateway: Gateway, credentials: Path, tmp_path: Path
) -> None:
    digest = publish(store)
    other = ArtifactStore(gateway.storage("models"), "production", credentials)
    assert copy(store, other, digest, tmp_path, lambda _: None).sent == 3
    assert copy(store, other, digest, tmp_path, lambda _: None).sent == 0
    assert other.find("0123456789", KEY) == (digest, store.get_manifest(digest))
    assert other.get_figures(digest, "3" * 64, Task.RAW, 100) == figures(digest)
