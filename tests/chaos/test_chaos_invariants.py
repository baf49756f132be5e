"""That a broken promise is seen, and what chaos itself did is forgiven and nothing else."""

from __future__ import annotations

import asyncio
import datetime
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from trtmodel_contract.control import BootPointer, PointerEntry, SignedArtifact
from trtmodel_contract.identity import ModelRef, Storage
from trtmodel_contract.signing import Signature

from chaos import plan, run, sources, traffic, watch
from chaos.ledger import Ledger
from chaos.subject import Subject, applied
from chaos.traffic import Traffic

Json = dict[str, Any]
MODEL = "one"
BEGIN = time.time()
EXPECTED = {tuple(row): scores for row, scores in sources.rows()}


def source(name: str) -> Json:
    return {"source": {"uri": f"s3://e2e-models/chaos/{name}.onnx"}}


def model(spec: str = "g3", reason: str = "Serving", stable: str = "aaa", available: str = "True") -> Json:
    status = "True" if reason == "Serving" else "False"
    told = {"Ready": (status, reason), "Available": (available, "Serving")}
    conditions = [
        {"type": kind, "status": s, "reason": r, "message": "", "observedGeneration": 1}
        for kind, (s, r) in told.items()
    ]
    rollout = {"stable": {"revision": stable}}
    return {
        "metadata": {"generation": 1},
        "spec": source(spec),
        "status": {"conditions": conditions, "rollout": rollout},
    }


def pod(
    name: str, *, ready: bool = True, role: str = "worker", phase: str = "Running", made: float = 0.0, restarts: int = 0
) -> Json:
    since = datetime.datetime.fromtimestamp(made, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "metadata": {"name": name, "uid": name, "labels": {"trtmodel.io/role": role}, "creationTimestamp": since},
        "status": {
            "phase": phase,
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"restartCount": restarts}],
        },
    }


class Promised:
    name = MODEL

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self.trusted = dict.fromkeys(range(10), BEGIN)

    def floor(self, at: float, patience: float) -> int:
        return self._floor


# ----------------------------------------------------------------------------------------------------------- workers


def looked(ledger: Ledger, floor: int, ready: int, *, times: int = 2, found: Json | None = None) -> dict[str, int]:
    """What a watch finds broken in `times` looks that lie far apart."""
    eye = watch.Watch({}, None, ledger)  # type: ignore[arg-type]
    for n in range(times):
        workers = [pod(f"w{i}") for i in range(ready)] + [pod("late", ready=False)]
        eye._look(Promised(floor), found or model(), workers, time.time() + n * watch.LASTING_SECONDS)  # type: ignore[arg-type]
    return dict(ledger.broken)


def test_a_worker_that_is_missing_for_longer_than_a_moment_breaks_the_promise_once() -> None:
    assert looked(Ledger(), floor=2, ready=1, times=5) == {"fewer ready workers than promised": 1}
    assert looked(Ledger(), floor=2, ready=1, times=1) == {}
    assert looked(Ledger(), floor=2, ready=2) == {}


def test_a_worker_that_chaos_hit_may_be_missing_and_no_other_one() -> None:
    ledger = Ledger()
    ledger.hit(MODEL, "w9")
    ledger.hit(MODEL, "w9")
    ledger.hit("two", "x1")
    assert looked(ledger, floor=2, ready=1) == {}
    assert looked(ledger, floor=2, ready=0) == {"fewer ready workers than promised": 1}


def test_a_worker_that_was_hit_and_is_back_excuses_no_other_one() -> None:
    now = time.time()
    hit = {"a": now - 30}
    assert watch.lacking(hit, [pod("a", ready=False), pod("b")]) == 1
    assert watch.lacking(hit, [pod("a"), pod("b", ready=False)]) == 0
    assert watch.lacking(hit, [pod("b")]) == 1  # it was deleted
    assert watch.lacking(hit, [pod("b"), pod("c", ready=False, made=now - 20)]) == 1
    assert watch.lacking(hit, [pod("b", ready=False), pod("c", made=now - 20)]) == 0
    assert watch.lacking({"a": now - 30, "b": now - 10}, [pod("c", made=now - 20)]) == 1
    assert watch.lacking(hit, [pod("a", ready=False), pod("b"), pod("c", made=now - 20)]) == 1  # asked for, not instead


