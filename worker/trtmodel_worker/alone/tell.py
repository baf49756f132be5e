"""What `trtmodel check` found, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from trtmodel_contract.codec import encode

from trtmodel_worker.alone.engine import Checked
from trtmodel_worker.alone.say import name, plain
from trtmodel_worker.engines.building import Finding, Rejected


def as_text(model: str, checked: Checked, digest: str | None) -> str:
    """A model that can be built. `digest` is that of its engine, if there is one."""
    report = checked.report
    lines = [f"{model}: {checked.source.size:,} bytes, sha256 {checked.sha256}"]
    lines.append(
        f"graph  {report.nodes:,} nodes, IR {report.ir_version}, opset {', '.join(dict.fromkeys(report.opsets))}, "
        f"{report.weight_bytes:,} bytes of weights{', quantized' if report.quantized else ''}"
    )
    lines += [f"input  {name(t.name)} {t.datatype} {list(t.dims)}" for t in checked.graph.inputs]
    lines += [f"output {name(t.name)} {t.datatype} {list(t.dims)}" for t in checked.graph.outputs]
    for profile in checked.settings.profiles:
        lines += [f"served {name(i)} from {list(r.min)} to {list(r.max)}" for i, r in profile.inputs.items()]
    if report.findings:
        lines.append(findings(report.findings))
    built = f"engine {digest}" if digest else "not built yet"
    lines.append(f"revision {checked.revision} in {checked.settings.precision} for {checked.load_key}: {built}")
    return plain("\n".join(lines))


def findings(found: Sequence[Finding]) -> str:
    lines = []
    for finding in found:
        lines.append(f"{finding.severity.value:7} {finding.reason.value}: {finding.message}")
        if finding.way_out:
            lines.append(f"        way out: {finding.way_out}")
    return plain("\n".join(lines))


def as_json(model: str, checked: Checked, digest: str | None) -> str:
    report = checked.report
    return _json(
        model,
        True,
        report.findings,
        {
            "sha256": checked.sha256,
            "sizeBytes": checked.source.size,
            "irVersion": report.ir_version,
            "opsets": list(report.opsets),
            "nodes": report.nodes,
            "weightBytes": report.weight_bytes,
            "quantized": report.quantized,
            "inputs": [encode(t) for t in checked.graph.inputs],
            "outputs": [encode(t) for t in checked.graph.outputs],
            "profiles": [encode(p) for p in checked.settings.profiles],
            "precision": checked.settings.precision,
            "revision": checked.revision,
            "loadKey": str(checked.load_key),
            "engine": digest,
        },
    )


def refused_as_json(model: str, error: Rejected) -> str:
    return _json(model, False, error.findings, {})


def _json(model: str, accepted: bool, found: Sequence[Finding], more: dict[str, Any]) -> str:
    document = {"model": model, "accepted": accepted, "findings": [encode(f) for f in found], **more}
    return json.dumps(document, indent=2)
