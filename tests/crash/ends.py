"""How each scenario has to end: what is stable, what the condition Ready says, and what history tells, newest first."""

from __future__ import annotations

import memory_scenarios
import odd_scenarios
import platform_scenarios
from world import World

ENDS: dict[str, str] = {
    "first rollout": "a Serving: Promoted",
    "good update": "b Serving: Promoted, Promoted",
    "slow update": "a TooSlow: RolledBack, Promoted",
    "failing update": "a ErrorRateTooHigh: RolledBack, Promoted",
    "update that no worker can load": "a EngineFailed: RolledBack, Promoted",
    "update whose host dies": "a EngineDied: RolledBack, Promoted",
    "update that fails its gate": "a GateFailed: GateFailed, Promoted",
    "update without traffic": "a ProgressDeadlineExceeded: RolledBack, Promoted",
    "build that fails for good": "a OperatorUnsupported: Promoted",
    "build that fails, is healed and tried again": "broken Serving: Promoted, Promoted",
    "storage away during the build": "b Serving: Promoted, Promoted",
    "storage away for too long, then tried again": "b Serving: Promoted, Promoted",
    "storage away while workers load": "b Serving: Promoted, Promoted",
    "storage away beyond the deadline while workers load": "b Serving: Promoted, Promoted",
    "image missing for a while": "a Serving: Promoted",
    "source changed for good in mid-canary": "c Serving: Promoted, Superseded, Promoted",
    "a to b to a": "a Serving: Superseded, Promoted",
    "a to b to a while b is built": "a Serving: Promoted",
    "a to b to c while b is built": "c Serving: Promoted, Promoted",
    "bad, then fixed": "b Serving: Promoted, RolledBack, Promoted",
    "steps edited to fewer in mid-step": "b Serving: Promoted, Promoted",
    "steps edited in mid-step": "b Serving: Promoted, Promoted",
    "scaled in in mid-step": "b Serving: Promoted, Promoted",
    "scaled out in mid-step": "b Serving: Promoted, Promoted",
    "scaled out right before the step is passed": "b Serving: Promoted, Promoted",
    "scaled to zero in mid-step and back": "b Serving: Promoted, Promoted",
    "member lost": "b Serving: Promoted, Promoted",
    "member's container dies": "a WorkerDied: RolledBack, Promoted",
    "stable worker lost": "b Serving: Promoted, Promoted",
    "worker that says everything at once": "b Serving: Promoted, Promoted",
    "worker that answers with a strange engine": "b Serving: Promoted, Promoted",
    "worker unreachable for a while": "b Serving: Promoted, Promoted",
    "worker unreachable beyond the deadline": "a ProgressDeadlineExceeded: RolledBack, Promoted",
    "aborted in mid-canary": "a Aborted: Aborted, Promoted",
    "aborted while it is built": "a Aborted: Aborted, Promoted",
    "aborted, then tried again": "b Serving: Promoted, Aborted, Promoted",
    "rolled back by command after its promotion": "a RolledBackByCommand: RolledBack, Promoted, Promoted",
    "rolled back by command in mid-canary": "a RolledBackByCommand: RolledBack, Promoted",
    "paused in mid-step and resumed": "b Serving: Promoted, Promoted",
    "paused by command in mid-step and resumed": "b Serving: Promoted, Promoted",
    "failing update, paused by command": "a ErrorRateTooHigh: RolledBack, Promoted",
    "promoted by command in mid-step": "b Serving: Promoted, Promoted",
    "step skipped by command": "b Serving: Promoted, Promoted",
    "paused, and rolled back by command to an older revision": (
        "a RolledBackByCommand: RolledBack, Promoted, Promoted, Promoted"
    ),
    "rolled back to an older revision while storage is away": (
        "a RolledBackByCommand: RolledBack, Promoted, Promoted, Promoted"
    ),
    "worker on another kind of node": "b Serving: Promoted, Promoted",
    "spec unreadable in mid-step, then put right": "b Serving: Promoted, Promoted",
    "paused and edited, then resumed": "b Serving: Promoted, Promoted",
    "back to what was rejected in mid-canary": "a ErrorRateTooHigh: Superseded, RolledBack, Promoted",
    "another file at the same address, and a refresh": "b Serving: Promoted, Promoted",
    "status lost at rest": "a Serving: ",
    "status lost in mid-canary": "b Serving: Promoted",
    "status lost after a rollback by command": "b Serving: Promoted",
    "status lost while it is built": "b Serving: Promoted",
    "status restored from a backup": "b Serving: Promoted, Promoted, Promoted",
    "deleted while it is resolved": "gone",
    "deleted while it is built": "gone",
    "deleted while it is deployed": "gone",
    "deleted in mid-canary": "gone",
    "deleted while it is promoted": "gone",
    "deleted at rest": "gone",
    "two targets, good update": "b Serving: Promoted, Promoted",
    "two targets, failing update": "a ErrorRateTooHigh: RolledBack, Promoted",
    "two targets, one fails and the other is held, then aborted": "a Aborted: Aborted, Promoted",
    "two targets, one fails and the other is held, steps edited, then aborted": "a Aborted: Aborted, Promoted",
    "shares, good update": "b Serving: Promoted, Promoted",
    "shares, failing update": "a ErrorRateTooHigh: RolledBack, Promoted",
    "shares, slow update": "a TooSlow: RolledBack, Promoted",
    "shares, steps edited in mid-step": "b Serving: Promoted, Promoted",
    "shares, scaled in in mid-step": "b Serving: Promoted, Promoted",
    "shares, member lost": "b Serving: Promoted, Promoted",
    "shares, spec unreadable in mid-step, then put right": "b Serving: Promoted, Promoted",
    "shares, fleet of one": "b Serving: Promoted, Promoted",
    "step that pauses, then resumed": "b Serving: Promoted, Promoted",
    "step that pauses, scaled out meanwhile, then resumed": "b Serving: Promoted, Promoted",
    "manual promotion": "b Serving: Promoted, Promoted",
    "rollout that a webhook confirms late": "b Serving: Promoted, Promoted",
    "promotion that a webhook confirms late": "b Serving: Promoted, Promoted",
    "promotion that a webhook never confirms": "a ProgressDeadlineExceeded: RolledBack, Promoted",
    "promotion that a webhook never answers": "a ProgressDeadlineExceeded: RolledBack, Promoted",
    "rollout that a webhook never confirms, aborted": "a Aborted: Aborted, Promoted",
    "queried, good update": "b Serving: Promoted, Promoted",
    "queried, outside its bounds": "a MetricOutOfBounds: RolledBack, Promoted",
    "queried, Prometheus down for a while": "b Serving: Promoted, Promoted",
    "queried, Prometheus down beyond the deadline": "a ProgressDeadlineExceeded: RolledBack, Promoted",
    "no traffic, golden samples": "b Serving: Promoted, Promoted",
    "no traffic, golden samples fail": "a ErrorRateTooHigh: RolledBack, Promoted",
    "fleet of one, never any traffic, golden samples": "b Serving: Promoted, Promoted",
    "no traffic, promoted": "b Serving: Promoted, Promoted",
    "manual promotion, aborted instead": "a Aborted: Aborted, Promoted",
    "first rollout without workers": "a Serving: Promoted",
    "fleet of one, good update": "b Serving: Promoted, Promoted",
    "fleet of one, slow update": "a TooSlow: RolledBack, Promoted",
    "fleet of one, more steps than a worker keeps windows": "b Serving: Promoted, Promoted",
    "fleet of one, worker lost": "a ProgressDeadlineExceeded: RolledBack, Promoted",
} | platform_scenarios.ENDS
ENDS |= memory_scenarios.ENDS | odd_scenarios.ENDS


def told(world: World) -> str:
    if world.model is None:
        return "gone"
    stable, history = world.rollout["stable"], world.rollout["history"]
    source = world.by_digest[stable["artifacts"][0]["manifestDigest"]].content
    images = {w.image for w in world.workers.values()} - {"worker:1"}
    made_of = f" on {', '.join(sorted(images))}" if images else ""
    return f"{source} {world.condition('Ready')[1]}: {', '.join(entry['outcome'] for entry in history)}{made_of}"