def test_a_worker_that_falls_over_by_itself_is_seen_and_one_that_chaos_hit_is_not() -> None:
    ledger = Ledger()
    eye = watch.Watch({}, None, ledger)  # type: ignore[arg-type]
    eye._look_at_restarts(MODEL, [pod("a", restarts=1), pod("b"), pod("begins", ready=False)])
    assert ledger.broken == {}
    ledger.hit(MODEL, "b")
    eye._look_at_restarts(MODEL, [pod("a", restarts=1), pod("b", restarts=1), pod("begins", restarts=4)])
    assert ledger.broken == {}
    eye._look_at_restarts(MODEL, [pod("a", restarts=2, ready=False), pod("b", restarts=2)])
    assert ledger.broken == {"a worker that was left alone goes on": 1}


def test_a_worker_is_asked_itself_while_nobody_can_tell_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"a": "", "b": "503: draining", "hit": "TimeoutError", "late": "503: loading"}
    monkeypatch.setattr(watch.Watch, "_asked", lambda self, p: said[p["metadata"]["name"]])
    ledger = Ledger()
    ledger.hit(MODEL, "hit")
    begin = time.time()
    workers = [pod("a"), pod("hit"), pod("late", ready=False)]
    for found in (workers, [*workers, pod("b")]):
        eye = watch.Watch({}, None, ledger)  # type: ignore[arg-type]
        for n in range(3):
            eye._look_at_workers(MODEL, found, begin + n * watch.LASTING_SECONDS)
        assert eye.looks_at_workers == 3
        assert ledger.broken == ({} if found is workers else {watch.NOT_READY: 1})


def test_a_watch_that_cannot_look_breaks_the_run_and_goes_on() -> None:
    class Odd:
        name, looked = MODEL, 0

        def model(self) -> Json:
            self.looked += 1
            raise KeyError("no such field")

    ledger, odd = Ledger(), Odd()
    kept = SimpleNamespace(keep_logs=lambda _: None)
    eye = watch.Watch({MODEL: odd}, kept, ledger)  # type: ignore[dict-item, arg-type]
    eye.start()
    deadline = time.monotonic() + 30
    while odd.looked < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    eye.stop()
    assert odd.looked >= 2
    assert set(ledger.broken) == {"all can be looked at"}


def test_what_boot_pointers_name_is_kept_with_the_time_and_one_that_cannot_be_read_is_told() -> None:
    signed = SignedArtifact("r", "d" * 64, Signature("k", "s"))
    stable = PointerEntry("r", {"key": signed})
    text = BootPointer(ModelRef("n", MODEL, "u"), Storage("b"), 3, stable).text().decode()
    ledger = Ledger()
    eye = watch.Watch({}, None, ledger)  # type: ignore[arg-type]
    maps = [{"metadata": {"name": "m"}, "data": {watch.POINTER_FILE: text}}, {"metadata": {"name": "k"}}]
    eye._note_pointers(maps, 5.0)
    eye._note_pointers(maps, 6.0)
    assert (eye.pointed, ledger.broken) == ({("m", "d" * 64): 5.0}, {})
    eye._note_pointers([{"metadata": {"name": "m"}, "data": {watch.POINTER_FILE: "{"}}], 7.0)
    assert ledger.broken == {"a boot pointer can be read": 1}


def test_a_model_that_says_that_nothing_serves_breaks_the_promise() -> None:
    assert looked(Ledger(), floor=2, ready=2, found=model(available="False")) == {"Available is False": 1}


def test_the_promise_is_the_least_that_was_asked_for_lately() -> None:
    subject = Subject(None, MODEL, "", None)  # type: ignore[arg-type]
    subject.replicas = [(0.0, 2), (1000.0, 3), (2000.0, 2)]
    assert [subject.floor(at, 90.0) for at in (500.0, 1001.0, 1089.0, 1091.0, 2000.0, 2500.0)] == [2, 2, 2, 3, 2, 2]


def test_what_is_forgiven_is_forgiven_longer_while_nobody_can_put_it_right() -> None:
    ledger, now = Ledger(), time.time()
    ledger.excuse(MODEL, 20.0)
    ledger.hit(MODEL, "w1", 60.0)
    assert [ledger.excused(MODEL, now + 25), ledger.missing(MODEL, now + 65)] == [False, {}]
    ledger.blind(10.0)
    assert [ledger.excused(MODEL, now + at) for at in (25, 39, 45)] == [True, True, False]
    assert set(ledger.missing(MODEL, now + 75)) == {"w1"}
    ledger.blind(10.0)
    assert not ledger.excused("two", now + 25)


def test_what_the_api_tells_is_no_evidence_while_kubelet_or_api_server_is_gone() -> None:
    ledger, now = Ledger(), time.time()
    ledger.blind(10.0)
    assert [ledger.sees(at, 5.0) for at in (now - 1, now + 5, now + 14, now + 16)] == [True, False, False, True]


