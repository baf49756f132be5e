"""Scenes for tests of the rules: what was observed, and an obedient world that does what was decided."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trtmodel_contract.codec import sha256_hex
from trtmodel_contract.control import (
    AttemptCounts,
    EngineReport,
    EngineState,
    Fence,
    ModelReport,
    Report,
    Role,
    Routes,
    ShadowCounts,
    WorkerState,
)
from trtmodel_contract.gate import GateFigures, OutputFigures, Task, Top1Figures
from trtmodel_contract.histogram import bucket_index
from trtmodel_contract.identity import LoadKey, ModelRef
from trtmodel_contract.jobs import BuildResult, FoundArtifact, JobResult, Reason, ResolveResult
from trtmodel_operator import manifests
from trtmodel_operator.decide import decide, jobs
from trtmodel_operator.decide.builds import gate_key
from trtmodel_operator.decide.turn import Turn
from trtmodel_operator.model import (
    ApplyPointer,
    ApplyService,
    ApplyWorkload,
    Artifact,
    Built,
    CreateJob,
    Decision,
    DeleteJob,
    DeleteWorkload,
    Deployed,
    JobKind,
    JobState,
    Memory,
    Observed,
    ObservedJob,
    ObservedPointer,
    ObservedWorker,
    ObservedWorkload,
    Resolved,
    Signal,
    Spec,
)
from trtmodel_operator.spec import parse

MODEL = ModelRef("ml", "magika", "uid-1")
NOW = 1_760_000_000.0
LOAD_KEY = LoadKey("ONNXRuntime", "1.20", "cpu")
IMAGE = "worker:1"
RAW: dict[str, Any] = {
    "source": {"uri": "s3://models/a.onnx"},
    "storage": {"bucket": "engines"},
    "engine": {"runtime": "ONNXRuntime"},
    "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz"}},
    "serving": {"replicas": 4},
    "rollout": {
        "steps": [{"workers": 1, "hold": "15s"}, {"workers": "50%", "hold": "15s"}],
        "analysis": {"interval": "5s", "minRequests": 150, "maxErrorRateIncrease": 0.02},
        "progressDeadline": "5m",
    },
}
A, B, C = "aaaaaaaaaa", "bbbbbbbbbb", "cccccccccc"  # revisions


@dataclass(frozen=True)
class Scene(Observed):
    """What was observed, and the spec as it is written, so that it can be edited."""

    raw: Mapping[str, Any] = field(default_factory=dict)


def changed_raw(raw: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """With fields set by path: ``rollout__paused=True``."""
    raw = copy.deepcopy(dict(raw))
    for path, value in changes.items():
        node: dict[str, Any] = raw
        *parents, last = path.split("__")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return raw


def spec(**changes: Any) -> Spec:
    return parse(changed_raw(RAW, **changes))


def digest(revision: str, target: str = "default") -> str:
    """Of the manifest of the engine of this revision for this target."""
    return sha256_hex((revision if target == "default" else f"{revision}/{target}").encode())


def load_key(target: str) -> LoadKey:
    return LOAD_KEY if target == "default" else replace(LOAD_KEY, device=target)


def deployed(revision: str, *targets: str) -> Deployed:
    artifacts = (Artifact(t, str(load_key(t)), digest(revision, t)) for t in targets or ("default",))
    return Deployed(revision, tuple(artifacts))


def figures(revision: str = B, differs: int = 0, dataset: str = "") -> GateFigures:
    output = OutputFigures(0.9999, 0.999, 0.001, 0.01, 0, False)
    data = dataset or digest("data")
    return GateFigures(digest(revision), data, Task.CLASSIFICATION, 2000, False, {"out": output}, Top1Figures(differs))


def found(revision: str, differs: int = 0, target: str = "default") -> FoundArtifact:
    return FoundArtifact(load_key(target), digest(revision, target), 1, "", figures(revision, differs))


def new(**changes: Any) -> Scene:
    """A TRTModel that was just made."""
    seen = Scene(NOW, MODEL, 1, False, spec(), Memory(), default_image=IMAGE, key_ids=("k1",), raw=RAW)
    return replace(seen, **changes)


def knows(seen: Scene, revision: str) -> Scene:
    """Today's spec was resolved to this revision."""
    key = jobs.resolve_key(Turn(seen, seen.memory))
    resolved = Resolved(key, digest(f"source of {revision}"), revision, "", digest("data"))
    return replace(seen, memory=replace(seen.memory, resolved=resolved))


