"""The fingerprint of a worker Deployment is of what people chose: nothing that they chose and that is rendered is
missing in it, and nothing that another version of the operator renders otherwise changes it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from decide_scene import MODEL, A, Scene, canary, decide, edited, obey, of, serving
from trtmodel_contract.identity import ModelRef
from trtmodel_operator import manifests
from trtmodel_operator.fields import SpecError
from trtmodel_operator.manifests import names, pods, workers
from trtmodel_operator.model import Action, ApplyPointer, ApplyService, ApplyWorkload, Decision, Platform, Spec, Target
from trtmodel_operator.spec import parse

Json = dict[str, Any]
Path_ = tuple[str | int, ...]
EVERY_FIELD = Path(__file__).parents[3] / "examples" / "every-field.yaml"
MODELS = (MODEL, replace(MODEL, namespace="x"), replace(MODEL, name="x"), replace(MODEL, uid="x"))
# Of damaged or older memories: settings that are the spec's, that cannot be read, or that are pinned and others.
PINNED = ("", "{}", "no JSON", "[]", '{"labels":{"a":"b"}}', '{"env":[{"name":"A","value":"1"}]}')
# By which an upgrade has replaced pods, and may again.
ANOTHER_VERSION = {
    "RESOURCES": {"requests": {"cpu": "300m", "memory": "1Gi"}, "limits": {"cpu": "4", "memory": "4Gi"}},
    "POINTER_DIR": "/etc/trtmodel/elsewhere",
    "METRICS_PORT": 9999,
}


def written() -> Json:
    spec: Json = yaml.safe_load(EVERY_FIELD.read_text())["spec"]
    # which the example leaves out: its engine runs on CPUs
    spec["targets"][0] |= {"gpu": "NVIDIA-A10", "gpus": 1, "runtimeClassName": "nvidia"}
    return spec


def leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Every field that is no object, and every item that is none, each with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from leaves(inner, (*path, name))
    if not isinstance(value, (dict, list)):
        yield path, value


def others(value: Any) -> Iterator[Any]:
    """What might stand there instead; what the field refuses is skipped by `mutants`."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, (int, float)):
        yield from (value + 1, value / 2, 0, 1)
    else:
        yield from ("other", "3", "7s", "75%", "Auto", 2, "")
        yield from ("FP16", "FP32", "TensorRT", "Error", "Resource", "Availability", "Manual", "Hold", "Delete")


def changed(spec: Json, path: Path_, value: Any) -> Json:
    found = copy.deepcopy(spec)
    inner: Any = found
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return found


def readable(spec: Json) -> Spec | None:
    try:
        return parse(spec)
    except SpecError:
        return None


def mutants() -> Iterator[tuple[Path_, Json]]:
    """The example with each field changed in turn, and with some together."""
    example = written()
    single = [
        (path, value)
        for path, held in leaves(example)
        for value in others(held)
        if value != held and readable(changed(example, path, value))
    ]
    for path, value in single:
        yield path, changed(example, path, value)
    chance = random.Random(7)
    for _ in range(200):
        spec = example
        for path, value in chance.sample(single, chance.randint(2, 6)):
            spec = changed(spec, path, value)
        if readable(spec):
            yield (), spec


def rendered(model: ModelRef, spec: Spec, target: Target, platform: Platform) -> tuple[str, str]:
    """The Deployment but for its fingerprint and replicas, and its fingerprint."""
    apply = ApplyWorkload(manifests.workload_name(model, target.name, platform.hash), target, platform, 3)
    manifest = manifests.worker_deployment(model, spec, apply)
    mark = manifest["metadata"]["annotations"].pop(manifests.ANNOTATION_FINGERPRINT)
    assert mark == manifests.workload_fingerprint(model, spec, apply)
    del manifest["spec"]["replicas"]
    return json.dumps(manifest, sort_keys=True), mark


def of_spec(raw: Json) -> tuple[str, str]:
    spec = parse(raw)
    platform = manifests.platform(spec.serving.image or "worker:1", spec.serving.pod)
    return rendered(MODEL, spec, spec.targets[0], platform)


def test_deployments_that_differ_have_fingerprints_that_differ() -> None:
    made: dict[str, set[str]] = {}
    fields: set[str] = set()
    base, _ = of_spec(written())
    for path, raw in mutants():
        text, mark = of_spec(raw)
        made.setdefault(mark, set()).add(text)
        if text != base and path:
            fields.add(".".join(str(name) for name in path if isinstance(name, str)))
    assert [texts for texts in made.values() if len(texts) > 1] == []
    assert len(made) > 150
    # Otherwise the mutants would show nothing.
    assert {
        "storage.credentialsSecret",
        "engine.runtime",
        "targets.name",
        "targets.gpu",
        "targets.gpus",
        "targets.nodeSelector.kubernetes.io/arch",
        "targets.tolerations.key",
        "targets.runtimeClassName",
        "serving.image",
        "serving.hosts",
        "serving.contexts",
        "serving.healthInterval",
        "serving.requestTimeout",
        "serving.fallback",
        "serving.retry.hedgeAfter",
        "serving.batching.buckets",
        "serving.pod.serviceAccountName",
        "serving.pod.imagePullSecrets.name",
        "rollout.memoryPolicy",
        "rollout.allowDowntime",
    } <= fields


