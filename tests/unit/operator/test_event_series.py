"""Events that are told again and again."""

from __future__ import annotations

import pytest
from fakes.api_server import FakeApiServer
from trtmodel_operator.adapters import events
from trtmodel_operator.adapters.api import Api
from trtmodel_operator.adapters.events import EventPoster
from trtmodel_operator.ports import Json
from with_api import with_api

MODEL = {
    "apiVersion": "trtmodel.io/v1alpha1",
    "kind": "TRTModel",
    "metadata": {"namespace": "ml", "name": "magika", "uid": "uid-1"},
}


def tell(server: FakeApiServer, *said: str, dropped_before: int = 0) -> list[Json]:
    """The events that lie there when these were told one after the other, the oldest first. Before the one with the
    number `dropped_before` all of them are deleted."""

    async def scene(api: Api) -> None:
        poster = EventPoster(api, "trtmodel.io/operator", "operator-1", "trtmodel-operator")
        for number, message in enumerate(said):
            for event in server.all("events") if dropped_before and number == dropped_before else ():
                server.delete("events", "ml", event["metadata"]["name"])
            poster.post(MODEL, "NoWorkerServes", message, warning=True)
            await poster._waiting.join()
        await poster.close()

    with_api(server, scene)
    return sorted(server.all("events"), key=lambda e: str(e["eventTime"]))


def test_what_is_told_again_soon_is_counted_in_the_first_one(api_server: FakeApiServer) -> None:
    (event,) = tell(api_server, "no worker serves", "no worker serves", "no worker serves")
    assert event["note"] == "no worker serves"
    assert event["series"]["count"] == 3
    assert event["series"]["lastObservedTime"] > event["eventTime"]


def test_other_words_are_another_event(api_server: FakeApiServer) -> None:
    told = tell(api_server, "a", "b", "a")
    assert [(e["note"], (e.get("series") or {}).get("count")) for e in told] == [("a", 2), ("b", None)]


def test_what_is_told_again_much_later_is_an_event_of_its_own(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SERIES_SECONDS", 0.0)
    assert [e["note"] for e in tell(api_server, "a", "a")] == ["a", "a"]


def test_an_event_that_the_api_server_dropped_meanwhile_is_posted_anew(api_server: FakeApiServer) -> None:
    (event,) = tell(api_server, "a", "a", "a", dropped_before=2)
    assert event["note"] == "a"
    assert "series" not in event


def test_no_more_series_are_remembered_than_the_bound(
    api_server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SERIES_KEPT", 2)
    told = tell(api_server, "a", "b", "c", "c", "a")
    assert [e["note"] for e in told] == ["a", "b", "c", "a"]