def has_built(seen: Scene, revision: str, differs: int = 0) -> Scene:
    """It is resolved, and its engine is in the bucket with figures of today's data set."""
    seen = knows(seen, revision)
    assert seen.spec is not None
    key = gate_key(Turn(seen, seen.memory))
    entries = [Built(revision, t.name, found(revision, differs, t.name), key) for t in seen.spec.targets]
    return replace(seen, memory=replace(seen.memory, built=(*entries, *seen.memory.built)))


def asks_for(seen: Scene, revision: str) -> Scene:
    """The spec was changed so that it means this revision, which is built already."""
    return has_built(edited(seen, source__uri=f"s3://models/{revision}.onnx"), revision)


def edited(seen: Scene, **changes: Any) -> Scene:
    raw = changed_raw(seen.raw, **changes)
    return replace(seen, raw=raw, spec=parse(raw), generation=seen.generation + 1)


def serving(revision: str = A, replicas: int = 4, **changes: Any) -> Scene:
    """`revision` was promoted, everything is as it should be, and nothing is left to do."""
    seen = has_built(edited(new(), serving__replicas=replicas, **changes), revision)
    seen, last = run(seen, lambda s, d: d.rule == "settle" and not d.actions)
    assert last.situation.stage.value == "Serving"
    return seen


def run(seen: Scene, until: Callable[[Scene, Decision], bool], passes: int = 60) -> tuple[Scene, Decision]:
    """Passes in an obedient world until this decision (which is not carried out)."""
    for _ in range(passes):
        decision = decide(seen)
        if until(seen, decision):
            return seen, decision
        seen = obey(seen, decision)
    raise AssertionError(f"it never came to that: {decision.rule}, {decision.situation}")


def reaches(rule: str) -> Callable[[Scene, Decision], bool]:
    return lambda _, decision: decision.rule == rule


def canary(seen: Scene, revision: str = B, index: int = 0) -> Scene:
    """The spec asks for `revision`, which is routed on the members of step `index`, just now."""

    def routed(now: Scene, decision: Decision) -> bool:
        step = now.memory.step
        candidates = members(now)
        return (
            decision.rule == "watch"
            and step is not None
            and (step.index, step.routed) == (index, True)
            and bool(candidates)
        )

    seen = asks_for(seen, revision)
    for _ in range(60):
        decision = decide(seen)
        if routed(seen, decision):
            assert seen.memory.step is not None
            return replace(seen, now=seen.memory.step.seen_at)
        seen = obey(seen, decision)
        if seen.memory.step is not None and seen.memory.step.index < index:
            seen = busy(seen, seconds=0.008)
    raise AssertionError(decision)


def promoted() -> Scene:
    """B was promoted over A, and A is the standby."""
    seen = canary(serving(A))
    for _ in range(40):
        decision = decide(seen)
        if decision.rule == "settle" and not decision.actions:
            return seen
        seen = later(busy(obey(seen, decision, seconds=0)), 5)
    raise AssertionError(decision)


def members(seen: Scene) -> list[str]:
    """Workers that answer with the candidate."""
    return [w.uid for w in seen.workers if w.report is not None and w.report.models[MODEL.name].routes.candidate]


