"""Manifests against the definition: by this machine alone, or by the API server as well, which has the last word."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trtmodel_operator.analysis import least_proved, least_requests
from trtmodel_operator.cli import output, rules, schema
from trtmodel_operator.cli.words import Failed, plain
from trtmodel_operator.fields import SpecError
from trtmodel_operator.spec import parse

if TYPE_CHECKING:  # the client takes its time to load
    from trtmodel_operator.cli.connection import Connection

EXIT_FOUND = 1
EXIT_NOTHING = 2
API_VERSION, KIND = "trtmodel.io/v1alpha1", "TRTModel"
LARGEST_BYTES = 4 << 20  # of a file; etcd takes less


def lint(at: Connection | None, options: argparse.Namespace) -> int:
    """The exit code: 1 if something was found, also a file without a TRTModel; 2 if there is none at all. What is
    accepted and will hardly do what was meant is told, and is no finding. Raises Failed."""
    told: list[dict[str, str]] = []
    warned: list[dict[str, str]] = []
    count = 0
    for file in options.files:
        manifests = list(_manifests(file))
        count += len(manifests)
        if not manifests:
            told.append({"file": file, "name": "", "path": "", "message": f"there is no {KIND} in it"})
            print(plain(f"{file}: there is no {KIND} in it"), file=sys.stderr)
        for manifest in manifests:
            name = str((manifest.get("metadata") or {}).get("name", ""))
            found = list(findings(manifest))
            if at is not None and not found:
                found = list(_by_server(at, manifest))
            doubts = [] if found else list(warnings(manifest))
            told += [{"file": file, "name": name, "path": f.path, "message": f.message} for f in found]
            warned += [{"file": file, "name": name, "path": w.path, "message": w.message} for w in doubts]
            if options.output != "json":
                for finding in found:
                    where = f"{finding.path}: " if finding.path else ""
                    print(plain(f"{file}: {name}: {where}{finding.message}"))
                for doubt in doubts:
                    print(plain(f"{file}: {name}: warning: {doubt.path}: {doubt.message}"))
                if not found:
                    print(plain(f"{file}: {name}: ok"))
    if options.output == "json":
        print(output.as_json({"manifests": count, "findings": told, "warnings": warned}))
    if not count:
        return EXIT_NOTHING
    return EXIT_FOUND if told else 0


def findings(manifest: dict[str, Any]) -> Iterator[schema.Finding]:
    """What the API server would refuse, as far as it can be known without one; and what the operator would."""
    if manifest.get("apiVersion") != API_VERSION:
        yield schema.Finding("apiVersion", f"{manifest.get('apiVersion')!r} is not {API_VERSION}")
        return
    wanted = schema.definition()
    whole = schema.completed(wanted, manifest)
    found = [*schema.unknown(wanted, manifest), *schema.bounds(wanted, whole), *schema.lists(wanted, whole)]
    # The API server does not ask the rules of what has another shape than they are written for.
    found = found or list(schema.rules(wanted, whole, rules.evaluate))
    yield from found
    if not found:
        try:
            parse(whole.get("spec"))
        except SpecError as e:
            yield schema.Finding("", str(e))


def warnings(manifest: dict[str, Any]) -> Iterator[schema.Finding]:
    """What will hardly do what was meant, of a manifest that `findings` accepts."""
    asked = parse(schema.completed(schema.definition(), manifest).get("spec")).rollout.analysis
    limit, needed = asked.max_error_rate_increase, least_requests(asked.max_error_rate_increase)
    if asked.min_requests < needed:
        proved = least_proved(asked.min_requests)
        digits = 1 - math.floor(math.log10(proved))
        enough = math.ceil(proved * 10**digits) / 10**digits  # two digits, upwards
        yield schema.Finding(
            "spec.rollout.analysis.minRequests",
            f"{asked.min_requests:,} requests cannot prove that errors rise by less than {limit:g} "
            f"(maxErrorRateIncrease): even without a failure that takes {needed:,}. With fewer the verdict is "
            "Inconclusive, and the step waits for more. "
            f"Give minRequests {needed} or more, or maxErrorRateIncrease {enough:g} or more",
        )


def _by_server(at: Connection, manifest: dict[str, Any]) -> Iterator[schema.Finding]:
    from trtmodel_operator.cli.connection import Refused

    try:
        at.dry_run(manifest)
    except Refused as e:
        if e.status not in (400, 409, 422, 500):
            raise
        yield schema.Finding("", f"the API server says: {e}")


class _Loader(yaml.SafeLoader):
    """As kubectl reads YAML: no dates, and a key that stands there twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = sorted({str(k) for k in keys if keys.count(k) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} stands there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _manifests(file: str) -> Iterator[dict[str, Any]]:
    """The TRTModels in a file, Lists opened; other kinds are not ours to judge."""
    try:
        documents = list(yaml.load_all(_read(file), Loader=_Loader))
    except OSError as e:
        raise Failed(f"{file}: {e.strerror or e}") from e
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as e:
        raise Failed(f"{file}: it is no YAML: {plain(e)}") from e
    for document in documents:
        if not isinstance(document, dict):
            continue
        items = document.get("items") if str(document.get("kind", "")).endswith("List") else [document]
        for item in items if isinstance(items, list) else []:
            if isinstance(item, dict) and item.get("kind") == KIND:
                yield item


def _read(file: str) -> bytes:
    with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as opened:
        data = opened.read(LARGEST_BYTES + 1)
    if len(data) > LARGEST_BYTES:
        raise Failed(f"{file}: it is larger than {LARGEST_BYTES >> 20} MiB: is it a manifest?")
    return data
