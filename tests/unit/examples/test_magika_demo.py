"""The demo's reading of the cluster and its table, and that its manifests say what its text says."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import kube
import pytest
import report
import traffic
import yaml

HERE = Path(report.__file__).parent


def model(generation: int, observed: int, **statuses: str) -> dict[str, Any]:
    conditions = [
        {"type": kind, "status": status, "reason": "Because", "message": "so", "observedGeneration": observed}
        for kind, status in statuses.items()
    ]
    memory = {"stable": {"revision": "0123456789"}, "candidate": None}
    return {
        "metadata": {"generation": generation},
        "status": {"phase": "Canary", "conditions": conditions, "rollout": memory},
    }


def test_a_condition_of_an_older_generation_is_unknown() -> None:
    """Ready is still True in the moment after a change: it is about what was there before."""
    assert kube.condition(model(2, 1, Ready="True"), "Ready")["status"] == "Unknown"
    assert kube.condition(model(2, 2, Ready="True"), "Ready")["status"] == "True"
    assert kube.condition({"metadata": {"generation": 1}}, "Ready")["status"] == "Unknown"


def test_a_role_without_a_revision_is_empty() -> None:
    assert kube.revision(model(1, 1), "stable") == "0123456789"
    assert kube.revision(model(1, 1), "candidate") == ""
    assert kube.revision({"metadata": {}}, "stable") == ""


def test_a_failure_tells_all_conditions() -> None:
    assert kube.describe(model(1, 1, Ready="False")) == "phase Canary\n  Ready=False Because: so"
    assert "never seen" in kube.describe(None)
    assert "empty" in kube.describe({"metadata": {}})


def test_a_kubectl_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    program.write_text("#!/bin/sh\necho 'Error from server: no' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(kube.DemoError, match="kubectl get pods: Error from server: no"):
        kube.Kubectl({"KUBECTL": str(program)}).run("get", "pods")


def test_a_watch_gives_the_newest_state_and_ends_in_time(tmp_path: Path) -> None:
    program = tmp_path / "kubectl"
    lines = "\\n".join(f'{{"type":"MODIFIED","object":{{"metadata":{{"generation":{n}}}}}}}' for n in (1, 2))
    program.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\nexec sleep 60\n")
    program.chmod(0o755)
    watch = kube.ModelWatch(kube.Kubectl({"KUBECTL": str(program), "PATH": "/usr/bin:/bin"}), "ns", "m")
    try:
        assert watch.wait("second", 10, lambda m: m["metadata"]["generation"] == 2)
        with pytest.raises(kube.DemoError, match=r"third: not in 0\.1 s"):
            watch.wait("third", 0.1, lambda m: m["metadata"]["generation"] == 3)
    finally:
        watch.close()


def test_the_table_has_a_row_for_each_rollout_and_dashes_for_what_was_not_reached() -> None:
    figures = {"sent": 400, "failed": 0, "p50": 3.25, "p99": 9.0}
    done = report.Result("2 INT8", "promoted", 100.0, 160.0, 120.5, 130.0, 131.0, 0.0004, "promoted", figures, figures)
    stopped = report.Result("3 damaged", "stopped", 200.0)
    lines = report.table([done, stopped]).splitlines()
    assert lines[0].split()[:5] == ["rollout", "ended", "as", "built", "gated"]
    assert lines[2].split() == [
        *["2", "INT8", "promoted", "20.5", "s", "30.0", "s", "31.0", "s", "60.0", "s", "0.400", "ms", "400", "0"],
        *["3.2", "ms", "3.2", "ms", "9.0", "ms", "9.0", "ms"],
    ]
    assert lines[3].split() == ["3", "damaged", "unfinished", *"-" * 10, "-"]


def test_the_manifests_are_yaml_and_fit_together() -> None:
    manifest = yaml.safe_load((HERE / "trtmodel.yaml").read_text())
    patch = yaml.safe_load((HERE / "patch-int8.yaml").read_text())
    spec = manifest["spec"]
    assert patch["spec"]["engine"]["calibration"]["samples"] == 64
    assert spec["engine"]["precision"] == "FP32"
    assert (spec["rollout"]["analysis"]["minRequests"], spec["rollout"]["steps"][0]["hold"]) == (150, "15s")


def test_the_load_pod_has_no_placeholder_left() -> None:
    names = ("NAMESPACE", "IMAGE", "SERVICE", "MODEL", "RATE", "SECONDS")
    text = string.Template((HERE / "load-pod.yaml").read_text()).substitute(dict.fromkeys(names, "x1"))
    pod = yaml.safe_load(text)
    assert str(traffic.PORT) in pod["spec"]["containers"][0]["args"]
    assert pod["spec"]["containers"][0]["image"] == "x1"