def obey(seen: Scene, decision: Decision, seconds: float = 2.0, loading: Iterable[str] = ()) -> Scene:
    """The world after the decision was carried out: engines load at once, but those of the revisions in `loading`."""
    seen = replace(seen, memory=decision.memory, now=seen.now + seconds)
    for action in decision.actions:
        match action:
            case CreateJob():
                job = ObservedJob(action.name, action.kind, action.target.name, JobState.RUNNING, started_at=seen.now)
                seen = replace(seen, jobs=(*seen.jobs, job))
            case DeleteJob():
                seen = replace(seen, jobs=tuple(j for j in seen.jobs if j.name != action.name))
            case ApplyPointer():
                seen = _apply_pointer(seen, action)
            case ApplyService():
                assert seen.spec is not None
                seen = replace(seen, service_fingerprint=manifests.service_fingerprint(seen.model, seen.spec))
            case ApplyWorkload():
                seen = _apply_workload(seen, action)
            case DeleteWorkload():
                seen = _delete_workload(seen, action)
            case Signal() if any(w.uid == action.uid for w in seen.workers):
                seen = with_worker(seen, action.uid, report=_told(seen, action, set(loading)))
    return seen


def made_up(seen: Scene) -> Scene:
    """The Deployment's controller has replaced the pods that are missing."""
    seen = replace(seen, workers=tuple(w for w in seen.workers if not w.terminating))
    for workload in seen.workloads:
        for pointer in seen.pointers:
            there = sum(_is_of(w, workload.target, workload.platform) for w in seen.workers)
            missing = workload.replicas - there if pointer.name == workload.name and pointer.stable else 0
            names = [f"x{workload.platform[:2]}{int(seen.now)}-{i}" for i in range(missing)]
            fresh = [booted(name, pointer, workload.target, workload.platform) for name in names]
            seen = replace(seen, workers=(*seen.workers, *fresh))
    return seen


def _apply_pointer(seen: Scene, action: ApplyPointer) -> Scene:
    assert seen.spec is not None
    pointer = ObservedPointer(
        name=action.workload,
        sequence=action.sequence,
        content=manifests.wanted_content(seen.model, action),
        stable=action.stable,
        standby=action.standby,
        key_ids=seen.key_ids,
        storage=action.storage,
    )
    return replace(seen, pointers=(*(p for p in seen.pointers if p.name != action.workload), pointer))


def _apply_workload(seen: Scene, action: ApplyWorkload) -> Scene:
    assert seen.spec is not None
    fingerprint = manifests.workload_fingerprint(seen.model, seen.spec, action)
    workload = ObservedWorkload(
        action.name,
        action.target.name,
        action.platform.hash,
        action.replicas,
        fingerprint,
        action.platform.image,
        pod=action.platform.pod,
    )
    if action.only_replicas:
        (there,) = (w for w in seen.workloads if w.name == action.name)
        workload = replace(there, replicas=action.replicas)
    target = action.target.name
    mine = [w for w in seen.workers if _is_of(w, target, workload.platform)]
    workers = sorted(mine, key=lambda w: not w.ready)[: action.replicas]  # those that are not ready go first
    pointer = next((p for p in seen.pointers if p.name == action.name), None)
    first = all(w.name == action.name for w in seen.workloads if w.target == target)
    prefix = ("w" if target == "default" else f"{target}-") if first else f"{target[0]}{workload.platform[:4]}-"
    taken = {w.uid for w in seen.workers}
    free = (name for i in itertools.count() if (name := f"{prefix}{i}") not in taken)
    while pointer is not None and len(workers) < action.replicas:
        workers.append(booted(next(free), pointer, target, workload.platform))
    return replace(
        seen,
        workloads=(*(w for w in seen.workloads if w.name != action.name), workload),
        workers=(*(w for w in seen.workers if not _is_of(w, target, workload.platform)), *workers),
    )


