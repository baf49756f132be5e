"""What is kept of children: the same as a list shows, less what no pass reads, and nothing that is stale."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from fakes.api_server import FakeApiServer, Seen, refusal
from trtmodel_operator.adapters import children as adapter
from trtmodel_operator.adapters import informer
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.children import KeptChildren
from trtmodel_operator.adapters.cluster import KubernetesCluster
from trtmodel_operator.adapters.informer import Kept
from trtmodel_operator.manifests import ENV_MODEL_UID
from trtmodel_operator.ports import Json, Key
from with_api import with_api

KEY: Key = ("ml", "magika")
LABELS = {"trtmodel.io/model": "magika"}


class Scene:
    def __init__(self, server: FakeApiServer, api: Api) -> None:
        self.server, self.changed = server, list[tuple[str, Key]]()
        self.kept = KeptChildren(api, (), lambda kind, key: self.changed.append((kind, key)))
        self.cluster = KubernetesCluster(api, kept=self.kept)

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(15):
            while not condition():  # noqa: ASYNC110 - what it waits for is no event
                await asyncio.sleep(0.01)

    def names(self, kind: str, key: Key = KEY) -> list[str]:
        return [c["metadata"]["name"] for c in (self.kept.children(key) or {}).get(kind, ())]

    def lists(self) -> int:
        return sum("limit" in s.query for s in self.server.seen)

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.kept.run())
        try:
            await self.kept.ready()
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def play(server: FakeApiServer, scene: Callable[[Scene], Awaitable[None]]) -> None:
    with_api(server, lambda api: scene(Scene(server, api)))


def pod(name: str, *, labels: Json | None = None, **status: Any) -> Json:
    container = {
        "name": "worker",
        "image": "worker:1",
        "args": ["serve"],
        "env": [{"name": ENV_MODEL_UID, "value": "uid-1"}, {"name": "OTHER", "value": "x" * 100}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "ml", "name": name, "labels": labels or LABELS},
        "spec": {"nodeName": "n1", "containers": [container], "tolerations": [{"key": "x"}]},
        "status": {"podIP": "10.0.0.1", **status},
    }


def job(name: str, waiting: str = "magika", maker: str = "magika", **status: Any) -> Json:
    labels = {"trtmodel.io/model": maker, f"model.trtmodel.io/{waiting}": "", "trtmodel.io/role": "job"}
    spec = {"suspend": False, "template": {"spec": {"containers": [{"name": "build", "env": []}]}}}
    meta = {"namespace": "ml", "name": name, "uid": f"uid-{name}", "labels": labels}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec, "status": status}


def test_children_are_kept_as_they_come_change_and_go_and_each_time_their_model_is_named(
    api_server: FakeApiServer,
) -> None:
    async def scene(s: Scene) -> None:
        s.server.put(pod("before"))
        async with s.watching():
            assert s.names("Pod") == ["before"]
            assert s.changed == [("Pod", KEY)]
            s.server.put(pod("after"))
            await s.until(lambda: s.names("Pod") == ["before", "after"])
            s.server.put(pod("before", phase="Failed"))
            await s.until(lambda: len(s.changed) == 3)
            s.server.delete("pods", "ml", "before")
            await s.until(lambda: s.names("Pod") == ["after"])
            assert s.changed == [("Pod", KEY)] * 4

    play(api_server, scene)


def test_a_pass_lists_nothing_while_what_is_kept_is_fresh_and_for_itself_when_it_is_not(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(s: Scene) -> None:
        s.server.put(pod("worker"))
        async with s.watching():
            before = s.lists()
            assert [p["metadata"]["name"] for p in (await s.cluster.children(KEY))["Pod"]] == ["worker"]
            assert s.lists() == before
            monkeypatch.setattr(informer, "SILENCE", 0.0)
            assert [p["metadata"]["name"] for p in (await s.cluster.children(KEY))["Pod"]] == ["worker"]
            assert s.lists() == before + 5

    play(api_server, scene)


def test_what_no_pass_reads_is_not_kept_and_what_it_reads_is() -> None:
    kept = Kept("Pod")
    whole = pod("worker", phase="Running")
    whole["metadata"] |= {"resourceVersion": "1", "managedFields": [{"manager": "kubelet"}]}
    kept.put(whole)
    (found,) = kept.of(KEY)
    assert found["status"] == whole["status"]
    assert found["spec"] == {
        "nodeName": "n1",
        "containers": [{"name": "worker", "image": "worker:1", "env": [{"name": ENV_MODEL_UID, "value": "uid-1"}]}],
    }
    assert found["metadata"] == {k: v for k, v in whole["metadata"].items() if k != "managedFields"}


def test_a_build_is_kept_for_everyone_who_waits_for_it_with_the_pods_of_its_maker(api_server: FakeApiServer) -> None:
    async def scene(s: Scene) -> None:
        s.server.put(job("shared", waiting="other"))
        s.server.put(pod("shared-1", labels=LABELS | {"batch.kubernetes.io/job-name": "shared"}))
        async with s.watching():
            assert s.names("Job", ("ml", "other")) == ["shared"]
            assert s.names("Pod", ("ml", "other")) == ["shared-1"]
            assert s.names("Job") == []  # who made it waits for it no more
            assert {key for _, key in s.changed} == {KEY, ("ml", "other")}

    play(api_server, scene)


def test_a_watch_that_is_too_old_lists_again_and_finds_what_went_meanwhile(api_server: FakeApiServer) -> None:
    async def scene(s: Scene) -> None:
        s.server.put(pod("stays"))
        s.server.put(pod("goes"))
        refused = iter([True])

        async def fault(seen: Seen) -> Any:
            if seen.query.get("watch") and seen.path.endswith("/pods") and next(refused, False):
                await s.server._remove(("", "pods", "ml", "goes"), silently=True)
                return refusal(410, "too old resource version")
            return None

        s.server.fault = fault
        async with s.watching():
            await s.until(lambda: s.names("Pod") == ["stays"])
            assert s.changed.count(("Pod", KEY)) == 3  # came, came, went

    play(api_server, scene)


def test_while_a_kind_is_listed_again_passes_go_on_with_what_is_kept(api_server: FakeApiServer) -> None:
    """They listed for themselves, five lists each, and the API server that says 410 is the one in trouble."""

    async def scene(s: Scene) -> None:
        believed: list[bool] = []

        async def fault(seen: Seen) -> Any:
            if not seen.path.endswith("/pods"):
                return None
            if seen.query.get("watch"):
                return refusal(410, "too old resource version") if s.kept.fresh() else refusal(500)
            believed.append(s.kept.fresh())
            return None

        s.server.fault = fault
        async with s.watching():
            await s.until(lambda: len(believed) >= 3)
            assert believed == [False, *[True] * (len(believed) - 1)]

    play(api_server, scene)


def test_a_watch_that_says_nothing_is_opened_again_where_it_ended(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer, "OPEN_AGAIN", 0.3)

    async def scene(s: Scene) -> None:
        def opened() -> list[Seen]:
            return [x for x in s.server.seen if x.query.get("watch") and x.path.endswith("/pods")]

        async with s.watching():
            await s.until(lambda: len(opened()) >= 3)
            assert sum("limit" in x.query and x.path.endswith("/pods") for x in s.server.seen) == 1
            assert s.kept.trouble() == ""
            monkeypatch.setattr(adapter, "DEAD", 0.0)
            assert "nothing was heard of" in s.kept.trouble()

    play(api_server, scene)


def test_a_kind_of_which_the_api_server_has_nothing_to_tell_stays_believed_while_its_watch_can_be_opened(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends no bookmark before the first event of a kind: passes listed for themselves, five lists each."""
    monkeypatch.setattr(informer, "OPEN_AGAIN", 0.2)

    async def scene(s: Scene) -> None:
        def opened() -> int:
            return sum(x.query.get("watch") == "1" and x.path.endswith("/jobs") for x in s.server.seen)

        async with s.watching():
            began = time.monotonic()
            await s.until(lambda: opened() >= 4)
            assert s.kept._informers["Job"].silence() < time.monotonic() - began

    play(api_server, scene)


