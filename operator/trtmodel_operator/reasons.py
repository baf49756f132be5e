"""Why something is as it is, in one word: the reasons of conditions, events and history that are the operator's own.

Beside them stand a Job's reasons (contract `jobs.Reason`), and what Kubernetes calls a trouble: Unschedulable,
ImagePullBackOff, OOMKilled, DeadlineExceeded, CrashLoopBackOff ...
"""

# Where a model stands
DELETING = "Deleting"
INVALID_SPEC = "InvalidSpec"
PAUSED = "Paused"
RESOLVED = "Resolved"
BUILT = "Built"
DEPLOYING = "Deploying"
PREPARING = "Preparing"
ROUTING = "Routing"
HOLDING = "Holding"
NO_TRAFFIC = "NoTraffic"
INCONCLUSIVE = "Inconclusive"
SLOW_LOOK = "SlowLook"  # the first of two looks that fail for the latency
AWAITING_CONFIRMATION = "AwaitingConfirmation"
STEP_PASSED = "StepPassed"
STEPS_CHANGED = "StepsChanged"
PROMOTED = "Promoted"
SERVING = "Serving"
SCALED_TO_ZERO = "ScaledToZero"
WAITING = "Waiting"
WORKERS_NOT_READY = "WorkersNotReady"
ADOPTED = "Adopted"
STEP_PAUSED = "StepPaused"  # at a step that a person has to lift
AWAITING_PROMOTION = "AwaitingPromotion"
GOING_BACK = "GoingBack"
PLATFORM_CHANGES = "PlatformChanges"  # workers of another image, or with other pod settings, are tried
WORKERS_LEAVE = "WorkersLeave"  # of the platform of before, or of one that was taken back

# Why a revision is not tried, or not any more
ROLLED_BACK = "RolledBack"
ABORTED = "Aborted"
ROLLED_BACK_BY_COMMAND = "RolledBackByCommand"
ENGINE_FAILED = "EngineFailed"
ENGINE_DIED = "EngineDied"
WORKER_DIED = "WorkerDied"
ERROR_RATE = "ErrorRateTooHigh"
TOO_SLOW = "TooSlow"
DISAGREES = "AnswersDisagree"
METRIC = "MetricOutOfBounds"
DEADLINE = "ProgressDeadlineExceeded"
GATE_PASSED = "GatePassed"
GATE_FAILED = "GateFailed"
GATE_INCONCLUSIVE = "GateInconclusive"
SUPERSEDED = "Superseded"

# Why nothing moves
NO_WORKER_IMAGE = "NoWorkerImage"
JOB_FAILED = "JobFailed"
RESULT_MISSING = "ResultMissing"
VERIFICATION_MISSING = "VerificationMissing"
BUILD_QUEUED = "BuildQueued"
NO_ENGINE_FOR_LOAD_KEY = "NoEngineForLoadKey"
OTHER_LOAD_KEY = "OtherLoadKey"
NO_STAGED_ENGINE = "NoStagedEngine"
TARGET_FAILED = "TargetFailed"
NO_ROOM = "NoRoomForWorker"
CLUSTER_REFUSED = "ClusterRefused"

# Only in conditions
AS_ASKED = "AsAsked"
NOT_STALLED = "NotStalled"
NOT_BUILT = "NotBuilt"
NOT_MEASURED = "NotMeasured"
NO_WORKER_SERVES = "NoWorkerServes"
WORKERS_UNKNOWN = "WorkersUnknown"
WORKERS_MISSING = "WorkersMissing"
OTHER_ENGINE = "OtherEngine"
HOST_DOWN = "EngineHostDown"
STANDBY_MISSING = "StandbyMissing"
SCALING = "Scaling"
OTHER = "Other"

# While a TRTModel with deletionPolicy Delete goes
REMOVING_ARTIFACTS = "RemovingArtifacts"
ARTIFACTS_REMOVED = "ArtifactsRemoved"
ARTIFACTS_KEPT = "ArtifactsKept"

# Only in events
COMMAND_TAKEN = "CommandTaken"
COMMAND_IGNORED = "CommandIgnored"
