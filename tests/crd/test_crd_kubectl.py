"""What people and other controllers see: apply, explain, columns, scale, wait, status."""

from __future__ import annotations

import json
import secrets

import pytest
from crd_api import Api, refusal_of
from crd_manifests import DEFINITION, Json, manifest

pytestmark = pytest.mark.e2e

CONDITION = {"observedGeneration": 1, "lastTransitionTime": "2026-01-02T03:04:05Z"}
STATUS: Json = {
    "observedGeneration": 1,
    "phase": "Canary",
    "summary": "step 1/2 1 of 3 workers, 1,240 req, err +0.00%, p99 x1.03",
    "conditions": [
        {"type": "Available", "status": "True", "reason": "Serving", "message": "3 workers serve", **CONDITION},
        {"type": "Ready", "status": "False", "reason": "Canary", "message": "1 of 3 workers tries it", **CONDITION},
    ],
    "targets": [
        {
            "name": "default",
            "engines": [{"loadKey": "onnxruntime-1.23-cpu-avx2", "digest": "ab" * 32, "driver": ""}],
            "job": {"name": "magika-build-1", "stage": "Gate", "progress": 50, "message": "500 of 1,000 samples"},
            "gate": {"verdict": "Pass", "message": "fine", "samples": 1000, "figures": {"cosine": 0.9998}},
            "workers": {"desired": 3, "ready": 3, "onStable": 2, "onCandidate": 1, "withStandby": 0},
        }
    ],
    "history": [
        {"revision": "0123456789", "digests": ["ab" * 32], "promotedAt": "2026-01-02T03:04:05Z",
         "outcome": "Promoted", "reason": "all steps passed"}
    ],
    "replicas": 3,
    "selector": "trtmodel.io/model=magika,trtmodel.io/role=worker",
}  # fmt: skip
MEMORY: Json = {
    "sequence": 7,
    "stable": {"revision": "0123456789", "artifacts": [{"target": "default", "loadKey": {"runtime": "x"}}]},
    "candidate": {"revision": "abcdef0123", "artifacts": []},
    "standby": None,
    "step": {"index": 0, "held": 1.5, "routed": True},
    "rejected": [],
}


@pytest.fixture
def model(api: Api) -> str:
    name = f"m-{secrets.token_hex(4)}"
    api.create(manifest({".metadata.name": name, "serving.replicas": 3}), dry_run=False)
    return name


def test_the_definition_can_be_applied_again(api: Api) -> None:
    """Also after another tool made it: the first apply of two is what leaves kubectl's annotation."""
    api.kubectl("apply", "-f", str(DEFINITION))
    assert "unchanged" in api.kubectl("apply", "-f", str(DEFINITION))
    assert "serverside-applied" in api.kubectl(
        "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", str(DEFINITION)
    )


def test_no_field_is_dropped_by_the_structural_schema(api: Api) -> None:
    found = json.loads(api.kubectl("get", "crd", "trtmodels.trtmodel.io", "-o", "json"))
    states = {c["type"]: c["status"] for c in found["status"]["conditions"]}
    assert states["Established"] == "True"
    assert states.get("NonStructuralSchema", "False") == "False"


def test_explain_describes_the_steps(api: Api) -> None:
    text = api.kubectl("explain", "trtmodel.spec.rollout.steps")
    for word in ("workers", "weight", "shadow", "hold", "Each must be passed for its hold", "required"):
        assert word in text


def test_explain_lists_every_field(api: Api) -> None:
    text = api.kubectl("explain", "trtmodel.spec", "--recursive")
    for word in ("keepPrecision", "hedgeAfter", "ConfirmPromotion", "calibration", "podAntiAffinity", "deletionPolicy"):
        assert word in text


def test_the_short_name_works(api: Api, model: str) -> None:
    assert model in api.kubectl("get", "trtm", "-o", "name")


def test_the_columns_show_status(api: Api, model: str) -> None:
    api.apply_status(model, STATUS)
    api.apply_status(model, {"rollout": MEMORY}, "memory")
    header, row = api.kubectl("get", "trtmodels", model).splitlines()
    assert header.split() == ["NAME", "PHASE", "READY", "STABLE", "CANDIDATE", "CANARY", "REPLICAS", "AGE"]
    assert row.split()[:5] == [model, "Canary", "False", "0123456789", "abcdef0123"]
    assert STATUS["summary"] in row
    wide = api.kubectl("get", "trtmodels", model, "-o", "wide").splitlines()
    assert wide[0].split()[-4:] == ["GPU", "PRECISION", "REASON", "MESSAGE"]
    assert "FP32" in wide[1]
    assert "1 of 3 workers tries it" in wide[1]


def test_columns_are_empty_before_the_first_visit(api: Api, model: str) -> None:
    assert model in api.kubectl("get", "trtmodels", model, "-o", "wide")


def test_scale_changes_the_replicas_and_the_generation(api: Api, model: str) -> None:
    api.kubectl("scale", f"trtmodel/{model}", "--replicas=2")
    found = json.loads(api.kubectl("get", "trtmodel", model, "-o", "json"))
    assert found["spec"]["serving"]["replicas"] == 2
    assert found["metadata"]["generation"] == 2


def test_the_scale_subresource_can_be_read_at_once_and_tells_the_selector(api: Api, model: str) -> None:
    read = ("get", "trtmodel", model, "--subresource=scale", "-o", "json")
    assert json.loads(api.kubectl(*read))["spec"] == {"replicas": 3}
    api.apply_status(model, STATUS)
    assert json.loads(api.kubectl(*read))["status"] == {"replicas": 3, "selector": STATUS["selector"]}


def test_wait_follows_the_conditions(api: Api, model: str) -> None:
    api.apply_status(model, STATUS)
    api.kubectl("wait", "--for=condition=Available", f"trtmodel/{model}", "--timeout=10s")
    with pytest.raises(AssertionError, match="timed out"):
        api.kubectl("wait", "--for=condition=Ready", f"trtmodel/{model}", "--timeout=1s")


def test_status_does_not_change_the_generation_and_spec_does(api: Api, model: str) -> None:
    assert api.apply_status(model, STATUS)["metadata"]["generation"] == 1
    assert api.patch(model, {"spec": {"serving": {"replicas": 4}}})["metadata"]["generation"] == 2


def test_the_memory_of_the_operator_is_kept_as_it_was_written(api: Api, model: str) -> None:
    api.apply_status(model, STATUS)
    kept = api.apply_status(model, {"rollout": MEMORY}, "memory")["status"]
    assert kept["rollout"] == MEMORY
    assert kept["targets"] == STATUS["targets"]


def test_what_the_operator_forgets_is_gone(api: Api, model: str) -> None:
    api.apply_status(model, {"rollout": MEMORY}, "memory")
    kept = api.apply_status(model, {"rollout": {"sequence": 8}}, "memory")["status"]
    assert kept == {"rollout": {"sequence": 8}}


def test_status_outside_the_schema_is_an_error(api: Api, model: str) -> None:
    assert "field not declared in schema" in refusal_of(lambda: api.apply_status(model, {"mood": "good"}))


def test_status_outside_its_bounds_is_an_error(api: Api, model: str) -> None:
    assert "status.summary: Too long" in refusal_of(lambda: api.apply_status(model, {"summary": "x" * 300}))