def test_what_no_worker_is_made_of_changes_no_fingerprint() -> None:
    made: dict[str, set[str]] = {}
    for path, raw in mutants():
        if path:
            text, mark = of_spec(raw)
            made.setdefault(text, set()).add(mark)
    assert [marks for marks in made.values() if len(marks) > 1] == []


@pytest.mark.parametrize("pod", [{}, {"labels": {"c": "d"}}], ids=["the spec has no settings", "the spec has others"])
def test_the_fingerprint_knows_whose_the_pods_are_and_which_settings_are_pinned(pod: Json) -> None:
    raw = written()
    raw["serving"]["pod"] = pod
    spec = parse(raw)
    platforms = [Platform(image, hash_, text) for image in ("a", "b") for hash_ in ("p1", "p2") for text in PINNED]
    made = [rendered(model, spec, spec.targets[0], platform) for model in MODELS for platform in platforms]
    assert len({mark for _, mark in made}) == len({text for text, _ in made}) == len(set(made)) > len(platforms)


# ---------------------------------------------------------------------------------------------------------------
# another version of the operator
# ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[*ANOTHER_VERSION, "probes", "all pods", "service"])
def upgrade(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on the operator makes pods, or the Service, otherwise than before."""

    def probes(*given: Any, make: Any = workers._worker_pod) -> Json:
        pod: Json = make(*given)
        pod["containers"][0]["readinessProbe"]["periodSeconds"] += 1
        return pod

    def base(*given: Any, make: Any = pods.pod_base) -> Json:
        return {**make(*given), "hostUsers": False}

    def metadata(model: ModelRef, name: str, labels: Json, make: Any = names.metadata) -> Json:
        return dict(make(model, name, {**labels, "version": "2"}))

    def happens() -> None:
        if request.param in ANOTHER_VERSION:
            monkeypatch.setattr(workers, request.param, ANOTHER_VERSION[request.param])
        elif request.param == "probes":
            monkeypatch.setattr(workers, "_worker_pod", probes)
        elif request.param == "all pods":
            monkeypatch.setattr(pods, "pod_base", base)
        else:
            monkeypatch.setattr(workers, "metadata", metadata)

    return happens


def text_of(seen: Scene) -> str:
    assert seen.spec is not None
    assert seen.memory.platform is not None
    return rendered(MODEL, seen.spec, seen.spec.targets[0], seen.memory.platform)[0]


def of_pods(decision: Decision) -> list[Action]:
    """All but the Service, which may be written anew: no pod goes for it."""
    return [action for action in decision.actions if not isinstance(action, ApplyService)]


def test_an_upgrade_of_the_operator_proposes_nothing(upgrade: Callable[[], None]) -> None:
    seen = serving(A)
    before = text_of(seen)
    upgrade()
    assert text_of(seen) != before
    decision = decide(seen)
    assert (decision.rule, of_pods(decision)) == ("settle", [])
    assert decision.memory == seen.memory
    assert decide(obey(seen, decision)).actions == ()


def test_an_upgrade_in_the_middle_of_a_rollout_writes_no_deployment(upgrade: Callable[[], None]) -> None:
    seen = canary(serving(A))
    upgrade()
    assert not of(decide(seen), ApplyWorkload)
    assert not of(decide(seen), ApplyPointer)


def test_scaling_after_an_upgrade_writes_the_replicas_and_nothing_else(upgrade: Callable[[], None]) -> None:
    seen = edited(serving(A), serving__replicas=6)
    upgrade()
    (scaled,) = of(decide(seen), ApplyWorkload)
    assert (scaled.replicas, scaled.only_replicas) == (6, True)
    after = obey(seen, decide(seen))
    assert [w.fingerprint for w in after.workloads] == [w.fingerprint for w in seen.workloads]
    assert not of(decide(after), ApplyWorkload)


def test_after_an_upgrade_a_choice_of_people_brings_all_of_it(upgrade: Callable[[], None]) -> None:
    seen = edited(serving(A), serving__requestTimeout="7s", serving__replicas=6)
    upgrade()
    (applied,) = of(decide(seen), ApplyWorkload)
    assert (applied.replicas, applied.only_replicas) == (6, False)


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({}, "b32b80ca59c25d2d"),
        ({"serving__hosts": 2, "storage__credentialsSecret": "s3"}, "00c873d4de3afbd4"),
        (
            {"serving__pod": {"labels": {"team": "ml"}}, "targets": [{"name": "a10", "gpu": "A10", "gpus": 1}]},
            "fa296992716ddbbc",
        ),
    ],
    ids=["nothing chosen", "settings", "pods and nodes"],
)
def test_the_fingerprint_of_the_same_choices_is_the_same_for_every_version(changes: Json, mark: str) -> None:
    """Who changes what is hashed, or how, replaces every worker of everybody with the next upgrade."""
    (workload,) = serving(A, **changes).workloads
    assert workload.fingerprint == mark
