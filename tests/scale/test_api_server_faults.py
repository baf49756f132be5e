"""Rollouts while the API server, or what stands before it, fails in every way that it may: each ends as it should, no
Job is made twice, and the operator asks no more often than a server in trouble can bear."""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faulty.proxy import Fault, FaultProxy, Request, lease
from hollow.operators import OperatorProcess
from hollow.plane import ControlPlane
from test_leaders import PLENTY, items, jobs_of, once_each, put, settled

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.night, pytest.mark.timeout(420)]

NAMES = [f"faulty-{n}" for n in range(6)]
FAULT_SECONDS = 8.0
OUTAGE_SECONDS = 30.0
STREAMS = 6  # TRTModels, and five kinds of children
MOST_IN_ONE = 240  # requests in any second, of whatever kind: a fast machine puts what six rollouts need into one (152)
MOST_IN_FIVE = 400


def a_watch(request: Request) -> bool:
    return request.is_watch


def a_write(request: Request) -> bool:
    return request.verb in ("POST", "PUT", "PATCH", "DELETE") and not lease(request)


def a_call(request: Request) -> bool:
    return not request.is_watch and not lease(request)


def a_list_or_watch(request: Request) -> bool:
    """Of all that is followed; a pass and the lease are none."""
    kinds = ("trtmodels", "jobs", "pods", "deployments", "configmaps", "services")
    return request.verb in ("GET", "WATCH") and request.path.rpartition("/")[2] in kinds


