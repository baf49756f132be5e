"""Which worker is hit, and what is forgiven before it is."""

from __future__ import annotations

import datetime
import threading
import time
from types import SimpleNamespace
from typing import Any

from chaos import actions, plan
from chaos.actions import Scene
from chaos.ledger import Ledger
from chaos.plan import Action

Json = dict[str, Any]
MODEL = "one"


def pod(name: str, *, ready_for: float = 3600.0, ready: bool = True, restarts: int = 0) -> Json:
    since = datetime.datetime.fromtimestamp(time.time() - ready_for, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    container = {"containerID": f"containerd://c-{name}", "state": {"running": {}}, "restartCount": restarts}
    return {
        "metadata": {"name": name, "uid": f"u-{name}", "namespace": "chaos"},
        "status": {
            "podIP": "10.0.0.1",
            "containerStatuses": [container],
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": since}],
        },
    }


class Stand:
    """A scene with these workers, and what was signalled and asked of the API server in it."""

    def __init__(self, *pods: Json) -> None:
        self.signalled: list[tuple[str, str]] = []
        self.asked: list[tuple[str, str]] = []
        self.ledger = Ledger()
        machine = SimpleNamespace(signal_in=self._signal)
        cluster = SimpleNamespace(items=lambda path, selector: list(pods), request=self._request)
        self.scene = Scene(cluster, machine, self.ledger, {}, threading.Event())  # type: ignore[arg-type]

    def does(self, kind: str, pick: float = 0.0) -> bool:
        return actions.perform(self.scene, Action(0.0, kind, MODEL, pick=pick))

    def _signal(self, container: str, number: int, words: str = "") -> int:
        assert self.ledger.excused(MODEL, time.time())  # before, not after
        self.signalled.append((container, words))
        return 7

    def _request(self, method: str, path: str, body: Json) -> None:
        self.asked.append((method, path))


def test_a_worker_is_killed_when_another_one_can_be_leant_on() -> None:
    stand = Stand(pod("a"), pod("b"))
    assert stand.does(plan.WORKER_KILL, pick=0.6)
    assert stand.signalled == [("c-b", "")]
    assert stand.ledger.missing(MODEL, time.time()) == {"u-b"}


def test_an_engine_host_is_a_process_of_its_own_in_the_workers_container() -> None:
    stand = Stand(pod("a"), pod("b"))
    assert stand.does(plan.HOST_KILL)
    assert stand.signalled == [("c-a", "trtmodel_worker.host")]


def test_nothing_is_done_to_a_worker_on_which_all_depends() -> None:
    for others in ((), (pod("b", ready=False),), (pod("b", ready_for=5.0),)):
        stand = Stand(pod("a"), *others)
        assert not stand.does(plan.WORKER_KILL)
        assert (stand.signalled, stand.ledger.missing(MODEL, time.time())) == ([], set())


def test_a_worker_that_was_hit_lately_is_none_to_lean_on() -> None:
    stand = Stand(pod("a"), pod("b"))
    assert stand.does(plan.HOST_KILL, pick=0.0)
    assert not stand.does(plan.WORKER_KILL, pick=0.9)
    assert stand.does(plan.WORKER_KILL, pick=0.0)  # the same one again


def test_no_worker_is_hit_while_nobody_could_replace_it() -> None:
    stand = Stand(pod("a"), pod("b"))
    stand.ledger.blind(30.0)
    assert not stand.does(plan.WORKER_POD)


def test_a_container_that_was_started_again_often_is_not_killed_but_its_pod_deleted() -> None:
    """The kubelet would wait for minutes before it starts it again."""
    stand = Stand(pod("a", restarts=2), pod("b"))
    assert stand.does(plan.WORKER_KILL)
    assert stand.signalled == []
    assert stand.asked == [("DELETE", "/api/v1/namespaces/chaos/pods/a")]
