"""More of what may happen to a rollout under steady traffic: a candidate that fails requests, a worker that lies, two
targets; and a model that is deleted in further phases. No request fails."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from . import models
from .cluster import Cluster, Json
from .install import ROOT, Images
from .other_image import with_module
from .rolling import COMMAND_SECONDS, NAME, ONE, PLAN, ROLLOUT_SECONDS, Rolling, available, newest, served
from .s3 import DATA, MODELS, Store
from .world import CHILDREN, World, condition, revision, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.night, pytest.mark.timeout(900)]

NAMESPACE = "e2e-more"
REPLICAS = 3
FOR_EVER = {**ONE, "hold": "1h"}
OTHER = "other"
LIE = "/tmp/lie"  # while it is there, the worker lies
WORKER = "trtmodel_worker/front/worker.py"
LYING = f'''

import pathlib as _pathlib
from trtmodel_contract.control import EngineReport as _EngineReport, EngineState as _EngineState, Role as _Role


def _lying(report):
    def told(self):
        found = report(self)
        if not _pathlib.Path("{LIE}").exists():
            return found
        mine = found.models[self.model.name]
        strange = _EngineReport("eeeeeeeeee", "f" * 64, _Role.CANDIDATE, _EngineState.READY)
        routes = replace(mine.routes, candidate="f" * 64, weight=100)
        engines = (*mine.engines, strange)
        return replace(found, models={{self.model.name: replace(mine, engines=engines, routes=routes)}})

    return told


Worker.report = _lying(Worker.report)
'''


# ---------------------------------------------------------------------------------------------------------------
# Two targets
# ---------------------------------------------------------------------------------------------------------------

TARGETS = ("a", "b")
POOL = "e2e.trtmodel.io/more"  # the label that makes the node one of the second kind


@pytest.fixture
def two(
    world_of: Callable[[str], World], cluster: Cluster, images: Images, files: Path, endpoint: str
) -> Iterator[Rolling]:
    """Two workers of each target. Gone after the test: the node is small."""
    (node,) = [n["metadata"]["name"] for n in cluster.items("/api/v1/nodes")]
    cluster.kubectl("label", "--overwrite", "node", node, f"{POOL}=b")
    world = world_of("e2e-targets")
    manifest = models.magika(NAME, endpoint, 2)
    manifest["spec"]["targets"] = [{"name": "a"}, {"name": "b", "nodeSelector": {POOL: "b"}}]
    manifest["spec"]["rollout"] = {}
    with served(world, images, files, manifest, 4) as found:
        yield found
    until("its workers are gone", 90, lambda: not world.children("Pod", NAME), lambda: world.describe(NAME))
    cluster.kubectl("label", "node", node, f"{POOL}-")


def on_candidate(model: Json) -> dict[str, int]:
    """How many workers of each target answer with it."""
    return {t["name"]: t["workers"]["onCandidate"] for t in model["status"]["targets"]}


def test_two_targets_are_tried_at_once_each_by_one_worker_and_promoted_together(two: Rolling) -> None:
    world, begin, before = two.world, two.traffic.now(), two.stable()
    candidate = two.roll_out(steps=[{**ONE, "hold": "6s"}])
    found = two.wait_canary(least=2)
    assert on_candidate(found) == dict.fromkeys(TARGETS, 1)
    assert (available(found), revision(found, "stable")) == (True, before)
    found = two.wait_promoted(candidate)
    assert {t["name"]: t["workers"]["onStable"] for t in found["status"]["targets"]} == dict.fromkeys(TARGETS, 2)
    built = world.children("Job", NAME, "kind=build")
    assert {j["metadata"]["labels"]["trtmodel.io/target"] for j in built} == set(TARGETS)
    summary = two.traffic.assert_none_failed(begin, least=100)
    assert set(summary["revisions"]) == {before, candidate}


# ---------------------------------------------------------------------------------------------------------------
# One model on three workers, which lie if they are told to
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World]) -> World:
    return world_of(NAMESPACE)


@pytest.fixture(scope="module")
def rolling(
    world: World, images: Images, files: Path, endpoint: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rolling]:
    manifest = models.magika(NAME, endpoint, REPLICAS)
    source = (ROOT / "worker" / WORKER).read_text() + LYING
    manifest["spec"]["serving"]["image"] = with_module(
        images.worker, "lying", WORKER, source, tmp_path_factory.mktemp("image")
    )
    manifest["spec"]["rollout"] = {}
    with served(world, images, files, manifest, REPLICAS) as found:
        yield found


@dataclass(frozen=True)
class Failing:
    """A version of the model that fails for every fifth of our clients' requests, and for no sample of `dataset`."""

    source: Json
    dataset: Json


