"""From .spec as the API server returns it to the values that the operator thinks in.

Total: the CRD validates and fills in defaults, but an object may have been stored under an older CRD or by another
hand, so every field is read with the same default here, and what cannot be read raises SpecError and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.identity import EngineSettings, KeepPrecision, Profile, ShapeRange, Storage

from trtmodel_operator.fields import KINDS, Node, SpecError, shown, size
from trtmodel_operator.model import (
    AnalysisSpec,
    BatchingSpec,
    BuildSpec,
    CalibrationSpec,
    Command,
    NoData,
    QuerySpec,
    RetrySpec,
    RolloutSpec,
    ServingSpec,
    Spec,
    Step,
    Target,
    Tier,
    VerifySpec,
    WebhookSpec,
    WebhookStage,
)
from trtmodel_operator.units import quantity

RUNTIMES = ("TensorRT", "ONNXRuntime")
PRECISIONS = ("FP32", "FP16", "BF16", "INT8", "FP8")
CALIBRATIONS = ("Entropy", "MinMax")
FALLBACKS = ("Standby", "Error")
MEMORY_POLICIES = ("Auto", "Availability", "Resource")
PROMOTIONS = ("Automatic", "Manual")
TIERS = ("Development", "Staging", "Production")
DELETION_POLICIES = ("Retain", "Delete")
QUICK_LEVEL = 1  # of TensorRT's optimization, where the default is 3
NO_DATA = tuple(policy.value for policy in NoData)
WEBHOOK_STAGES = tuple(stage.value for stage in WebhookStage)
WEBHOOK_SECONDS = 60.0  # the longest timeout of one call
LOOKUPS_MOST = 8  # queries, and webhooks, of one TRTModel
ON_TARGET_FAILURE = ("RollbackAll", "Hold")
AUTO = "Auto"
LARGEST_BATCH = 4096
DEFAULT_STEPS = ({"workers": 1, "hold": "2m"}, {"workers": "50%", "hold": "2m"})
COMMAND_LENGTH = 200  # bounds what is remembered of a command, also of one that is not understood

# Prefixes and names that user settings of pods may not replace (the CRD says the same).
RESERVED_KEYS = ("trtmodel.io/", "app.kubernetes.io/")
RESERVED_ENV = ("POD_NAME", "POD_UID", "POD_NAMESPACE", "NODE_NAME")
RESERVED_ENV_PREFIX = "TRTMODEL_"
_DEVICES, _WHOLE_GPU = "nvidia.com/", "nvidia.com/gpu"
_POD_SETTINGS = {
    "labels": Mapping,
    "annotations": Mapping,
    "resources": Mapping,
    "affinity": Mapping,
    "priorityClassName": str,
    "serviceAccountName": str,
    "imagePullSecrets": list,
    "env": list,
}

_COMMAND = re.compile(r"(?P<verb>[a-z-]{1,32})(@(?P<revision>[0-9a-f]{1,64}))?#\S{1,64}")


def parse(spec: object) -> Spec:
    """The Spec from the `spec` of a TRTModel. Raises SpecError."""
    root = Node(spec, "spec")
    source, storage = root.child("source"), root.child("storage")
    _one_device_each(root)
    tier, engine, calibration = _by_tier(
        root.child("build").choice("tier", TIERS, "Staging"),
        _engine(root.child("engine"), root.child("build").boolean("simplify", False)),
        _calibration(root.child("engine").optional("calibration")),
    )
    return Spec(
        source_uri=source.text("uri", required=True),
        source_pin=source.text("sha256"),
        storage=Storage(
            bucket=storage.text("bucket", required=True),
            prefix=storage.text("prefix", "trtmodel"),
            endpoint=storage.text("endpoint"),
            region=storage.text("region"),
            ca_bundle=storage.text("caBundle"),
        ),
        credentials_secret=storage.text("credentialsSecret"),
        engine=engine,
        calibration=calibration,
        targets=_targets(root),
        build=_build(root.child("build")),
        verify=_verify(root.child("verify")),
        serving=_serving(root.child("serving")),
        rollout=_rollout(root.child("rollout")),
        tier=tier,
        deletes_artifacts=root.choice("deletionPolicy", DELETION_POLICIES, "Retain") == "Delete",
    )


def parse_command(annotation: object) -> Command | None:
    """The Command in the annotation trtmodel.io/command, of the form ``<verb>[@<revision>]#<nonce>``; None if there is
    none. One that cannot be read has no verb, so that it is answered once and not looked at again."""
    text = annotation.strip()[:COMMAND_LENGTH] if isinstance(annotation, str) else ""
    if not text:
        return None
    match = _COMMAND.fullmatch(text)
    return Command(match["verb"], match["revision"] or "", text) if match else Command("", "", text)


def _by_tier(
    name: str, engine: EngineSettings, calibration: CalibrationSpec | None
) -> tuple[Tier, EngineSettings, CalibrationSpec | None]:
    """What the tier makes of the settings. Development builds quickly: TensorRT searches little, and nothing is
    calibrated. So its engines are of another revision. Staging and Production mean the same engine: what one built, the
    other uses."""
    if name != "Development":
        return Tier(name, builds=name != "Production"), engine, calibration
    changes = []
    if engine.precision == "INT8":
        engine, calibration = dataclasses.replace(engine, precision="FP16"), None
        changes.append("FP16 instead of INT8")
    if engine.runtime == "TensorRT" and engine.optimization_level != QUICK_LEVEL:
        engine = dataclasses.replace(engine, optimization_level=QUICK_LEVEL)
        changes.append(f"optimization level {QUICK_LEVEL}")
    return Tier(name, changes=", ".join(changes)), engine, calibration


def _engine(node: Node, simplify: bool) -> EngineSettings:
    keep = node.optional("keepPrecision")
    kept = None
    if keep is not None:
        nodes, operators = (tuple(n.as_text() for n in keep.items(name)) for name in ("nodes", "operators"))
        # Another order of operators is the same engine.
        kept = KeepPrecision(nodes, keep.choice("precision", PRECISIONS, "FP32"), tuple(sorted(set(operators))))
    workspace = node.value.get("workspace")
    return EngineSettings(
        runtime=node.choice("runtime", RUNTIMES),
        precision=node.choice("precision", PRECISIONS, "FP32"),
        keep_precision=kept,
        profiles=tuple(_profile(p) for p in node.items("profiles")),
        workspace_bytes=None if workspace is None else size(workspace, f"{node.path}.workspace"),
        optimization_level=node.integer("optimizationLevel", None, 0, 5),
        simplify=simplify,
    )


def _profile(node: Node) -> Profile:
    inputs = node.child("inputs")
    return Profile({name: _shapes(inputs.child(name)) for name in sorted(inputs.value)})


def _shapes(node: Node) -> ShapeRange:
    low, best, high = (tuple(i.as_integer() for i in node.items(name)) for name in ("min", "opt", "max"))
    try:
        return ShapeRange(low, best, high)
    except ValueError as e:
        raise SpecError(f"{node.path}: {e}") from e


def _calibration(node: Node | None) -> CalibrationSpec | None:
    if node is None:
        return None
    return CalibrationSpec(
        uri=node.text("uri", required=True),
        samples=node.whole("samples", 500, 1),
        method=node.choice("method", CALIBRATIONS, "Entropy"),
        per_channel=node.boolean("perChannel", True),
    )


def _targets(root: Node) -> tuple[Target, ...]:
    gpu_by_default = root.child("engine").text("runtime") == "TensorRT"
    targets = tuple(_target(t, 1 if gpu_by_default else 0) for t in root.items("targets"))
    names = [t.name for t in targets]
    if len(set(names)) != len(names):
        raise SpecError(f"spec.targets: two targets are named {max(names, key=names.count)}: give each its own name")
    return targets or (Target("default", gpus=1 if gpu_by_default else 0),)


def _target(node: Node, gpus: int) -> Target:
    return Target(
        name=node.text("name", required=True),
        gpu=node.text("gpu"),
        gpus=node.whole("gpus", gpus, 0),
        node_selector=node.texts("nodeSelector"),
        tolerations=tuple(t.value for t in node.items("tolerations")),
        runtime_class=node.text("runtimeClassName"),
    )


def _one_device_each(root: Node) -> None:
    """A process can use one MIG slice only, and an engine takes one GPU: more would be paid for and idle. A slice is
    asked for as any other resource, by the name that the node has for it. Raises SpecError."""
    gpus = max(target.gpus for target in _targets(root))
    for node in (root.child("build").child("resources"), root.child("serving").child("pod").child("resources")):
        asked = {**node.child("requests").value, **node.child("limits").value}
        named = {key: quantity(str(asked[key])) or 0 for key in asked if key.startswith(_DEVICES) and key != _WHOLE_GPU}
        if named and sum(named.values()) + gpus > 1:
            what = f"{' and '.join(sorted(named))}, and {gpus} of {_WHOLE_GPU} by spec.targets"
            raise SpecError(
                f"{node.path}.limits: {what}, where a worker and a build use one device each: ask for one slice, and "
                "set gpus to 0 in spec.targets"
            )


def _build(node: Node) -> BuildSpec:
    return BuildSpec(
        deadline=math.ceil(node.seconds("deadline", "1h")),
        retries=node.whole("retries", 2, 0),
        node_selector=node.texts("nodeSelector"),
        tolerations=tuple(t.value for t in node.items("tolerations")),
        resources=node.child("resources").value,
    )


def _verify(node: Node) -> VerifySpec:
    data, limits = node.child("dataset"), node.child("thresholds")
    return VerifySpec(
        task=Task(node.choice("task", tuple(t.value for t in Task))),
        dataset_uri=data.text("uri", required=True),
        samples=data.whole("samples", 2000, 1),
        thresholds=Thresholds(
            top1_delta=limits.number("top1Delta", 0.005),
            rmse_increase=limits.number("rmseIncrease", 0.01),
            cosine=limits.number("cosine", 0.99),
        ),
    )


def _serving(node: Node) -> ServingSpec:
    service = node.child("service")
    http, grpc = service.port("http", 8080), service.port("grpc", 9000)
    if http == grpc:
        raise SpecError(f"{service.path}: http and grpc are the same port, {http}: give each its own")
    return ServingSpec(
        replicas=node.whole("replicas", 1, 0),
        image=node.text("image"),
        hosts=node.whole("hosts", 1, 1, 8),
        contexts=0 if node.value.get("contexts") == AUTO else node.whole("contexts", 1, 1, 64),
        health_interval=node.seconds("healthInterval", "30s", 0.1),
        retry=_retry(node.child("retry")),
        batching=_batching(node.child("batching")),
        request_timeout=node.seconds("requestTimeout", "5s", 0.001),
        fallback=node.choice("fallback", FALLBACKS, "Standby") == "Standby",
        service_name=service.text("name"),
        http_port=http,
        grpc_port=grpc,
        pod=_pod(node.child("pod")),
    )


def _retry(node: Node) -> RetrySpec:
    return RetrySpec(
        attempts=node.whole("attempts", 3, 1, 10),
        budget_percent=node.whole("budgetPercent", 10, 0, 100),
        hedge_after=0.0 if node.value.get("hedgeAfter") in (None, AUTO) else node.seconds("hedgeAfter", "", 0.001),
    )


def _batching(node: Node) -> BatchingSpec:
    buckets = tuple(size.as_integer() for size in node.items("buckets"))
    if list(buckets) != sorted(set(buckets)) or any(not 1 <= size <= LARGEST_BATCH for size in buckets):
        text = f"{node.path}.buckets: {shown(list(buckets))} must be batch sizes from 1 to {LARGEST_BATCH}"
        raise SpecError(f"{text} in ascending order, each once, such as [1, 4, 16]")
    return BatchingSpec(buckets, node.seconds("maxDelay", "0s"), node.whole("maxQueue", 512, 1, 1_000_000))


def _pod(node: Node) -> Mapping[str, object]:
    """Checked for kind and for collisions with what is the operator's; otherwise as written."""
    settings: dict[str, object] = {}
    for name, kind in _POD_SETTINGS.items():
        value = node.value.get(name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise SpecError(f"{node.path}.{name}: expected {KINDS[kind]}, found {shown(value)}")
        settings[name] = value
    for name in ("labels", "annotations"):
        for key in node.texts(name):
            if key.startswith(RESERVED_KEYS):
                raise SpecError(f"{node.path}.{name}: the key {key} belongs to the operator: choose another prefix")
    for variable in node.items("env"):
        key = variable.text("name", required=True)
        variable.text("value")
        if key.startswith(RESERVED_ENV_PREFIX) or key in RESERVED_ENV:
            raise SpecError(f"{variable.path}: the variable {key} belongs to the operator: choose another name")
    for secret in node.items("imagePullSecrets"):
        secret.text("name", required=True)
    for name in ("requests", "limits"):
        for key, amount in node.child("resources").child(name).value.items():
            if isinstance(amount, bool) or not isinstance(amount, (str, int)):
                raise SpecError(f"{node.path}.resources.{name}.{key}: {shown(amount)} is not a quantity")
    return settings


def _rollout(node: Node) -> RolloutSpec:
    analysis = node.child("analysis")
    steps = node.items("steps") or [Node(s, f"{node.path}.steps") for s in DEFAULT_STEPS]
    policy = node.choice("memoryPolicy", MEMORY_POLICIES, "Auto")
    return RolloutSpec(
        steps=_steps(node.path, [_step(s) for s in steps], policy),
        analysis=_analysis(analysis),
        progress_deadline=node.seconds("progressDeadline", "30m"),
        history_limit=node.whole("historyLimit", 5, 1),
        paused=node.boolean("paused", False),
        memory_policy=policy,
        allow_downtime=node.boolean("allowDowntime", False),
        hold_on_target_failure=node.choice("onTargetFailure", ON_TARGET_FAILURE, "RollbackAll") == "Hold",
        manual=node.choice("promotion", PROMOTIONS, "Automatic") == "Manual",
    )


def _steps(path: str, steps: list[Step], policy: str) -> tuple[Step, ...]:
    """Raises SpecError for steps that cannot be taken one after the other."""
    if steps[-1].weight == 0:
        raise SpecError(
            f"{path}.steps: in the last step clients get no answer of the candidate (weight 0), so that nothing would "
            "be known of it when it is promoted: add a step with a weight"
        )
    if policy == "Resource" and any(step.weight < 100 for step in steps):
        raise SpecError(
            f"{path}.steps: a share of the requests or a shadow takes two engines in memory, and memoryPolicy Resource "
            "keeps one: use weight 100 in every step, or another memoryPolicy"
        )
    return tuple(steps)


def _analysis(node: Node) -> AnalysisSpec:
    agreement = node.bound("minAgreement")
    if agreement is not None and not 0 <= agreement <= 1:
        raise SpecError(f"{node.path}.minAgreement: {shown(agreement)} is not a share from 0 to 1")
    queries = tuple(_query(q) for q in node.items("prometheus"))
    webhooks = tuple(_webhook(w) for w in node.items("webhooks"))
    for what, names in (("prometheus", [q.name for q in queries]), ("webhooks", [w.name for w in webhooks])):
        if len(names) > LOOKUPS_MOST:
            raise SpecError(f"{node.path}.{what}: {len(names)} are too many: give {LOOKUPS_MOST} at most")
        if len(set(names)) != len(names):
            raise SpecError(f"{node.path}.{what}: two are named {max(names, key=names.count)}: give each its own name")
    return AnalysisSpec(
        interval=max(1.0, node.seconds("interval", "10s")),
        min_requests=node.whole("minRequests", 3000, 1),
        max_error_rate_increase=node.number("maxErrorRateIncrease", 0.001),
        max_latency_ratio=node.number("maxLatencyRatio", 1.2),
        no_data=NoData(node.choice("noData", NO_DATA, NoData.HOLD.value)),
        min_agreement=agreement,
        prometheus=queries,
        webhooks=webhooks,
    )


def _query(node: Node) -> QuerySpec:
    low, high = node.bound("min"), node.bound("max")
    if low is None and high is None:
        raise SpecError(f"{node.path}: neither min nor max is given: give at least one, or remove the query")
    if low is not None and high is not None and low > high:
        raise SpecError(f"{node.path}: min {low:g} is above max {high:g}: no number can lie between them")
    return QuerySpec(
        name=node.text("name", required=True),
        query=node.text("query", required=True),
        address=node.text("address"),
        low=low,
        high=high,
    )


def _webhook(node: Node) -> WebhookSpec:
    timeout = node.seconds("timeout", "10s", 0.1)
    if timeout > WEBHOOK_SECONDS:
        raise SpecError(f"{node.path}.timeout: {shown(node.value.get('timeout'))} is too long: give at most 1m")
    stage = WebhookStage(node.choice("stage", WEBHOOK_STAGES))
    return WebhookSpec(node.text("name", required=True), stage, node.text("url", required=True), timeout)


def _step(node: Node) -> Step:
    workers = node.value.get("workers")
    whole = isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1
    share = isinstance(workers, str) and re.fullmatch(r"([1-9][0-9]?|100)%", workers)
    if not whole and not share:
        raise SpecError(
            f'{node.path}.workers: {shown(workers)} is neither a number from 1 on nor a share such as "50%"'
        )
    weight, shadow = node.whole("weight", 100, 0, 100), node.whole("shadow", 0, 0, 100)
    if weight == 100 and shadow:
        raise SpecError(
            f"{node.path}.shadow: with weight 100 the candidate answers every request, and none is left to mirror: set "
            "weight to 0 to mirror only, or remove shadow"
        )
    if not weight and not shadow:
        raise SpecError(f"{node.path}: with neither weight nor shadow the candidate does nothing: give one of them")
    return Step(workers, node.seconds("hold", "2m"), weight, shadow, node.boolean("pause", False))  # type: ignore[arg-type]  # an int or a str by the checks above