def test_the_answer_to_a_write_is_seen_by_the_next_pass_whenever_the_watch_tells_of_it(
    api_server: FakeApiServer,
) -> None:
    async def scene(s: Scene) -> None:
        s.server.fault = lambda seen: refusal(500) if seen.query.get("watch") else None
        async with s.watching():
            await s.cluster.create_job(job("made"))
            assert s.names("Job") == ["made"]

    play(api_server, scene)


def test_an_event_that_is_older_than_what_is_held_changes_nothing() -> None:
    kept, newer, older = Kept("Pod"), pod("worker", phase="Running"), pod("worker", phase="Pending")
    newer["metadata"]["resourceVersion"], older["metadata"]["resourceVersion"] = "12", "9"
    assert kept.put(newer)
    assert not kept.put(older)
    assert not kept.remove(older["metadata"])
    assert [p["status"]["phase"] for p in kept.of(KEY)] == ["Running"]


def test_a_job_that_is_seen_to_have_ended_before_its_pod_is_not_taken_for_one_without_a_result(
    api_server: FakeApiServer,
) -> None:
    """Two watches have no common order: the Job's may be ahead."""
    ended: Json = {"conditions": [{"type": "Complete", "status": "True"}]}
    told = {"containerStatuses": [{"state": {"terminated": {"exitCode": 0, "message": "{}"}}}]}

    async def scene(s: Scene) -> None:
        async with s.watching():
            running = pod("build-1", labels=LABELS | {"batch.kubernetes.io/job-name": "build"})
            running["metadata"]["ownerReferences"] = [{"uid": "uid-build", "controller": True}]
            s.server.put(running)
            s.server.put(job("build", **ended))
            await s.until(lambda: s.names("Job") and s.names("Pod"))
            s.server.put({**running, "status": told}, silently=True)
            found = await s.cluster.children(KEY)
            assert [p["status"].get("containerStatuses") for p in found["Pod"]] == [told["containerStatuses"]]

    play(api_server, scene)


