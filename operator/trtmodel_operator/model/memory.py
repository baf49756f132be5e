"""What cannot be observed again: .status.rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtmodel_contract.codec import LATER
from trtmodel_contract.jobs import FoundArtifact

from trtmodel_operator.model.checks import Check

SEQUENCE_MOST = 2**52  # that is believed of a worker, a pointer or a status: twice that is the end of the numbers


@dataclass(frozen=True)
class Artifact:
    """One engine of a revision on one target. `load_key` is the key's text, which is all that a boot pointer keeps of
    it. `verdict_text` is the gate's sentence when it was accepted."""

    target: str
    load_key: str
    manifest_digest: str
    driver: str = ""
    verdict_text: str = ""


@dataclass(frozen=True)
class Deployed:
    """A revision with its engines: stable, candidate or standby."""

    revision: str
    artifacts: tuple[Artifact, ...]

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(a.manifest_digest for a in self.artifacts)


@dataclass(frozen=True)
class Resolved:
    """What the resolve Job of `key` (a hash of the fields that it reads, and the counter) found out."""

    key: str
    source_sha256: str
    revision: str
    calibration_digest: str
    dataset_digest: str


@dataclass(frozen=True)
class Built:
    """An engine that exists in the bucket, with its gate figures. Judged anew with today's thresholds. `gate` is the
    hash of the data set, task and number of samples that the figures were measured with; `image` that of the Job that
    brought it, '' where resolve found it."""

    revision: str
    target: str
    artifact: FoundArtifact
    gate: str
    image: str = field(default="", metadata=LATER)


@dataclass(frozen=True)
class Failure:
    """A Job that ended for good. Kept, since the Job itself is collected after a day."""

    job: str
    reason: str
    message: str


@dataclass(frozen=True)
class Platform:
    """Image and pod settings of the workers; `hash` names their Deployment. `pod` is the settings as canonical JSON, so
    that workers which stay are never made of what the spec says by now; '' in a status that is older than this field:
    then they are the spec's."""

    image: str
    hash: str
    pod: str = field(default="", metadata=LATER)


@dataclass(frozen=True)
class StepMemory:
    """The step in hand. An `index` equal to the number of steps is the last preparation, of all workers.

    `plan` is the hash of the steps: an edited plan starts again. `began_at` is when the step began. `restarts` are
    those that each worker (by a short hash of its uid) had had when it was told to hold the candidate, whose doing its
    next death may be: a count, since no two clocks agree. `members` is the hash of those that were routed to it when
    `routed` became true: other members mean a new window. `deaths` are those that an engine had before its trial (it
    may have been stable once), by worker; without an entry none.
    `held` counts the seconds during which the operator watched all members serve the candidate; `seen_at` is the last
    look at the figures (0 = no worker was routed yet), whose `verdict`, `figures` (short) and `sentence` are kept, so
    that status changes with the looks and not with every pass. `fails` counts successive looks that failed for the
    latency (two are needed), of the targets in `slow`. `baseline` is the window before the rollout: what a fleet of one
    is compared with.
    `failed` are the targets that went back alone, each with the reason: nothing moves until a person decides.
    `checks` are the queries of Prometheus as they stood at the last look. `counted` are the candidate's requests in
    this window, by target and hash of its members, when all of these were heard last: fewer later means that counters
    began anew. `synthetic`: too few requests came, and workers run golden samples.
    `weight` and `shadow` are what the last step that was opened gave the candidate. `resumed`: a person lifted this
    step's pause; `approved`: a person promoted it. `back`: no trial, but a person's way back to it.
    `platform` is what is on trial instead of an engine: the candidate is then named by its hash and has stable's
    engines. `tight`: another worker has no room, so that one of the others leaves first.
    """

    index: int
    plan: str
    began_at: float
    members: str = ""
    deaths: Mapping[str, int] = field(default_factory=dict)
    routed: bool = False
    held: float = 0.0
    seen_at: float = 0.0
    fails: int = 0
    baseline: str = ""
    verdict: str = ""
    figures: str = ""
    sentence: str = ""
    slow: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    counted: Mapping[str, int] = field(default_factory=dict)
    synthetic: bool = False
    weight: int = 100
    shadow: int = 0
    resumed: bool = False
    approved: bool = False
    back: bool = False
    platform: Platform | None = field(default=None, metadata=LATER)
    tight: bool = field(default=False, metadata=LATER)
    restarts: Mapping[str, int] = field(default_factory=dict, metadata=LATER)


@dataclass(frozen=True)
class Rejected:
    """A revision, or a platform by its hash, that is not tried again until the spec, or `key` (hash of verify and
    analysis), changes."""

    revision: str
    key: str
    reason: str
    message: str


@dataclass(frozen=True)
class HistoryEntry:
    """One finished rollout, newest first in the history. `reason` is a constant, `message` a sentence. `engines` are
    those of a revision that was promoted: one may go back to it."""

    revision: str
    outcome: str  # Promoted | RolledBack | GateFailed | Aborted | Superseded
    reason: str
    at: str  # RFC 3339, seconds
    digests: tuple[str, ...] = ()
    message: str = ""
    engines: tuple[Artifact, ...] = ()


@dataclass(frozen=True)
class Memory:
    """Written to .status.rollout with a precondition before any effect. `sequence` rises with every change of what
    workers should do (`plan` is the hash of it): together with the uid it is the fence.

    `window` is the id under which workers count attempts now. `stable_resolved` is what `resolved` was when stable
    was promoted: a spec that goes back to it needs no Job. `attempt` counts the retries that a person asked for,
    `resolve_counter` the refreshes, `source_changes` the sources that changed under a build without one succeeding,
    `pinned` are builds that other models made and we took: a resolve Job of our own pins what each of them brought.
    `waiting` is what the progress deadline counts for (another word starts the clock again, but for room
    that lacks: that word keeps where the clock stood), `waited` the observed
    seconds of it, `waited_at` when it was last looked at. `command` is the text of the last one taken, `paused`
    that of the one that paused, '' if none did. `platform` is what workers are made of until another one is promoted.
    `default_image` is what an empty spec.serving.image means for this model: the operator's setting of when its
    platform was chosen, so that an upgrade of the operator changes no worker.
    """

    sequence: int = 0
    plan: str = ""
    stable: Deployed | None = None
    candidate: Deployed | None = None
    standby: Deployed | None = None
    resolved: Resolved | None = None
    stable_resolved: Resolved | None = None
    resolve_counter: int = 0
    source_changes: int = 0
    attempt: int = 0
    built: tuple[Built, ...] = ()
    failure: Failure | None = None
    step: StepMemory | None = None
    rejected: tuple[Rejected, ...] = ()
    platform: Platform | None = None
    command: str = ""
    window: str = ""
    waiting: str = ""
    waited: float = 0.0
    waited_at: float = 0.0
    history: tuple[HistoryEntry, ...] = ()
    paused: str = ""
    default_image: str = field(default="", metadata=LATER)
    pinned: tuple[str, ...] = field(default=(), metadata=LATER)
