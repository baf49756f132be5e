"""A pass reads the TRTModel as it was told of last, and never writes over what it did not read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes.api_server import FakeApiServer
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.cluster import KubernetesCluster
from trtmodel_operator.adapters.models import KeptModels
from trtmodel_operator.ports import Conflict, Json, Key
from with_api import with_api

KEY: Key = ("ml", "magika")


def model(uri: str = "s3://models/v1") -> Json:
    meta = {"namespace": "ml", "name": "magika"}
    return {
        "apiVersion": "trtmodel.io/v1alpha1",
        "kind": "TRTModel",
        "metadata": meta,
        "spec": {"source": {"uri": uri}},
    }


class Scene:
    def __init__(self, server: FakeApiServer, api: Api) -> None:
        self.server, self.models = server, KeptModels()
        self.cluster = KubernetesCluster(api, models=self.models)

    def gets(self) -> int:
        return sum(s.method == "GET" and s.path.endswith("/magika") for s in self.server.seen)

    async def source(self) -> str:
        found = await self.cluster.get_model(KEY)
        return "" if found is None else str(found["spec"]["source"]["uri"])


def play(server: FakeApiServer, scene: Callable[[Scene], Awaitable[None]]) -> None:
    with_api(server, lambda api: scene(Scene(server, api)))


def test_what_the_watch_told_and_what_was_written_is_read_without_a_call(api_server: FakeApiServer) -> None:
    async def scene(s: Scene) -> None:
        s.models.put(s.server.put(model()))
        found = await s.cluster.get_model(KEY)
        assert found is not None
        await s.cluster.write_memory(KEY, found["metadata"]["resourceVersion"], {"sequence": 3})
        await s.cluster.write_status(KEY, {"phase": "Serving"})
        found = await s.cluster.get_model(KEY)
        assert found is not None
        assert found["status"] == {"rollout": {"sequence": 3}, "phase": "Serving"}
        assert "managedFields" not in found["metadata"]
        assert s.gets() == 0

    play(api_server, scene)


def test_what_somebody_else_wrote_meanwhile_refuses_the_memory_and_is_read_anew(api_server: FakeApiServer) -> None:
    async def scene(s: Scene) -> None:
        stored = s.server.put(model())
        s.models.put(stored)
        s.server.put(model("s3://models/v2"))
        with pytest.raises(Conflict):
            await s.cluster.write_memory(KEY, stored["metadata"]["resourceVersion"], {"sequence": 3})
        assert await s.source() == "s3://models/v2"
        assert s.gets() == 1

    play(api_server, scene)


def test_a_list_shows_what_the_watch_did_not_tell(api_server: FakeApiServer) -> None:
    async def scene(s: Scene) -> None:
        s.models.put(s.server.put(model()))
        s.server.put(model("s3://models/v2"))
        assert await s.source() == "s3://models/v1"
        await s.cluster.list_models()
        assert await s.source() == "s3://models/v2"

    play(api_server, scene)


def test_a_model_that_is_gone_is_not_kept_for_ever_by_a_late_answer_to_a_write(api_server: FakeApiServer) -> None:
    async def scene(s: Scene) -> None:
        late = s.server.put(model())
        s.server.delete("trtmodels", "ml", "magika")
        s.models.put(late)
        with pytest.raises(Conflict):
            await s.cluster.write_status(KEY, {"phase": "Serving"})
        assert await s.cluster.get_model(KEY) is None
        s.models.put(late)
        await s.cluster.list_models()
        assert await s.cluster.get_model(KEY) is None

    play(api_server, scene)


@pytest.mark.parametrize("asked", ["a write", "a question"])
def test_an_answer_that_comes_after_the_end_of_its_model_is_not_kept(api_server: FakeApiServer, asked: str) -> None:
    async def scene(s: Scene) -> None:
        stored = s.server.put(model())
        if asked == "a write":
            s.models.put(stored)
        real = s.cluster._api.apply if asked == "a write" else s.cluster._api.get

        async def slow(*args: Any, **kwargs: Any) -> Any:
            answer = await real(*args, **kwargs)
            s.server.delete("trtmodels", "ml", "magika")
            s.models.drop(KEY)  # as at the event DELETED
            return answer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(s.cluster._api, "apply" if asked == "a write" else "get", slow)
            if asked == "a write":
                await s.cluster.write_status(KEY, {"phase": "Serving"})
            else:
                assert await s.cluster.get_model(KEY) is not None
        assert len(s.models) == 0
        assert await s.cluster.get_model(KEY) is None

    play(api_server, scene)


def test_what_was_asked_for_is_kept_and_so_are_the_answers_to_writes_after_it(api_server: FakeApiServer) -> None:
    async def scene(s: Scene) -> None:
        s.server.put(model())
        assert await s.source() == "s3://models/v1"
        await s.cluster.write_status(KEY, {"phase": "Serving"})
        found = await s.cluster.get_model(KEY)
        assert found is not None
        assert (found["status"], s.gets()) == ({"phase": "Serving"}, 1)

    play(api_server, scene)


def test_an_older_event_changes_nothing() -> None:
    kept = KeptModels()
    newer, older = model("s3://models/v2"), model()
    newer["metadata"]["resourceVersion"], older["metadata"]["resourceVersion"] = "12", "9"
    kept.put(newer)
    kept.put(older)
    found = kept.get(KEY)
    assert found is not None
    assert found["spec"]["source"]["uri"] == "s3://models/v2"
    assert kept.version(KEY) == "12"
