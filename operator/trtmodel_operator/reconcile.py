"""One pass: observe, decide, remember, act, report.

The process may end at any line. The memory is written before any effect, so the next pass sees a memory that is ahead
of the world and performs the effect again; every effect may be performed twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Callable

from trtmodel_contract.codec import encode

from trtmodel_operator import conditions, manifests, reasons
from trtmodel_operator.adapters import signing
from trtmodel_operator.adapters.observe import observe
from trtmodel_operator.decide import decide
from trtmodel_operator.envelope import event
from trtmodel_operator.model import (
    Action,
    ApplyPointer,
    ApplyService,
    ApplyWorkload,
    CreateJob,
    Decision,
    DeleteJob,
    DeleteWorkload,
    Guard,
    Notice,
    Observed,
    ObservedWorker,
    Signal,
    Stage,
    WebhookStage,
)
from trtmodel_operator.ports import (
    Clock,
    Cluster,
    ClusterError,
    Conflict,
    Inquiries,
    Json,
    Key,
    KeyWatch,
    Metrics,
    Progress,
    Refusals,
    Signer,
    Turns,
    WorkerError,
    Workers,
)

ATTEMPTS = 3  # at once, when somebody else writes the object between our read and our write
UNANSWERED = 5.0  # seconds after which a worker that could not be told is told again
# Seconds that what is told in status waits at most while changes of other models wait for the first thing that is done
# about them: with hundred of them at once, every second write would be such a tale.
TELL_LATER = 2.0
PROGRESS = 4.0  # seconds between two looks at a Job that says how far it is
MOVING = (Stage.DEPLOYING, Stage.PREPARING, Stage.CANARY, Stage.PROMOTING)  # what workers say decides what comes next
REFUSALS = (400, 403, 404, 405, 413, 415, 422)  # the API server's answer to what will be wrong the next time too

NAMESPACE_GOES = "because it is being terminated"  # the API server's words where nothing is made any more

NO_POLICY = manifests.JobPolicy()

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Reconciler:
    cluster: Cluster
    workers: Workers
    signer: Signer
    clock: Clock
    metrics: Metrics
    default_image: str
    decide: Callable[[Observed], Decision] = decide
    progress: Progress | None = None
    refusals: Refusals | None = None
    keys: KeyWatch | None = None
    inquiries: Inquiries | None = None
    job_policy: manifests.JobPolicy = NO_POLICY
    turns: Turns | None = None
    installation: str = ""  # names this operator in buckets: see Observed.cluster

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the next pass is wanted; None = when something happens. Raises Conflict, ClusterError."""
        for attempt in itertools.count(1):
            try:
                return await self._once(key)
            except Conflict:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def _once(self, key: Key) -> float | None:
        raw = await self.cluster.get_model(key)
        if raw is None:
            self.workers.follow(key, {})
            if self.inquiries is not None:
                self.inquiries.follow(key, ())
            self.metrics.forget(key)
            if self.keys is not None:
                self.keys.forget(key)
            return None
        observed = await observe(
            raw,
            await self.cluster.children(key),
            workers=self.workers,
            signer=self.signer,
            default_image=self.default_image,
            now=self.clock.now(),
            progress=self.progress,
            refusals=self.refusals,
            cluster=self.installation,
            answers=self.inquiries.answers(key) if self.inquiries is not None else (),
        )
        if self.keys is not None:
            self.keys.saw(key, observed)
        decision = self.decide(observed)
        versions = {w.uid: (w.ip, w.report.version if w.report else 0) for w in _reachable(observed)}
        self.workers.follow(key, versions, closely=decision.situation.stage in MOVING)
        moved = decision.memory != observed.memory
        level = logging.INFO if moved or decision.actions else logging.DEBUG
        log.log(level, "%s: %s", decision.rule, decision.situation.message)
        if moved:
            await self.cluster.write_memory(key, raw["metadata"]["resourceVersion"], encode(decision.memory))
        if self.inquiries is not None:
            self.inquiries.follow(key, decision.lookups)
        try:
            unanswered = await self._act(observed, decision)
        except ClusterError as e:
            if observed.guarded and NAMESPACE_GOES in str(e):
                # No Job can be made there any more: what lies in the bucket stays, and holds up nothing.
                log.warning("artifacts stay, since the namespace is being deleted: %s", e)
                await self.cluster.guard(key, observed.model.uid, on=False)
                return None
            tells = any(isinstance(action, Signal) for action in decision.actions)
            goes_on = NAMESPACE_GOES not in str(e) and decision.memory.stable is not None
            if goes_on and (tells or decision.memory.candidate is not None):
                # A trial is looked at, and workers that have not heard are told, as often as ever.
                e.again = max(decision.requeue or 0.0, UNANSWERED, e.retry_after)
            if e.status in REFUSALS:
                await self._report(key, raw, observed, _refused(decision, e))
            raise
        if self.turns is not None:
            self.turns.acted(key)
            await self.turns.calm(TELL_LATER)
        await self._report(key, raw, observed, decision)
        if Guard(on=False) in decision.actions:  # last: there may be no object to report on afterwards
            await self.cluster.guard(key, observed.model.uid, on=False)
        if moved:
            return 0.0  # one kind of change in a pass: the next is due at once
        due = [UNANSWERED] if unanswered else []
        due += [PROGRESS] if any(job.progress for job in observed.jobs) else []
        return min([*due, decision.requeue or due[0]]) if due else decision.requeue

    async def _act(self, observed: Observed, decision: Decision) -> bool:
        """In the order given; neighbouring signals go out together. True if a worker could not be told."""
        unanswered = False
        for signals, group in itertools.groupby(decision.actions, lambda a: isinstance(a, Signal)):
            if signals:
                told = [self._send(observed, decision, a) for a in group if isinstance(a, Signal)]
                unanswered |= not all(await asyncio.gather(*told))
            else:
                for action in group:
                    await self._effect(observed, action)
        return unanswered

    async def _effect(self, observed: Observed, action: Action) -> None:
        model, spec = observed.model, observed.spec
        if isinstance(action, DeleteJob):
            await self.cluster.delete_job((model.namespace, model.name), action.name)
            return
        if isinstance(action, DeleteWorkload):
            await self.cluster.delete_workload((model.namespace, model.name), action.name)
            return
        if isinstance(action, Guard):
            if action.on:
                await self.cluster.guard((model.namespace, model.name), model.uid, on=True)
            return
        assert spec is not None, "without a spec nothing is created"
        match action:
            case CreateJob():
                await self.cluster.create_job(manifests.job(model, spec, action, self.job_policy))
            case ApplyPointer():
                # The keys first: a worker that reads the pointer must know who signed it.
                await self.cluster.apply(manifests.keys_config_map(model, self.signer.public_keys()))
                await self.cluster.apply(signing.pointer_config_map(self.signer, model, action))
            case ApplyService():
                await self.cluster.apply(manifests.service(model, spec))
            case ApplyWorkload():
                # The Deployment last: its replicas and fingerprint are what the next pass takes for all of it.
                if budget := manifests.pod_disruption_budget(model, spec):
                    await self.cluster.apply(budget)
                if action.only_replicas:
                    await self.cluster.scale_workload((model.namespace, model.name), action.name, action.replicas)
                else:
                    await self.cluster.apply(manifests.worker_deployment(model, spec, action))

    async def _send(self, observed: Observed, decision: Decision, signal: Signal) -> bool:
        request = signing.desired_request(self.signer, observed.model, decision.memory.sequence, signal)
        try:
            await self.workers.send(signal.ip, signal.uid, request)
        except WorkerError as e:
            log.warning("worker %s was not told: %s", signal.pod, e)
            return False
        return True

    async def _report(self, key: Key, raw: Json, observed: Observed, decision: Decision) -> None:
        previous = {name: value for name, value in (raw.get("status") or {}).items() if name != "rollout"}
        status = conditions.status(observed, decision, previous)
        if status != previous:
            await self.cluster.write_status(key, status)
        for notice in conditions.events(previous, status, decision.notices):
            await self.cluster.post_event(raw, notice.reason, notice.message, warning=notice.warning)
            self._tell(observed, notice)
        self.metrics.persisted(key, observed, decision, status)

    def _tell(self, observed: Observed, notice: Notice) -> None:
        if observed.spec is None or self.inquiries is None:
            return
        for hook in observed.spec.rollout.analysis.webhooks:
            if hook.stage is WebhookStage.EVENT:
                self.inquiries.tell(hook, *event(observed.model, hook, notice, observed.now))


def _reachable(observed: Observed) -> list[ObservedWorker]:
    return [w for w in observed.workers if w.ip and not w.terminating]


def _refused(decision: Decision, error: ClusterError) -> Decision:
    """The same decision, told as what it came to: an effect that the API server will never accept as it is."""
    message = f"The API server refused a step of this rollout: {error}. Correct the spec or the operator's rights."
    return dataclasses.replace(
        decision, situation=dataclasses.replace(decision.situation, reason=reasons.CLUSTER_REFUSED, message=message)
    )
