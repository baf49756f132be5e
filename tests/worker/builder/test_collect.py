"""The collector: what is pinned or young stays, the rest goes in two steps, and nothing goes without --delete."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bucket_fill import LONG_AGO, MODEL, age, figures, keys, open_bucket, plan_path, publish, revoked
from trtmodel_contract import storelayout as layout
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.exitcodes import JobExit
from trtmodel_contract.gate import GateReport
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import TASK_ENV, CollectTask, JobResult
from trtmodel_contract.keeping import Cause, Pin, Revocation
from trtmodel_worker.builder import main, pins
from trtmodel_worker.builder.collect import (
    SETTLE_SECONDS,
    WAIT_SECONDS,
    NothingIsPinned,
    Rules,
    Summary,
    _Run,
    collect,
)
from trtmodel_worker.storage import ArtifactStore, StorageError
from trtmodel_worker.storage.backends import Entry

RULES = Rules(grace=86400.0, delete=True)
OTHER = dataclasses.replace(MODEL, name="other", uid="uid-2")


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return open_bucket(tmp_path)


def run(store: ArtifactStore, rules: Rules = RULES) -> Summary:
    return collect(store, rules, lambda _: None)


def settle(folder: Path) -> None:
    """Each marker is old enough that no Job can have found its engine before."""
    for path in folder.rglob("revoked"):
        then = time.time() - SETTLE_SECONDS - 1
        os.utime(path, (then, then))


def test_what_nothing_pins_is_first_out_of_use_and_then_gone_with_all_that_is_its_own(
    store: ArtifactStore, tmp_path: Path
) -> None:
    kept = publish(store, "1111111111", b"one")
    before = keys(store)
    publish(store, "2222222222", b"two")
    age(tmp_path)
    pins.pin(store, "c", MODEL, [kept])
    first = run(store)
    assert (first.kept, first.revoked, first.waiting, first.deleted) == (1, 1, 1, 0)
    assert list(store.current("2222222222")) == []
    assert (run(store).waiting, revoked(store, "2222222222")) == (1, [True])
    settle(tmp_path)
    second = run(store)
    assert (second.kept, second.deleted) == (1, 1)
    assert second.freed_bytes > len(b"two")
    marker = [key for key in keys(store) if key.endswith("revoked")]
    assert keys(store) == sorted([*before, *marker, *keys(store, "pins")])
    age(tmp_path)
    run(store)
    assert keys(store) == sorted([*before, *keys(store, "pins")])


def test_without_delete_nothing_is_changed_and_the_same_is_told(store: ArtifactStore, tmp_path: Path) -> None:
    kept = publish(store, "1111111111", b"one")
    gone = publish(store, "2222222222", b"two")
    manifest = store.get_manifest(gone)
    store.revoke("2222222222", manifest.load_key, gone, Revocation(Cause.BY_HAND, "a test"))
    age(tmp_path)
    pins.pin(store, "c", MODEL, [kept])
    before = {path: path.stat().st_mtime for path in tmp_path.rglob("*")}
    told = run(store, dataclasses.replace(RULES, delete=False))
    assert {path: path.stat().st_mtime for path in tmp_path.rglob("*")} == before
    done = run(store)
    assert (told.kept, told.deleted, told.waiting) == (done.kept, done.deleted, done.waiting) == (1, 1, 0)
    assert told.freed_bytes <= done.freed_bytes


def test_what_is_young_stays_though_nothing_pins_it(store: ArtifactStore) -> None:
    publish(store)
    store.put_bytes(b"of a Job that has not published yet")
    before = keys(store)
    assert run(store, dataclasses.replace(RULES, without_pins=True)).kept == 1
    assert keys(store) == before


def test_the_pins_of_every_cluster_count(store: ArtifactStore, tmp_path: Path) -> None:
    digests = [publish(store, revision, revision.encode()) for revision in ("1111111111", "2222222222", "3333333333")]
    age(tmp_path)
    pins.pin(store, "one", MODEL, digests[:1])
    pins.pin(store, "two", OTHER, digests[1:])
    assert (run(store).kept, run(store).waiting) == (3, 0)


def test_a_namespace_without_a_single_pin_is_left_alone(store: ArtifactStore, tmp_path: Path) -> None:
    publish(store)
    age(tmp_path)
    with pytest.raises(NothingIsPinned, match="nothing tells"):
        run(store)
    assert revoked(store) == [False]
    assert run(store, dataclasses.replace(RULES, without_pins=True)).revoked == 1


def test_a_pin_that_cannot_be_read_stops_everything(store: ArtifactStore, tmp_path: Path) -> None:
    publish(store)
    age(tmp_path)
    store.objects.put(layout.pin_key(store.root, "c", "uid-1", "odd"), b"{}")
    with pytest.raises(StorageError, match="nothing is removed"):
        run(store)
    assert revoked(store) == [False]


def test_a_pin_that_a_job_is_writing_or_was_killed_at_stops_nothing(store: ArtifactStore, tmp_path: Path) -> None:
    pins.pin(store, "c", MODEL, [publish(store)])
    store.objects.put(f"{layout.pins_prefix(store.root, 'c', MODEL.uid)}.{'a' * 32}", b"")
    assert run(store).kept == 1
    age(tmp_path)
    run(store)
    assert len(keys(store, "pins")) == 1


def test_an_engine_that_a_job_pins_after_it_was_put_out_of_use_comes_back(store: ArtifactStore, tmp_path: Path) -> None:
    digest, other = publish(store, "1111111111", b"one"), publish(store, "2222222222", b"two")
    age(tmp_path)
    pins.pin(store, "c", MODEL, [other])
    run(store)
    pins.pin(store, "c", MODEL, [digest])
    settle(tmp_path)
    assert (run(store).kept, revoked(store, "1111111111")) == (2, [False])


def test_one_that_a_person_revoked_stays_revoked_while_it_is_pinned(store: ArtifactStore, tmp_path: Path) -> None:
    digest = publish(store)
    manifest = store.get_manifest(digest)
    store.revoke(manifest.revision, manifest.load_key, digest, Revocation(Cause.BY_HAND, "bad"))
    age(tmp_path)
    pins.pin(store, "c", MODEL, [digest])
    assert (run(store).kept, revoked(store)) == (1, [True])
    assert store.get_manifest(digest) == manifest


def test_one_that_a_person_revokes_when_the_collector_has_put_it_out_of_use_does_not_come_back(
    store: ArtifactStore, tmp_path: Path
) -> None:
    digest, other = publish(store, "1111111111", b"one"), publish(store, "2222222222", b"two")
    key = store.get_manifest(digest).load_key
    age(tmp_path)
    pins.pin(store, "c", MODEL, [other])
    assert run(store).revoked == 1
    why = Revocation(Cause.BY_HAND, "wrong answers")
    assert store.revoke("1111111111", key, digest, why) == 1
    assert store.revoke("1111111111", key, digest, Revocation(Cause.BY_HAND, "once more")) == 0
    assert store.revoke("1111111111", key, digest, Revocation(Cause.COLLECTED, "nothing pinned it")) == 0
    assert loads(Revocation, store.read(layout.revoked_key(store.root, "1111111111", key, 1))) == why
    pins.pin(store, "c", MODEL, [digest])
    settle(tmp_path)
    assert (run(store).kept, revoked(store, "1111111111")) == (2, [True])


def test_a_blob_that_a_pinned_engine_shares_stays(store: ArtifactStore, tmp_path: Path) -> None:
    kept, gone = publish(store, "1111111111", b"same"), publish(store, "2222222222", b"same")
    age(tmp_path)
    pins.pin(store, "c", MODEL, [kept])
    run(store)
    settle(tmp_path)
    assert run(store).deleted == 1
    assert plan_path(tmp_path, store, kept).read_bytes() == b"same"
    assert gone not in "".join(keys(store))


def test_what_dead_jobs_left_goes_when_it_is_old(store: ArtifactStore, tmp_path: Path) -> None:
    kept = publish(store)
    before = keys(store)
    blob = store.put_bytes(b"nobody names it")
    store.objects.put(f"{layout.blobs_prefix(store.root)}.{'a' * 32}", b"half a file")
    store.objects.put(layout.timing_prefix(store.root, "TensorRT", "8.6.0", "A10") + "b" * 64, b"a cache")
    pins.pin(store, "c", MODEL, [kept])
    run(store)
    assert any(blob.digest in key for key in keys(store))
    age(tmp_path)
    run(store)
    assert keys(store) == sorted([*before, *keys(store, "pins")])


def test_a_number_is_not_given_again_while_its_marker_is_there(store: ArtifactStore, tmp_path: Path) -> None:
    """Otherwise a new build would begin as a revoked one."""
    kept = publish(store, "1111111111", b"one")
    publish(store, "2222222222", b"two")
    age(tmp_path)
    pins.pin(store, "c", MODEL, [kept])
    run(store)
    settle(tmp_path)
    run(store)
    assert (store.builds("2222222222"), publish(store, "2222222222", b"new") != "") == ([], True)
    assert [(b.number, b.revoked) for b in store.builds("2222222222")] == [(2, False)]


def test_of_a_deleted_model_goes_what_only_it_pinned_whatever_its_age(store: ArtifactStore, tmp_path: Path) -> None:
    mine, shared, theirs = (publish(store, str(n) * 10, b"%d" % n) for n in (1, 2, 3))
    pins.pin(store, "c", MODEL, [mine, shared])
    pins.pin(store, "c", OTHER, [shared, theirs])
    rules = dataclasses.replace(RULES, only=("c", MODEL.uid))
    assert run(store, rules).waiting == 1
    settle(tmp_path)
    assert (run(store, rules).deleted, run(store, rules).deleted) == (1, 0)
    left = "".join(keys(store))
    assert (mine in left, shared in left, theirs in left) == (False, True, True)
    assert not keys(store, f"pins/c/{MODEL.uid}")
    assert len(keys(store, "pins")) == 1
    assert store.get_manifest(shared).plan.size == 1


def report_on(store: ArtifactStore, digest: str, *texts: bytes) -> None:
    """Figures with a report of these two contents."""
    report = GateReport(*(store.put_bytes(text) for text in texts))
    store.put_figures(dataclasses.replace(figures(digest), report=report), samples=200)


def test_with_a_deleted_model_go_the_reports_on_its_engines_and_no_others(store: ArtifactStore, tmp_path: Path) -> None:
    theirs = publish(store, "2222222222", b"two")
    pins.pin(store, "c", OTHER, [theirs])
    report_on(store, theirs, b"{2}", b"of both")
    left = keys(store)
    mine = publish(store, "1111111111", b"one")
    pins.pin(store, "c", MODEL, [mine])
    report_on(store, mine, b"{1}", b"of both")
    rules = dataclasses.replace(RULES, only=("c", MODEL.uid))
    run(store, rules)
    settle(tmp_path)
    run(store, rules)
    assert [key for key in keys(store) if not key.endswith("revoked")] == left


@pytest.mark.parametrize("steps", range(9))
def test_a_run_for_a_deleted_model_that_was_killed_leaves_no_report_to_the_next_one(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Only figures tell which files are reports on an engine."""
    mine = publish(store)
    pins.pin(store, "c", MODEL, [mine])
    report_on(store, mine, b"{1}", b"<1>")
    rules = dataclasses.replace(RULES, only=("c", MODEL.uid))
    run(store, rules)
    settle(tmp_path)
    done: list[str] = []
    remove = _Run._remove

    def killed(ours: _Run, entry: Entry) -> None:
        if len(done) == steps:
            raise KeyboardInterrupt
        done.append(entry.key)
        remove(ours, entry)

    with monkeypatch.context() as patch:
        patch.setattr(_Run, "_remove", killed)
        with pytest.raises(KeyboardInterrupt):
            run(store, rules)
    run(store, rules)
    assert [key for key in keys(store) if not key.endswith("revoked")] == []


