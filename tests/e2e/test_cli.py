"""`kubectl trtmodel` on the real cluster: what a person types from the first look to promote, roll back and abort."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from . import models
from .cluster import Json
from .world import World, revision

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

NAME = "typed"
COMMAND_SECONDS = 180
# Nobody sends requests, so a step lasts until a person decides.
HELD = {**models.ROLLOUT, "steps": [{"workers": 1, "hold": "30m"}], "progressDeadline": "2h"}


@dataclass(frozen=True)
class Typed:
    code: int
    out: str
    err: str


class Terminal:
    """Someone with kubectl, and our plugin on the PATH."""

    def __init__(self, world: World) -> None:
        self.world = world
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self._environment = {**world.cluster.environment, "PATH": path}

    def type(self, *words: str, text: str = "") -> Typed:
        """`kubectl trtmodel WORDS` in the namespace."""
        command = [*self._environment["KUBECTL"].split(), "trtmodel", *words, "-n", self.world.namespace]
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False,
            env=self._environment,
        )  # fmt: skip
        return Typed(done.returncode, done.stdout, done.stderr)

    def read(self, *words: str) -> Json:
        found = self.type(*words, "-o", "json")
        assert found.code == 0, found
        answer: Json = json.loads(found.out)
        return answer


@pytest.fixture(scope="module")
def terminal(world_of: Callable[[str], World], endpoint: str) -> Terminal:
    """One model that serves, applied and waited for as a pipeline does it."""
    found = Terminal(world_of("e2e-cli"))
    found.world.apply(models.tiny(NAME, endpoint, rollout=HELD))
    waited = found.type("status", NAME, "--timeout", "2m")
    assert waited.code == 0, waited
    return found


def on_trial(terminal: Terminal, source: str) -> str:
    """Another model is asked for, and a worker answers with it. Its revision."""
    terminal.world.patch(NAME, {"source": {"uri": f"s3://{models.MODELS}/tiny/{source}.onnx"}})

    def answers(model: Json) -> bool:
        return bool(revision(model, "candidate")) and model["status"]["targets"][0]["workers"]["onCandidate"] > 0

    return revision(terminal.world.wait(NAME, "a candidate that answers", answers, 120), "candidate")


def test_get_status_and_history_tell_what_serves(terminal: Terminal) -> None:
    stable = revision(terminal.world.model(NAME), "stable")
    row = terminal.type("get", NAME).out.splitlines()[1].split()
    assert row[:4] == [NAME, "Serving", "True", stable]
    shown = terminal.type("status", NAME).out
    assert f"stable {stable}" in shown
    assert "gate Pass: " in shown
    found = terminal.read("status", NAME)
    assert found["outcome"]["exitCode"] == 0
    assert [(w["ready"], w["serves"], w["holds"]) for w in found["workers"]] == [(True, stable, [stable])]
    assert terminal.type("history", NAME).out.splitlines()[1].split()[:2] == [stable, "Promoted"]
    assert "Promoted" in terminal.type("events", NAME).out
    assert terminal.type("explain", NAME).out == f"{NAME}: all is as asked\n"


def test_lint_by_the_api_server_agrees_with_lint_alone(terminal: Terminal, endpoint: str, tmp_path: Path) -> None:
    good, bad, file = models.tiny("other", endpoint), models.tiny("other", endpoint), tmp_path / "m.yaml"
    bad["spec"]["build"]["deadline"] = "1 day"
    for manifest, code in ((good, 0), (bad, 1)):
        file.write_text(yaml.safe_dump(manifest))
        for more in ((), ("--server",)):
            found = terminal.type("lint", *more, str(file))
            assert found.code == code, found


def test_the_page_of_the_gate_is_fetched_from_the_bucket(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "gate.html"
    endpoint = terminal.world.cluster.environment["S3_ENDPOINT"]
    found = terminal.type("report", NAME, "--endpoint", endpoint, "-f", str(file))
    assert found.code == 0, found
    assert "<html" in file.read_text().lower()
    assert revision(terminal.world.model(NAME), "stable") in file.read_text()


def test_bench_reaches_a_worker_by_a_port_forward_and_tells_who_answered(terminal: Terminal) -> None:
    found = terminal.type("bench", NAME, "--duration", "2s", "--concurrency", "2", "-o", "json")
    assert found.code == 0, found
    measured = json.loads(found.out)
    assert measured["revisions"] == {revision(terminal.world.model(NAME), "stable"): measured["answered"]}
    assert measured["request"] == f"zeros in x FP32 1x{models.WIDTH}"


def test_a_candidate_is_promoted_and_taken_back_by_hand(terminal: Terminal) -> None:
    first = revision(terminal.world.model(NAME), "stable")
    second = on_trial(terminal, "b")
    assert [w["serves"] for w in terminal.read("status", NAME)["workers"]] == [second]
    waits = terminal.type("status", NAME, "--timeout", "1s")
    assert waits.code == 124, waits
    assert "step 1/1: workers 1" in waits.out
    late = terminal.type("promote", NAME, "--revision", "0123456789")
    assert (late.code, late.out) == (1, "")
    assert second in late.err
    done = terminal.type("promote", NAME, "--wait", "--timeout", "2m")
    assert done.code == 0, (done, terminal.world.describe(NAME))
    assert revision(terminal.world.model(NAME), "stable") == second

    back = terminal.type("rollback", NAME, "--wait", "--timeout", "2m")
    assert back.code == 0, (back, terminal.world.describe(NAME))
    assert revision(terminal.world.model(NAME), "stable") == first
    ended = terminal.type("status", NAME, "--timeout", "30s")
    assert ended.code == 3, ended
    assert "kubectl trtmodel retry" in terminal.type("explain", NAME).out


def test_a_candidate_is_aborted_and_no_worker_answers_with_it(terminal: Terminal) -> None:
    stable = revision(terminal.world.model(NAME), "stable")
    candidate = on_trial(terminal, "c")
    done = terminal.type("abort", NAME, "--wait", "--timeout", "1m")
    assert done.code == 0, (done, terminal.world.describe(NAME))
    found = terminal.read("status", NAME)
    assert found["revisions"]["stable"] == stable
    assert found["revisions"]["candidate"] == ""
    assert [w["serves"] for w in found["workers"]] == [stable]
    assert terminal.type("history", NAME).out.splitlines()[1].split()[:2] == [candidate, "Aborted"]