@pytest.mark.parametrize("seen", [0, 1], ids=["the last try is not seen", "the last try is seen to run"])
def test_what_an_older_try_said_is_not_taken_for_the_result_of_one_whose_end_is_not_seen_yet(
    api_server: FakeApiServer, seen: int
) -> None:
    def ends(code: int) -> Json:
        return {"containerStatuses": [{"state": {"terminated": {"exitCode": code, "message": "{}"}}}]}

    async def scene(s: Scene) -> None:
        async with s.watching():
            old, new = (pod(n, labels=LABELS | {"batch.kubernetes.io/job-name": "build"}) for n in ("one", "two"))
            for n, one in enumerate((old, new)):
                one["metadata"]["ownerReferences"] = [{"uid": "uid-build", "controller": True}]
                one["metadata"]["creationTimestamp"] = f"2026-01-01T00:0{n}:00Z"
            s.server.put({**old, "status": ends(1)})
            if seen:
                s.server.put(new)
            s.server.put(job("build", failed=1, succeeded=1, conditions=[{"type": "Complete", "status": "True"}]))
            await s.until(lambda: s.names("Job") and len(s.names("Pod")) == 1 + seen)
            s.server.put({**new, "status": ends(0)}, silently=True)
            found = {p["metadata"]["name"]: p["status"] for p in (await s.cluster.children(KEY))["Pod"]}
            assert found["two"] == ends(0)

    play(api_server, scene)


def test_jobs_that_ended_are_not_looked_at_again(api_server: FakeApiServer) -> None:
    async def scene(s: Scene) -> None:
        s.server.put(job("runs"))
        s.server.put(job("ended", conditions=[{"type": "Complete", "status": "True"}]))
        assert [j["metadata"]["name"] for j in await s.cluster.unfinished_jobs()] == ["runs"]
        async with s.watching():
            before = s.lists()
            assert [j["metadata"]["name"] for j in await s.cluster.unfinished_jobs()] == ["runs"]
            s.server.put(job("runs", conditions=[{"type": "Failed", "status": "True"}]))
            await s.until(lambda: s.kept.unfinished_jobs() == [])
            assert s.lists() == before

    play(api_server, scene)