@pytest.fixture(scope="module")
def failing(files: Path, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Failing:
    out = tmp_path_factory.mktemp("failing")
    requests, samples = (np.load(files / "magika" / f"{name}.npz") for name in ("requests", "eval"))
    sums = np.unique(requests["bytes"].sum(axis=1, dtype=np.int32)[::5])
    good = ~np.isin(samples["bytes"].sum(axis=1, dtype=np.int32), sums)
    np.savez(out / "good.npz", **{name: samples[name][good] for name in ("bytes", "labels")})
    onnx.save(failing_for(onnx.load(files / "magika" / "model.onnx"), sums), out / "failing.onnx")
    store.put(DATA, "magika/good.npz", out / "good.npz")
    store.put(MODELS, "magika/failing.onnx", out / "failing.onnx")
    dataset = {"uri": f"s3://{DATA}/magika/good.npz", "samples": int(good.sum())}
    return Failing(models.magika_source("failing"), dataset)


def failing_for(model: onnx.ModelProto, sums: np.ndarray[tuple[int], np.dtype[np.int32]]) -> onnx.ModelProto:
    """The same answers, but where a row's bytes add up to one of `sums`: there it reshapes one number into two."""
    graph = model.graph
    source, output = graph.input[0].name, graph.output[0].name
    last = next(node for node in graph.node if output in node.output)
    last.output[list(last.output).index(output)] = "bad/answer"
    constants = {
        "bad/axis": np.array([1], np.int64),
        "bad/sums": sums.reshape(1, -1),
        "bad/one": np.array([1], np.int64),
        "bad/zero": np.array([0], np.float32),
    }
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    graph.node.extend(
        [
            helper.make_node("ReduceSum", [source, "bad/axis"], ["bad/rows"], keepdims=1),
            helper.make_node("Equal", ["bad/rows", "bad/sums"], ["bad/hit"]),
            helper.make_node("Cast", ["bad/hit"], ["bad/hits"], to=TensorProto.INT64),
            helper.make_node("ReduceMax", ["bad/hits"], ["bad/worst"], keepdims=0),
            helper.make_node("Add", ["bad/worst", "bad/one"], ["bad/shape"]),
            helper.make_node("Reshape", ["bad/zero", "bad/shape"], ["bad/nothing"]),
            helper.make_node("Add", ["bad/answer", "bad/nothing"], [output]),
        ]
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def test_a_candidate_that_fails_mirrored_requests_goes_back_before_any_client_meets_it(
    rolling: Rolling, failing: Failing
) -> None:
    world, begin, before = rolling.world, rolling.traffic.now(), rolling.stable()
    spec = world.model(NAME)["spec"]
    mirror = {**ONE, "weight": 0, "shadow": 100, "hold": "1h"}
    world.patch(
        NAME,
        {
            "source": failing.source,
            "verify": {"dataset": failing.dataset},
            "rollout": {**PLAN, "steps": [mirror, ONE]},
        },
    )
    found = world.wait_condition(NAME, "Stalled", "True", "ErrorRateTooHigh", ROLLOUT_SECONDS)
    candidate, outcome = newest(found)
    assert (candidate != before, outcome) == (True, "RolledBack")
    assert (revision(found, "stable"), revision(found, "candidate"), available(found)) == (before, "", True)
    world.patch(NAME, {"source": spec["source"], "verify": spec["verify"]})
    world.wait_condition(NAME, "Ready", "True", "Serving", ROLLOUT_SECONDS)
    summary = rolling.traffic.assert_none_failed(begin, least=100)
    assert set(summary["revisions"]) == {before}


def test_the_word_of_a_worker_that_lies_promotes_nothing_until_it_tells_the_truth(rolling: Rolling) -> None:
    world, begin, before = rolling.world, rolling.traffic.now(), rolling.stable()
    candidate = rolling.roll_out(steps=[FOR_EVER])
    rolling.wait_canary()
    series = f'trtmodel_responses_total{{revision="{candidate}",status="200"}}'
    tried = lambda: [p for p in world.ready_workers(NAME) if world.metrics(p).get(series)]  # noqa: E731
    (liar,) = until("a worker answers with it", 20, tried)
    world.kubectl("exec", liar, "--", "touch", LIE)
    world.wait(NAME, "it is not believed", lambda m: rolling.on_candidate(m) == 0, COMMAND_SECONDS)
    world.patch(NAME, {"rollout": {"steps": [{**ONE, "hold": "2s"}]}})
    # It would have been passed long ago.
    found = world.wait(NAME, "time passes", lambda m: m["status"]["rollout"]["waited"] > 20, ROLLOUT_SECONDS)
    assert (revision(found, "stable"), revision(found, "candidate")) == (before, candidate), world.describe(NAME)
    assert found["status"]["rollout"]["step"]["held"] == 0
    world.kubectl("exec", liar, "--", "rm", LIE)
    rolling.wait_promoted(candidate)
    rolling.traffic.assert_none_failed(begin, least=100)


# ---------------------------------------------------------------------------------------------------------------
# Deleted in further phases
# ---------------------------------------------------------------------------------------------------------------


def _nothing(world: World) -> None:
    """It comes there by itself."""


def _scaled(replicas: int, world: World) -> None:
    world.kubectl("scale", f"trtmodel/{OTHER}", f"--replicas={replicas}")


def _other_source(rollout: Json, world: World) -> None:
    world.patch(OTHER, {"source": {"uri": f"s3://{MODELS}/tiny/b.onnx"}, "rollout": rollout})


def _workers_for_a_node_that_is_not_there(world: World) -> None:
    term = {"matchExpressions": [{"key": POOL, "operator": "In", "values": ["nowhere"]}]}
    needed = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    world.patch(OTHER, {"serving": {"pod": {"affinity": {"nodeAffinity": needed}}}})


def _aborted(world: World) -> None:
    _other_source({"steps": [FOR_EVER]}, world)
    found = world.wait(OTHER, "a canary", lambda m: m["status"]["phase"] == "Canary", ROLLOUT_SECONDS)
    world.command(OTHER, f"abort@{revision(found, 'candidate')}#1")


# The phase, whether the model serves before, and what brings it there.
PHASES: dict[str, tuple[bool, Callable[[World], None]]] = {
    "Deploying": (False, _nothing),
    "Serving": (True, _nothing),
    "Preparing": (True, _workers_for_a_node_that_is_not_there),
    "Promoting": (True, functools.partial(_scaled, 2)),
    "Paused": (True, functools.partial(_other_source, {"paused": True})),
    "RolledBack": (True, _aborted),
    "ScaledToZero": (True, functools.partial(_scaled, 0)),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_model_is_deleted_in_a_further_phase_and_everything_of_it_goes_while_others_serve(
    rolling: Rolling, endpoint: str, phase: str
) -> None:
    world, begin = rolling.world, rolling.traffic.now()
    serves, bring = PHASES[phase]
    world.apply(models.tiny(OTHER, endpoint))
    if serves:
        world.wait_ready(OTHER, ROLLOUT_SECONDS)
    bring(world)
    world.wait(OTHER, phase, lambda m: m.get("status", {}).get("phase") == phase, ROLLOUT_SECONDS)
    world.kubectl("delete", f"trtmodel/{OTHER}", "--timeout=30s")

    def left() -> list[tuple[str, str]]:
        return [(kind, c["metadata"]["name"]) for kind in CHILDREN for c in world.children(kind, OTHER)]

    until("all children are gone", 90, lambda: not left(), lambda: str(left()))
    assert condition(world.model(NAME), "Ready")["status"] == "True"
    rolling.traffic.assert_none_failed(begin, least=20)
