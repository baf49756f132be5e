from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import LOAD_KEY, MODEL, A, B, Scene, decide, deployed, digest, edited, has_built, knows, new, of
from trtmodel_contract.codec import loads
from trtmodel_contract.control import BootPointer
from trtmodel_contract.identity import Storage
from trtmodel_contract.jobs import BuildTask, ResolveTask
from trtmodel_contract.signing import KeySet, Signature
from trtmodel_operator import manifests
from trtmodel_operator.model import ApplyPointer, ApplyWorkload, CreateJob, ObservedPointer
from trtmodel_worker.settings import Settings, from_environment

GPU = {
    "engine__runtime": "TensorRT",
    "targets": [
        {
            "name": "a10",
            "gpu": "NVIDIA-A10",
            "runtimeClassName": "nvidia",
            "nodeSelector": {"zone": "b"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        }
    ],
}


def resolve_job(**changes: Any) -> dict[str, Any]:
    seen = edited(new(), **changes)
    return job_of(seen)


def build_job(**changes: Any) -> dict[str, Any]:
    return job_of(knows(edited(new(), **changes), B))


def job_of(seen: Scene) -> dict[str, Any]:
    (create,) = of(decide(seen), CreateJob)
    assert seen.spec is not None
    return manifests.job(seen.model, seen.spec, create)


def deployment(**changes: Any) -> dict[str, Any]:
    seen = has_built(edited(new(), **changes), A)
    (apply,) = of(decide(seen), ApplyWorkload)
    assert seen.spec is not None
    return manifests.worker_deployment(seen.model, seen.spec, apply)


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (only,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(only)


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    return dict(manifest["spec"]["template"]["spec"])


def env(manifest: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in container(manifest)["env"] if "value" in e}


EVERY = [resolve_job, build_job, deployment]


# ---------------------------------------------------------------------------------------------------------------
# every pod
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", EVERY)
def test_a_manifest_is_the_same_for_the_same_facts(make: Any) -> None:
    assert json.dumps(make(), sort_keys=True) == json.dumps(make(), sort_keys=True)


@pytest.mark.parametrize("make", EVERY)
def test_a_pod_has_no_privilege_no_token_and_a_read_only_file_system(make: Any) -> None:
    manifest = make(storage__credentialsSecret="s3")
    spec, main = pod(manifest), container(manifest)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert main["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {m["name"] for m in main["volumeMounts"]}
    assert mounted == {v["name"] for v in spec["volumes"]}
    assert {"tmp", "cache", "credentials"} <= mounted


def test_C01_children_of_the_longest_names_that_are_admitted_have_names_that_kubernetes_takes() -> None:
    seen = edited(new(model=replace(MODEL, name="m" * 40)), targets=[{"name": "t" * 12}])
    names = []
    for stage in (seen, knows(seen, B), has_built(seen, B)):
        assert stage.spec is not None
        decision = decide(stage)
        names += [a.name for a in of(decision, CreateJob)] + [a.name for a in of(decision, ApplyWorkload)]
        names += [a.workload for a in of(decision, ApplyPointer)] + [manifests.service_name(stage.model, stage.spec)]
    # The pods of a Job and of a Deployment have six and seventeen characters more.
    assert len(set(names)) >= 4
    assert max(map(len, names)) <= 63


@pytest.mark.parametrize("make", EVERY)
def test_C21_every_container_has_requests_and_limits(make: Any) -> None:
    resources = container(make())["resources"]
    for kind in ("requests", "limits"):
        assert {"cpu", "memory"} <= set(resources[kind])


@pytest.mark.parametrize("make", EVERY)
def test_a_child_belongs_to_its_model_and_is_found_by_its_labels(make: Any) -> None:
    metadata = make()["metadata"]
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == ("TRTModel", "magika", "uid-1", True)
    assert metadata["labels"]["trtmodel.io/model"] == "magika"
    assert metadata["namespace"] == "ml"
    assert len(metadata["name"]) <= 63


@pytest.mark.parametrize("make", EVERY)
def test_the_users_secret_is_mounted_as_files_and_may_come_later(make: Any) -> None:
    volumes = {v["name"]: v for v in pod(make(storage__credentialsSecret="s3"))["volumes"]}
    assert volumes["credentials"]["secret"]["secretName"] == "s3"
    assert volumes["credentials"]["secret"]["optional"] is True
    assert "credentials" not in {v["name"] for v in pod(make())["volumes"]}


@pytest.mark.parametrize("make", EVERY)
def test_identity_and_image_access_are_the_users(make: Any) -> None:
    spec = pod(make(serving__pod={"serviceAccountName": "models", "imagePullSecrets": [{"name": "registry"}]}))
    assert spec["serviceAccountName"] == "models"
    assert spec["imagePullSecrets"] == [{"name": "registry"}]


# ---------------------------------------------------------------------------------------------------------------
# Jobs
# ---------------------------------------------------------------------------------------------------------------


def test_C22_a_job_fails_at_once_on_what_no_retry_cures_and_an_eviction_is_no_failure() -> None:
    spec = build_job(build__retries=3, build__deadline="90m")["spec"]
    assert spec["backoffLimit"] == 3
    assert spec["activeDeadlineSeconds"] == 5400
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["ttlSecondsAfterFinished"] == 86400
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    final, disrupted = spec["podFailurePolicy"]["rules"]
    assert (final["action"], final["onExitCodes"]["values"]) == ("FailJob", [42, 43, 44])
    assert final["onExitCodes"]["containerName"] == container(build_job())["name"]
    assert disrupted == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def test_a_job_is_told_its_task_in_one_document() -> None:
    assert loads(ResolveTask, env(resolve_job())["TRTMODEL_TASK"]).source_uri == "s3://models/a.onnx"
    assert loads(BuildTask, env(build_job())["TRTMODEL_TASK"]).revision == B
    assert container(resolve_job())["args"] == ["resolve"]
    assert container(build_job())["args"] == ["build"]
    assert env(build_job())["TRTMODEL_CACHE_DIR"] == "/var/cache/trtmodel"


def test_only_the_build_takes_a_gpu_and_goes_where_the_workers_go() -> None:
    built, resolved = build_job(**GPU), resolve_job(**GPU)
    assert container(built)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert pod(built)["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A10", "zone": "b"}
    assert pod(built)["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert pod(built)["runtimeClassName"] == "nvidia"
    assert "nvidia.com/gpu" not in container(resolved)["resources"]["limits"]
    assert not {"nodeSelector", "runtimeClassName"} & pod(resolved).keys()


def test_a_jobs_pod_is_no_worker() -> None:
    labels = build_job()["spec"]["template"]["metadata"]["labels"]
    assert labels["trtmodel.io/role"] == "job"
    assert labels["trtmodel.io/kind"] == "build"


# ---------------------------------------------------------------------------------------------------------------
# workers
# ---------------------------------------------------------------------------------------------------------------


def test_a_worker_knows_itself_its_model_and_where_things_are() -> None:
    manifest = deployment(serving__requestTimeout="500ms", serving__contexts=2)
    assert env(manifest) == {
        "TRTMODEL_MODEL": "magika",
        "TRTMODEL_MODEL_UID": "uid-1",
        "TRTMODEL_RUNTIME": "ONNXRuntime",
        "TRTMODEL_CONTEXTS": "2",
        "TRTMODEL_REQUEST_TIMEOUT_SECONDS": "0.5",
        "TRTMODEL_GRPC_PORT": "9000",
        "TRTMODEL_POINTER_DIR": "/etc/trtmodel/pointer",
        "TRTMODEL_KEYS_DIR": "/etc/trtmodel/keys",
        "TRTMODEL_CREDENTIALS_DIR": "/etc/trtmodel/credentials",
        "TRTMODEL_CACHE_DIR": "/var/cache/trtmodel",
    }
    from_pod = {e["name"] for e in container(manifest)["env"] if "valueFrom" in e}
    assert from_pod == {"POD_NAME", "POD_UID", "POD_NAMESPACE", "NODE_NAME"}
    volumes = {v["name"]: v for v in pod(manifest)["volumes"]}
    assert volumes["pointer"]["configMap"] == {"name": manifest["metadata"]["name"]}
    assert volumes["keys"]["configMap"] == {"name": "magika-keys"}
    assert all("subPath" not in m for m in container(manifest)["volumeMounts"])


# What a user may say of serving, and what the worker makes of it.
SERVING = [
    ({"serving__hosts": 2}, "hosts", 2),
    ({"serving__contexts": 3}, "lanes", 3),
    ({"serving__contexts": "Auto"}, "lanes", 0),
    ({"serving__healthInterval": "1m500ms"}, "health_seconds", 60.5),
    ({"serving__retry": {"attempts": 1}}, "retry_attempts", 1),
    ({"serving__retry": {"budgetPercent": 0}}, "retry_budget_percent", 0.0),
    ({"serving__retry": {"hedgeAfter": "20ms"}}, "hedge_seconds", 0.02),
    ({"serving__batching": {"buckets": [1, 4, 16]}}, "buckets", (1, 4, 16)),
    ({"serving__batching": {"maxDelay": "2ms"}}, "batch_delay_seconds", 0.002),
    ({"serving__batching": {"maxQueue": 64}}, "queue_limit", 64),
    ({"serving__requestTimeout": "1s"}, "request_seconds", 1.0),
    ({"serving__fallback": "Error"}, "fallback", False),
    ({"rollout__memoryPolicy": "Resource"}, "memory_policy", "Resource"),
    ({"rollout__allowDowntime": True}, "allow_downtime", True),
]


def understood(**changes: Any) -> Settings:
    """What a worker with this Deployment's environment does."""
    pod_fields = {"POD_NAME": "magika-0", "POD_UID": "u", "POD_NAMESPACE": "ml"}
    return from_environment({**env(deployment(**changes)), **pod_fields})


@pytest.mark.parametrize(("changes", "setting", "value"), SERVING, ids=lambda v: str(v))
def test_what_the_user_says_of_serving_reaches_the_worker(changes: dict[str, Any], setting: str, value: object) -> None:
    assert getattr(understood(**changes), setting) == value
    others = {**vars(understood(**changes)), setting: None}
    assert others == {**vars(understood()), setting: None}


def test_a_default_is_not_said_to_the_worker_which_has_the_same() -> None:
    """Otherwise an upgrade of the operator would replace the pods of models that use none of it."""
    said = deployment(
        serving__hosts=1,
        serving__healthInterval="30s",
        serving__retry={"attempts": 3, "budgetPercent": 10, "hedgeAfter": "Auto"},
        serving__batching={"maxDelay": "0s", "maxQueue": 512},
        serving__fallback="Standby",
        rollout__memoryPolicy="Auto",
        rollout__allowDowntime=False,
    )
    assert said == deployment()
    worker, spec = understood(), new().spec
    assert spec is not None
    assert (worker.hosts, worker.health_seconds) == (spec.serving.hosts, spec.serving.health_interval)
    assert (worker.retry_attempts, worker.retry_budget_percent, worker.hedge_seconds) == (
        spec.serving.retry.attempts,
        spec.serving.retry.budget_percent,
        spec.serving.retry.hedge_after,
    )
    assert (worker.buckets, worker.batch_delay_seconds, worker.queue_limit) == (
        spec.serving.batching.buckets,
        spec.serving.batching.max_delay,
        spec.serving.batching.max_queue,
    )
    assert worker.fallback == spec.serving.fallback
    assert (worker.memory_policy, worker.allow_downtime) == (spec.rollout.memory_policy, spec.rollout.allow_downtime)


def test_a_worker_is_replaced_only_when_its_successor_is_ready_and_has_time_to_drain() -> None:
    manifest = deployment()
    assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert pod(manifest)["terminationGracePeriodSeconds"] == 60
    main = container(manifest)
    assert main["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"
    assert main["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert {main[p]["timeoutSeconds"] for p in ("livenessProbe", "readinessProbe", "startupProbe")} == {5}


def test_G07_a_worker_that_loads_its_first_engine_for_half_an_hour_is_not_killed() -> None:
    main = container(deployment())
    assert main["livenessProbe"]["terminationGracePeriodSeconds"] == 10
    probe = main["startupProbe"]  # liveness begins when it has succeeded once
    path, _, wait = probe["httpGet"]["path"].partition("?wait=")
    assert path == "/v2/health/ready"
    assert float(wait) < probe["timeoutSeconds"]
    assert float(wait) * probe["failureThreshold"] >= 1800


def test_the_users_pod_settings_are_merged_and_ours_stay() -> None:
    manifest = deployment(
        serving__pod={
            "labels": {"team": "ml"},
            "annotations": {"note": "x"},
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "high",
            "resources": {"limits": {"memory": "4Gi"}},
        }
    )
    template = manifest["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "ml"
    assert template["metadata"]["labels"]["trtmodel.io/role"] == "worker"
    assert template["metadata"]["annotations"] == {"note": "x"}
    assert "team" not in manifest["spec"]["selector"]["matchLabels"]
    assert env(manifest)["OMP_NUM_THREADS"] == "1"
    assert pod(manifest)["priorityClassName"] == "high"
    assert container(manifest)["resources"]["limits"] == {"cpu": "2", "memory": "4Gi"}


@pytest.mark.parametrize(
    ("asked", "requests", "limits"),
    [
        ({}, {"cpu": "250m", "memory": "512Mi"}, {"cpu": "2", "memory": "2Gi"}),
        ({"limits": {"cpu": "100m"}}, {"cpu": "100m", "memory": "512Mi"}, {"cpu": "100m", "memory": "2Gi"}),
        ({"requests": {"memory": "8Gi"}}, {"cpu": "250m", "memory": "8Gi"}, {"cpu": "2", "memory": "8Gi"}),
        (
            {"limits": {"memory": 268435456}},
            {"cpu": "250m", "memory": "268435456"},
            {"cpu": "2", "memory": "268435456"},
        ),
        ({"limits": {"example.com/x": 1}}, {"cpu": "250m"}, {"example.com/x": "1"}),
    ],
)
def test_a_request_never_exceeds_the_limit_that_the_user_wrote(
    asked: dict[str, Any], requests: dict[str, str], limits: dict[str, str]
) -> None:
    found = container(deployment(serving__pod={"resources": asked}))["resources"]
    assert requests.items() <= found["requests"].items()
    assert limits.items() <= found["limits"].items()


def test_the_platform_is_the_image_as_written_and_the_pod_settings() -> None:
    one = manifests.platform("worker:1", {"labels": {"a": "b"}})
    assert one == manifests.platform("worker:1", {"labels": {"a": "b"}})
    assert (
        len(
            {
                one.hash,
                manifests.platform("worker:2", {"labels": {"a": "b"}}).hash,
                manifests.platform("worker:1", {}).hash,
            }
        )
        == 3
    )
    assert len(one.hash) == 8


def test_the_selector_for_scale_matches_the_workers_and_no_job() -> None:
    wanted = dict(part.split("=") for part in manifests.worker_selector(MODEL).split(","))
    assert wanted.items() <= deployment()["spec"]["template"]["metadata"]["labels"].items()
    assert not wanted.items() <= build_job()["spec"]["template"]["metadata"]["labels"].items()


def test_the_service_spans_all_targets_and_platforms() -> None:
    seen = edited(new(), serving__service={"name": "front", "http": 80})
    assert seen.spec is not None
    service = manifests.service(seen.model, seen.spec)
    assert service["metadata"]["name"] == "front"
    assert service["spec"]["selector"] == {"trtmodel.io/model": "magika", "trtmodel.io/role": "worker"}
    assert service["spec"]["ports"] == [
        {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"},
        {"name": "grpc", "port": 9000, "targetPort": "grpc", "protocol": "TCP"},
    ]
    ports = {p["name"]: p["containerPort"] for p in container(deployment())["ports"]}
    assert ports == {"http": 8080, "grpc": 9000, "control": 8081, "metrics": 8082}
    assert manifests.service_name(MODEL, new().spec) == "magika"  # type: ignore[arg-type]


def test_C25_a_budget_never_makes_a_drain_impossible() -> None:
    def budget(replicas: int) -> dict[str, Any] | None:
        seen = edited(new(), serving__replicas=replicas)
        assert seen.spec is not None
        return manifests.pod_disruption_budget(seen.model, seen.spec)

    assert budget(0) is None
    assert budget(1) is None
    three = budget(3)
    assert three is not None
    assert three["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in three["spec"]
    assert three["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


# ---------------------------------------------------------------------------------------------------------------
# pointer and keys
# ---------------------------------------------------------------------------------------------------------------

STORAGE = Storage("engines")
POINTER = ApplyPointer("magika-default-1234abcd", "default", 7, deployed(A), deployed(B), STORAGE)


def signed(name: str) -> Signature:
    return Signature("k1", name[:8])


def test_what_is_written_is_what_is_read() -> None:
    pointer = manifests.boot_pointer(MODEL, POINTER, signed)
    config = manifests.pointer_config_map(MODEL, POINTER, pointer.text(), Signature("k1", "abc"))
    assert config["metadata"]["name"] == "magika-default-1234abcd"
    assert loads(BootPointer, config["data"]["pointer.json"]) == pointer
    assert json.loads(config["data"]["pointer.sig.json"]) == {"keyId": "k1", "value": "abc"}
    data = config["data"]
    found = manifests.read_pointer("magika-default-1234abcd", "default", data["pointer.json"], data["pointer.sig.json"])
    assert (found.sequence, found.key_ids) == (7, ("k1",))
    assert (found.stable, found.standby) == (deployed(A), deployed(B))
    assert found.content == manifests.wanted_content(MODEL, POINTER)


def test_a_pointer_names_engines_by_load_key_for_its_own_target_only() -> None:
    pointer = manifests.boot_pointer(MODEL, POINTER, signed)
    assert set(pointer.stable.artifacts) == {str(LOAD_KEY)}
    assert pointer.stable.artifacts[str(LOAD_KEY)].manifest_digest == digest(A)
    other = manifests.boot_pointer(MODEL, ApplyPointer("x", "a10", 7, deployed(A), None, STORAGE), signed)
    assert other.stable.artifacts == {}


def test_the_content_is_of_everything_but_sequence_and_signatures() -> None:
    def content(storage: Storage = STORAGE, sequence: int = 7, standby: str = B, by: str = "k1") -> str:
        apply = ApplyPointer("x", "default", sequence, deployed(A), deployed(standby), storage)
        return manifests.pointer_content(manifests.boot_pointer(MODEL, apply, lambda name: Signature(by, name)))

    assert content() == content(sequence=9) == content(by="k2")
    assert len({content(), content(Storage("other")), content(standby=A)}) == 3


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"schema": "trtmodel.io/pointer/v9"}', "\x00"])
def test_a_damaged_pointer_is_one_without_content(text: str) -> None:
    assert manifests.read_pointer("p", "default", text, "{}") == ObservedPointer("p", 0, "")


@pytest.mark.parametrize("signature", ["", "{}", "[]", "no json", '{"keyId":"old","value":"x"}'])
def test_a_pointer_whose_own_signature_is_lost_or_by_another_key_is_not_by_the_key_that_signs(signature: str) -> None:
    text = manifests.boot_pointer(MODEL, POINTER, signed).text().decode()
    found = manifests.read_pointer("p", "default", text, signature)
    assert found.stable == deployed(A)
    assert set(found.key_ids) != {"k1"}


def test_the_public_keys_lie_beside_it() -> None:
    config = manifests.keys_config_map(MODEL, {"k1": "AA=="})
    assert config["metadata"]["name"] == manifests.keys_name(MODEL) == "magika-keys"
    assert loads(KeySet, config["data"]["keys.json"]) == KeySet({"k1": "AA=="})
