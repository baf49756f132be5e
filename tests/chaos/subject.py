"""The TRTModels under chaos, as those who write them know them: what was applied, and what may come of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import urllib3
from e2e import models
from e2e.cluster import Cluster, Json, Refused
from e2e.s3 import DATA
from e2e.world import World, revision

from chaos import sources
from chaos.plan import BAD_FILE, BAD_GATE, GOOD, MODELS

NAMESPACE = "chaos"
SYSTEM = "chaos-system"
RELEASE = "chaos-trtmodel-operator"
FOLDER = "chaos"  # in the buckets
REPLICAS = (2, 3)
REUSED = 0.25  # of the good specs are of a model that was applied before
PATIENCE = 120.0  # seconds that a person goes on trying while the API server is away
RETRY_SECONDS = 0.5
TRANSIENT = (0, None, 408, 429, 500, 502, 503, 504)
SAMPLES = 200
TOP1_DELTA = 0.05

ROLLOUT: Json = {
    "steps": [{"workers": 1, "hold": "4s"}],
    # Workers, builds and whatever else runs share two cores: a ratio would say nothing about the engine.
    "analysis": {"interval": "2s", "minRequests": 20, "maxErrorRateIncrease": 0.2, "maxLatencyRatio": 50},
    "progressDeadline": "4m",
    "historyLimit": 20,
}
BUILD: Json = {"resources": models.SMALL, "retries": 10, "deadline": "10m"}

T = TypeVar("T")


class Away(Exception):
    """The API server does not answer, or not now."""


def asked(call: Callable[[], T]) -> T:
    """Raises Away where trying again may help, else what `call` raises."""
    try:
        return call()
    except Refused as e:
        if e.status in TRANSIENT:
            raise Away(str(e)) from e
        raise
    except (urllib3.exceptions.HTTPError, OSError) as e:
        raise Away(f"{type(e).__name__}: {e}") from e


def patiently(call: Callable[[], T], over: threading.Event) -> T:
    """As a person does who meets an API server that is away. Raises Away when patience or time is over."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return asked(call)
        except Away:
            if time.monotonic() > deadline or over.wait(RETRY_SECONDS):
                raise


@dataclass(frozen=True)
class Applied:
    """A spec: GOOD, BAD_GATE or BAD_FILE; the gain of what it would serve."""

    kind: str
    gain: int


def applied(spec: Json) -> Applied:
    """What a spec is, by its source."""
    name = spec["source"]["uri"].rpartition("/")[2].removesuffix(".onnx")
    if name == sources.OUTLIERS:
        return Applied(BAD_GATE, sources.BAD_GAIN)
    if name == sources.PAGE:
        return Applied(BAD_FILE, 0)
    return Applied(GOOD, int(name.removeprefix("g")))


class Subject:
    """One TRTModel."""

    def __init__(self, cluster: Cluster, name: str, endpoint: str, over: threading.Event) -> None:
        self.name = name
        self.world = World(cluster, NAMESPACE, (SYSTEM, RELEASE))
        self._endpoint, self._over = endpoint, over
        self._lock = threading.Lock()
        # Its own numbers first, so that two models seldom share an engine, and sometimes do.
        self._gains = itertools.cycle(
            [*range(1 + MODELS.index(name), sources.GOOD_ONES, 2), *range(2 - MODELS.index(name), sources.GOOD_ONES, 2)]
        )
        self._nonces = itertools.count(1)
        self.trusted: dict[int, float] = {}  # gains of good specs, and since when they may serve
        self._last = 0  # gain of the newest good spec
        self.replicas: list[tuple[float, int]] = []  # since when

    def create(self, replicas: int) -> None:
        source, engine = self._good()
        self.replicas = [(time.time(), replicas)]
        dataset = {"uri": f"s3://{DATA}/{FOLDER}/eval.npz", "samples": SAMPLES}
        verify = {"task": "Classification", "dataset": dataset, "thresholds": {"top1Delta": TOP1_DELTA}}
        serving = {"replicas": replicas, "contexts": 1, "pod": {"resources": models.WORKER}}
        manifest = models.tiny(
            self.name, self._endpoint, source=source, engine=engine, verify=verify, build=BUILD, serving=serving,
            rollout=ROLLOUT,
        )  # fmt: skip
        path = f"/apis/trtmodel.io/v1alpha1/namespaces/{NAMESPACE}/trtmodels"
        patiently(lambda: self.world.cluster.request("POST", path, manifest), self._over)

    def change(self, kind: str, pick: float = 1.0) -> Applied:
        """Another source and engine. Returns what it is."""
        if kind == GOOD:
            source, engine = self._good(pick)
        else:
            source = self._source(sources.OUTLIERS if kind == BAD_GATE else sources.PAGE)
            engine = self._engine("FP16")
        self._patch({"source": source, "engine": engine})
        return applied({"source": source})

    def scale(self, pick: float) -> int:
        wanted = REPLICAS[int(pick * len(REPLICAS)) % len(REPLICAS)]
        # A promise of fewer holds from the moment when it is asked for, one of more when it was accepted.
        fewer = wanted < self.replicas[-1][1]
        begin = time.time()
        if fewer:
            self.replicas.append((begin, wanted))
        self._patch({"serving": {"replicas": wanted}})
        if not fewer:
            self.replicas.append((time.time(), wanted))
        return wanted

    def command(self, verb: str) -> str:
        text = f"{verb}#chaos-{next(self._nonces)}"
        body = {"metadata": {"annotations": {"trtmodel.io/command": text}}}
        patiently(lambda: self._merge(body), self._over)
        return text

    def model(self) -> Json:
        """Raises Away."""
        return asked(lambda: self.world.model(self.name))

    def wait_canary(self, seconds: float) -> str:
        """The revision on trial, once a worker answers with it; '' if none does in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._over.wait(0.5):
            try:
                found = self.model()
            except Away:
                continue
            status = found.get("status", {})
            if status.get("phase") == "Canary" and any(t["workers"]["onCandidate"] for t in status["targets"]):
                return revision(found, "candidate")
        return ""

    def floor(self, at: float, patience: float) -> int:
        """How many workers are promised: of what was asked for in the last `patience` seconds, the least."""
        current = [n for since, n in self.replicas if since <= at][-1:]
        lately = [n for since, n in self.replicas if at - patience <= since <= at]
        before = [n for since, n in self.replicas if since < at - patience][-1:]
        return min([*current, *lately, *before] or [0])

    def _good(self, pick: float = 1.0) -> tuple[Json, Json]:
        with self._lock:
            known = sorted(self.trusted.keys() - {self._last})
            gain = known[int(pick / REUSED * len(known))] if known and pick < REUSED else next(self._gains)
            self.trusted.setdefault(gain, time.time())
            self._last = gain
        return self._source(f"g{gain}"), self._engine("FP32" if gain % 2 else "FP16")

    def _source(self, file: str) -> Json:
        return {"uri": f"s3://{models.MODELS}/{FOLDER}/{file}.onnx"}

    def _engine(self, precision: str) -> Json:
        shapes = models.shapes(models.WIDTH)
        return {"runtime": "ONNXRuntime", "precision": precision, "profiles": [{"inputs": {"x": shapes}}]}

    def _patch(self, spec: Json) -> None:
        patiently(lambda: self._merge({"spec": spec}), self._over)

    def _merge(self, body: Json) -> Any:
        path = f"/apis/trtmodel.io/v1alpha1/namespaces/{NAMESPACE}/trtmodels/{self.name}"
        return self.world.cluster.merge(path, body)
