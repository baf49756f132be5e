"""A TRTModel as a tree of lines, and as rows of a table. Pure: from what the API server and workers said.

Nothing in it counts time, so that two looks at a model that stands still are equal, and only news is printed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtmodel_operator.cli import advice
from trtmodel_operator.cli.outcome import condition, listed, memory, revision, wanted
from trtmodel_operator.cli.words import age, plain, span
from trtmodel_operator.spec import DEFAULT_STEPS

Json = Mapping[str, Any]

SHOWN_MOST = 20  # workers of one target
SHORT = 12  # hex digits of a digest that tell it apart for people


class Mood(str, enum.Enum):
    """What a line is, for its colour."""

    PLAIN = ""
    GOOD = "green"
    BAD = "red"
    MOVES = "cyan"
    WARN = "yellow"
    FAINT = "dim"


@dataclass(frozen=True)
class Line:
    text: str
    mood: Mood = Mood.PLAIN
    below: tuple[Line, ...] = ()


@dataclass(frozen=True)
class Worker:
    """A worker pod. `serves` and `holds` are revisions by its own answer; `silence` says why there is none. `trial`:
    what a candidate does beside the one that serves."""

    name: str
    target: str
    ready: bool
    node: str = ""
    restarts: int = 0
    serves: str = ""
    holds: tuple[str, ...] = ()
    silence: str = ""
    trial: str = ""


def tree(model: Json, workers: Sequence[Worker] = ()) -> Line:
    """All that a person asks first: where it stands, why, what serves where, what runs, what to do."""
    status, meta = _mapping(model.get("status")), _mapping(model.get("metadata"))
    name = f"{plain(meta.get('namespace', ''))}/{plain(meta.get('name', ''))}"
    if not status:
        return Line(
            f"{name}: no operator has looked at it yet: is one installed, and may it see this namespace?", Mood.WARN
        )
    head = f"{name} {plain(status.get('phase', ''))}"
    summary = plain(status.get("summary", ""))
    if summary and summary != plain(status.get("phase", "")):
        head += f": {summary}"
    below = [*_state(model), _revisions(model), *_step(model)]
    below += [_target(model, target, workers) for target in listed(status.get("targets"))]
    return Line(head, _mood(model), tuple(below))


def rows(models: Sequence[Json], now: float, *, everywhere: bool, wide: bool) -> list[tuple[str, ...]]:
    """The table of get, its head first; as kubectl prints it."""
    head = ("NAME", "PHASE", "READY", "STABLE", "CANDIDATE", "CANARY", "REPLICAS", "AGE")
    more = ("GPU", "PRECISION", "REASON", "MESSAGE") if wide else ()
    found = [(("NAMESPACE",) if everywhere else ()) + head + more]
    for model in models:
        meta, status, spec = (_mapping(model.get(part)) for part in ("metadata", "status", "spec"))
        ready = next((c for c in listed(status.get("conditions")) if c.get("type") == "Ready"), {})
        row = [
            meta.get("name", ""),
            status.get("phase", ""),
            ready.get("status", ""),
            revision(model, "stable"),
            revision(model, "candidate"),
            status.get("summary", ""),
            status.get("replicas", ""),
            age(str(meta.get("creationTimestamp", "")), now),
        ]
        if wide:
            gpus = ",".join(str(t["gpu"]) for t in listed(spec.get("targets")) if t.get("gpu"))
            row += [gpus, _mapping(spec.get("engine")).get("precision", ""), ready.get("reason"), ready.get("message")]
        place = (plain(meta.get("namespace", "")),) if everywhere else ()
        found.append(place + tuple(plain(cell if cell is not None else "") for cell in row))
    return found


def history(model: Json, now: float) -> list[tuple[str, ...]]:
    """Finished rollouts, newest first, with the head."""
    found: list[tuple[str, ...]] = [("REVISION", "OUTCOME", "ENDED", "DIGESTS", "REASON")]
    for entry in listed(_mapping(model.get("status")).get("history")):
        digests = ",".join(str(d)[:SHORT] for d in entry.get("digests") or ())
        when = age(str(entry.get("endedAt") or entry.get("promotedAt") or ""), now)
        cells = (
            entry.get("revision"),
            entry.get("outcome"),
            f"{when} ago" if when else "",
            digests,
            entry.get("reason"),
        )
        found.append(tuple(plain(cell or "") for cell in cells))
    return found


def events(found: Sequence[Json], now: float) -> list[tuple[str, ...]]:
    """With the head."""
    rows_: list[tuple[str, ...]] = [("AGE", "TYPE", "REASON", "MESSAGE")]
    for event in found:
        when = str(event.get("eventTime") or _mapping(event.get("metadata")).get("creationTimestamp") or "")
        cells = (age(when, now), event.get("type"), event.get("reason"), event.get("note"))
        rows_.append(tuple(plain(cell or "") for cell in cells))
    return rows_


def explain(model: Json) -> Line:
    """What stands in the way, what it means, and what to do."""
    meta = _mapping(model.get("metadata"))
    name = plain(meta.get("name", ""))
    told = [c for c in _matters(model) if c]
    if not told:
        if condition(model, "Ready"):
            return Line(f"{name}: all is as asked", Mood.GOOD)
        return Line(f"{name}: the operator has not looked at the newest spec yet", Mood.MOVES)
    below = []
    for found in told:
        reason = str(found.get("reason"))
        known = advice.of(reason)
        lines = [Line(plain(found.get("message", "")))]
        if known:
            lines += [Line(f"it means: {known.means}"), Line(f"what to do: {known.todo}", Mood.GOOD)]
        below.append(Line(f"{found.get('type')} is {found.get('status')}: {plain(reason)}", Mood.WARN, tuple(lines)))
    return Line(name, _mood(model), tuple(below))


# ----------------------------------------------------------------------------------------------------------------


def _matters(model: Json) -> Iterator[Json]:
    """Conditions that are not as one wants them, each reason once, the one that stops most first."""
    seen = set()
    for kind, bad in (("Stalled", "True"), ("Available", "False"), ("Ready", "False"), ("Degraded", "True")):
        found = condition(model, kind)
        if kind == "Available" and _comes_up(model):
            continue
        if found.get("status") == bad and found.get("reason") not in seen:
            seen.add(found.get("reason"))
            yield found


def _comes_up(model: Json) -> bool:
    """The first revision is on its way: that nothing serves yet is no trouble."""
    return not revision(model, "stable") and condition(model, "Progressing").get("status") == "True"


def _state(model: Json) -> Iterator[Line]:
    status, meta = _mapping(model.get("status")), _mapping(model.get("metadata"))
    if status.get("observedGeneration") != meta.get("generation"):
        yield Line("the spec was changed: the operator has not looked at it yet", Mood.MOVES)
    for found in _matters(model):
        mood = Mood.BAD if found.get("type") in ("Stalled", "Available") else Mood.WARN
        moving = found.get("type") == "Ready" and condition(model, "Progressing").get("status") == "True"
        sentence = str(_mapping(status.get("analysis")).get("message") or "")  # has its own line: see _step
        message = str(found.get("message", ""))
        message = message.replace(sentence, "see below") if sentence and revision(model, "candidate") else message
        text = f"{'why it waits' if moving else plain(found.get('reason'))}: {plain(message)}"
        known = advice.of(str(found.get("reason")))
        todo = known.todo if known and not moving and known.todo != advice.NOTHING else ""
        below = (Line(f"what to do: {todo}", Mood.GOOD),) if todo else ()
        yield Line(text, Mood.MOVES if moving else mood, below)


def _revisions(model: Json) -> Line:
    held = [(role, revision(model, role)) for role in ("stable", "candidate", "standby")]
    text = ", ".join(f"{role} {name}" for role, name in held if name)
    want = wanted(model)
    if want and want not in [name for _, name in held]:
        text = f"{text}, " if text else ""
        text += f"asked for {want}"
    return Line(plain(text) or "no revision yet", Mood.FAINT if not text else Mood.PLAIN)


def _step(model: Json) -> Iterator[Line]:
    step = _mapping(memory(model).get("step"))
    if not step or not revision(model, "candidate"):
        return
    steps = listed(_mapping(_mapping(model.get("spec")).get("rollout")).get("steps")) or DEFAULT_STEPS
    platform = _mapping(step.get("platform"))
    index = step.get("index")
    number = index if isinstance(index, int) else 0
    if step.get("back"):
        text = f"workers load {revision(model, 'candidate')}, to which a person goes back"
    elif number < len(steps):
        plan = steps[number]
        shares = ("weight", "shadow") if not platform else ()  # of other workers a Service decides
        dose = "".join(f", {name} {plan[name]}" for name in shares if plan.get(name))
        text = f"step {number + 1}/{len(steps)}: workers {plan.get('workers')}{dose}"
        text += f", held {span(float(step.get('held') or 0))} of {plan.get('hold', '2m')}" if step.get("routed") else ""
        text += ", then it waits for a person" if plan.get("pause") else ""
        text += "; too few requests: golden samples run" if step.get("synthetic") else ""
    else:
        text = "all workers are replaced" if platform else "all workers are prepared for the promotion"
    if platform:
        text = f"other workers are tried, of image {platform.get('image')}: {text}"
    analysis = _mapping(_mapping(model.get("status")).get("analysis"))
    below = [_judged("analysis", analysis)] if analysis else []
    below += [_judged(f"query {check.get('name')}", check) for check in listed(analysis.get("checks"))]
    below += [
        Line(f"target {plain(t)} went back: {plain(why)}", Mood.BAD) for t, why in _mapping(step.get("failed")).items()
    ]
    yield Line(plain(text), Mood.MOVES, tuple(below))


def _judged(what: str, found: Json) -> Line:
    verdict = str(found.get("verdict") or "")
    mood = {"Pass": Mood.GOOD, "Fail": Mood.BAD}.get(verdict, Mood.MOVES)
    return Line(plain(f"{what} {verdict}: {found.get('message') or ''}"), mood)


def _target(model: Json, target: Json, workers: Sequence[Worker]) -> Line:
    name, count = plain(target.get("name", "")), _mapping(target.get("workers"))
    text = f"target {name}: {count.get('ready', 0)} of {count.get('desired', 0)} workers ready"
    text += f", {count.get('onStable', 0)} on stable"
    text += "".join(
        f", {count[key]} {words}"
        for key, words in (("onCandidate", "on candidate"), ("withStandby", "with standby"))
        if count.get(key)
    )
    below = []
    for engine in listed(target.get("engines")):
        driver = f", driver {engine['driver']}" if engine.get("driver") else ""
        below.append(
            Line(plain(f"engine {str(engine.get('digest'))[:SHORT]} for {engine.get('loadKey')}{driver}"), Mood.FAINT)
        )
    if job := _mapping(target.get("job")):
        percent = job.get("progress")
        bar = f" {_bar(percent)} {percent} %" if isinstance(percent, int) else ""
        said = f": {job['message']}" if job.get("message") else ""
        below.append(Line(plain(f"Job {job.get('name')} {job.get('stage', '')}{bar}{said}"), Mood.MOVES))
    if gate := _mapping(target.get("gate")):
        mood = {"Pass": Mood.GOOD, "Fail": Mood.BAD}.get(str(gate.get("verdict")), Mood.WARN)
        below.append(Line(plain(f"gate {gate.get('verdict')}: {gate.get('message', '')}"), mood))
    mine = [worker for worker in workers if worker.target == target.get("name")]
    below += [_worker(model, worker) for worker in mine[:SHOWN_MOST]]
    below += [Line(f"and {len(mine) - SHOWN_MOST} more workers", Mood.FAINT)] if len(mine) > SHOWN_MOST else []
    desired = count.get("desired", 0)
    served = count.get("onStable", 0) + count.get("onCandidate", 0)
    return Line(text, Mood.GOOD if desired and served >= desired else Mood.WARN, tuple(below))


def _worker(model: Json, worker: Worker) -> Line:
    text = f"worker {worker.name} {'ready' if worker.ready else 'not ready'}"
    if worker.serves:
        text += f", serves {worker.serves}{_digest(model, worker)}"
    text += f", {worker.trial}" if worker.trial else ""
    if others := [r for r in worker.holds if r != worker.serves]:
        text += f", holds {' '.join(others)}"
    if worker.silence:
        text += f" ({worker.silence})"
    text += f", {worker.restarts} restarts" if worker.restarts else ""
    return Line(plain(text), Mood.PLAIN if worker.ready else Mood.WARN)


def _digest(model: Json, worker: Worker) -> str:
    """Of the engine that this revision has on the worker's target, where there is only one."""
    found = {
        str(a.get("manifestDigest"))
        for role in ("stable", "candidate", "standby")
        if revision(model, role) == worker.serves
        for a in listed(_mapping(memory(model).get(role)).get("artifacts"))
        if a.get("target") == worker.target
    }
    return f" ({found.pop()[:SHORT]})" if len(found) == 1 else ""


def _bar(percent: int, width: int = 10) -> str:
    done = max(0, min(width, percent * width // 100))
    return "[" + "#" * done + "." * (width - done) + "]"


def _mood(model: Json) -> Mood:
    if condition(model, "Stalled").get("status") == "True":
        return Mood.BAD
    if condition(model, "Available").get("status") == "False" and not _comes_up(model):
        return Mood.BAD
    if condition(model, "Ready").get("status") == "True":
        return Mood.WARN if condition(model, "Degraded").get("status") == "True" else Mood.GOOD
    return Mood.MOVES


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}
