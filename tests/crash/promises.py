"""What must hold at every moment in the simulator, whatever an operator does and whenever it dies. The world asserts it
where it would break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from machines import KEY, Worker, load_key
from trtmodel_contract.control import EngineState
from trtmodel_operator.manifests import LABEL_PLATFORM
from trtmodel_operator.ports import Json

if TYPE_CHECKING:
    from world import World


def check_wanted(world: World) -> None:
    deleted = world.model is None or "deletionTimestamp" in world.model["metadata"]
    assert not (deleted and world.alone), "something is made for a TRTModel that is being deleted"


def check_promotion(world: World, model: Json, new: Json) -> None:
    """The fence never goes back; and who is promoted is held, by its own report, by every worker that is wanted."""
    old = model.get("status", {}).get("rollout")
    if old is None:
        return
    assert new["sequence"] >= old["sequence"], "the sequence went back"
    candidate = old["candidate"]
    _check_platform(world, model["spec"], old, new)
    promoted = candidate is not None and new["stable"] == candidate and old["stable"] != candidate
    if not promoted or not world.alone:
        return
    for target, mine in _wanted(world, model["spec"]):
        assert len(mine) >= max(1, model["spec"]["serving"]["replicas"]), "promoted with workers missing"
        digests = {a["loadKey"]: a["manifestDigest"] for a in candidate["artifacts"] if a["target"] == target}
        before = (old["stable"] or candidate)["artifacts"]
        served = {a["loadKey"] for a in before if a["target"] == target}  # the others answered nobody
        for worker in mine:
            key = str(load_key(target, worker.node, worker.image))
            if key not in served:
                continue
            digest = digests[key]
            assert worker.reachable, f"promoted although {worker.uid} is unknown"
            engines = worker.report(world).models[KEY[1]].engines
            ready = {e.manifest_digest for e in engines if e.state is EngineState.READY}
            assert digest in ready, f"promoted although {worker.uid} does not have it"


def _check_platform(world: World, spec: Json, old: Json, new: Json) -> None:
    """Workers are of another platform for good only when all that are wanted serve as such."""
    before, now = old["platform"], new["platform"]
    if before is None or now is None or before["hash"] == now["hash"] or old["stable"] is None or not world.alone:
        return
    for _, mine in _wanted(world, spec):
        serving = [w for w in mine if w.labels[LABEL_PLATFORM] == now["hash"] and w.serves(world)]
        assert len(serving) >= max(1, spec["serving"]["replicas"]), "another platform with workers missing"


def _wanted(world: World, spec: Json) -> Iterator[tuple[str, list[Worker]]]:
    """The targets of the spec, and their workers that are not on their way out."""
    for target in [t["name"] for t in spec.get("targets", [{"name": "default"}])]:
        yield target, [w for w in world.workers.values() if w.target == target and w.leaves_at is None]


def check_promise(world: World) -> None:
    serving = sum(w.serves(world) for w in world.workers.values() if w.leaves_at is None)
    assert serving >= world.promised or world.misled, f"{serving} workers serve, {world.promised} are promised"


def check_dose(world: World) -> None:
    """Never do more workers answer with a candidate, or with more of their requests, than the steps that it reached
    allow; and with none that a person only goes back to."""
    rollout = world.rollout
    candidate, step = rollout["candidate"], rollout["step"]
    spec = (world.model or {}).get("spec", {})
    for target in {w.target for w in world.workers.values()}:
        mine = [w for w in world.workers.values() if w.target == target and w.leaves_at is None]
        if candidate is not None and step is not None and not step["back"]:
            steps, trial = spec["rollout"]["steps"], (target, candidate["revision"])
            reached = steps[min(step["index"], len(steps) - 1)]
            all_ = world.narrow and step["index"] >= len(steps)  # who holds it alone answers with it
            cap = len(mine) if all_ else _share(reached["workers"], len(mine))
            world.caps[trial] = max(world.caps.get(trial, 0), cap)
            world.weights[trial] = max(world.weights.get(trial, 0), reached.get("weight", 100))
        answering = Counter(w.engines[w.routes.candidate][0] for w in mine if w.routes.candidate)
        for revision, on in answering.items():
            assert on <= world.caps.get((target, revision), 0), f"{on} workers try it: its steps allow fewer"
        for w in mine:
            most = world.weights.get((target, w.engines[w.routes.candidate][0]), 0) if w.routes.candidate else 100
            assert w.routes.weight <= most, f"it answers {w.routes.weight} %: its steps allow {most}"


def _share(workers: int | str, n: int) -> int:
    """Of n workers, as the design has it."""
    asked = -(-int(workers[:-1]) * n // 100) if isinstance(workers, str) else workers
    return max(1, min(n - 1, asked))