# --------------------------------------------------------------------------------------------------------------- end


def ended(found: Json, gains: dict[str, int], *done: str) -> set[str]:
    """What is broken, after these were done to the model."""
    ledger = Ledger()
    for kind in done:
        ledger.did(kind, MODEL, time.time())
    watch.judge_end(Promised(2), found, gains, ledger)  # type: ignore[arg-type]
    return set(ledger.broken)


def test_a_good_spec_may_end_by_what_was_done_to_it_and_is_never_refused() -> None:
    refused = {"a good spec is not refused"}
    assert ended(model("g3"), {"aaa": 3}) == set()
    assert ended(model("g3", "Aborted"), {"aaa": 2}, plan.ABORT) == set()
    assert ended(model("g3", "WorkerDied"), {"aaa": 2}, plan.WORKER_POD) == set()
    assert ended(model("g3", "JobFailed"), {"aaa": 2}, plan.S3_CUT) == set()
    assert ended(model("g3", "Aborted"), {"aaa": 2}) == refused
    assert ended(model("g3", "WorkerDied"), {"aaa": 2}, plan.ABORT, plan.OPERATOR_KILL) == refused
    assert ended(model("g3", "GateFailed"), {"aaa": 2}, *plan.DECK) == refused
    assert ended(model("outliers", "GateFailed"), {"aaa": 2}) == set()


def test_what_was_done_before_a_spec_was_there_excuses_no_end_of_it() -> None:
    ledger = Ledger()
    ledger.did(plan.HOST_KILL, MODEL, time.time())
    subject = Promised(2)
    subject.trusted[3] = time.time() + 1
    watch.judge_end(subject, model("g3", "EngineDied"), {"aaa": 2}, ledger)  # type: ignore[arg-type]
    assert set(ledger.broken) == {"a good spec is not refused"}


def test_ready_means_that_the_spec_serves() -> None:
    assert ended(model("g3"), {"aaa": 2}) == {"Ready means that the spec serves"}
    assert ended(model("outliers"), {"aaa": 2}) == {"Ready means that the spec serves"}
    assert ended(model("page"), {}) == {"Ready means that the spec serves"}


def test_no_end_leaves_a_model_without_service() -> None:
    assert ended(model("g3", available="False"), {"aaa": 3}) == {"available at the end"}


def test_what_is_left_over_is_named() -> None:
    workers = [pod("w1"), pod("w2")]
    none: dict[str, list[Json]] = {k: [] for k in ("Job", "Deployment", "ConfigMap", "Service", "PodDisruptionBudget")}
    assert watch.orphans(Promised(2), none | {"Pod": workers}, 2) == []  # type: ignore[arg-type]
    job = {"metadata": {"name": "build-1"}, "status": {"conditions": [{"type": "SuccessCriteriaMet"}]}}
    extra = [{"metadata": {"name": "d1"}}, {"metadata": {"name": "d2"}}]
    left = none | {"Job": [job], "Pod": [workers[0], pod("j", role="job")], "Deployment": extra}
    assert watch.orphans(Promised(2), left, 2) == [  # type: ignore[arg-type]
        "Jobs still run: build-1",
        "1 worker pods, 1 ready, 2 wanted",
        "pods of Jobs still run: j",
        "2 of kind Deployment, at most 1 are used: d1, d2",
    ]


def test_what_a_spec_is_can_be_told_from_its_source() -> None:
    assert [applied(source(name)).kind for name in ("g7", sources.OUTLIERS, sources.PAGE)] == [
        "good",
        "bad-gate",
        "bad-file",
    ]
    assert applied(source("g7")).gain == 7


def test_a_run_that_cannot_even_begin_is_a_broken_one_and_raises_nothing() -> None:
    def fail() -> None:
        raise RuntimeError("no cluster")

    logs = SimpleNamespace(kept_logs=SimpleNamespace(glob=lambda _: []))
    stage = SimpleNamespace(prepare=fail, heal=lambda: None, machine=logs)
    result = run.run_seed(stage, 7, 1)  # type: ignore[arg-type]
    assert result.broken == {"the run came to its end": 1}
    first = result.first["the run came to its end"]
    assert first.endswith("RuntimeError: no cluster")
    assert "File" not in first


# ----------------------------------------------------------------------------------------------------------- traffic


