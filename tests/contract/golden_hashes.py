"""Prints the hash of each sample document. Run by every interpreter that the contract supports; needs nothing but it.

PYTHONPATH=contract python3.10 tests/contract/golden_hashes.py > tests/contract/golden_hashes.json writes the recorded
ones anew: do so only when a document's form changes on purpose, since engines of earlier versions are then rebuilt
and signatures made by an earlier operator no longer hold.
"""

from __future__ import annotations

import json
import sys

from trtmodel_contract.codec import dumps, sha256_hex
from trtmodel_contract.control import (
    AttemptCounts,
    BootPointer,
    DesiredEngine,
    DesiredModel,
    DesiredRequest,
    DesiredState,
    EngineReport,
    EngineState,
    Fence,
    ModelReport,
    PointerEntry,
    Report,
    Role,
    Routes,
    SignedArtifact,
    WorkerState,
)
from trtmodel_contract.gate import GateFigures, OutputFigures, Task, Top1Figures
from trtmodel_contract.identity import (
    Calibration,
    EngineSettings,
    KeepPrecision,
    LoadKey,
    ModelRef,
    Profile,
    Recipe,
    ShapeRange,
    Storage,
    revision,
    short_hash,
)
from trtmodel_contract.jobs import JobResult, Reason
from trtmodel_contract.manifest import Blob, Golden, Manifest, MemoryNeed, TensorSpec
from trtmodel_contract.signing import Signature, artifact_payload, request_payload

A, B = "a" * 64, "b" * 64
MODEL = ModelRef("ml", "magika", "3f5b")
KEY = LoadKey("TensorRT", "10.16.0.72", "NVIDIA A10", "8.6")
PROFILES = (Profile({"bytes": ShapeRange((1, 2048), (8, 2048), (32, 2048))}),)
PLAIN = Recipe(A, EngineSettings("ONNXRuntime"))
FULL = Recipe(
    A,
    EngineSettings("TensorRT", "INT8", KeepPrecision(("^/kopf/ä.*",)), PROFILES, 1 << 30, 3, True),
    Calibration(B, 64, "MinMax", False),
)
ARTIFACT = SignedArtifact("0123456789", A, Signature("0011223344556677", "c2lnbmF0dXJl"))
TENSORS = (TensorSpec("bytes", "INT32", (-1, 2048)), TensorSpec("名前 🙂 \x00\u2028", "FP32", (-1, 214)))
MANIFEST = Manifest(
    revision=revision(FULL),
    load_key=KEY,
    number=1,
    driver="550.54",
    build={"precision": "INT8", "level": "3"},
    source_sha256=A,
    plan=Blob(B, 3_163_737),
    inputs=TENSORS[:1],
    outputs=TENSORS[1:],
    profiles=PROFILES,
    memory=MemoryNeed(1 << 28, 1 << 27),
    golden=(Golden(Blob(A, 12), 8, {"target_label": 1e-05, "other": 0.1, "third": 3.0, "tiny": 5e-324}),),
    tools={"onnx": "1.18.0"},
    created_at="2026-01-02T03:04:05Z",
)
COUNTS = AttemptCounts(7, {"Sticky": 1}, 2, {"8": {100: 3, 99: 4}, "16": {-0: 1}})
REPORT = Report(
    version=9,
    pod="magika-0",
    pod_uid="7c1d",
    load_key=KEY,
    driver="",
    state=WorkerState.SERVING,
    message="",
    fence=Fence("3f5b", 4),
    pointer_sequence=3,
    key_ids=("0011223344556677",),
    models={
        "magika": ModelReport(
            (EngineReport("0123456789", A, Role.STABLE, EngineState.READY, load_seconds=1.25),),
            Routes(A, B, 50),
            {"w1": {A: COUNTS}},
            0.0031,
            1_767_323_045.123456,
        )
    },
)
DESIRED = DesiredState(
    Fence("3f5b", 4), {"magika": DesiredModel((DesiredEngine(Role.STABLE, ARTIFACT),), Routes(A), "w1")}
)
FIGURES = GateFigures(
    A, B, Task.CLASSIFICATION, 1_762, True,
    {"target_label": OutputFigures(0.99987, float("nan"), 1 / 3, 1e22, 0, False)},
    Top1Figures(13, 1_700, 1_709, 2, 11), (1, 8, 32),
)  # fmt: skip

GOLDEN = {
    "revision of a plain recipe": revision(PLAIN),
    "revision of a full recipe": revision(FULL),
    "load key": short_hash(str(KEY)),
    "short hash": short_hash("ab", "c", "é"),
    "manifest": MANIFEST.digest(),
    "pointer": sha256_hex(
        BootPointer(MODEL, Storage("engines"), 3, PointerEntry("0123456789", {str(KEY): ARTIFACT})).text()
    ),
    "report": sha256_hex(dumps(REPORT)),
    "desired request": sha256_hex(dumps(DesiredRequest(DESIRED))),
    "desired content": DESIRED.content_hash(),
    "gate figures": sha256_hex(dumps(FIGURES)),
    "termination message": sha256_hex(JobResult(Reason.MODEL_INVALID, "\udcff🙂" * 3_000).to_termination_message()),
    "artifact payload": sha256_hex(artifact_payload(MODEL, A)),
    "request payload": sha256_hex(request_payload("PUT", "/control/v1/desired", "7c1d", b"{}", 1_700_000_000)),
}

if __name__ == "__main__":
    json.dump(GOLDEN, sys.stdout, indent=2)
    sys.stdout.write("\n")