def test_two_models_that_go_at_once_leave_nothing_of_what_they_share(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = publish(store)
    for model in (MODEL, OTHER):
        pins.pin(store, "c", model, [shared])
    mine, theirs = (dataclasses.replace(RULES, only=("c", model.uid)) for model in (MODEL, OTHER))
    beside: list[Summary] = []
    drop = _Run._drop_pins

    def drop_late(ours: _Run, cluster: str, uid: str) -> None:
        if uid == MODEL.uid:  # the other one's whole run falls between our last look and the end of our pins
            beside.append(run(store, theirs))
        drop(ours, cluster, uid)

    monkeypatch.setattr(_Run, "_drop_pins", drop_late)
    assert (run(store, mine).kept, beside[0].waiting) == (1, 1)
    settle(tmp_path)
    assert run(store, theirs).deleted == 1
    assert [key for key in keys(store) if not key.endswith("revoked")] == []


def test_an_engine_that_another_models_job_built_is_kept_for_all_that_asked_for_its_revision(
    store: ArtifactStore, tmp_path: Path
) -> None:
    """Two models of one recipe have one build Job, which pins for one of them; each has its own resolve Job."""
    for model in (MODEL, OTHER):
        pins.renew(store, "c", model, [], [], "1111111111")
    digest = publish(store, "1111111111", b"one")
    pins.pin(store, "c", MODEL, [digest])
    age(tmp_path)
    deleted = dataclasses.replace(RULES, only=("c", MODEL.uid))
    assert (run(store, deleted).kept, run(store).kept) == (1, 1)
    assert revoked(store, "1111111111") == [False]
    assert not keys(store, f"pins/c/{MODEL.uid}")
    assert run(store, dataclasses.replace(RULES, only=("c", OTHER.uid))).waiting == 1
    settle(tmp_path)
    assert run(store, dataclasses.replace(RULES, only=("c", OTHER.uid))).deleted == 1
    assert digest not in "".join(keys(store))


def test_a_job_that_is_told_what_lives_drops_its_old_pins_and_no_others(store: ArtifactStore, tmp_path: Path) -> None:
    old = pins.pin(store, "c", MODEL, ["a" * 64])
    age(tmp_path)
    young = pins.pin(store, "c", MODEL, ["b" * 64])
    foreign = pins.pin(store, "c", OTHER, ["c" * 64])
    os.utime(tmp_path / "engines" / foreign, (LONG_AGO, LONG_AGO))
    pins.renew(store, "c", MODEL, None, ["d" * 64], "0123456789")
    assert old in store.objects.list(f"{store.root}/pins/")
    pins.renew(store, "c", MODEL, ["e" * 64], ["f" * 64], "0123456789")
    left = set(store.objects.list(f"{store.root}/pins/"))
    assert old not in left
    assert {young, foreign} < left
    pinned = {digest for key in left for digest in loads(Pin, store.read(key)).digests}
    assert pinned == {"b" * 64, "c" * 64, "d" * 64, "e" * 64, "f" * 64}


def test_a_job_of_no_cluster_pins_nothing(store: ArtifactStore) -> None:
    pins.renew(store, "", MODEL, ["e" * 64], ["f" * 64], "0123456789")
    assert keys(store) == []


def job(store: ArtifactStore, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[JobResult, int]:
    storage = Storage("engines", endpoint=f"file://{folder}")
    task = CollectTask("ml", storage, "c", **{"delete": True, "grace_seconds": 86400, **changes})
    monkeypatch.setenv(TASK_ENV, dumps(task).decode())
    return main._run("collect")


def test_the_job_waits_until_what_it_has_put_out_of_use_may_go(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(main, "time", SimpleNamespace(sleep=lambda s: (slept.append(s), settle(tmp_path))))
    kept, _ = publish(store, "1111111111", b"one"), publish(store, "2222222222", b"two")
    age(tmp_path)
    pins.pin(store, "c", MODEL, [kept])
    result, code = job(store, tmp_path, monkeypatch, delete=False)
    assert (code, result.collect and result.collect.waiting, slept) == (JobExit.DONE, 1, [])
    result, code = job(store, tmp_path, monkeypatch)
    assert (code, slept) == (JobExit.DONE, [WAIT_SECONDS])
    assert result.collect is not None
    assert (result.collect.deleted, result.collect.kept, result.collect.waiting) == (1, 1, 0)
    assert "1 engines" in result.message


def test_the_wait_is_long_enough_where_the_stores_clock_tells_whole_seconds_only(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = float(int(time.time()))

    def slept(seconds: float) -> None:
        for marker in tmp_path.rglob("revoked"):
            os.utime(marker, (second + 0.95 - seconds,) * 2)

    monkeypatch.setattr(main, "time", SimpleNamespace(sleep=slept))
    monkeypatch.setattr(type(store.objects), "now", lambda _: second)
    kept, _ = publish(store, "1111111111", b"one"), publish(store, "2222222222", b"two")
    age(tmp_path)
    pins.pin(store, "c", MODEL, [kept])
    result, _ = job(store, tmp_path, monkeypatch)
    assert result.collect is not None
    assert (result.collect.deleted, result.collect.waiting) == (1, 0)


def test_the_job_of_a_deleted_model_removes_its_engine_and_its_pins(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "time", SimpleNamespace(sleep=lambda _: settle(tmp_path)))
    pins.pin(store, "c", MODEL, [publish(store)])
    for _ in range(2):  # the second is a retry after everything was done
        _, code = job(store, tmp_path, monkeypatch, model=MODEL)
        assert code == JobExit.DONE
        assert [key for key in keys(store) if not key.endswith("revoked")] == []


def test_the_job_says_that_nothing_is_pinned_and_is_not_tried_again(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store)
    result, code = job(store, tmp_path, monkeypatch)
    assert code == JobExit.REJECTED
    assert "no pin" in result.message