def test_an_answer_tells_which_model_gave_it() -> None:
    ((_, expected), *_) = sources.rows()
    assert sources.gain_of((expected * 5).tolist(), expected) == 5
    assert sources.gain_of((expected * 1000).tolist(), expected) == sources.BAD_GAIN
    assert sources.gain_of((expected[::-1] * 5).tolist(), expected) == 0
    assert sources.gain_of([float("nan")] * len(expected), expected) == 0
    assert sources.gain_of([], expected) == 0


class Server:
    """Answers as `reply` says, given how many requests came before."""

    def __init__(self, reply: Callable[[int, list[float]], web.Response]) -> None:
        self._reply, self.asked = reply, 0
        self._began, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._began.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application()
        app.add_routes([web.post(f"/v2/models/{MODEL}/infer", self._infer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._began.set()
        await self._over.wait()
        await runner.cleanup()

    async def _infer(self, request: web.Request) -> web.Response:
        self.asked += 1
        return self._reply(self.asked, (await request.json())["inputs"][0]["data"])


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow machine breaks no promise here."""
    monkeypatch.setattr(traffic, "TRY_SECONDS", 30.0)
    monkeypatch.setattr(traffic, "CONNECT_SECONDS", 30.0)
    monkeypatch.setattr(traffic, "LIFETIME", 60.0)


def answer(row: list[float], gain: int, revision: str = "aaa") -> web.Response:
    data = (EXPECTED[tuple(row)] * gain).tolist()
    return web.json_response({"outputs": [{"data": data}]}, headers={traffic.REVISION: revision})


def sent(
    reply: Callable[[int, list[float]], web.Response], ledger: Ledger, trusted: set[int], least: int = 4
) -> Traffic:
    with Server(reply) as server:
        load = Traffic({MODEL: server.url}, ledger, lambda _, gain: gain in trusted)
        load.start()
        deadline = time.monotonic() + 30
        while server.asked < least and time.monotonic() < deadline:
            time.sleep(0.02)
        load.stop()
    assert load.requests > 0
    return load


def test_answers_of_what_was_verified_break_nothing() -> None:
    ledger = Ledger()
    load = sent(lambda n, row: answer(row, 3), ledger, {3})
    assert (dict(ledger.broken), load.failed, dict(load.tries_failed)) == ({}, 0, {})
    assert {key: first.gain for key, first in load.firsts().items()} == {(MODEL, "aaa"): 3}


def test_an_answer_of_another_engine_is_seen() -> None:
    ledger = Ledger()
    sent(lambda n, row: answer(row, 3 if n < 3 else 1000, "aaa" if n < 3 else "bbb"), ledger, {3})
    assert set(ledger.broken) == {"an unverified engine answered"}


def test_a_revision_that_answers_in_two_ways_is_seen() -> None:
    ledger = Ledger()
    sent(lambda n, row: answer(row, 3 if n < 3 else 4), ledger, {3, 4})
    assert set(ledger.broken) == {"a revision is one engine"}


def test_a_try_that_fails_is_forgiven_in_declared_times_only() -> None:
    def reply(n: int, row: list[float]) -> web.Response:
        return web.Response(status=503) if n == 1 else answer(row, 3)

    ledger = Ledger()
    load = sent(reply, ledger, {3})
    assert (set(ledger.broken), load.failed) == ({"a try failed outside declared times"}, 0)
    ledger = Ledger()
    ledger.excuse(MODEL, 60.0)
    load = sent(reply, ledger, {3})
    assert (dict(ledger.broken), load.failed, dict(load.tries_failed)) == ({}, 0, {"503": 1})


def test_a_request_that_is_never_answered_or_answered_wrongly_is_never_forgiven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traffic, "LIFETIME", 0.5)
    for reply in (
        lambda n, row: web.Response(status=503),
        lambda n, row: web.Response(status=500),
        lambda n, row: web.json_response({"outputs": [{"data": [0.0]}]}, headers={traffic.REVISION: "aaa"}),
        lambda n, row: web.Response(text="{", headers={traffic.REVISION: "aaa"}),
        lambda n, row: web.json_response([], headers={traffic.REVISION: "aaa"}),
    ):
        ledger = Ledger()
        ledger.excuse(MODEL, 60.0)
        load = sent(reply, ledger, {3})
        assert set(ledger.broken) == {"a request failed"}
        assert load.failed == load.requests


def test_requests_that_stop_by_themselves_break_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no descriptors are left")

    monkeypatch.setattr(traffic.aiohttp, "TCPConnector", fail)
    ledger = Ledger()
    load = Traffic({MODEL: "http://127.0.0.1:9"}, ledger, lambda *_: True)
    load.start()
    load.stop()
    assert set(ledger.broken) == {traffic.GOES_ON}
