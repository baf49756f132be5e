"""One seed from its begin to its end, and what is left of it: a line of JSON."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import urllib3
from e2e.cluster import Cluster, Json
from e2e.conftest import make_secrets
from e2e.install import CLUSTER, ROOT, Operator, build_images
from e2e.s3 import DATA, ENGINES, MODELS, Store
from e2e.world import condition, revision

from chaos import plan, proof, sources, watch
from chaos.actions import Scene, perform
from chaos.ledger import Ledger
from chaos.machine import KUBERNETES_VERSION, Machine
from chaos.plan import Action
from chaos.subject import FOLDER, NAMESPACE, RELEASE, SYSTEM, Away, Subject, asked, patiently
from chaos.traffic import Traffic

REPLICAS = 2
FIRST_SECONDS = 120.0  # until the models serve, before anything happens
SERVICE_SECONDS = 30.0  # from a model that is Ready to a Service that leads to it
CONVERGED_SECONDS = 300.0  # after chaos has stopped, until nothing moves any more: declared
FINAL_SECONDS = 180.0  # from a last good spec until it serves on every worker, without chaos: declared
SETTLED_SECONDS = 4.0  # of answers, which then come from stable, or hedged from standby
GONE_SECONDS = 90.0  # after a model was deleted
ACTION_SECONDS = 180.0  # that an action may go on when the time is over
HEAL_SECONDS = 240


@dataclass
class Result:
    seed: int
    minutes: float
    date: str
    commit: str
    machine: str
    load: float = 0.0  # of the last five minutes, when chaos was over
    actions: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    never: list[str] = field(default_factory=list)  # kinds of the plan of which none could be done
    packets: dict[str, int] = field(default_factory=dict)  # lost by cuts
    requests: int = 0
    failed: int = 0
    late: float = 0.0  # seconds that the client was late at most: a machine without time
    tries_failed: dict[str, int] = field(default_factory=dict)
    revisions: int = 0
    routes: int = 0  # that workers told of
    pointed: int = 0  # engines in boot pointers
    looks: int = 0
    looks_at_workers: int = 0  # while the API tells nothing that is sure
    broken: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)  # violation of each kind
    ends: dict[str, str] = field(default_factory=dict)  # of the last spec under chaos, by model
    converged: float | None = None  # seconds
    final: float | None = None  # seconds


class Stage:
    """The product, installed for chaos, with its models in S3; used by one seed after the other. Close it."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.environment = _environment()
        self.cluster = Cluster(self.environment)
        self.images = build_images()
        self.store = Store(self.environment)
        self._operator = Operator(self.cluster, self.images, [NAMESPACE], SYSTEM, RELEASE)

    def close(self) -> None:
        self._delete_namespaces()
        self.cluster.close()

    def prepare(self) -> None:
        """Everything as new, whatever a seed before has left."""
        self.heal()
        self._delete_namespaces()
        self.machine.forget_logs()
        self.store.make_buckets()
        self.store.delete(ENGINES, f"trtmodel/{NAMESPACE}/")
        with tempfile.TemporaryDirectory() as folder:
            sources.write(Path(folder))
            for file in sorted(Path(folder).iterdir()):
                self.store.put(MODELS if file.suffix == ".onnx" else DATA, f"{FOLDER}/{file.name}", file)
        for namespace in (SYSTEM, NAMESPACE):
            self.cluster.kubectl("create", "namespace", namespace)
        make_secrets(self.cluster, NAMESPACE)
        self._operator.install(replicas=2)

    def heal(self) -> None:
        self.machine.heal()
        subprocess.run([CLUSTER, "up"], check=True, capture_output=True, text=True, timeout=HEAL_SECONDS)

    def _delete_namespaces(self) -> None:
        self.cluster.kubectl(
            "delete", "namespace", NAMESPACE, SYSTEM, "--ignore-not-found", "--timeout=120s", seconds=130
        )


