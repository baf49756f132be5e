"""What people's hands do to a TRTModel on a real API server: a status that was removed or written anew, commands of any
text, edit upon edit. What serves goes on, nothing is made twice, and the last word counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hollow.operators import OperatorProcess
from hollow.plane import ControlPlane
from test_leaders import PLENTY, TEAM, items, jobs_of, once_each, put, settled

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.night, pytest.mark.timeout(420)]

NAME = "hand"
EDITS, COMMANDS = 40, 20
COMMAND = "trtmodel.io/command"
NONSENSE: dict[str, Any] = {
    "removed": None,
    "of another kind": {"sequence": 3, "stable": {"revision": "zz", "artifacts": "many"}},
    "at the end of the numbers": {"sequence": 2**53 - 1},
    "empty": {},
}


def model(plane: ControlPlane) -> dict[str, Any]:
    (found,) = [m for m in items(plane) if m["metadata"]["name"] == NAME]
    return found


def revision(found: dict[str, Any], role: str) -> str:
    return str((found["status"].get("rollout", {}).get(role) or {}).get("revision", ""))


def patch(plane: ControlPlane, body: object, folder: Path, *how: str) -> None:
    path = folder / "patch.json"
    path.write_text(json.dumps(body))
    plane.kubectl("patch", f"trtmodel/{NAME}", "-n", TEAM, "--patch-file", str(path), *how)


def holds(plane: ControlPlane, folder: Path, hold: str) -> None:
    patch(plane, {"spec": {"rollout": {"steps": [{"workers": 1, "hold": hold}]}}}, folder, "--type=merge")


@pytest.fixture(scope="module")
def operator(plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    with OperatorProcess(plane.kubeconfig("operator"), tmp_path_factory.mktemp("operator"), "one") as running:
        running.until(running.leads)
        put(plane, [NAME], "v0")
        running.until(lambda: settled(plane, [NAME], "v0"), PLENTY)
        yield running


def test_a_status_that_a_hand_removed_or_filled_with_nonsense_in_mid_canary_is_mended(
    plane: ControlPlane, operator: OperatorProcess, tmp_path: Path
) -> None:
    holds(plane, tmp_path, "1h")
    before = revision(model(plane), "stable")
    source = {"uri": f"s3://models/{NAME}/v1/model.onnx"}
    patch(plane, {"spec": {"source": source}}, tmp_path, "--type=merge")

    def in_canary() -> bool:
        found = model(plane)
        now = (found["status"].get("phase"), revision(found, "stable"), bool(revision(found, "candidate")))
        return now == ("Canary", before, True)

    operator.until(in_canary, PLENTY)
    candidate = revision(model(plane), "candidate")
    for name, rollout in NONSENSE.items():
        where = {"path": "/status/rollout"}
        change = {"op": "remove", **where} if rollout is None else {"op": "replace", **where, "value": rollout}
        patch(plane, [change], tmp_path, "--subresource=status", "--type=json")
        # Nothing wakes the operator for a foreign edit of status alone: here an edit of the spec does.
        holds(plane, tmp_path, f"{60 + len(name)}m")
        operator.until(in_canary, PLENTY)
        found = model(plane)
        assert revision(found, "candidate") == candidate, name
        available = next(c for c in found["status"]["conditions"] if c["type"] == "Available")
        assert available["status"] == "True", name
        assert 0 < found["status"]["rollout"]["sequence"] < 10_000, name
    holds(plane, tmp_path, "1s")
    operator.until(lambda: settled(plane, [NAME], "v1"), PLENTY)
    assert revision(model(plane), "stable") == candidate
    assert jobs_of(plane, "v1") == once_each([NAME])


def test_commands_of_any_text_and_size_are_answered_once_and_change_nothing(
    plane: ControlPlane, operator: OperatorProcess, tmp_path: Path
) -> None:
    before = revision(model(plane), "stable")
    huge = "promote@" + "x" * 200_000
    texts = [huge, "launch it!", "promote", "abort@" + "f" * 64 + "#1", "rollback@zz#1", "\u0000#\u0000", "retry#" * 50]
    texts += [f"skip-step@{before}#{n}" for n in range(COMMANDS)]
    for text in texts:
        patch(plane, {"metadata": {"annotations": {COMMAND: text}}}, tmp_path, "--type=merge")
    last = texts[-1]
    operator.until(lambda: model(plane)["status"]["rollout"]["command"] == last, PLENTY)
    found = model(plane)
    assert revision(found, "stable") == before
    assert len(json.dumps(found["status"])) < 20_000
    told = [e for e in items(plane, "events.events.k8s.io") if e["reason"] == "CommandIgnored"]
    assert any(last in e["note"] for e in told)
    assert all(len(e["note"]) <= 1024 for e in told)
    patch(plane, {"metadata": {"annotations": {COMMAND: huge}}}, tmp_path, "--type=merge")
    operator.until(lambda: model(plane)["status"]["rollout"]["command"] == huge[:200], PLENTY)


def test_of_many_edits_in_a_moment_the_last_one_is_what_serves(
    plane: ControlPlane, operator: OperatorProcess, tmp_path: Path
) -> None:
    for n in range(EDITS):
        source = {"uri": f"s3://models/{NAME}/e{n}/model.onnx"}
        patch(plane, {"spec": {"source": source}}, tmp_path, "--type=merge")
    operator.until(lambda: settled(plane, [NAME], f"e{EDITS - 1}"), PLENTY)
    assert jobs_of(plane, f"e{EDITS - 1}") == once_each([NAME])
    running = [j for j in items(plane, "jobs") if not (j.get("status") or {}).get("conditions")]
    assert running == []
