"""The whole of .status but the memory: conditions, targets, history, and the words for people. Pure.

Everything here is an output: it is computed anew in each pass from what was observed and decided, written if it differs
from what lies there, and never read back but for lastTransitionTime. Nothing in it moves while nothing happens: figures
come from the memory, which takes them once an interval, and no time of day but of a change is in it.

Reconciling and Stalled follow kstatus (Helm, Flux, Argo CD): a wait for Ready ends when Stalled turns True.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtmodel_contract.control import EngineState, Role
from trtmodel_contract.gate import Verdict

from trtmodel_operator import facts, manifests, reasons, targets
from trtmodel_operator.model import Decision, Notice, Observed, Signal, Stage
from trtmodel_operator.text import cut, timestamp

# The order in which they stand in status.
AVAILABLE = "Available"
READY = "Ready"
RECONCILING = "Reconciling"
STALLED = "Stalled"
BUILT = "Built"
VERIFIED = "Verified"
PROGRESSING = "Progressing"
DEGRADED = "Degraded"

SUMMARY_LENGTH = 256

_MOVING = (Stage.RESOLVING, Stage.BUILDING, Stage.DEPLOYING, Stage.PREPARING, Stage.CANARY, Stage.PROMOTING)
_ENDED = (Stage.INVALID, Stage.GATE_FAILED, Stage.GATE_INCONCLUSIVE, Stage.ROLLED_BACK, Stage.STALLED)
_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_]{0,62}[A-Za-z0-9])?")
_NO_NEWS = (reasons.NOT_STALLED, reasons.NOT_BUILT, reasons.NOT_MEASURED)  # they say that there is nothing to tell
_BAD_WHEN = {STALLED: "True", DEGRADED: "True", AVAILABLE: "False", VERIFIED: "False"}


@dataclass(frozen=True)
class Condition:
    """Before it gets its generation and time. `status` is True, False or Unknown."""

    type: str
    status: str
    reason: str
    message: str


def status(seen: Observed, decision: Decision, previous: Mapping[str, object]) -> targets.Status:
    """`previous` is .status as it lies there: only the times of its conditions are read."""
    conditions = [judge_condition(seen, decision) for judge_condition in _CONDITIONS]
    degraded = conditions[-1].status == "True"
    found: targets.Status = {
        "observedGeneration": seen.generation,
        "phase": _phase(decision, degraded),
        "summary": cut(_summary(seen, decision), SUMMARY_LENGTH),
        "conditions": [_written(c, seen, previous) for c in conditions],
        "targets": [targets.target_status(seen, decision, t) for t in seen.spec.targets] if seen.spec else [],
        "history": [targets.history_status(entry) for entry in decision.memory.history[: targets.HISTORY]],
        "replicas": targets.replicas(seen),
        "selector": manifests.worker_selector(seen.model),
    }
    if analysis := targets.analysis_status(decision):
        found["analysis"] = analysis
    return found


def events(
    previous: Mapping[str, object], status: Mapping[str, object], notices: Sequence[Notice] = ()
) -> list[Notice]:
    """What is worth an event: a condition that is True and was not, or for another reason; one that is not True any
    more, or not Unknown any more; and what happened once (a command). One event for all of one reason. A reason that
    some condition had before is told again only where a status changes with it."""
    before = {str(c.get("type")): c for c in targets.listed(previous.get("conditions"))}
    told = {c.get("reason") for c in before.values()}
    found: dict[str, Notice] = {}
    for c in targets.listed(status.get("conditions")):
        kind, state, reason = str(c.get("type")), c.get("status"), str(c.get("reason"))
        old = before.get(kind, {})
        turned = state != old.get("status") and bool(old or state == "True")
        if reason in _NO_NEWS or not (turned or (state == "True" and reason not in told)):
            continue
        warning = _BAD_WHEN.get(kind) == state
        if reason not in found or (warning and not found[reason].warning):
            found[reason] = Notice(reason, str(c.get("message")), warning)
    once = {notice.reason for notice in notices}
    return [*notices, *(told for told in found.values() if told.reason not in once)]


# ---------------------------------------------------------------------------------------------------------------
# Conditions
# ---------------------------------------------------------------------------------------------------------------


def _available(seen: Observed, _: Decision) -> Condition:
    """A verified engine serves on at least one ready worker of every target; so it stays True through a rollout."""
    names = [t.name for t in seen.spec.targets] if seen.spec else sorted({w.target for w in seen.workers})
    without = [t for t in names if not any(targets.serves(seen, w) for w in facts.present(seen, t))]
    if names and not without:
        return Condition(AVAILABLE, "True", reasons.SERVING, "a verified engine serves")
    unknown = [w for w in facts.present(seen) if w.ready and w.report is None]
    if unknown:
        message = f"{facts.names(unknown)} cannot be asked: {unknown[0].silence or 'no answer'}"
        return Condition(AVAILABLE, "Unknown", reasons.WORKERS_UNKNOWN, message)
    if seen.spec and seen.spec.serving.replicas == 0:
        return Condition(AVAILABLE, "False", reasons.SCALED_TO_ZERO, "no worker is wanted")
    where = f" of target {', '.join(without)}" if len(names) > 1 else ""
    return Condition(AVAILABLE, "False", reasons.NO_WORKER_SERVES, f"no ready worker{where} serves a verified engine")


def _ready(seen: Observed, decision: Decision) -> Condition:
    """This generation's revision is promoted and every desired worker reports it. Scaling alone leaves it True while
    those that are there serve and the deadline has not passed."""
    situation, memory = decision.situation, decision.memory
    promoted = memory.stable is not None and memory.candidate is None and memory.stable.revision == decision.wanted
    if promoted and situation.stage is Stage.SERVING and facts.settled(seen, memory.stable):
        return Condition(READY, "True", reasons.SERVING, situation.message)
    if promoted and situation.reason == reasons.WORKERS_NOT_READY:
        ready = [w for w in facts.present(seen) if w.ready]
        if ready and all(facts.serves(seen, w, memory.stable) for w in ready):
            return Condition(READY, "True", reasons.SCALING, situation.message)
    return Condition(READY, "False", situation.reason, situation.message)


def _reconciling(seen: Observed, decision: Decision) -> Condition:
    moving = decision.situation.stage in _MOVING
    if moving and _ready(seen, decision).status == "True":
        return Condition(RECONCILING, "False", reasons.SCALING, decision.situation.message)
    return Condition(RECONCILING, "True" if moving else "False", decision.situation.reason, decision.situation.message)


def _stalled(_: Observed, decision: Decision) -> Condition:
    """Nothing more happens until a person or the cluster changes something."""
    if decision.situation.stage in _ENDED:
        return Condition(STALLED, "True", decision.situation.reason, decision.situation.message)
    return Condition(STALLED, "False", reasons.NOT_STALLED, "nothing stands in the way for good")


def _built(seen: Observed, decision: Decision) -> Condition:
    """Engines of this generation's revision exist for every target."""
    situation = decision.situation
    if decision.wanted and all(targets.engines(decision, t) for t in targets.targets(seen)):
        message = f"the engine of revision {decision.wanted} exists for every target{_tier_words(seen)}"
        return Condition(BUILT, "True", reasons.BUILT, message)
    if not decision.wanted and situation.stage not in _ENDED:
        return Condition(BUILT, "Unknown", situation.reason, situation.message)
    if situation.stage in (Stage.RESOLVING, Stage.BUILDING, Stage.PAUSED, *_ENDED):
        return Condition(BUILT, "False", situation.reason, situation.message)
    return Condition(BUILT, "False", reasons.NOT_BUILT, f"there is no engine of revision {decision.wanted} yet")