def _delete_workload(seen: Scene, action: DeleteWorkload) -> Scene:
    gone = [(w.target, w.platform) for w in seen.workloads if w.name == action.name]
    return replace(
        seen,
        workloads=tuple(w for w in seen.workloads if w.name != action.name),
        pointers=tuple(p for p in seen.pointers if p.name != action.name),
        workers=tuple(w for w in seen.workers if not any(_is_of(w, *which) for which in gone)),
    )


def _is_of(worker: ObservedWorker, target: str, platform: str) -> bool:
    return worker.target == target and worker.platform in ("", platform)


def booted(uid: str, pointer: ObservedPointer, target: str = "default", platform: str = "") -> ObservedWorker:
    """A worker that booted from the pointer and serves, and that the operator has not spoken to."""
    assert pointer.stable is not None
    stable = digest(pointer.stable.revision, target)
    engines = [EngineReport(pointer.stable.revision, stable, Role.STABLE, EngineState.READY)]
    if pointer.standby is not None:
        standby = pointer.standby.revision
        engines.append(EngineReport(standby, digest(standby, target), Role.STANDBY, EngineState.READY))
    routes = Routes(stable)
    report = Report(
        version=1,
        pod=f"pod-{uid}",
        pod_uid=uid,
        load_key=load_key(target),
        driver="",
        state=WorkerState.SERVING,
        message="",
        fence=Fence(MODEL.uid, pointer.sequence),
        pointer_sequence=pointer.sequence,
        key_ids=("k1",),
        models={MODEL.name: ModelReport(tuple(engines), routes, {"": {}})},
    )
    return ObservedWorker(
        f"pod-{uid}", uid, "10.0.0.1", target, True, False, report, node=f"node-{uid}", platform=platform
    )


def _told(seen: Scene, signal: Signal, loading: set[str]) -> Report:
    worker = next(w for w in seen.workers if w.uid == signal.uid)
    assert worker.report is not None
    before = worker.report.models.get(MODEL.name, ModelReport((), Routes(""), {}))
    ready = {e.manifest_digest for e in before.engines if e.state is EngineState.READY}
    engines = []
    for e in signal.engines:
        waits = e.revision in loading and e.manifest_digest not in ready
        state = EngineState.LOADING if waits else EngineState.READY
        old = next((o for o in before.engines if o.manifest_digest == e.manifest_digest), None)
        kept = old if old is not None and old.state is not EngineState.LOADING else None
        report = EngineReport(e.revision, e.manifest_digest, e.role, state)
        engines.append(replace(kept, role=e.role) if kept is not None else report)
    routes = Routes(signal.stable, signal.candidate, signal.weight, signal.shadow)
    if not (signal.weight or signal.shadow):
        routes = Routes(signal.stable)
    windows = {**before.windows, signal.window: before.windows.get(signal.window, {})}
    return replace(
        worker.report,
        version=worker.report.version + 1,
        fence=Fence(MODEL.uid, seen.memory.sequence),
        models={MODEL.name: ModelReport(tuple(engines), routes, windows)},
    )


def with_worker(seen: Scene, uid: str, **changes: Any) -> Scene:
    workers = [replace(w, **changes) if w.uid == uid else w for w in seen.workers]
    return replace(seen, workers=tuple(workers))


def with_engine(seen: Scene, uid: str, revision: str, **changes: Any) -> Scene:
    """Changes what a worker reports about one of its engines."""
    worker = next(w for w in seen.workers if w.uid == uid)
    assert worker.report is not None
    model = worker.report.models[MODEL.name]
    assert any(e.revision == revision for e in model.engines), f"{uid} does not have {revision}"
    engines = tuple(replace(e, **changes) if e.revision == revision else e for e in model.engines)
    report = replace(worker.report, models={MODEL.name: replace(model, engines=engines)})
    return with_worker(seen, uid, report=report)


def without(seen: Scene, uid: str) -> Scene:
    return replace(seen, workers=tuple(w for w in seen.workers if w.uid != uid))


