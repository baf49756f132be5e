"""What the cluster says about a pod, in words for status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from decide_scene import B, decide, knows, new, of
from trtmodel_operator import manifests
from trtmodel_operator.adapters.informer import pruned
from trtmodel_operator.adapters.troubles import LAST_WORDS, death_of, trouble_of
from trtmodel_operator.model import CreateJob
from trtmodel_operator.ports import Json


def job_pod(**ended: Any) -> Json:
    """Of a build as the operator makes it, after its container ended."""
    seen = knows(new(), B)
    assert seen.spec is not None
    (build,) = of(decide(seen), CreateJob)
    template = manifests.job(seen.model, seen.spec, build)["spec"]["template"]
    status = {"phase": "Failed", "containerStatuses": [{"name": "build", "state": {"terminated": ended}}]}
    return {"metadata": {**template["metadata"], "name": "p"}, "spec": template["spec"], "status": status}


@pytest.mark.parametrize("kept", [False, True], ids=["whole", "as it is kept"])
def test_C24_a_builder_that_was_killed_for_memory_is_told_with_container_limit_and_its_last_words(kept: bool) -> None:
    pod = job_pod(
        exitCode=137, reason="OOMKilled", message="stage build: tactic 17 of 40\nstage build: tactic 18 of 40\n"
    )
    pod = json.loads(json.dumps(pruned("Pod", pod))) if kept else pod
    assert trouble_of(pod) == (
        "OOMKilled",
        "the container build ended with exit code 137: it needed more memory than its limit of 4Gi. "
        "It said last: stage build: tactic 17 of 40 stage build: tactic 18 of 40",
    )


def test_a_container_that_is_killed_leaves_the_end_of_its_log_in_status() -> None:
    """The kubelet writes it where a container ended badly without a message; a Job that can speak writes its own."""
    (container,) = job_pod(exitCode=1)["spec"]["containers"]
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_a_log_is_repeated_by_its_end_only() -> None:
    said = trouble_of(job_pod(exitCode=1, reason="Error", message="x" * 5000))[1]
    assert len(said) < LAST_WORDS + 80
    assert said.startswith("the container build ended with exit code 1. It said last: xxx")


def test_how_the_last_life_of_a_container_ended_is_known_when_it_runs_again() -> None:
    life = {"exitCode": 139, "reason": "Error"}
    container = {"name": "worker", "state": {"running": {}}, "lastState": {"terminated": life}}
    pod = {"metadata": {"name": "w"}, "spec": {}, "status": {"containerStatuses": [container]}}
    assert trouble_of(pod) == ("", "")
    assert death_of(pod) == "the container worker ended with exit code 139"
    assert death_of({"metadata": {}, "status": {}}) == ""