def _tier_words(seen: Observed) -> str:
    """That it is not the engine that the settings would mean in the other tiers."""
    tier = seen.spec.tier if seen.spec else None
    return f"; tier {tier.name} made it another one: {tier.changes}" if tier is not None and tier.changes else ""


def _verified(seen: Observed, decision: Decision) -> Condition:
    """Today's thresholds, applied to the figures of the engines of this generation's revision."""
    verdicts = [v for t in targets.targets(seen) if (v := targets.verdict(seen, decision, t)) is not None]
    for bad, state, reason in (
        (Verdict.FAIL, "False", reasons.GATE_FAILED),
        (Verdict.INCONCLUSIVE, "False", reasons.GATE_INCONCLUSIVE),
    ):
        sentence = next((s for v, s, _ in verdicts if v is bad), None)
        if sentence is not None:
            return Condition(VERIFIED, state, reason, sentence)
    if decision.situation.stage in (Stage.GATE_FAILED, Stage.GATE_INCONCLUSIVE):
        return Condition(VERIFIED, "False", decision.situation.reason, decision.situation.message)
    if verdicts and len(verdicts) == len(targets.targets(seen)):
        return Condition(VERIFIED, "True", reasons.GATE_PASSED, verdicts[0][1])
    accepted = next((a.verdict_text for d in targets.deployed(decision) for a in d.artifacts if a.verdict_text), "")
    if accepted:
        message = f"it passed when it was built ({accepted}); it was not measured on today's data set"
        return Condition(VERIFIED, "Unknown", reasons.NOT_MEASURED, message)
    return Condition(VERIFIED, "Unknown", reasons.NOT_MEASURED, "there are no figures of this revision yet")