def silent(seen: Scene, uid: str) -> Scene:
    return with_worker(seen, uid, report=None, silence="connection refused")


def busy(
    seen: Scene,
    *,
    requests: int = 200,
    seconds: float = 0.008,
    failed: int = 0,
    kind: str = "Error",
    only_candidate: bool = False,
    failing: Collection[str] = (),
) -> Scene:
    """Every worker answers `requests` more with what it routes to, in its shares. `seconds` and `failed` are the
    candidate's; stable takes 8 ms and fails nothing, but on the workers in `failing` (uids)."""
    for worker in seen.workers:
        if worker.report is None or MODEL.name not in worker.report.models:
            continue
        model = worker.report.models[MODEL.name]
        routes = model.routes
        if only_candidate and not routes.candidate:
            continue
        weight = routes.weight if routes.candidate else 0
        tried, window = requests * weight // 100, seen.memory.window
        counts = dict(model.windows.get(window, {}))
        if tried:
            counts[routes.candidate] = _more(counts.get(routes.candidate), tried, seconds, failed, kind)
        if requests - tried:
            counts[routes.stable] = _more(
                counts.get(routes.stable), requests - tried, 0.008, failed if worker.uid in failing else 0, kind
            )
        if routes.shadow and routes.candidate:
            mirrored = (requests - tried) * routes.shadow // 100
            before = counts.get(routes.candidate, AttemptCounts())
            known = before.shadow or ShadowCounts()
            all_of = _more(
                AttemptCounts(known.mirrored, known.failed, 0, known.compute), mirrored, seconds, failed, kind
            )
            shadow = ShadowCounts(all_of.ok, 0, all_of.failed, all_of.compute)
            counts[routes.candidate] = replace(before, shadow=shadow)
        models = {MODEL.name: replace(model, windows={**model.windows, window: counts})}
        seen = with_worker(seen, worker.uid, report=replace(worker.report, models=models))
    return seen


def _more(before: AttemptCounts | None, requests: int, seconds: float, failed: int, kind: str) -> AttemptCounts:
    before = before or AttemptCounts()
    lost = min(failed, requests)
    histogram = dict(before.compute.get("1", {}))
    for i in range(requests - lost):
        index = bucket_index(seconds * (0.9 + 0.02 * (i % 10)))
        histogram[index] = histogram.get(index, 0) + 1
    return replace(
        before,
        ok=before.ok + requests - lost,
        failed={**before.failed, kind: before.failed.get(kind, 0) + lost} if lost else before.failed,
        compute={"1": histogram},
    )


def later(seen: Scene, seconds: float) -> Scene:
    return replace(seen, now=seen.now + seconds)


def finished(seen: Scene, kind: JobKind, result: JobResult | None, **changes: Any) -> Scene:
    """The running Job of this kind ended: well if the result says Done."""
    good = result is not None and result.reason is Reason.DONE
    state = JobState.COMPLETE if good else JobState.FAILED
    ended = [
        replace(j, state=state, result=result, **changes) if j.kind is kind and j.state is JobState.RUNNING else j
        for j in seen.jobs
    ]
    assert ended != list(seen.jobs), "no such Job runs"
    return replace(seen, jobs=tuple(ended))


def resolve_result(revision: str, *artifacts: FoundArtifact) -> JobResult:
    return JobResult(
        Reason.DONE,
        "",
        resolve=ResolveResult(digest(f"source of {revision}"), 1, revision, "", digest("data"), (), (), artifacts),
    )


def build_result(revision: str, differs: int = 0, target: str = "default") -> JobResult:
    build = BuildResult(revision, found(revision, differs, target), False, 1, 12.0, 3.0, "2026-11-29T20:00:00Z")
    return JobResult(Reason.DONE, "", build=build)


def of(decision: Decision, kind: type[Any]) -> list[Any]:
    return [a for a in decision.actions if isinstance(a, kind)]
