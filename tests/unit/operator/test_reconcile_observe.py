from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from trtmodel_contract.codec import dumps, encode
from trtmodel_contract.control import CONTROL_PORT, DesiredRequest, Fence, Report, WorkerState
from trtmodel_contract.identity import LoadKey, ModelRef, Storage
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_contract.signing import Signature
from trtmodel_operator import manifests
from trtmodel_operator.adapters.observe import observe
from trtmodel_operator.model import (
    ApplyPointer,
    Artifact,
    Command,
    Deployed,
    JobState,
    Memory,
    Observed,
    ObservedJob,
    ObservedWorker,
)
from trtmodel_operator.ports import Json, Key, WorkerError

UID = "uid-1"
MODEL = ModelRef("ml", "magika", UID)
SPEC = {
    "source": {"uri": "s3://models/model.onnx"},
    "storage": {"bucket": "engines"},
    "engine": {"runtime": "ONNXRuntime"},
    "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz", "samples": 1000}},
    "serving": {"replicas": 1},
}


class Signer:
    def sign(self, payload: bytes) -> Signature:
        return Signature("k1", "c2ln")

    def public_keys(self) -> Mapping[str, str]:
        return {"k1": "cHVi"}


class Workers:
    """Answers by uid; without an answer a worker is silent."""

    def __init__(self, **reports: Report) -> None:
        self.reports = reports
        self.most_at_once = 0
        self._at_once = 0

    async def report(self, ip: str, uid: str) -> Report:
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0.01)
        self._at_once -= 1
        if uid not in self.reports:
            raise WorkerError(f"no answer from {ip}:{CONTROL_PORT} within 2 s")
        return self.reports[uid]

    async def send(self, ip: str, uid: str, request: DesiredRequest) -> None:
        raise AssertionError("observing sends nothing")

    def follow(self, key: Key, workers: Mapping[str, tuple[str, int]], *, closely: bool = True) -> None:
        raise AssertionError("observing follows nobody")


def look(workers: Workers | None = None, raw: Json | None = None, **children: list[Json]) -> Observed:
    return asyncio.run(
        observe(
            raw or model(),
            children,
            workers=workers or Workers(),
            signer=Signer(),
            default_image="worker:1",
            now=1000.0,
        )
    )


def model(**more: Any) -> Json:
    metadata = {"namespace": "ml", "name": "magika", "uid": UID, "generation": 3, **more.pop("metadata", {})}
    return {"metadata": metadata, "spec": SPEC, **more}


def child(kind: str, name: str, owner: str = UID, **more: Any) -> Json:
    owners = [{"uid": owner, "controller": True}] if owner else []
    metadata = {
        "name": name,
        "namespace": "ml",
        "uid": f"uid-of-{name}",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "ownerReferences": owners,
        **more.pop("metadata", {}),
    }
    return {"kind": kind, "metadata": metadata, **more}


def job(name: str = "build-1", owner: str = UID, kind: str = "build", **status: Any) -> Json:
    labels = {manifests.LABEL_KIND: kind, manifests.LABEL_TARGET: "cpu"}
    return child("Job", name, owner, metadata={"labels": labels}, status=status)


def job_pod(name: str, created: str = "2026-01-01T00:00:00Z", job_name: str = "build-1", **status: Any) -> Json:
    return child("Pod", name, f"uid-of-{job_name}", metadata={"creationTimestamp": created}, status=status)


def terminated(code: int, reason: str = "Error", message: str = "") -> Json:
    ended = {"exitCode": code, "reason": reason} | ({"message": message} if message else {})
    return {"containerStatuses": [{"name": "build", "state": {"terminated": ended}}]}


def message(reason: Reason, text: str = "said") -> str:
    return dumps(JobResult(reason, text)).decode()


FAILED = [
    {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "Job has reached its limit"}
]


def the_job(*pods: Json, **status: Any) -> ObservedJob:
    (found,) = look(Job=[job(**status)], Pod=list(pods)).jobs
    return found


# ----- jobs --------------------------------------------------------------------------------------------------------


def test_a_running_job_without_trouble_is_running() -> None:
    found = the_job(job_pod("p", phase="Running"), startTime="2026-01-01T00:00:10Z", active=1)
    assert (found.state, found.result, found.trouble, found.target) == (JobState.RUNNING, None, "", "cpu")
    assert found.started_at == 1767225610.0


def test_a_complete_job_gives_the_result_in_its_termination_message() -> None:
    pod = job_pod("p", phase="Succeeded", **terminated(0, "Completed", message(Reason.DONE)))
    found = the_job(pod, conditions=[{"type": "Complete", "status": "True"}])
    assert found.state is JobState.COMPLETE
    assert found.result is not None
    assert found.result.reason is Reason.DONE