def _progressing(_: Observed, decision: Decision) -> Condition:
    situation = decision.situation
    moving = situation.stage in _MOVING and not situation.stuck
    return Condition(PROGRESSING, "True" if moving else "False", situation.reason, situation.message)


def _degraded(seen: Observed, decision: Decision) -> Condition:
    """Something serves, but not as asked."""
    workers, wanted = facts.present(seen), facts.desired(seen)
    serving = [w for w in workers if targets.serves(seen, w)]
    if not serving:
        return Condition(DEGRADED, "False", reasons.NO_WORKER_SERVES, "nothing serves: see Available")
    silent = [w for w in workers if w.ready and w.report is None]
    if silent:
        message = f"{facts.names(silent)} cannot be asked: {silent[0].silence or 'no answer'}"
        return Condition(DEGRADED, "True", reasons.WORKERS_UNKNOWN, message)
    for worker in workers:
        report = facts.model_report(seen, worker)
        for engine in report.engines if report else ():
            if engine.state in (EngineState.DOWN, EngineState.FAILED):
                why = engine.message or engine.reason or engine.state.value
                failed = engine.reason if engine.state is EngineState.FAILED else ""  # AccessDenied and the like
                reason = reasons.STANDBY_MISSING if engine.role is Role.STANDBY else failed or reasons.HOST_DOWN
                return Condition(DEGRADED, "True", reason, f"{engine.role.value} engine of {worker.pod}: {why}")
    refused = next((w for w in seen.workloads if w.trouble and w.platform == _platform(decision)), None)
    if refused is not None:
        message = f"{len(serving)} of {wanted} workers serve; no pod of Deployment {refused.name} can be made: "
        return Condition(DEGRADED, "True", refused.trouble, message + refused.message)
    if len(serving) < wanted:
        message = f"{len(serving)} of {wanted} workers serve"
        return Condition(DEGRADED, "True", reasons.WORKERS_MISSING, message)
    told = {a.uid for a in decision.actions if isinstance(a, Signal)}  # in this very pass: they had no time yet
    other = [w for w in serving if not targets.as_planned(seen, decision, w) and w.uid not in told]
    if other:
        message = f"{facts.names(other)} do not serve what they should yet"
        return Condition(DEGRADED, "True", reasons.OTHER_ENGINE, message)
    return Condition(DEGRADED, "False", reasons.AS_ASKED, f"{len(serving)} of {wanted} workers serve")


def _platform(decision: Decision) -> str:
    """That of the workers that serve; what is on trial is told by the rollout's own words."""
    return decision.memory.platform.hash if decision.memory.platform is not None else ""


_CONDITIONS = (_available, _ready, _reconciling, _stalled, _built, _verified, _progressing, _degraded)


def _written(condition: Condition, seen: Observed, previous: Mapping[str, object]) -> targets.Status:
    """As metav1 has it. The time changes only with the status."""
    old = next((c for c in targets.listed(previous.get("conditions")) if c.get("type") == condition.type), {})
    changed = old.get("status") != condition.status or not isinstance(old.get("lastTransitionTime"), str)
    return {
        "type": condition.type,
        "status": condition.status,
        "observedGeneration": seen.generation,
        "lastTransitionTime": timestamp(seen.now) if changed else old["lastTransitionTime"],
        "reason": condition.reason if _REASON.fullmatch(condition.reason) else reasons.OTHER,
        "message": cut(condition.message, targets.MESSAGE_LENGTH),
    }


# ---------------------------------------------------------------------------------------------------------------
# Words for people
# ---------------------------------------------------------------------------------------------------------------


def _phase(decision: Decision, degraded: bool) -> str:
    stage = decision.situation.stage
    if stage is Stage.SERVING and degraded:
        return DEGRADED
    return stage.value


def _summary(seen: Observed, decision: Decision) -> str:
    situation = decision.situation
    if situation.summary:
        return situation.summary
    if situation.stage is Stage.SERVING:
        serving = sum(facts.serves(seen, w, decision.memory.stable) for w in facts.present(seen))
        return f"{serving} of {facts.desired(seen)} workers"
    if situation.stage in _ENDED or situation.stuck:
        return situation.reason
    return ""
