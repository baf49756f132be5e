"""Which worker is hit, and what is forgiven before it is."""

from __future__ import annotations

import datetime
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from chaos import actions, machine, plan
from chaos.actions import Scene
from chaos.ledger import Ledger
from chaos.plan import Action

Json = dict[str, Any]
MODEL = "one"


def pod(
    name: str, *, ready_for: float = 3600.0, ready: bool = True, restarts: int = 0, address: str = "10.0.0.1"
) -> Json:
    since = datetime.datetime.fromtimestamp(time.time() - ready_for, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    container = {"containerID": f"containerd://c-{name}", "state": {"running": {}}, "restartCount": restarts}
    return {
        "metadata": {"name": name, "uid": f"u-{name}", "namespace": "chaos"},
        "status": {
            "podIP": address,
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
        self.cuts: list[tuple[str, ...]] = []
        self.operators: list[list[Json]] = []  # at one look after the other; the last one goes on
        below = SimpleNamespace(
            signal_in=self._signal, cut=lambda *pair: self.cuts.append(pair), mend=lambda *pair: len(pair)
        )
        cluster = SimpleNamespace(items=lambda path, selector: self._pods(path, pods), request=self._request)
        self.scene = Scene(cluster, below, self.ledger, {}, threading.Event())  # type: ignore[arg-type]

    def does(self, kind: str, pick: float = 0.0, seconds: float = 0.0) -> bool:
        return actions.perform(self.scene, Action(0.0, kind, MODEL, seconds, pick))

    def _pods(self, path: str, workers: tuple[Json, ...]) -> list[Json]:
        if path != f"/api/v1/namespaces/{actions.SYSTEM}/pods":
            return list(workers)
        if len(self.operators) == 1:
            self.scene.over.set()
        return self.operators.pop(0)

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
    assert set(stand.ledger.missing(MODEL, time.time())) == {"u-b"}


def test_an_engine_host_is_a_process_of_its_own_in_the_workers_container() -> None:
    stand = Stand(pod("a"), pod("b"))
    assert stand.does(plan.HOST_KILL)
    assert stand.signalled == [("c-a", "trtmodel_worker.host")]


def test_nothing_is_done_to_a_worker_on_which_all_depends() -> None:
    for others in ((), (pod("b", ready=False),), (pod("b", ready_for=5.0),)):
        stand = Stand(pod("a"), *others)
        assert not stand.does(plan.WORKER_KILL)
        assert (stand.signalled, stand.ledger.missing(MODEL, time.time())) == ([], {})


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


def test_a_worker_that_is_cut_off_is_so_from_operators_that_come_later_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "AGAIN_SECONDS", 0.01)
    stand = Stand(pod("w", address="10.0.0.9"))
    first, other, later = (pod(name, address=f"10.0.0.{n}") for n, name in enumerate("abc", 1))
    stand.operators = [[first, other], [other], [other, later, pod("d", address="")]]
    assert stand.does(plan.WORKER_CUT, seconds=60.0)
    assert sorted(stand.cuts) == [("10.0.0.1", "10.0.0.9"), ("10.0.0.2", "10.0.0.9"), ("10.0.0.3", "10.0.0.9")]
    assert stand.ledger.packets == {plan.WORKER_CUT: 6}


def test_an_operator_that_stands_still_and_is_not_started_again_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def stood(*, goes_on: bool, blind: bool = False) -> dict[str, int]:
        stand = Stand()
        stand.operators = [[pod("a")]]
        stand.scene.cluster.request = lambda *_: {"spec": {}}  # type: ignore[method-assign]
        stand.scene.machine.thaw = lambda _: goes_on  # type: ignore[method-assign]
        stand.ledger.excuse(MODEL, 60.0)
        if blind:
            stand.ledger.blind(1.0)
        assert stand.does(plan.OPERATOR_FREEZE, seconds=60.0)
        return dict(stand.ledger.broken)

    assert stood(goes_on=True) == {}
    monkeypatch.setattr(actions, "HUNG_SECONDS", 0.0)
    assert stood(goes_on=True) == {"what hangs is started again": 1}
    assert stood(goes_on=False) == {}
    assert stood(goes_on=True, blind=True) == {}


def test_packets_that_a_cut_has_dropped_are_counted() -> None:
    """As iptables 1.8 tells them."""
    end = "-m comment --comment trtmodel-chaos -c"
    rules = f"""-P FORWARD ACCEPT -c 0 0
-A FORWARD -s 10.0.0.1/32 -d 10.0.0.9/32 {end} 12 720 -j DROP
-A FORWARD -s 10.0.0.9/32 -d 10.0.0.1/32 {end} 3 180 -j DROP
-A FORWARD -s 10.0.0.2/32 -d 10.0.0.9/32 {end} 500 30000 -j DROP
-A FORWARD -s 10.0.0.1/32 -d 10.0.0.9/32 -c 900 54000 -j ACCEPT
-A FORWARD -d 10.0.0.7/32 {end} 40 2400 -j DROP"""
    assert machine._dropped(rules, "10.0.0.1", "10.0.0.9") == 15
    assert machine._dropped(rules, "10.0.0.7", "") == 40
    assert machine._dropped("-P FORWARD ACCEPT -c 0 0", "10.0.0.7", "") == 0


def test_what_was_done_can_be_asked_for_and_what_was_skipped_was_not_done() -> None:
    stand, begin = Stand(pod("a"), pod("b")), time.time()
    assert stand.does(plan.HOST_KILL)
    lonely = Stand(pod("a"))
    assert not lonely.does(plan.HOST_KILL)
    kinds = {plan.HOST_KILL, plan.WORKER_KILL}
    assert stand.ledger.done_since(kinds, MODEL, begin)
    assert not stand.ledger.done_since(kinds, "two", begin)
    assert not stand.ledger.done_since(kinds, MODEL, time.time() + 1)
    assert not stand.ledger.done_since({plan.WORKER_KILL}, MODEL, begin)
    assert not lonely.ledger.done_since(kinds, MODEL, begin)


def test_what_watches_the_api_server_is_started_again_when_it_is_back_and_its_absence_is_forgiven_until_then() -> None:
    stand, done = Stand(), list[str]()
    below = stand.scene.machine
    below.alone = threading.Lock()
    below.kill_component = lambda name: len(done.append(f"kill {name}") or done)  # type: ignore[func-returns-value, method-assign]
    below.start_components = lambda: done.append("start")  # type: ignore[method-assign]
    below.restart_followers = lambda: done.append("restart")  # type: ignore[method-assign]
    stand.scene.cluster.text = lambda path: done.append(path) or "ok"  # type: ignore[func-returns-value, method-assign]
    stand.ledger.excuse(MODEL, 20.0)
    begin = time.time()
    assert stand.does(plan.API_SERVER, seconds=0.01)
    assert done == ["kill kube-apiserver", "start", "/readyz", "restart"]
    assert not below.alone.locked()
    assert stand.ledger.excused(MODEL, begin + 35)
    assert not stand.ledger.sees(time.time())
    done.clear()
    assert stand.does(plan.KUBELET, seconds=0.01)
    assert done == ["kill kubelet", "start"]


def test_a_component_whose_port_is_not_free_yet_is_started_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def start(_: machine.Machine) -> None:
        tried.append(1)
        if len(tried) < 3:
            raise machine.ClusterError("another program listens already")

    monkeypatch.setattr(machine.Machine, "_start", start)
    object.__new__(machine.Machine).start_components()
    assert len(tried) == 3
    monkeypatch.setattr(machine, "DEAD_SECONDS", 0.0)
    tried.clear()
    with pytest.raises(machine.ClusterError):
        object.__new__(machine.Machine).start_components()
