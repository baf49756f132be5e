"""How a worker comes, with and without an operator, and how it goes."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trtmodel_contract.control import KEYS_FILE, POINTER_FILE, EngineState, WorkerState
from trtmodel_contract.identity import LoadKey
from worker_harness import (
    FACTORS,
    LOAD_KEY,
    MODEL,
    REVISION_1,
    REVISION_2,
    Bucket,
    Load,
    Operator,
    WorkerProcess,
    eventually,
    fp32,
)


def test_it_serves_from_the_pointer_without_an_operator_and_loads_the_standby_afterwards(
    worker: WorkerProcess, engines: list[Any]
) -> None:
    worker.point(engines[0], engines[1])
    worker.start()
    worker.wait_ready()
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1
    worker.wait_engine(engines[1].manifest_digest)
    report = worker.report()
    assert (report.state, report.fence.sequence, report.pointer_sequence) == (WorkerState.SERVING, 1, 1)
    assert (report.load_key, report.driver, report.pod, report.pod_uid) == (LOAD_KEY, "5.5", "m-0", "pod-uid-1")
    assert report.key_ids == (worker.operator.key_id,)


def test_an_operator_that_is_faster_than_the_look_at_the_machine_is_followed_as_soon_as_that_is_over(
    worker: WorkerProcess, engines: list[Any]
) -> None:
    """No try fails meanwhile: the next one would be seconds later."""
    worker.environment |= {"TRTMODEL_RUNTIME": "TestLate", "TMPDIR": str(worker.directory)}
    worker.point(engines[0])
    worker.start()
    worker.wait_listening()
    assert worker.desire(engines[0]).status == 200
    states = {worker.wait_engine(engines[0].manifest_digest, EngineState.FETCHING).state for _ in range(20)}
    assert states == {EngineState.FETCHING}
    (worker.directory / "seen").touch()
    worker.wait_ready()
    assert worker.report().load_key == LOAD_KEY
    assert "NotStarted" not in worker.tail()


def test_who_asks_whether_it_is_ready_may_wait_for_the_moment_in_which_it_is(
    worker: WorkerProcess, engines: list[Any]
) -> None:
    worker.start()
    worker.wait_listening()
    begun = time.monotonic()
    assert worker.get("/v2/health/ready?wait=0.5").status == 503
    assert time.monotonic() - begun >= 0.5
    assert worker.get("/v2/health/ready?wait=soon").status == 400
    worker.point(engines[0])
    eventually(lambda: worker.get("/v2/health/ready?wait=10").status == 200, "it is told")
    assert worker.infer_rows([[1] * 4]).revision == REVISION_1


def test_a_pointer_that_comes_later_or_changes_is_followed_if_its_sequence_is_higher(
    worker: WorkerProcess, engines: list[Any]
) -> None:
    worker.start()
    worker.wait_listening()
    assert worker.get("/v2/health/ready").status == 503
    assert worker.infer_rows([[1] * 4]).status == 503
    assert worker.report().state is WorkerState.STARTING
    worker.point(engines[0], sequence=5)
    worker.wait_ready()
    worker.point(engines[1], sequence=6)
    worker.wait_routed(engines[1].manifest_digest)
    worker.point(engines[2], sequence=4)
    eventually(lambda: worker.report().pointer_sequence == 4, "the older pointer was seen")
    assert worker.report().fence.sequence == 6
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2


def test_the_kubelets_way_of_changing_files_is_noticed(worker: WorkerProcess, engines: list[Any]) -> None:
    """A mounted ConfigMap is a link to a link to a directory, which is replaced as a whole."""
    worker.point(engines[0])
    files = list(worker.pointer_dir.iterdir())
    first = worker.pointer_dir / "..2026_1"
    first.mkdir()
    for path in files:
        path.replace(first / path.name)
        path.symlink_to(f"..data/{path.name}")
    (worker.pointer_dir / "..data").symlink_to(first.name)
    worker.start()
    worker.wait_ready()
    other = WorkerProcess(worker.directory / "other", worker.operator, worker.bucket)
    other.point(engines[1], sequence=2)
    second = worker.pointer_dir / "..2026_2"
    other.pointer_dir.replace(second)
    (worker.pointer_dir / "..data_tmp").symlink_to(second.name)
    (worker.pointer_dir / "..data_tmp").replace(worker.pointer_dir / "..data")
    worker.wait_routed(engines[1].manifest_digest)


@pytest.mark.parametrize("what", ["another key", "another model", "changed bytes", "no signature"])
def test_a_pointer_that_is_not_the_operators_for_this_model_is_not_followed(
    worker: WorkerProcess, engines: list[Any], what: str
) -> None:
    worker.point(
        engines[0],
        signer=Operator() if what == "another key" else None,
        model=replace(MODEL, name="other") if what == "another model" else MODEL,
    )
    path = worker.pointer_dir / POINTER_FILE
    if what == "changed bytes":
        path.write_bytes(path.read_bytes().replace(b'"sequence":1', b'"sequence":9'))
    if what == "no signature":
        (worker.pointer_dir / "pointer.sig.json").unlink()
    worker.start()
    worker.wait_listening()
    eventually(lambda: "not followed" in worker.report().message, "it says so")
    assert 'trtmodel_untrusted_total{what="pointer"} 0.0' not in worker.metrics()
    assert worker.report().state is WorkerState.STARTING
    assert worker.host_pids() == []
    worker.point(engines[0])
    worker.wait_ready()


def test_without_an_engine_for_its_load_key_it_says_so_and_is_not_ready(
    worker: WorkerProcess, engines: list[Any]
) -> None:
    worker.point(engines[0], load_key=LoadKey("Test", "2", "gpu"))
    worker.start()
    worker.wait_listening()
    eventually(lambda: worker.report().state is WorkerState.NO_ENGINE, "NoEngine")
    assert worker.get("/v2/health/ready").status == 503
    assert worker.get("/v2/health/live").status == 200
    assert worker.report().load_key == LOAD_KEY
    worker.point(engines[0])
    worker.wait_ready()


def test_when_the_stable_cannot_be_loaded_at_boot_the_standby_serves(
    worker: WorkerProcess, bucket: Bucket, operator: Operator, engines: list[Any]
) -> None:
    broken = operator.artifact("dddddddddd", bucket.publish("dddddddddd", {"refuse": "broken"})[0])
    worker.point(broken, engines[1])
    worker.start()
    worker.wait_ready()
    assert worker.infer_rows([[1] * 4]).revision == REVISION_2
    report = worker.report()
    assert report.models["m"].routes.stable == engines[1].manifest_digest
    assert "CannotLoad: broken" in report.message
    assert {e.revision: e.state for e in report.models["m"].engines} == {
        "dddddddddd": EngineState.FAILED,
        REVISION_2: EngineState.READY,
    }


def test_after_a_restart_it_boots_from_its_cache_although_the_storage_is_gone(
    worker: WorkerProcess, bucket: Bucket, engines: list[Any]
) -> None:
    worker.point(engines[0], engines[1])
    worker.start()
    worker.wait_engine(engines[1].manifest_digest)
    worker.stop()
    for path in (bucket.directory / "engines" / "trtmodel").rglob("*"):
        if path.is_file():
            path.unlink()
    worker.start()
    worker.wait_ready()
    worker.wait_engine(engines[1].manifest_digest)


def test_while_the_storage_is_away_a_boot_waits_and_then_succeeds(
    worker: WorkerProcess, bucket: Bucket, engines: list[Any]
) -> None:
    away = bucket.directory / "away"
    (bucket.directory / "engines").rename(away)
    worker.point(engines[0])
    worker.start()
    failed = worker.wait_engine(engines[0].manifest_digest, EngineState.FAILED)
    assert failed.reason == "BucketNotFound"
    assert worker.report().state is WorkerState.NOT_SERVING
    away.rename(bucket.directory / "engines")
    worker.wait_ready()


def test_files_in_the_cache_that_no_engine_needs_are_dropped(worker: WorkerProcess, engines: list[Any]) -> None:
    worker.point(engines[0])
    worker.start()
    worker.wait_ready()
    cache = worker.directory / "cache" / "sha256"
    (cache / ("f" * 64)).write_bytes(b"old")
    worker.desire(engines[1])
    worker.wait_routed(engines[1].manifest_digest)
    eventually(lambda: len(list(cache.iterdir())) == 3, "manifest, plan and golden samples of one engine are left")


def test_a_new_key_is_taken_from_the_mounted_file(worker: WorkerProcess, bucket: Bucket, engines: list[Any]) -> None:
    worker.point(engines[0])
    worker.start()
    worker.wait_ready()
    following = Operator()
    artifact = following.artifact(REVISION_2, engines[1].manifest_digest)
    worker.desire(artifact)
    worker.wait_engine(artifact.manifest_digest, EngineState.FAILED)
    keys = json.loads(worker.operator.keys())
    keys["keys"].update(json.loads(following.keys())["keys"])
    (worker.keys_dir / KEYS_FILE).write_text(json.dumps(keys))
    worker.wait_routed(artifact.manifest_digest)
    assert set(worker.report().key_ids) == {worker.operator.key_id, following.key_id}


def test_a_sigterm_under_load_fails_no_request_that_came_in_the_drain_delay(
    start_worker: Callable[..., WorkerProcess], bucket: Bucket, operator: Operator
) -> None:
    worker = start_worker(TRTMODEL_DRAIN_SECONDS="2")
    worker.point(operator.artifact(REVISION_1, bucket.publish(REVISION_1, {"factor": 1.0, "work": 0.02})[0]))
    worker.start()
    worker.wait_ready()
    with Load(worker.port, FACTORS, clients=4) as load:
        load.wait_for(20)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        eventually(lambda: worker.get("/v2/health/ready").status == 503, "not ready at once", 1.0)
        assert worker.get("/v2/health/live").status == 200
        answer = worker.infer_rows([[1] * 4])
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert worker.report().state is WorkerState.DRAINING
        load.wait_for(20)
    assert load.failures == []
    assert worker.process.wait(20) == 0


def test_a_request_that_runs_when_the_drain_delay_ends_is_answered(
    start_worker: Callable[..., WorkerProcess], bucket: Bucket, operator: Operator
) -> None:
    worker = start_worker(TRTMODEL_DRAIN_SECONDS="0.2")
    worker.point(operator.artifact(REVISION_1, bucket.publish(REVISION_1, {"slow": {"width": 4, "seconds": 0.6}})[0]))
    worker.start()
    worker.wait_ready()
    body = json.dumps(fp32([5, 6, 7, 8], [1, 4])).encode()
    with socket.create_connection(("127.0.0.1", worker.port), timeout=20) as s:
        s.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: m\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        time.sleep(0.2)
        assert worker.process is not None
        worker.process.send_signal(signal.SIGTERM)
        said = s.recv(65536)
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in said
    assert worker.process.wait(20) == 0


def test_a_worker_that_is_told_to_end_ends_its_hosts_itself(worker: WorkerProcess, engines: list[Any]) -> None:
    worker.point(engines[0])
    worker.start()
    worker.wait_ready()
    assert worker.stop() == 0
    assert f"revision {REVISION_1} was released" in worker.tail()


def test_hosts_do_not_outlive_a_front_that_is_killed(worker: WorkerProcess, engines: list[Any]) -> None:
    worker.point(engines[0], engines[1])
    worker.start()
    worker.wait_engine(engines[1].manifest_digest)
    pids = worker.host_pids()
    assert len(pids) == 2
    assert worker.process is not None
    worker.process.kill()
    worker.process.wait(10)
    eventually(lambda: not any(alive(pid) for pid in pids), "the hosts are gone", 5.0)


def test_hosts_know_nothing_of_the_pod(worker: WorkerProcess, engines: list[Any]) -> None:
    worker.point(engines[0])
    worker.start()
    worker.wait_ready()
    (pid,) = worker.host_pids()
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"a secret" not in environment
    assert b"POD_" not in environment
    assert b"TRTMODEL_" not in environment
    links = [str(p.readlink()) for p in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = [link for link in links if link.startswith("socket:")]
    assert len(sockets) == 3, "one for control, one for each of two lanes"


@pytest.mark.parametrize(
    ("name", "value"), [("POD_UID", ""), ("TRTMODEL_CONTEXTS", "0"), ("TRTMODEL_HTTP_PORT", "http")]
)
def test_a_setting_that_makes_no_sense_is_named(
    start_worker: Callable[..., WorkerProcess], name: str, value: str
) -> None:
    worker = start_worker(**{name: value})
    worker.start()
    assert worker.process is not None
    assert worker.process.wait(20) == 2
    assert name in worker.tail()
    worker.process = None


def test_the_front_is_light_and_starts_within_a_second() -> None:
    code = "import sys, trtmodel_worker.front.main; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert not {"onnxruntime", "onnx", "boto3", "aiohttp", "kopf"} & set(eval(done.stdout))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False