def test_a_condition_that_is_false_ends_no_job() -> None:
    assert the_job(conditions=[{"type": "Complete", "status": "False"}]).state is JobState.RUNNING


def test_of_several_tries_the_newest_message_counts() -> None:
    old = job_pod("a", "2026-01-01T00:00:00Z", phase="Failed", **terminated(1, message=message(Reason.NO_SPACE)))
    new = job_pod("b", "2026-01-01T00:05:00Z", phase="Failed", **terminated(42, message=message(Reason.GATE_FAILED)))
    for pods in ([old, new], [new, old]):
        found = the_job(*pods, conditions=FAILED)
        assert found.state is JobState.FAILED
        assert found.result is not None
        assert found.result.reason is Reason.GATE_FAILED
        assert found.trouble == ""


def test_a_pod_that_ended_with_its_result_ends_the_job_before_the_job_controller_says_so() -> None:
    done = the_job(job_pod("p", phase="Succeeded", **terminated(0, "Completed", message(Reason.DONE))), active=1)
    assert (done.state, done.trouble) == (JobState.COMPLETE, "")
    phase_lags = the_job(job_pod("p", phase="Running", **terminated(0, "Completed", message(Reason.DONE))), active=1)
    assert (phase_lags.state, phase_lags.trouble) == (JobState.COMPLETE, "")
    refused = the_job(job_pod("p", phase="Failed", **terminated(42, message=message(Reason.GATE_FAILED))), active=1)
    assert (refused.state, refused.trouble) == (JobState.FAILED, "")
    silent = the_job(job_pod("p", phase="Succeeded", **terminated(0, "Completed")), active=1)
    assert silent.state is JobState.RUNNING


def test_a_try_that_told_why_it_failed_is_the_trouble_until_the_next_one_has_its_own() -> None:
    old = job_pod("a", "2026-01-01T00:00:00Z", phase="Failed", **terminated(1, message=message(Reason.NO_SPACE)))
    between = the_job(old, active=0)
    assert (between.state, between.trouble, between.message) == (JobState.RUNNING, "NoSpace", "said")
    waiting = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nodes"}]
    again = the_job(old, job_pod("b", "2026-01-01T00:05:00Z", phase="Pending", conditions=waiting), active=1)
    assert (again.state, again.trouble) == (JobState.RUNNING, "Unschedulable")


def test_a_last_try_that_left_no_word_is_told_as_it_ended_and_not_by_what_an_older_one_said() -> None:
    old = job_pod("a", "2026-01-01T00:00:00Z", phase="Failed", **terminated(1, message=message(Reason.NO_SPACE)))
    killed = job_pod("b", "2026-01-01T00:05:00Z", phase="Failed", **terminated(137, "OOMKilled"))
    found = the_job(old, killed, conditions=FAILED)
    assert (found.result, found.trouble) == (None, "OOMKilled")
    assert "it needed more memory than its limit" in found.message
    silent = job_pod("b", "2026-01-01T00:05:00Z", phase="Succeeded", **terminated(0, "Completed"))
    done = the_job(old, silent, conditions=[{"type": "Complete", "status": "True"}])
    assert (done.state, done.result) == (JobState.COMPLETE, None)


def test_a_pod_of_another_job_says_nothing() -> None:
    pod = job_pod("p", job_name="other", **terminated(42, message=message(Reason.GATE_FAILED)))
    assert the_job(pod, conditions=FAILED).result is None


def test_a_job_without_a_message_tells_what_the_cluster_says() -> None:
    killed = the_job(job_pod("p", phase="Failed", **terminated(137, "OOMKilled")), conditions=FAILED)
    assert killed.trouble == "OOMKilled"
    assert "exit code 137: it needed more memory than its limit" in killed.message
    evicted = the_job(
        job_pod("p", phase="Failed", reason="Evicted", message="The node was low on memory"), conditions=FAILED
    )
    assert (evicted.trouble, evicted.message) == ("Evicted", "The node was low on memory")
    gone = the_job(conditions=FAILED)
    assert (gone.trouble, gone.message) == ("BackoffLimitExceeded", "Job has reached its limit")


def test_a_deadline_says_what_the_job_was_waiting_for() -> None:
    deadline = [
        {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "Job was active too long"}
    ]
    waiting = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no GPU"}]
    found = the_job(job_pod("p", phase="Pending", conditions=waiting), conditions=deadline)
    assert (found.trouble, found.message) == ("DeadlineExceeded", "Job was active too long: 0/1 nodes: no GPU")


def test_a_message_that_cannot_be_read_is_shown_and_is_no_result() -> None:
    found = the_job(
        job_pod("p", phase="Failed", **terminated(1, message="Traceback: boom")),
        conditions=[{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}],
    )
    assert found.result is None
    assert found.trouble == "DeadlineExceeded"


