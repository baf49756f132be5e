"""Every reason that a condition, an event or the history can have: what it means, and what to do.

One table for `trtmodel explain` and for docs/conditions.md. A test holds it against the reasons of operator and Jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

NOTHING = "Nothing."


@dataclass(frozen=True)
class Advice:
    """Two sentences for people."""

    means: str
    todo: str = NOTHING


CONDITIONS: Mapping[str, str] = {
    "Available": "A verified engine serves on at least one ready worker of every target. It stays True during a "
    "rollout and after a rollback.",
    "Ready": "The newest spec was processed, its revision is promoted, and every desired worker reports it. Scaling "
    "alone leaves it True.",
    "Reconciling": "The operator works towards the newest spec (kstatus).",
    "Stalled": "It ended, and nothing more happens until a person or the cluster changes something (kstatus): a wait "
    "ends.",
    "Built": "The engine of the newest spec's revision exists for every target.",
    "Verified": "Its gate passed, by today's thresholds.",
    "Progressing": "A rollout moves. False with a reason when it is done, paused, stuck or waits for a person.",
    "Degraded": "Something serves, but not as asked: fewer workers, a failing process, another engine, no standby.",
}

PHASES: Mapping[str, str] = {
    "Resolving": "A Job fetches the source and finds out which revision it makes.",
    "Building": "A Job builds the engine and holds it against the original.",
    "Deploying": "The first revision is built, and its workers start.",
    "Preparing": "Workers load and prove the candidate beside the engine that serves.",
    "Canary": "The candidate is on trial; CANARY says which step, and what was measured.",
    "Promoting": "The trial is over, and all workers are led to what was decided.",
    "Serving": "The spec's revision serves everywhere.",
    "Degraded": "The same, but not as asked: fewer workers, a failing process, no standby.",
    "Paused": "The rollout stands still until a person goes on.",
    "ScaledToZero": "No worker is wanted.",
    "RolledBack": "The trial failed or was ended by a person, and the stable revision serves.",
    "GateFailed": "The engine is less accurate than the limits allow, and reaches no worker.",
    "GateInconclusive": "The data set is too small to prove the limits.",
    "Stalled": "A Job failed for good, or something is awaited that may never come.",
    "Invalid": "The spec cannot be read.",
    "Deleting": "The TRTModel and what it owns are being removed.",
}
"""What the column PHASE and the label `stage` of a metric say."""

MOVES: Mapping[str, Advice] = {
    "Resolving": Advice("A Job fetches the source, checks it, and looks for engines of its revision."),
    "Building": Advice("A Job builds the engine and measures it; status shows its stage."),
    "Resolved": Advice("The source was fetched and checked, and its revision is known."),
    "Built": Advice("The engine of this revision exists for every target."),
    "Deploying": Advice(
        "The first revision passed its gate, and its workers start.", "Wait; if it lasts, look at the pods."
    ),
    "Preparing": Advice("The workers of the next step load and prove the candidate beside the engine that serves."),
    "Routing": Advice("Workers are told to answer with the candidate."),
    "Holding": Advice("The candidate answers on the workers of this step, and is watched."),
    "NoTraffic": Advice(
        "The step's workers got no requests, so there is nothing to compare.",
        "Send requests, have golden samples run (`rollout.analysis.noData: Synthetic`), or decide yourself: `kubectl "
        "trtmodel promote` or `abort`.",
    ),
    "Inconclusive": Advice(
        "The hold is over, and the figures allow no verdict yet.",
        "Wait for more requests; `rollout.progressDeadline` ends it. If it comes often, allow more with "
        "`maxErrorRateIncrease` or `maxLatencyRatio`; `trtmodel lint` tells how many requests a limit takes.",
    ),
    "SlowLook": Advice("The candidate was too slow at one look; a second one in a row takes it back."),
    "AwaitingConfirmation": Advice(
        "A webhook of `rollout.analysis.webhooks` has not agreed yet.",
        "Look at what answers there; the message has its words.",
    ),
    "GoingBack": Advice("Workers load the earlier revision that a person asked for; stable serves until all have it."),
    "PlatformChanges": Advice(
        "Workers of another image, or with other pod settings, are tried beside those of before."
    ),
    "WorkersLeave": Advice("All workers that are wanted serve; those of another image or other settings leave."),
    "StepPassed": Advice("The analysis passed, and the next step begins."),
    "StepsChanged": Advice("The steps were edited, so the trial begins at the first step again."),
    "Promoted": Advice("The revision became stable on every worker."),
    "Serving": Advice("The promoted revision serves on every desired worker."),
    "Scaling": Advice("Workers come or go; those that are there serve."),
    "Adopted": Advice("Status was lost; what runs was taken as stable.", "Check that STABLE is what you expect."),
    "Superseded": Advice("A newer spec took the place of this revision before it was promoted."),
    "AsAsked": Advice("What serves is what the spec asks for."),
    "NotStalled": Advice("Nothing stands in the way for good."),
    "NotBuilt": Advice("There is no engine of this revision yet."),
    "NotMeasured": Advice("There are no figures of this revision on today's data set yet."),
    "GatePassed": Advice("The engine is as accurate as the limits ask."),
    "Done": Advice("The Job did what it was asked."),
    "CommandTaken": Advice("A command was carried out."),
    "CommandIgnored": Advice(
        "A command did nothing; the event says why.", "Give it again for the revision that it names."
    ),
}

WAITS: Mapping[str, Advice] = {
    "Paused": Advice(
        "Rollouts stand still; repair and rollback do not.", "`kubectl trtmodel resume`, or `rollout.paused: false`."
    ),
    "StepPaused": Advice(
        "The step was passed, and its `pause` asks for a person.", "`kubectl trtmodel resume`, or `abort`."
    ),
    "AwaitingPromotion": Advice(
        "Every step was passed, and `promotion: Manual` asks for a person.", "`kubectl trtmodel promote`, or `abort`."
    ),
    "ScaledToZero": Advice("No worker is wanted, so nothing is promoted.", "Raise `serving.replicas`."),
    "Waiting": Advice("Something outside is awaited; the message says what.", "Read the message."),
    "WorkersNotReady": Advice(
        "Workers are missing or unready.",
        "Look at the pods: `kubectl get pods -l trtmodel.io/model=<name>`, then their events.",
    ),
    "BuildQueued": Advice(
        "`builds.concurrent` builds run already; this one waits for its turn.",
        "Wait, or raise `builds.concurrent` of the chart.",
    ),
    "VerificationMissing": Advice(
        "There is an engine without figures of today's data set, and no Job measures it.",
        "In tier Production: run the gate in Staging with this data set and copy the engine again.",
    ),
    "NoEngineForLoadKey": Advice(
        "A worker found no engine for its device and runtime; one is built on its node while the others serve.",
        "Leave a GPU of that node free for the build, or list that kind of GPU in `spec.targets`.",
    ),
    "NoRoomForWorker": Advice(
        "No node takes one more worker, and no old one may leave first, or one has left already; the others serve on.",
        "Add a node, or use `rollout.memoryPolicy: Resource` (and `allowDowntime` for a single worker): see rollouts.",
    ),
    "OtherLoadKey": Advice(
        "A build ran on another kind of machine than the workers that wait for it.",
        "Narrow `targets[].nodeSelector` or `targets[].gpu` to one kind of machine.",
    ),
    "NoWorkerImage": Advice(
        "No image of workers is known.", "Set `worker.image` of the chart or `spec.serving.image`."
    ),
    "ResultMissing": Advice(
        "A Job ended without saying how.", "Look at its pod and node; then `kubectl trtmodel retry`."
    ),
    "ClusterRefused": Advice(
        "The API server refuses an object that the rollout needs.",
        "The message quotes it: a quota, an admission policy, or a right of the operator's ServiceAccount.",
    ),
    "NoStagedEngine": Advice(
        "Tier Production builds nothing, and there is no staged engine of this revision.",
        "Build it in Staging, bring it here with `trtmodel cache copy`, then `kubectl trtmodel refresh`.",
    ),
    "Unschedulable": Advice(
        "No node takes the pod.", "Add such a node, free one, or change `spec.targets` and `build.nodeSelector`."
    ),
    "FailedCreate": Advice(
        "No pod of a Job, or no further worker, can be made.",
        "The message quotes why: raise the quota, or correct `spec.targets`, `build.resources` or `serving.pod`.",
    ),
    "ImagePullBackOff": Advice(
        "The image cannot be pulled.", "Check its name, the registry and `serving.pod.imagePullSecrets`."
    ),
    "CrashLoopBackOff": Advice("A container ends again and again.", "`kubectl logs --previous` of the pod tells why."),
    "Evicted": Advice(
        "The node was short of memory or disk.", "Give it room, or lower what the pod asks for; builds are tried again."
    ),
}

ENDS: Mapping[str, Advice] = {
    "InvalidSpec": Advice(
        "The spec cannot be read.", "The message names the field: correct it; `trtmodel lint` checks a manifest."
    ),
    "GateFailed": Advice(
        "The engine is less accurate than the limits allow. It reaches no worker.",
        "`kubectl trtmodel report` shows where. Keep nodes in FP32 (`engine.keepPrecision`), use a higher precision, "
        "calibrate on better data, or change `verify.thresholds` if the loss is acceptable.",
    ),
    "GateInconclusive": Advice(
        "The data set is too small to prove the limits.", "Use as many samples as the message says, or a wider limit."
    ),
    "RolledBack": Advice(
        "The trial failed and the stable revision serves.",
        "The message has the figures. Change the spec, or try once more: `kubectl trtmodel retry`.",
    ),
    "Aborted": Advice("A person ended the rollout.", "Change the spec, or `kubectl trtmodel retry`."),
    "RolledBackByCommand": Advice(
        "A person went back.", "Change the spec, or `kubectl trtmodel retry` to try it once more."
    ),
    "ErrorRateTooHigh": Advice(
        "More of the candidate's attempts failed than of the baseline's.",
        "Workers' logs and `trtmodel_failed_attempts_total` have the errors by class.",
    ),
    "TooSlow": Advice(
        "The candidate computed slower than the limit, at two looks in a row.",
        "Compare `precision` and `profiles`; raise `analysis.maxLatencyRatio`, or `retry` if a node was busy.",
    ),
    "AnswersDisagree": Advice(
        "The candidate's answers differ from stable's more than `analysis.minAgreement` allows.",
        "If the model was meant to change its answers, lower or remove `minAgreement`.",
    ),
    "MetricOutOfBounds": Advice(
        "A query of `analysis.prometheus` left its bounds.", "The message names query and value: look at that metric."
    ),
    "EngineFailed": Advice(
        "A worker could not load or prove the candidate.",
        "The message quotes it. If memory was short, change `rollout.memoryPolicy`, then `kubectl trtmodel retry`.",
    ),
    "EngineDied": Advice(
        "A process that ran the candidate died.",
        "The worker's log has the signal or error; it is the engine's doing until shown otherwise.",
    ),
    "WorkerDied": Advice(
        "A worker's container died while it ran the candidate.",
        "`kubectl logs --previous`; often memory: raise `serving.pod.resources`, then `kubectl trtmodel retry`.",
    ),
    "ProgressDeadlineExceeded": Advice(
        "A step took longer than `rollout.progressDeadline`.",
        "The message says what was awaited. Remove that cause, or raise the deadline; then `kubectl trtmodel retry`.",
    ),
    "TargetFailed": Advice(
        "The candidate failed on one target, and `onTargetFailure: Hold` waits for a person.",
        "`kubectl trtmodel retry` tries that target again, `abort` takes all back.",
    ),
    "JobFailed": Advice(
        "A Job failed for good.", "The message has its last words. Remove the cause, then `kubectl trtmodel retry`."
    ),
    "SourceNotFound": Advice(
        "Nothing lies at an address of the spec.", "Upload it or correct the URI; then `kubectl trtmodel retry`."
    ),
    "AccessDenied": Advice(
        "The storage refuses the credentials.",
        "Check `storage.credentialsSecret` and the bucket's policy; then `kubectl trtmodel retry`.",
    ),
    "BucketNotFound": Advice(
        "The bucket does not exist.", "Make it, or correct `storage.bucket` and `storage.endpoint`."
    ),
    "StorageUnavailable": Advice(
        "The storage did not answer in time.", "Jobs try again by themselves; afterwards `kubectl trtmodel retry`."
    ),
    "SourceChanged": Advice(
        "The source changed while it was built, several times.",
        "Publish under a new name, or pin `source.sha256`; then retry.",
    ),
    "DigestMismatch": Advice(
        "The content is not what was pinned or published.",
        "Correct `source.sha256`, or find out who changed the bucket.",
    ),
    "ModelInvalid": Advice(
        "The ONNX file cannot be used.", "`trtmodel check model.onnx` shows all that is wrong, on your machine."
    ),
    "OperatorUnsupported": Advice(
        "The runtime lacks an operator of the graph.",
        "Export with another opset, replace the node, or choose another runtime.",
    ),
    "ProfileMismatch": Advice(
        "`engine.profiles` does not fit the graph's inputs.", "The message names the input and both shapes."
    ),
    "PrecisionUnsupported": Advice("Runtime or GPU lack this precision.", "Choose one that the message offers."),
    "DatasetInvalid": Advice(
        "The npz does not fit the model.", "Arrays are named as the inputs, first axis samples: see docs/accuracy.md."
    ),
    "BuildFailed": Advice(
        "The engine could not be built.",
        "The message quotes the builder; memory and unsupported shapes are the usual causes. Change the engine, or "
        "`kubectl trtmodel retry`.",
    ),
    "NoSpace": Advice(
        "The Job's disk is full.",
        "Raise `build.resources` for ephemeral-storage, or the node's disk; then `kubectl trtmodel retry`.",
    ),
    "InternalError": Advice(
        "A defect of this product.", "Please report it with the Job's log; `kubectl trtmodel retry` tries again."
    ),
    "OOMKilled": Advice(
        "The Job needed more memory than its limit.",
        "Raise `build.resources.limits.memory`, then `kubectl trtmodel retry`.",
    ),
    "DeadlineExceeded": Advice(
        "The Job ran longer than `build.deadline`.",
        "Raise it, or find out what it waited for; then `kubectl trtmodel retry`.",
    ),
}

DEGRADES: Mapping[str, Advice] = {
    "NoWorkerServes": Advice("No ready worker has a verified engine.", "Look at the workers' pods and their logs."),
    "WorkersUnknown": Advice(
        "Ready workers cannot be asked, so they count as unknown.",
        "Let the operator reach their port 8081 (NetworkPolicy).",
    ),
    "WorkersMissing": Advice("Fewer workers serve than are desired.", "Look at the pods that are pending or unready."),
    "OtherEngine": Advice(
        "A worker serves another engine than it was told.", "It is told again; if it stays, look at its log."
    ),
    "EngineHostDown": Advice(
        "A process that runs an engine is down and is being replaced.",
        "If it comes back again and again: the worker's log.",
    ),
    "StandbyMissing": Advice(
        "A worker does not hold the previous revision, so a rollback would have to load it.",
        "Usually memory: raise it, or accept with `rollout.memoryPolicy: Resource`.",
    ),
    "SignatureInvalid": Advice(
        "A worker was given an engine that no key it knows has signed.",
        "If it stays: compare the ConfigMap `<model>-keys` with the operator's Secret; docs/security.md.",
    ),
    "HostNotStarted": Advice(
        "The process for an engine did not start.", "The worker's log; often memory or too few processes."
    ),
    "NotStarted": Advice("The process for an engine did not start in time.", "The worker's log; often a busy node."),
    "FetchTimeout": Advice(
        "A worker could not fetch an engine in time.", "The storage, or the network to it, is slow."
    ),
    "StorageStuck": Advice("A worker's storage hangs.", "Look at the endpoint and at the node's disk."),
    "DeviceLost": Advice(
        "The GPU was lost; the container is made anew.", "Look at the node: `nvidia-smi`, its kernel log."
    ),
    "Other": Advice("The cluster gave a reason that is no word.", "Read the message."),
    "Deleting": Advice("The TRTModel is being deleted with all that it owns."),
    "RemovingArtifacts": Advice("`deletionPolicy: Delete`: a Job removes what only this model needed from the bucket."),
    "ArtifactsRemoved": Advice("The model's artifacts are gone from the bucket."),
    "ArtifactsKept": Advice(
        "The artifacts could not be removed; the model is deleted all the same.",
        "Delete the model's pins, which the event names; then run `trtmodel cache collect`.",
    ),
}

SECTIONS: Mapping[str, Mapping[str, Advice]] = {
    "It moves, or has arrived": MOVES,
    "It waits": WAITS,
    "It has ended, and something else serves": ENDS,
    "It serves, but not as asked; or it goes": DEGRADES,
}


def of(reason: str) -> Advice | None:
    """None for a word that is Kubernetes' own and not in the table."""
    return next((section[reason] for section in SECTIONS.values() if reason in section), None)