def run_seed(stage: Stage, seed: int, minutes: float, logs: Path | None = None) -> Result:
    """Never raises but for an interruption: what goes wrong is a violation. `logs`: where those of a bad end go."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    result = Result(seed, minutes, now, _commit(), _machine())
    ledger, over = Ledger(), threading.Event()
    actions = plan.plan(seed, minutes)
    ledger.tell("seed", f"{seed}: {len(actions)} actions in {minutes:g} minutes")
    try:
        stage.prepare()
        _play(stage, actions, minutes, result, ledger, over)
    except Exception:
        ledger.violation("the run came to its end", traceback.format_exc())
    finally:
        over.set()  # whatever still waits ends
    try:
        stage.heal()
    except Exception as e:
        ledger.violation("the machine can be healed", f"{e} {getattr(e, 'stderr', '')}")
    proof.check_logs(stage.machine.kept_logs, ledger)
    result.broken, result.first = dict(ledger.broken), ledger.first
    if result.broken and logs is not None:
        shutil.copytree(stage.machine.kept_logs, logs / f"seed-{seed}", dirs_exist_ok=True)
        ledger.tell("logs", str(logs / f"seed-{seed}"))
    ledger.tell("result", json.dumps(asdict(result)))
    return result


def _play(
    stage: Stage, actions: tuple[Action, ...], minutes: float, result: Result, ledger: Ledger, over: threading.Event
) -> None:
    endpoint = stage.environment["S3_ENDPOINT_IN_CLUSTER"]
    subjects = {name: Subject(stage.cluster, name, endpoint, over) for name in plan.MODELS}
    for subject in subjects.values():
        subject.create(REPLICAS)
    for subject in subjects.values():
        subject.world.wait_ready(subject.name, FIRST_SECONDS)
    urls = _urls(subjects)
    _wait_served(urls)
    traffic = Traffic(urls, ledger, lambda model, gain: gain in subjects[model].trusted)
    watching = watch.Watch(subjects, stage.machine, ledger)
    traffic.start()
    watching.start()
    try:
        _chaos(Scene(stage.cluster, stage.machine, ledger, subjects, over), actions, minutes, result)
        stage.machine.heal()
        _converge(subjects, traffic, result, ledger)
        _end_well(subjects, traffic, result, ledger)
    except (Exception, KeyboardInterrupt):
        for subject in subjects.values():
            _describe(subject, ledger)
        raise
    finally:
        watching.stop()
        traffic.stop()
        result.requests, result.failed, result.late = traffic.requests, traffic.failed, round(traffic.late, 1)
        result.tries_failed = dict(traffic.tries_failed)
        result.looks, result.looks_at_workers = watching.looks, watching.looks_at_workers
    passed = proof.passed(stage.store)
    firsts = traffic.firsts()
    proof.check_answers(firsts, passed, ledger)
    proof.check_pointers(watching.pointed, passed, ledger)
    result.routes = proof.check_routes(stage.machine.kept_logs, passed, ledger)
    result.revisions, result.pointed = len(firsts), len(watching.pointed)
    _delete(subjects, ledger)


def _chaos(scene: Scene, actions: tuple[Action, ...], minutes: float, result: Result) -> None:
    """Every action at its time. Returns when the time is over and all have ended."""
    begin = time.monotonic()
    done: Counter[str] = Counter()
    threads = []

    def act(action: Action) -> None:
        try:
            if perform(scene, action):
                done[action.kind] += 1
            else:
                done[""] += 1
        except Exception:
            scene.ledger.violation("an action could be done", f"{action}: {traceback.format_exc()}")

    for action in actions:
        time.sleep(max(0.0, begin + action.at - time.monotonic()))
        name = f"{action.kind} {action.at}"
        threads.append(threading.Thread(target=act, args=(action,), name=name, daemon=True))
        threads[-1].start()
    time.sleep(max(0.0, begin + minutes * 60 - time.monotonic()))
    scene.over.set()
    for thread in threads:
        thread.join(ACTION_SECONDS)
        if thread.is_alive():
            scene.ledger.violation("an action could be done", f"{thread.name} does not end")
    scene.over.clear()
    result.load = round(os.getloadavg()[1], 1)
    result.skipped = done.pop("", 0)
    result.actions = {kind: done[kind] for kind in plan.DECK if done[kind]}
    result.never = [kind for kind in plan.counts(actions) if not done[kind]]
    result.packets = dict(scene.ledger.packets)
    scene.ledger.tell("chaos is over", f"{sum(done.values())} actions done, {result.skipped} skipped")


def _converge(subjects: Mapping[str, Subject], traffic: Traffic, result: Result, ledger: Ledger) -> None:
    begin = time.monotonic()
    ends: dict[str, Json] = {}
    while len(ends) < len(subjects):
        for name, subject in subjects.items():
            found = _seen(subject)
            if found is not None and watch.settled(found):
                ends[name] = found
            else:
                ends.pop(name, None)
        if time.monotonic() - begin > CONVERGED_SECONDS:
            for name in subjects.keys() - ends.keys():
                ledger.violation("everything converges", f"{name}: not in {CONVERGED_SECONDS:g} s")
                _describe(subjects[name], ledger)
            break
        time.sleep(0.5)
    result.converged = round(time.monotonic() - begin, 1)
    ledger.tell("converged", f"in {result.converged} s")
    settled_at = time.time()
    time.sleep(SETTLED_SECONDS)
    for name, found in ends.items():
        _wait_answer(traffic, name, revision(found, "stable"))
        near = {revision(found, "stable"), revision(found, "standby")}
        if far := {r for r, _ in traffic.since(name, settled_at)} - near:
            text = f"{name}: {', '.join(far)} answers, beside {', '.join(near)}"
            ledger.violation("at the end stable or standby answers", text)
        gains = {r: first.gain for (model, r), first in traffic.firsts().items() if model == name}
        result.ends[name] = watch.judge_end(subjects[name], found, gains, ledger)
        ledger.tell("end", f"{name}: {result.ends[name]}")


def _end_well(subjects: Mapping[str, Subject], traffic: Traffic, result: Result, ledger: Ledger) -> None:
    """A last good spec is served by everybody, and nothing is left over."""
    begin = time.monotonic()
    gains = {}
    for name, subject in subjects.items():
        gains[name] = subject.change(plan.GOOD).gain
        subject.scale(0.0)
    for name, subject in subjects.items():
        found: Json | None = None
        while found is None or condition(found, "Ready")["status"] != "True":
            if time.monotonic() - begin > FINAL_SECONDS:
                ledger.violation("a good spec is served after chaos", f"{name}: not in {FINAL_SECONDS:g} s")
                _describe(subject, ledger)
                return
            time.sleep(0.3)
            found = _seen(subject)
        _wait_answer(traffic, name, revision(found, "stable"))
        served = next(
            (g.gain for (m, r), g in traffic.firsts().items() if (m, r) == (name, revision(found, "stable"))), 0
        )
        if served != gains[name]:
            ledger.violation("a good spec is served after chaos", f"{name}: gain {served}, not {gains[name]}")
    result.final = round(time.monotonic() - begin, 1)
    ledger.tell("final", f"served in {result.final} s")
    for name, subject in subjects.items():
        wrong = _until_none(lambda subject=subject: watch.orphans(subject, watch.children(subject), REPLICAS))  # type: ignore[misc]
        if wrong:
            ledger.violation("nothing is left over", f"{name}: {'; '.join(wrong)}")


def _delete(subjects: Mapping[str, Subject], ledger: Ledger) -> None:
    """Nothing of a deleted model stays."""
    for subject in subjects.values():
        patiently(lambda subject=subject: subject.world.kubectl("delete", "trtmodel", subject.name), threading.Event())  # type: ignore[misc]
    for name, subject in subjects.items():
        left = _until_none(
            lambda subject=subject: [
                f"{k} {c['metadata']['name']}" for k, v in watch.children(subject).items() for c in v
            ]  # type: ignore[misc]
        )
        if left:
            ledger.violation("a deleted model leaves nothing", f"{name}: {', '.join(left)}")


def _until_none(look: Callable[[], list[str]]) -> list[str]:
    """What `look` still finds after a while."""
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        try:
            found = look()
        except Away as e:
            found = [str(e)]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.3)


def _wait_answer(traffic: Traffic, model: str, name: str) -> None:
    deadline = time.monotonic() + 20
    while (model, name) not in traffic.firsts() and time.monotonic() < deadline:
        time.sleep(0.2)


def _seen(subject: Subject) -> Json | None:
    try:
        return subject.model()
    except Away:
        return None


def _urls(subjects: Mapping[str, Subject]) -> dict[str, str]:
    found = {}
    for name, subject in subjects.items():
        path = f"/api/v1/namespaces/{NAMESPACE}/services/{name}"
        service = asked(lambda path=path, subject=subject: subject.world.cluster.request("GET", path))  # type: ignore[misc]
        found[name] = f"http://{service['spec']['clusterIP']}:8080"
    return found


def _wait_served(urls: Mapping[str, str]) -> None:
    """Until the Services lead to workers: kube-proxy takes a moment. Raises TimeoutError."""
    deadline = time.monotonic() + SERVICE_SECONDS
    with urllib3.PoolManager(timeout=2.0, retries=False) as client:
        for name, url in urls.items():
            while True:
                with contextlib.suppress(urllib3.exceptions.HTTPError):
                    if client.request("GET", f"{url}/v2/health/ready").status == 200:
                        break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{name}: its Service leads to no worker after {SERVICE_SECONDS:g} s")
                time.sleep(0.2)


def _describe(subject: Subject, ledger: Ledger) -> None:
    try:
        ledger.tell("looks so", subject.world.describe(subject.name))
    except Exception as e:
        ledger.tell("looks so", f"{subject.name}: {type(e).__name__}: {e}")


def _environment() -> dict[str, str]:
    done = subprocess.run([CLUSTER, "env"], check=True, capture_output=True, text=True, timeout=60)
    exports = re.findall(r"^export (\w+)=(.*)$", done.stdout, re.MULTILINE)
    return {name: " ".join(shlex.split(value)) for name, value in exports}


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return f"{os.cpu_count()} cores, {memory} GiB, Linux {os.uname().release}, Kubernetes {KUBERNETES_VERSION}"


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip() or os.environ.get("GIT_COMMIT", "unknown")
