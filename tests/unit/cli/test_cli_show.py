"""get, status, history, explain and events against an API server: what a person sees, and what a script gets."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from cli_scene import Typed, as_object, event, put
from decide_scene import A, B, Scene, busy, canary, digest, edited, later, reaches, run, serving
from fakes.api_server import FakeApiServer, Seen, refusal
from test_conditions import SITUATIONS
from test_decide_people import manual, with_pause
from trtmodel_operator.cli import look, output
from trtmodel_operator.cli.outcome import EXIT_DONE, EXIT_ENDED, EXIT_LATE, EXIT_PERSON

Type = Callable[..., Typed]


def test_get_prints_the_columns_of_kubectl(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, canary(serving(A)))
    head, row = trtmodel("get").out.splitlines()
    assert head.split() == ["NAME", "PHASE", "READY", "STABLE", "CANDIDATE", "CANARY", "REPLICAS", "AGE"]
    assert row.split()[:5] == ["magika", "Canary", "False", A, B]
    assert "step 1/2 1 of 4 workers" in row
    wide = trtmodel("get", "magika", "-o", "wide").out
    assert "REASON" in wide
    assert trtmodel("get", "-A").out.splitlines()[1].startswith("ml ")
    assert json.loads(trtmodel("get", "magika", "-o", "json").out)["metadata"]["name"] == "magika"
    assert len(json.loads(trtmodel("get", "-o", "json").out)["items"]) == 1


def test_get_of_nothing_says_so(trtmodel: Type) -> None:
    assert trtmodel("get") == Typed(0, "", "No TRTModels found.\n")
    gone = trtmodel("get", "magika")
    assert (gone.code, gone.out) == (1, "")
    assert 'trtmodels "magika" not found' in gone.err


def test_more_models_than_a_page_are_all_listed(
    api_server: FakeApiServer, trtmodel: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmodel_operator.cli.connection.PAGE", 2)
    for n in range(5):
        one = as_object(serving(A))
        one["metadata"] |= {"name": f"m{n}", "uid": f"u{n}"}
        api_server.put(one)
    assert [m["metadata"]["name"] for m in json.loads(trtmodel("get", "-o", "json").out)["items"]] == [
        f"m{n}" for n in range(5)
    ]


def test_status_tells_step_figures_targets_and_why_it_waits(api_server: FakeApiServer, trtmodel: Type) -> None:
    seen = later(busy(canary(serving(A)), seconds=0.008), 5)
    put(api_server, seen)
    shown = trtmodel("status", "magika")
    lines = [line.strip() for line in shown.out.splitlines()]
    assert shown.code == 0
    assert lines[0].startswith("ml/magika Canary: step 1/2 1 of 4 workers")
    assert lines[1].startswith("why it waits: ")
    assert f"stable {A}, candidate {B}" in lines
    assert any(line.startswith("step 1/2: workers 1, held ") and line.endswith(" of 15s") for line in lines)
    assert any(line.startswith("analysis ") for line in lines)
    assert "target default: 4 of 4 workers ready, 3 on stable, 1 on candidate" in lines
    assert any(line.startswith(f"engine {digest(B)[:12]} for onnxruntime") for line in lines)
    assert any(line.startswith("gate Pass: ") for line in lines)
    assert shown.out.isascii(), "piped, it is plain"


@pytest.mark.parametrize("name", ["new", "building the first", "deploying"])
def test_a_first_revision_on_its_way_is_no_trouble(name: str, api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, SITUATIONS[name][0])
    lines = [line.strip() for line in trtmodel("status", "magika").out.splitlines()]
    assert lines[1].startswith("why it waits: ")
    for command in ("status", "explain"):
        assert "NoWorkerServes" not in trtmodel(command, "magika").out


WEIGHTS = {"pod-a": 100, "pod-d": 10}


def test_status_tells_of_other_workers_what_they_are_made_of(api_server: FakeApiServer, trtmodel: Type) -> None:
    seen = edited(serving(A), serving__pod={"annotations": {"team": "b"}})
    seen, _ = run(seen, reaches("watch"))
    put(api_server, seen)
    lines = [line.strip() for line in trtmodel("status", "magika").out.splitlines()]
    (line,) = [line for line in lines if line.startswith("other workers are tried")]
    assert line.startswith("other workers are tried, of image worker:1: step 1/2: workers 1, held ")


def test_status_asks_each_ready_worker_what_it_serves(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, canary(serving(A)))
    for name, ready in (("pod-a", True), ("pod-b", True), ("pod-c", False), ("pod-d", True)):
        api_server.put(pod(name, ready=ready))
    asked = []

    def answer(seen: Seen) -> Any:
        found = re.search(r"/pods/([^/:]+):8080/proxy/v2/models/magika$", seen.path)
        if found is None:
            return None
        asked.append(found[1])
        if found[1] == "pod-b":
            return refusal(403, "pods/proxy is forbidden")
        trial = {"x-trtmodel-candidate": f"{B}; weight={WEIGHTS[found[1]]}; shadow=20"}
        return web.json_response({"versions": [A, B]}, headers={"x-trtmodel-revision": A, **trial})

    api_server.fault = answer
    lines = [line.strip() for line in trtmodel("status", "magika").out.splitlines()]
    assert f"worker pod-a ready, serves {B} ({digest(B)[:12]}), holds {A}" in lines
    assert f"worker pod-d ready, serves {A} ({digest(A)[:12]}), {B} answers 10 % and mirrors 20 %, holds {B}" in lines
    assert "worker pod-b ready (cannot be asked: pods/proxy is forbidden)" in lines
    assert "worker pod-c not ready, 2 restarts" in lines
    assert sorted(asked) == ["pod-a", "pod-b", "pod-d"]
    asked.clear()
    assert "worker" not in trtmodel("status", "magika", "--no-workers").out.replace("workers", "")
    assert asked == []


def test_status_for_programs_has_everything_by_name(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, canary(serving(A)))
    found = json.loads(trtmodel("status", "magika", "-o", "json").out)
    assert (found["phase"], found["outcome"]) == ("Canary", None)
    assert found["revisions"] == {"wanted": B, "stable": A, "candidate": B, "standby": ""}
    assert found["conditions"]["Available"]["status"] == "True"
    assert found["step"]["index"] == 0
    assert "analysis" in found
    assert found["targets"][0]["workers"]["onCandidate"] == 1


EXITS = {
    "serving": EXIT_DONE,
    "scaled out": EXIT_DONE,
    "gate failed": EXIT_ENDED,
    "rolled back": EXIT_ENDED,
    "job failed": EXIT_ENDED,
    "spec unreadable": EXIT_ENDED,
    "paused": EXIT_PERSON,
    "building": EXIT_LATE,
    "canary": EXIT_LATE,
    "deploying": EXIT_LATE,
}


@pytest.mark.parametrize("name", EXITS)
def test_a_pipeline_that_waits_learns_the_end_by_the_exit_code(
    name: str, api_server: FakeApiServer, trtmodel: Type
) -> None:
    put(api_server, SITUATIONS[name][0])
    shown = trtmodel("status", "magika", "--timeout", "200ms" if EXITS[name] == EXIT_LATE else "30s")
    assert shown.code == EXITS[name], shown
    assert shown.out.startswith("ml/magika ")
    last = shown.err.splitlines()[-1]
    assert last.startswith("magika: ")
    assert ("it did not end within" in last) == (EXITS[name] == EXIT_LATE)


@pytest.mark.parametrize(("scene", "command"), [(with_pause, "resume"), (manual, "promote")])
def test_a_pipeline_goes_on_to_its_manual_stage_where_a_person_is_asked(
    scene: Callable[[], Scene], command: str, api_server: FakeApiServer, trtmodel: Type
) -> None:
    put(api_server, scene())
    shown = trtmodel("status", "magika", "--timeout", "30s")
    assert shown.code == EXIT_PERSON
    assert f"use the command {command}@{B} to go on" in shown.err.splitlines()[-1]
    assert f"what to do: `kubectl trtmodel {command}`, or `abort`." in shown.out


def test_an_end_of_an_older_spec_is_none_of_the_newest(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, serving(A))
    model = api_server.get("trtmodels", "ml", "magika") or {}
    model["spec"]["engine"]["precision"] = "FP16"
    api_server.put(model)
    shown = trtmodel("status", "magika", "--timeout", "200ms")
    assert shown.code == EXIT_LATE
    assert "the operator has not looked at it yet" in shown.out


def test_a_model_that_no_operator_has_seen_is_told(api_server: FakeApiServer, trtmodel: Type) -> None:
    model = as_object(serving(A))
    del model["status"]
    api_server.put(model)
    assert "no operator has looked at it yet" in trtmodel("status", "magika").out
    assert trtmodel("status", "magika", "--timeout", "100ms").code == EXIT_LATE


def test_watching_prints_only_news_until_the_end(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, canary(serving(A)))
    looks = 0

    def after_some_looks(seen: Seen) -> None:
        nonlocal looks
        looks += seen.method == "GET" and seen.path.endswith("/trtmodels/magika")
        if looks == 4:  # the fault runs in the server's own thread: it cannot wait for itself
            api_server._objects["trtmodel.io", "trtmodels", "ml", "magika"] = promoted

    put(api_server, serving(B))
    promoted = api_server._objects["trtmodel.io", "trtmodels", "ml", "magika"]
    put(api_server, canary(serving(A)))
    promoted["metadata"]["generation"] = 1
    for entry in (promoted["status"], *promoted["status"]["conditions"]):
        entry["observedGeneration"] = 1
    api_server.fault = after_some_looks
    shown = trtmodel("status", "magika", "-w", "--timeout", "30s")
    assert shown.code == 0, shown
    heads = [line for line in shown.out.splitlines() if line.startswith("ml/magika")]
    assert [head.split()[1].rstrip(":") for head in heads] == ["Canary", "Serving"]


def test_who_waits_outlasts_an_api_server_that_restarts(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, serving(A))
    refused: list[Seen] = []

    def restarts(seen: Seen) -> Any:
        refused.append(seen)
        return refusal(503, "it restarts") if len(refused) <= 3 else None

    api_server.fault = restarts
    shown = trtmodel("status", "magika", "--timeout", "30s", "--no-workers")
    assert (shown.code, len(refused)) == (0, 4)
    assert shown.err.count("it restarts: trying again") == 1
    api_server.fault = lambda _: refusal(403, "you may not")
    assert trtmodel("status", "magika", "--timeout", "30s").err == "trtmodel: you may not\n"


def test_on_a_terminal_the_tree_is_drawn_over_the_last_one(
    api_server: FakeApiServer, trtmodel: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(api_server, serving(A))
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    for more in ((), ("-w", "--timeout", "30s")):
        shown = trtmodel("status", "magika", *more)
        assert shown.code == 0
        assert "target default: 4 of 4 workers ready" in shown.out
        assert "\x1b[32m" in shown.out, "what is well is green"


def test_an_api_server_that_cannot_be_reached_is_told(
    api_server: FakeApiServer, trtmodel: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    api_server.fault = lambda _: refusal(503, "etcd is on holiday")
    assert trtmodel("status", "magika") == Typed(1, "", "trtmodel: etcd is on holiday\n")
    monkeypatch.setattr("urllib3.connectionpool.HTTPConnectionPool.urlopen", refuse)
    shown = trtmodel("status", "magika")
    assert shown.code == 1
    assert "cannot be reached: connection refused" in shown.err


def refuse(*_: object, **__: object) -> None:
    raise OSError("connection refused")


def test_history_tells_how_rollouts_ended(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, SITUATIONS["rolled back"][0])
    head, newest, first = trtmodel("history", "magika").out.splitlines()
    assert head.split() == ["REVISION", "OUTCOME", "ENDED", "DIGESTS", "REASON"]
    assert newest.split()[:2] == [B, "Aborted"]
    assert "a person aborted the rollout" in newest
    assert first.split()[:2] == [A, "Promoted"]
    assert digest(A)[:12] in first
    assert json.loads(trtmodel("history", "magika", "-o", "json").out)[0]["outcome"] == "Aborted"


def test_events_are_those_of_this_object_oldest_first(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, serving(A))
    api_server.put(event("Promoted", "second", "2026-01-01T00:00:02.000000Z"))
    api_server.put(event("Built", "first", "2026-01-01T00:00:01.000000Z"))
    api_server.put(event("Built", "of a namesake that is gone", uid="other"))
    rows = trtmodel("events", "magika").out.splitlines()[1:]
    assert [row.split()[2:] for row in rows] == [["Built", "first"], ["Promoted", "second"]]


@pytest.mark.parametrize("name", ["gate failed", "rolled back", "job failed", "unschedulable", "paused"])
def test_explain_says_what_it_means_and_what_to_do(name: str, api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, SITUATIONS[name][0])
    shown = trtmodel("explain", "magika").out
    assert "it means: " in shown
    assert "what to do: " in shown
    assert json.loads(trtmodel("explain", "magika", "-o", "json").out)["below"]


def test_explain_of_what_is_well_says_so(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, serving(A))
    assert trtmodel("explain", "magika").out == "magika: all is as asked\n"


def test_no_word_of_a_message_reaches_the_terminal_as_a_command(api_server: FakeApiServer, trtmodel: Type) -> None:
    put(api_server, replace(serving(A), spec=None, spec_error="weight '\x1b[2J\x07' and\nReady: True [red]"))
    for command in ("status", "explain"):
        shown = trtmodel(command, "magika").out
        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "weight '\\x1b[2J\\x07' and Ready: True [red]" in shown
    assert "\x1b" not in trtmodel("get", "-o", "wide").out


def test_a_terminal_gets_the_same_lines_as_a_tree() -> None:
    from rich.console import Console

    model = look.tree(as_object(edited(canary(serving(A)), rollout__paused=True)))
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(output.rich_tree(model))
    drawn = console.export_text()
    for line in output.indented(model):
        assert line.strip() in drawn
    assert "├── " in drawn


def pod(name: str, *, ready: bool) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": "ml",
            "name": name,
            "labels": {
                "trtmodel.io/model": "magika",
                "trtmodel.io/role": "worker",
                "trtmodel.io/target": "default",
            },
        },
        "spec": {"nodeName": "n1"},
        "status": {
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{"restartCount": 0 if ready else 2}],
        },
    }


def test_queries_of_a_trial_stand_below_its_step_and_a_far_way_back_is_no_step() -> None:
    model = as_object(canary(serving(A)))
    check = {"name": "ctr", "verdict": "Fail", "value": 0.01, "message": "0.01 is below 0.02"}
    model["status"]["analysis"] = {"revision": B, "verdict": "Fail", "message": "ctr is low", "checks": [check]}
    lines = [line.strip() for line in output.indented(look.tree(model))]
    at = next(i for i, line in enumerate(lines) if line.startswith("step 1/2"))
    assert lines[at + 1 : at + 3] == ["analysis Fail: ctr is low", "query ctr Fail: 0.01 is below 0.02"]
    model["status"]["rollout"]["step"]["back"] = True
    assert f"workers load {B}, to which a person goes back" in [
        line.strip() for line in output.indented(look.tree(model))
    ]


def test_of_many_workers_some_are_asked_and_shown_and_all_are_told_to_programs(
    api_server: FakeApiServer, trtmodel: Type
) -> None:
    put(api_server, canary(serving(A)))
    for n in range(look.SHOWN_MOST + 3):
        api_server.put(pod(f"pod-{n:02}", ready=True))
    asked = []

    def answer(seen: Seen) -> Any:
        if "/proxy/" not in seen.path:
            return None
        asked.append(seen.path)
        return web.json_response({"versions": [A]}, headers={"x-trtmodel-revision": A})

    api_server.fault = answer
    lines = [line.strip() for line in trtmodel("status", "magika").out.splitlines()]
    assert len([line for line in lines if line.startswith("worker ")]) == look.SHOWN_MOST
    assert "and 3 more workers" in lines
    assert len(asked) == look.SHOWN_MOST
    told = trtmodel("status", "magika", "-w", "--timeout", "100ms", "-o", "json").out.splitlines()
    assert {len(json.loads(line)["workers"]) for line in told} == {look.SHOWN_MOST + 3}