@pytest.mark.parametrize(
    "reason",
    [
        "CreateContainerConfigError",
        "InvalidImageName",
    ],
)
def test_a_container_that_cannot_start_is_told_while_the_job_runs(reason: str) -> None:
    waiting = {"containerStatuses": [{"name": "b", "state": {"waiting": {"reason": reason, "message": "why"}}}]}
    found = the_job(job_pod("p", phase="Pending", **waiting))
    assert (found.state, found.trouble, found.message) == (JobState.RUNNING, reason, "why")


def test_the_two_faces_of_a_failed_pull_are_told_alike() -> None:
    faces = [
        {"reason": "ErrImagePull", "message": "dial tcp: refused"},
        {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x": ErrImagePull: dial tcp: refused'},
    ]
    told = [
        the_job(job_pod("p", phase="Pending", containerStatuses=[{"name": "b", "state": {"waiting": face}}]))
        for face in faces
    ]
    assert told[0] == told[1]
    assert (told[0].trouble, told[0].message) == ("ImagePullBackOff", "dial tcp: refused")


def test_a_container_that_is_being_created_is_no_trouble() -> None:
    waiting = {"containerStatuses": [{"name": "b", "state": {"waiting": {"reason": "ContainerCreating"}}}]}
    assert the_job(job_pod("p", phase="Pending", **waiting)).trouble == ""


def test_a_pod_that_cannot_be_scheduled_is_told_with_the_schedulers_words() -> None:
    unscheduled = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no nodes"}]
    found = the_job(job_pod("p", phase="Pending", conditions=unscheduled))
    assert (found.trouble, found.message) == ("Unschedulable", "no nodes")


def test_children_of_a_deleted_namesake_are_not_ours() -> None:
    found = look(Job=[job(owner="uid-of-the-deleted")], Deployment=[deployment(owner="uid-of-the-deleted")])
    assert found.jobs == ()
    assert found.workloads == ()


def test_a_job_that_another_hand_labelled_wrongly_is_left_out() -> None:
    assert look(Job=[job(kind="???")]).jobs == ()


# ----- workers -----------------------------------------------------------------------------------------------------


def worker_pod(name: str = "w1", model_uid: str = UID, **more: Any) -> Json:
    labels = {manifests.LABEL_ROLE: "worker", manifests.LABEL_TARGET: "cpu", manifests.LABEL_PLATFORM: "p1"}
    status = {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "worker", "restartCount": 2, "state": {"running": {}}}],
        **more.pop("status", {}),
    }
    metadata = {"labels": labels, **more.pop("metadata", {})}
    env = [{"name": "POD_NAME", "valueFrom": {}}, {"name": "TRTMODEL_MODEL_UID", "value": model_uid}]
    return child(
        "Pod", name, "uid-of-a-replica-set", metadata=metadata, spec={"containers": [{"env": env}]}, status=status
    )


def report(pod: str = "w1") -> Report:
    return Report(
        version=4,
        pod=pod,
        pod_uid=f"uid-of-{pod}",
        load_key=LoadKey("ONNXRuntime", "1.20", "cpu"),
        driver="",
        state=WorkerState.SERVING,
        message="",
        fence=Fence(UID, 2),
        pointer_sequence=2,
        key_ids=("k1",),
        models={},
    )


def the_worker(pod: Json, workers: Workers | None = None) -> ObservedWorker:
    (found,) = look(workers, Pod=[pod]).workers
    return found


def test_a_worker_comes_with_its_live_report() -> None:
    found = the_worker(worker_pod(), Workers(**{"uid-of-w1": report()}))
    assert found.report == report()
    assert (found.pod, found.uid, found.ip, found.target) == (
        "w1",
        "uid-of-w1",
        "10.0.0.1",
        "cpu",
    )
    assert (found.ready, found.terminating, found.silence) == (True, False, "")


def test_a_worker_that_cannot_be_asked_is_unknown_with_its_cause() -> None:
    found = the_worker(worker_pod())
    assert found.report is None
    assert "no answer from 10.0.0.1:8081" in found.silence
    assert found.ready  # what the kubelet saw, which is another fact


def test_a_worker_that_has_not_started_or_is_being_deleted_is_not_asked() -> None:
    asked = Workers(**{"uid-of-w1": report()})
    starting = the_worker(worker_pod(status={"containerStatuses": [{"state": {"waiting": {}}}]}), asked)
    assert (starting.report, starting.silence) == (None, "its container has not started")
    crashed = worker_pod(status={"containerStatuses": [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]})
    assert the_worker(crashed, asked).silence == "its container does not run (CrashLoopBackOff)"
    leaving = the_worker(worker_pod(metadata={"deletionTimestamp": "2026-01-01T00:10:00Z"}), asked)
    assert (leaving.report, leaving.terminating) == (None, True)
    assert asked.most_at_once == 0


