"""A manifest that is accepted, and changes of it by path."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEFINITION = ROOT / "crds" / "trtmodel.yaml"
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
ABSENT: Any = object()

Json = dict[str, Any]

BASE: Json = {
    "apiVersion": "trtmodel.io/v1alpha1",
    "kind": "TRTModel",
    "metadata": {"name": "magika"},
    "spec": {
        "source": {"uri": "s3://models/magika/model.onnx"},
        "storage": {"bucket": "engines"},
        "engine": {"runtime": "ONNXRuntime"},
        "verify": {"task": "Classification", "dataset": {"uri": "s3://data/eval.npz"}},
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A change of the accepted manifest. `says`: what the answer must contain; empty = it is accepted."""

    name: str
    changes: Mapping[str, Any]
    says: tuple[str, ...] = ()


def accepted(name: str, **changes: Any) -> Case:
    return Case(name, {path.replace("__", "."): value for path, value in changes.items()})


def manifest(changes: Mapping[str, Any], base: Json = BASE) -> Json:
    """`base` with `changes`: dotted paths below spec (or below the root, with a leading dot), ABSENT removes."""
    made = copy.deepcopy(base)
    for path, value in changes.items():
        *parents, last = (path[1:] if path.startswith(".") else f"spec.{path}").split(".")
        at = made
        for parent in parents:
            at = at.setdefault(parent, {})
        if value is ABSENT:
            at.pop(last, None)
        else:
            at[last] = copy.deepcopy(value)
    return made


def definition() -> Json:
    loaded: Json = yaml.safe_load(DEFINITION.read_text())
    return loaded


def schema() -> Json:
    found: Json = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found
