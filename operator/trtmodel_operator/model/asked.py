"""What the user asked for: .spec, parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trtmodel_contract.codec import LATER
from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.identity import EngineSettings, Storage

from trtmodel_operator.model.checks import NoData, QuerySpec, WebhookSpec


@dataclass(frozen=True)
class CalibrationSpec:
    uri: str
    samples: int
    method: str
    per_channel: bool


@dataclass(frozen=True)
class Target:
    """A kind of node that the model must run on. `gpu` selects the label nvidia.com/gpu.product; '' = any node.
    `runtime_class`: of its workers and builds; '' = the node's default runtime."""

    name: str
    gpu: str = ""
    gpus: int = 0
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, object], ...] = ()
    runtime_class: str = ""


@dataclass(frozen=True)
class BuildSpec:
    """`deadline` in seconds: of one Job, all its tries included."""

    deadline: int
    retries: int
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, object], ...] = ()
    resources: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifySpec:
    task: Task
    dataset_uri: str
    samples: int
    thresholds: Thresholds


@dataclass(frozen=True)
class RetrySpec:
    """`attempts` of one request, the first included. `budget_percent` of all requests may be retries. `hedge_after` in
    seconds: an overdue batch then also runs elsewhere; 0 for Auto."""

    attempts: int = 3
    budget_percent: int = 10
    hedge_after: float = 0.0


@dataclass(frozen=True)
class BatchingSpec:
    """`buckets`: batch sizes that are formed, empty for the worker's choice. `max_delay` in seconds: how long a free
    lane waits for a fuller batch. `max_queue`: requests that may wait, per engine."""

    buckets: tuple[int, ...] = ()
    max_delay: float = 0.0
    max_queue: int = 512


@dataclass(frozen=True)
class ServingSpec:
    """`hosts` of each engine. `contexts` are lanes of each host, 0 for Auto. `request_timeout` and `health_interval` in
    seconds. `fallback`: the standby answers while no host of the routed engine is up. `pod` is the closed list of pod
    settings, as written."""

    replicas: int
    image: str
    hosts: int
    contexts: int
    health_interval: float
    retry: RetrySpec
    batching: BatchingSpec
    request_timeout: float
    fallback: bool
    service_name: str
    http_port: int
    grpc_port: int
    pod: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """`workers` is a number or a percentage as written ("50%"); `hold` in seconds of observed time. `weight` is the
    percentage of these workers' requests that the candidate answers, `shadow` that of stable's answers which it only
    mirrors. `pause`: once passed, the step waits for a person."""

    workers: int | str
    hold: float
    weight: int = field(default=100, metadata=LATER)
    shadow: int = field(default=0, metadata=LATER)
    pause: bool = field(default=False, metadata=LATER)


@dataclass(frozen=True)
class AnalysisSpec:
    """`interval` in seconds: how often the figures are looked at. `min_agreement`: the least share of mirrored answers
    that agree; None: it is told only."""

    interval: float
    min_requests: int
    max_error_rate_increase: float
    max_latency_ratio: float
    no_data: NoData = field(default=NoData.HOLD, metadata=LATER)
    min_agreement: float | None = field(default=None, metadata=LATER)
    prometheus: tuple[QuerySpec, ...] = field(default=(), metadata=LATER)
    webhooks: tuple[WebhookSpec, ...] = field(default=(), metadata=LATER)


@dataclass(frozen=True)
class RolloutSpec:
    """`hold_on_target_failure`: a target whose trial fails goes back alone, and the others stay where they are until a
    person decides; otherwise all go back. `manual`: a person promotes."""

    steps: tuple[Step, ...]
    analysis: AnalysisSpec
    progress_deadline: float
    history_limit: int
    paused: bool
    memory_policy: str
    allow_downtime: bool
    hold_on_target_failure: bool = False
    manual: bool = False


@dataclass(frozen=True)
class Tier:
    """How engines come to be. `builds`: by Jobs; otherwise only what exists in the bucket is used. `changes` says what
    the tier made of the engine's settings, '' for nothing: `Spec.engine` has them already."""

    name: str = "Staging"
    builds: bool = True
    changes: str = ""


@dataclass(frozen=True)
class Spec:
    """`deletes_artifacts`: with the TRTModel goes from the bucket what no other one needs."""

    source_uri: str
    source_pin: str
    storage: Storage
    credentials_secret: str
    engine: EngineSettings
    calibration: CalibrationSpec | None
    targets: tuple[Target, ...]
    build: BuildSpec
    verify: VerifySpec
    serving: ServingSpec
    rollout: RolloutSpec
    tier: Tier = Tier()
    deletes_artifacts: bool = False