def test_workers_are_asked_together() -> None:
    asked = Workers(**{f"uid-of-w{n}": report(f"w{n}") for n in range(20)})
    found = look(asked, Pod=[worker_pod(f"w{n}") for n in range(20)])
    assert all(w.report for w in found.workers)
    assert asked.most_at_once == 20


def test_an_evicted_pod_is_no_worker_and_neither_is_one_of_a_namesake_or_of_a_job() -> None:
    evicted = worker_pod("a", status={"phase": "Failed", "reason": "Evicted"})
    assert look(Pod=[evicted, worker_pod("b", model_uid="uid-of-the-deleted"), job_pod("c")]).workers == ()


def test_deaths_of_a_workers_container_are_counted_and_the_last_one_is_told() -> None:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:10Z"}}
    container = {"name": "worker", "restartCount": 2, "state": {"running": {}}, "lastState": ended}
    found = the_worker(worker_pod(status={"containerStatuses": [container]}))
    assert found.restarts == 2
    assert found.death == "the container worker ended with exit code 137: it needed more memory than its limit"
    assert (the_worker(worker_pod()).restarts, the_worker(worker_pod()).death) == (2, "")


# ----- the rest ----------------------------------------------------------------------------------------------------


def deployment(owner: str = UID, **status: Any) -> Json:
    labels = {manifests.LABEL_TARGET: "cpu", manifests.LABEL_PLATFORM: "p1"}
    metadata = {"labels": labels, "annotations": {manifests.ANNOTATION_FINGERPRINT: "f1"}}
    spec = {"replicas": 3, "template": {"spec": {"containers": [{"image": "worker:1"}]}}}
    return child("Deployment", "magika-cpu-p1", owner, metadata=metadata, spec=spec, status=status)


def test_a_deployment_tells_replicas_fingerprint_image_and_why_it_cannot_make_pods() -> None:
    quota = [{"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}]
    (found,) = look(Deployment=[deployment(readyReplicas=2, conditions=quota)]).workloads
    assert (found.name, found.target, found.platform) == ("magika-cpu-p1", "cpu", "p1")
    assert (found.replicas, found.fingerprint, found.image) == (3, "f1", "worker:1")
    assert (found.trouble, found.message) == ("FailedCreate", "exceeded quota")


def pointer_map(text: str | None = None) -> Json:
    stable = Deployed("r1", (Artifact("cpu", "key", "a" * 64),))
    action = ApplyPointer("magika-cpu-p1", "cpu", 5, stable, None, Storage("engines"))
    pointer = manifests.boot_pointer(MODEL, action, lambda _: Signature("k1", "s"))
    stored = manifests.pointer_config_map(MODEL, action, pointer.text(), Signature("k1", "s"))
    if text is not None:
        stored["data"]["pointer.json"] = text
    return stored


def test_a_pointer_is_read_back_as_it_was_written() -> None:
    (found,) = look(ConfigMap=[pointer_map(), manifests.keys_config_map(MODEL, {"k1": "cHVi"})]).pointers
    assert (found.name, found.sequence, found.key_ids) == ("magika-cpu-p1", 5, ("k1",))
    assert found.stable == Deployed("r1", (Artifact("cpu", "key", "a" * 64),))


def test_a_damaged_pointer_is_an_absent_one() -> None:
    (found,) = look(ConfigMap=[pointer_map("{}")]).pointers
    assert (found.sequence, found.content, found.stable) == (0, "", None)


def test_the_memory_is_read_back_as_it_was_written() -> None:
    memory = Memory(sequence=7, stable=Deployed("r1", (Artifact("cpu", "key", "a" * 64),)), waited=1.5)
    assert look(raw=model(status={"rollout": encode(memory)})).memory == memory


def test_a_memory_that_cannot_be_read_counts_as_lost() -> None:
    assert look(raw=model(status={"rollout": {"sequence": "many"}})).memory == Memory()
    assert look(raw=model()).memory == Memory()


def test_a_spec_that_cannot_be_read_is_told_and_ends_nothing() -> None:
    found = look(raw=model(spec={"source": 1}), Pod=[worker_pod()])
    assert found.spec is None
    assert found.spec_error
    assert len(found.workers) == 1


def test_the_rest_of_the_facts() -> None:
    raw = model(
        metadata={"deletionTimestamp": "2026-01-01T00:00:00Z", "annotations": {"trtmodel.io/command": "abort#1"}}
    )
    service = child("Service", "magika", metadata={"annotations": {manifests.ANNOTATION_FINGERPRINT: "f2"}})
    found = look(raw=raw, Service=[service])
    assert (found.model, found.generation, found.now, found.deleting) == (MODEL, 3, 1000.0, True)
    assert found.command == Command("abort", "", "abort#1")
    assert (found.default_image, found.service_fingerprint, found.key_ids) == ("worker:1", "f2", ("k1",))
