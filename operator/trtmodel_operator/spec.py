"""From .spec as the API server returns it to the values that the operator thinks in.

Total: the CRD validates and fills in defaults, but an object may have been stored under an older CRD or by another
hand, so every field is read with the same default here, and what cannot be read raises SpecError and nothing else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

from trtmodel_contract.gate import Task, Thresholds
from trtmodel_contract.identity import EngineSettings, KeepPrecision, Profile, ShapeRange, Storage

from trtmodel_operator.model import (
    AnalysisSpec,
    BuildSpec,
    CalibrationSpec,
    Command,
    RolloutSpec,
    ServingSpec,
    Spec,
    Step,
    Target,
    VerifySpec,
)

RUNTIMES = ("TensorRT", "ONNXRuntime")
PRECISIONS = ("FP32", "FP16", "BF16", "INT8", "FP8")
CALIBRATIONS = ("Entropy", "MinMax")
DEFAULT_STEPS = ({"workers": 1, "hold": "2m"}, {"workers": "50%", "hold": "2m"})
COMMAND_LENGTH = 200  # bounds what is remembered of a command, also of one that is not understood

# Prefixes and names that user settings of pods may not replace (the CRD says the same).
RESERVED_KEYS = ("trtmodel.io/", "app.kubernetes.io/")
RESERVED_ENV = ("POD_NAME", "POD_UID", "POD_NAMESPACE", "NODE_NAME")
RESERVED_ENV_PREFIX = "TRTMODEL_"
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

_DURATION = re.compile(r"([0-9]{1,6}(ms|h|m|s))+")
_DURATION_PART = re.compile(r"([0-9]{1,6})(ms|h|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i|[kMGTPE])?")
_SUFFIXES = {"": 1, "k": 10**3, **{s: 1000 ** (i + 2) for i, s in enumerate("MGTPE")}}
_SUFFIXES |= {f"{s}i": 1024 ** (i + 1) for i, s in enumerate("KMGTPE")}
_COMMAND = re.compile(r"(?P<verb>[a-z-]{1,32})(@(?P<revision>[0-9a-f]{1,64}))?#\S{1,64}")


class SpecError(ValueError):
    """The spec cannot be used. The text names the field, what is there, and what would be right."""


def parse(spec: object) -> Spec:
    """The Spec from the `spec` of a TRTModel. Raises SpecError."""
    root = _Node(spec, "spec")
    source, storage = root.child("source"), root.child("storage")
    return Spec(
        source_uri=source.text("uri", required=True),
        source_pin=source.text("sha256"),
        storage=Storage(
            bucket=storage.text("bucket", required=True),
            prefix=storage.text("prefix", "trtmodel"),
            endpoint=storage.text("endpoint"),
            region=storage.text("region"),
        ),
        credentials_secret=storage.text("credentialsSecret"),
        engine=_engine(root.child("engine")),
        calibration=_calibration(root.child("engine").optional("calibration")),
        targets=_targets(root),
        build=_build(root.child("build")),
        verify=_verify(root.child("verify")),
        serving=_serving(root.child("serving")),
        rollout=_rollout(root.child("rollout")),
    )


def parse_command(annotation: object) -> Command | None:
    """The Command in the annotation trtmodel.io/command, of the form ``<verb>[@<revision>]#<nonce>``; None if there is
    none. One that cannot be read has no verb, so that it is answered once and not looked at again."""
    text = annotation.strip()[:COMMAND_LENGTH] if isinstance(annotation, str) else ""
    if not text:
        return None
    match = _COMMAND.fullmatch(text)
    return Command(match["verb"], match["revision"] or "", text) if match else Command("", "", text)


def duration(text: object, where: str) -> float:
    """Seconds of a duration such as 1h30m, 90s or 500ms. Raises SpecError."""
    if not isinstance(text, str) or not _DURATION.fullmatch(text):
        raise SpecError(f"{where}: {_shown(text)} is not a duration: give one such as 500ms, 90s or 1h30m")
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def quantity(text: object, where: str) -> int:
    """Bytes of a size such as 512Mi or 1G. Raises SpecError."""
    match = _QUANTITY.fullmatch(str(text)) if isinstance(text, (str, int)) and not isinstance(text, bool) else None
    if match is None:
        raise SpecError(f"{where}: {_shown(text)} is not a size: give one such as 512Mi or 1Gi")
    number, suffix = match[1], match[2] or ""
    return int(float(number) * _SUFFIXES[suffix]) if "." in number else int(number) * _SUFFIXES[suffix]


def _engine(node: _Node) -> EngineSettings:
    keep = node.optional("keepPrecision")
    kept = None
    if keep is not None:
        nodes = tuple(n.as_text() for n in keep.items("nodes"))
        kept = KeepPrecision(nodes, keep.choice("precision", PRECISIONS, "FP32"))
    workspace = node.value.get("workspace")
    return EngineSettings(
        runtime=node.choice("runtime", RUNTIMES),
        precision=node.choice("precision", PRECISIONS, "FP32"),
        keep_precision=kept,
        profiles=tuple(_profile(p) for p in node.items("profiles")),
        workspace_bytes=None if workspace is None else quantity(workspace, f"{node.path}.workspace"),
        optimization_level=node.integer("optimizationLevel", None, 0, 5),
    )


def _profile(node: _Node) -> Profile:
    inputs = node.child("inputs")
    return Profile({name: _shapes(inputs.child(name)) for name in sorted(inputs.value)})


def _shapes(node: _Node) -> ShapeRange:
    low, best, high = (tuple(i.as_integer() for i in node.items(name)) for name in ("min", "opt", "max"))
    try:
        return ShapeRange(low, best, high)
    except ValueError as e:
        raise SpecError(f"{node.path}: {e}") from e


def _calibration(node: _Node | None) -> CalibrationSpec | None:
    if node is None:
        return None
    return CalibrationSpec(
        uri=node.text("uri", required=True),
        samples=node.whole("samples", 500, 1),
        method=node.choice("method", CALIBRATIONS, "Entropy"),
        per_channel=node.boolean("perChannel", True),
    )


def _targets(root: _Node) -> tuple[Target, ...]:
    gpu_by_default = root.child("engine").text("runtime") == "TensorRT"
    targets = tuple(_target(t, 1 if gpu_by_default else 0) for t in root.items("targets"))
    names = [t.name for t in targets]
    if len(set(names)) != len(names):
        raise SpecError(f"spec.targets: two targets are named {max(names, key=names.count)}: give each its own name")
    return targets or (Target("default", gpus=1 if gpu_by_default else 0),)


def _target(node: _Node, gpus: int) -> Target:
    return Target(
        name=node.text("name", required=True),
        gpu=node.text("gpu"),
        gpus=node.whole("gpus", gpus, 0),
        node_selector=node.texts("nodeSelector"),
        tolerations=tuple(t.value for t in node.items("tolerations")),
    )


def _build(node: _Node) -> BuildSpec:
    return BuildSpec(
        deadline=math.ceil(node.seconds("deadline", "1h")),
        retries=node.whole("retries", 2, 0),
        node_selector=node.texts("nodeSelector"),
        tolerations=tuple(t.value for t in node.items("tolerations")),
        resources=node.child("resources").value,
    )


def _verify(node: _Node) -> VerifySpec:
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


def _serving(node: _Node) -> ServingSpec:
    service = node.child("service")
    return ServingSpec(
        replicas=node.whole("replicas", 1, 0),
        image=node.text("image"),
        contexts=node.whole("contexts", 1, 1),
        request_timeout=node.seconds("requestTimeout", "5s"),
        service_name=service.text("name"),
        http_port=service.whole("http", 8080, 1),
        pod=_pod(node.child("pod")),
    )


def _pod(node: _Node) -> Mapping[str, object]:
    """Checked for kind and for collisions with what is the operator's; otherwise as written."""
    settings: dict[str, object] = {}
    for name, kind in _POD_SETTINGS.items():
        value = node.value.get(name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise SpecError(f"{node.path}.{name}: expected {_KINDS[kind]}, found {_shown(value)}")
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
                raise SpecError(f"{node.path}.resources.{name}.{key}: {_shown(amount)} is not a quantity")
    return settings


def _rollout(node: _Node) -> RolloutSpec:
    analysis = node.child("analysis")
    steps = node.items("steps") or [_Node(s, f"{node.path}.steps") for s in DEFAULT_STEPS]
    return RolloutSpec(
        steps=tuple(_step(s) for s in steps),
        analysis=AnalysisSpec(
            interval=max(1.0, analysis.seconds("interval", "10s")),
            min_requests=analysis.whole("minRequests", 3000, 1),
            max_error_rate_increase=analysis.number("maxErrorRateIncrease", 0.001),
            max_latency_ratio=analysis.number("maxLatencyRatio", 1.2),
        ),
        progress_deadline=node.seconds("progressDeadline", "30m"),
        history_limit=node.whole("historyLimit", 5, 1),
        paused=node.boolean("paused", False),
    )


def _step(node: _Node) -> Step:
    workers = node.value.get("workers")
    whole = isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1
    share = isinstance(workers, str) and re.fullmatch(r"([1-9][0-9]?|100)%", workers)
    if not whole and not share:
        raise SpecError(
            f'{node.path}.workers: {_shown(workers)} is neither a number from 1 on nor a share such as "50%"'
        )
    return Step(workers, node.seconds("hold", "2m"))  # type: ignore[arg-type]  # an int or a str by the checks above


class _Node:
    """A value at a path. It is an object only if it is read as one; a field that is absent or null has its default."""

    def __init__(self, raw: object, path: str) -> None:
        self.raw = raw
        self.path = path

    @property
    def value(self) -> Mapping[str, object]:
        if not isinstance(self.raw, Mapping):
            raise SpecError(f"{self.path}: expected an object, found {_shown(self.raw)}")
        return self.raw

    def child(self, name: str) -> _Node:
        value = self.value.get(name)
        return _Node({} if value is None else value, f"{self.path}.{name}")

    def optional(self, name: str) -> _Node | None:
        return None if self.value.get(name) is None else self.child(name)

    def items(self, name: str) -> list[_Node]:
        value = self.value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise SpecError(f"{self.path}.{name}: expected a list, found {_shown(value)}")
        return [_Node(item, f"{self.path}.{name}[{i}]") for i, item in enumerate(value)]

    def text(self, name: str, default: str = "", *, required: bool = False) -> str:
        value = self.value.get(name)
        if value is None or value == "":
            if required:
                raise SpecError(f"{self.path}.{name} is missing: it has no default")
            return default
        return _Node(value, f"{self.path}.{name}").as_text()

    def choice(self, name: str, allowed: tuple[str, ...], default: str = "") -> str:
        value = self.text(name, default, required=not default)
        if value not in allowed:
            raise SpecError(f"{self.path}.{name}: {_shown(value)} is not one of {', '.join(allowed)}")
        return value

    def texts(self, name: str) -> Mapping[str, str]:
        child = self.child(name)
        return {key: _Node(value, f"{child.path}.{key}").as_text() for key, value in child.value.items()}

    def boolean(self, name: str, default: bool) -> bool:
        value = self.value.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SpecError(f"{self.path}.{name}: expected true or false, found {_shown(value)}")
        return value

    def integer(self, name: str, default: int | None, low: int, high: int | None = None) -> int | None:
        value = self.value.get(name)
        if value is None:
            return default
        number = _Node(value, f"{self.path}.{name}").as_integer()
        if number < low or (high is not None and number > high):
            bounds = f"from {low} on" if high is None else f"from {low} to {high}"
            raise SpecError(f"{self.path}.{name}: {_shown(number)} is out of range: give a whole number {bounds}")
        return number

    def whole(self, name: str, default: int, low: int) -> int:
        value = self.integer(name, default, low)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        value = self.value.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e15:
            raise SpecError(f"{self.path}.{name}: {_shown(value)} is not a number from 0 on")
        return float(value)

    def seconds(self, name: str, default: str) -> float:
        value = self.value.get(name)
        return duration(default if value is None else value, f"{self.path}.{name}")

    def as_text(self) -> str:
        if not isinstance(self.raw, str):
            raise SpecError(f"{self.path}: expected text, found {_shown(self.raw)}")
        return self.raw

    def as_integer(self) -> int:
        if isinstance(self.raw, bool) or not isinstance(self.raw, int):
            raise SpecError(f"{self.path}: expected a whole number, found {_shown(self.raw)}")
        return self.raw


_KINDS: Mapping[type, str] = {Mapping: "an object", str: "text", list: "a list"}


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