class Operator:
    """The process, begun again when it ends, as the kubelet would: soon the first time, then after ten seconds."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self._kubeconfig, self._folder = kubeconfig, folder
        self.starts = 0
        self._due = 0.0
        self._begin()

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()

    def _begin(self) -> None:
        self.starts += 1
        self.process = OperatorProcess(self._kubeconfig, self._folder, f"operator-{self.starts}")

    def tend(self) -> None:
        if self.process.process.poll() is None:
            return
        if not self._due:
            self._due = time.monotonic() + (1.0 if self.starts == 1 else 10.0)
        elif time.monotonic() > self._due:
            self._due = 0.0
            self._begin()

    def until(self, done: Callable[[], bool], seconds: float = PLENTY) -> float:
        began = time.monotonic()
        while not done():
            self.tend()
            assert time.monotonic() - began < seconds, f"not within {seconds} s:\n{self.process.log[-6000:]}"
            time.sleep(0.25)
        return time.monotonic() - began

    def lives_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, seconds + 60)


@pytest.fixture(scope="module")
def proxy(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    with FaultProxy(plane.url, tmp_path_factory.mktemp("proxy")) as running:
        yield running


@pytest.fixture(scope="module")
def operator(plane: ControlPlane, proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("operator")
    config = json.loads(plane.kubeconfig("operator").read_text())
    authority = base64.b64encode(proxy.ca.encode()).decode()
    config["clusters"][0]["cluster"] = {"server": proxy.url, "certificate-authority-data": authority}
    (folder / "kubeconfig").write_text(json.dumps(config))
    with Operator(folder / "kubeconfig", folder) as running:
        running.until(running.process.leads)
        put(plane, NAMES, "v0")
        running.until(lambda: settled(plane, NAMES, "v0"))
        yield running


@pytest.fixture
def steady(plane: ControlPlane, proxy: FaultProxy, operator: Operator) -> Iterator[Operator]:
    """One that leads, with nothing in its way; and so again afterwards."""
    operator.until(lambda: operator.process.leads() and proxy.watching() >= STREAMS and settled_now(plane))
    yield operator
    proxy.recover()


def settled_now(plane: ControlPlane) -> bool:
    """Each of the models serves what it asks for."""
    found = [m for m in items(plane) if m["metadata"]["name"] in NAMES]
    ready = [c for m in found for c in m["status"]["conditions"] if (c["type"], c["status"]) == ("Ready", "True")]
    return len(ready) == len(NAMES)


def promoted(model: dict[str, Any]) -> list[str]:
    """What became of the last rollout, and the one before."""
    return [f"{h['outcome']} {h['revision']}" for h in model["status"]["history"][:2]]


def roll_out_through(
    plane: ControlPlane, proxy: FaultProxy, operator: Operator, mark: str, trouble: Callable[[], object], seconds: float
) -> float:
    """Changes every model, begins the trouble amid the rollouts, ends it after so many seconds, and sees every rollout
    end well. Returns when the trouble began."""
    before = {m["metadata"]["name"]: promoted(m)[:1] for m in items(plane)}
    put(plane, NAMES, mark)
    operator.until(lambda: sum(jobs_of(plane, mark).values()) > 0)
    began, met, lives = time.monotonic(), proxy.hit, operator.starts
    trouble()
    operator.lives_for(seconds)
    proxy.recover()
    took = operator.until(lambda: settled(plane, NAMES, mark))
    told = {"hits": proxy.hit - met, "restarts": operator.starts - lives, "settled after": round(took, 1)}
    told |= {f"most in {s} s": proxy.most_in(s, began) for s in (1, 5)}
    told |= {"lists and watches in 5 s": proxy.most_in(5, began, a_list_or_watch)}
    print(f"\n{mark}: {told}")
    assert jobs_of(plane, mark) == once_each(NAMES)
    for model in items(plane):
        newest, earlier = promoted(model)
        assert newest.startswith("Promoted "), model["status"]
        assert [earlier] == before[model["metadata"]["name"]]
    assert proxy.most_in(1, began) <= MOST_IN_ONE
    assert proxy.most_in(5, began) <= MOST_IN_FIVE
    return began


@pytest.mark.parametrize(
    ("mark", "fault"),
    [
        ("conflicts", Fault(409, share=0.3, hits=a_write)),
        ("failures", Fault(500, share=0.3, hits=a_call)),
        ("lost-answers", Fault(500, share=0.3, hits=a_write, after=True)),
        ("slow-answers", Fault(delay=1.0, hits=a_call)),
    ],
)
def test_rollouts_end_well_although_calls_fail_now_and_then(
    plane: ControlPlane, proxy: FaultProxy, steady: Operator, mark: str, fault: Fault
) -> None:
    lives, met = steady.starts, proxy.hit
    roll_out_through(plane, proxy, steady, mark, lambda: faults(proxy, fault), FAULT_SECONDS)
    assert proxy.hit - met > 10
    assert steady.starts == lives


@pytest.mark.parametrize(
    ("mark", "fault"),
    [("all-fail", Fault(500, hits=a_call)), ("too-many", Fault(429, retry_after=3, hits=a_call))],
)
def test_a_server_that_refuses_everything_is_asked_seldom_and_rollouts_go_on_when_it_answers(
    plane: ControlPlane, proxy: FaultProxy, steady: Operator, mark: str, fault: Fault
) -> None:
    lives = steady.starts
    began = roll_out_through(plane, proxy, steady, mark, lambda: faults(proxy, fault), FAULT_SECONDS)
    refused = [r for r in proxy.seen if began + 2 < r.at < began + FAULT_SECONDS and not lease(r)]
    assert len(refused) <= 4 * (len(NAMES) + STREAMS), refused
    assert steady.starts == lives


@pytest.mark.parametrize(
    ("mark", "fault"),
    [
        ("cut", Fault(ends=0.0, hits=a_watch)),
        ("cut-late", Fault(ends=1.0, hits=a_watch)),
        ("torn", Fault(tears=True, hits=a_watch)),
        ("gone", Fault(410, ends=0.0, hits=a_watch)),
        ("failed", Fault(500, ends=0.0, hits=a_watch)),
    ],
)
def test_watches_that_end_at_once_are_opened_ever_more_seldom_and_no_change_is_lost(
    plane: ControlPlane, proxy: FaultProxy, steady: Operator, mark: str, fault: Fault
) -> None:
    def trouble() -> None:
        faults(proxy, fault)
        assert proxy.cut_watches() >= STREAMS

    lives = steady.starts
    began = roll_out_through(plane, proxy, steady, mark, trouble, FAULT_SECONDS)
    opened = [r for r in proxy.seen if began < r.at < began + FAULT_SECONDS and a_list_or_watch(r)]
    assert len(opened) <= 2 * 8 * STREAMS, len(opened)
    assert steady.starts == lives


def test_watches_on_which_nothing_comes_any_more_are_opened_again_and_no_change_is_lost(
    plane: ControlPlane, proxy: FaultProxy, steady: Operator
) -> None:
    """They are open, and all that happens meanwhile is told on them to nobody."""
    lives = steady.starts

    def trouble() -> None:
        assert proxy.hush_watches() >= STREAMS

    roll_out_through(plane, proxy, steady, "hushed", trouble, FAULT_SECONDS)
    assert steady.starts == lives


@pytest.mark.parametrize("how", ["refuse", "fall_silent"])
def test_an_outage_of_thirty_seconds_in_mid_rollout_loses_nothing(
    plane: ControlPlane, proxy: FaultProxy, steady: Operator, how: str
) -> None:
    lives = steady.starts
    roll_out_through(plane, proxy, steady, f"outage-{how}", getattr(proxy, how), OUTAGE_SECONDS)
    assert steady.starts == lives + 1  # it ended with its lease, and the next one waited for the server


def faults(proxy: FaultProxy, *now: Fault) -> None:
    proxy.faults = now
