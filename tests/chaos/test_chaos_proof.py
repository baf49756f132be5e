"""An engine that was routed without a gate that passed is found by its answers, by its workers' logs and by the boot
pointer; a defect that fell over something is found in the logs."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from trtmodel_contract.codec import dumps
from trtmodel_contract.gate import GateFigures, OutputFigures, Task, Top1Figures

from chaos import machine, proof, sources
from chaos.ledger import Ledger
from chaos.proof import Passed
from chaos.traffic import First

ROOT = "trtmodel/chaos"
CLEAN = OutputFigures(1.0, 1.0, 0.0, 0.0, 0, False)
VERIFIED = Passed({"a" * 64: 1000.0}, {"aaa": 1000.0})
WORKER = "chaos_one-w1_u1/worker/0.log"
OPERATOR = "chaos-system_operator-1_u2/operator/0.log"


class Bucket:
    """Keys with their bytes and times."""

    def __init__(self, content: Mapping[str, tuple[bytes, float]]) -> None:
        self._content = content

    def keys(self, bucket: str, prefix: str) -> list[str]:
        return [key for key in self._content if key.startswith(prefix)]

    def get(self, bucket: str, key: str) -> tuple[bytes, float]:
        return self._content[key]


def figures(wrong: int) -> bytes:
    """Of 200 samples, so many were answered otherwise."""
    labelled = Top1Figures(wrong, 200, 200 - wrong, wrong, 0)
    return dumps(GateFigures("a" * 64, "b" * 64, Task.CLASSIFICATION, 200, True, {"y": CLEAN}, labelled))


def log(folder: Path, name: str, *lines: tuple[float, str]) -> None:
    """As containerd writes it."""
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    stamps = [datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat() for at, _ in lines]
    pairs = zip(stamps, lines, strict=True)
    file.write_text(
        "".join(f"{stamp.replace('+00:00', '.123456789Z')} stderr F {text}\n" for stamp, (_, text) in pairs)
    )


def routed(stable: str, candidate: str = "none", share: int = 0) -> str:
    return f"2026-11-30 12:00:00,123 INFO front routes: stable {stable}, candidate {candidate} at {share} %"


def broken(ledger: Ledger) -> dict[str, int]:
    return dict(ledger.broken)


def test_an_engine_has_passed_when_figures_of_its_very_manifest_pass_and_since_then() -> None:
    manifests = {name: name.encode() for name in ("good", "bad", "none")}
    digest = {name: hashlib.sha256(data).hexdigest() for name, data in manifests.items()}
    content = {f"{ROOT}/engines/{name}/key/1/manifest.json": (data, 5.0) for name, data in manifests.items()}
    content[f"{ROOT}/gates/{digest['good']}/x.json"] = (figures(0), 20.0)
    content[f"{ROOT}/gates/{digest['good']}/y.json"] = (figures(0), 10.0)
    content[f"{ROOT}/gates/{digest['bad']}/x.json"] = (figures(150), 10.0)
    found = proof.passed(Bucket(content))  # type: ignore[arg-type]
    assert found == Passed({digest["good"]: 10.0}, {"good": 10.0})


@pytest.mark.parametrize(
    ("revision", "at", "gain", "wrong"),
    [
        ("aaa", 1001.0, 3, 0),
        ("aaa", 999.0, 3, 0),  # the bucket's times are whole seconds
        ("aaa", 990.0, 3, 1),
        ("bbb", 1001.0, 3, 1),
        ("aaa", 1001.0, sources.BAD_GAIN, 1),
    ],
)
def test_an_answer_comes_from_what_had_passed_before(revision: str, at: float, gain: int, wrong: int) -> None:
    ledger = Ledger()
    proof.check_answers({("one", revision): First(gain, at)}, VERIFIED, ledger)
    assert broken(ledger) == ({proof.UNVERIFIED: wrong} if wrong else {})


@pytest.mark.parametrize(("digest", "at", "wrong"), [("a", 1001.0, 0), ("a", 990.0, 1), ("b", 1001.0, 1)])
def test_a_boot_pointer_names_what_had_passed_before(digest: str, at: float, wrong: int) -> None:
    ledger = Ledger()
    proof.check_pointers({("one-default", digest * 64): at}, VERIFIED, ledger)
    assert broken(ledger) == ({proof.UNVERIFIED: wrong} if wrong else {})


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([(1001.0, routed("aaa")), (1002.0, routed("aaa", "aaa", 100))], 0),
        ([(1001.0, routed("aaa", "bbb", 0))], 1),
        ([(1001.0, routed("bbb", "aaa", 5))], 1),
        ([(990.0, routed("aaa"))], 1),
    ],
)
def test_a_worker_routes_to_what_had_passed_before_whether_or_not_anybody_asks(
    tmp_path: Path, lines: list[tuple[float, str]], wrong: int
) -> None:
    ledger = Ledger()
    log(tmp_path, WORKER, (900.0, "2026 INFO front revision aaa is ready after 1.0 s"), *lines)
    assert proof.check_routes(tmp_path, VERIFIED, ledger) > 0
    assert broken(ledger) == ({proof.UNVERIFIED: wrong} if wrong else {})


def test_logs_in_which_no_route_is_found_prove_nothing(tmp_path: Path) -> None:
    ledger = Ledger()
    log(tmp_path, WORKER, (1001.0, "2026 INFO front now routing to aaa"))
    assert proof.check_routes(tmp_path, VERIFIED, ledger) == 0
    assert broken(ledger) == {"workers tell of their routes": 1}


@pytest.mark.parametrize("name", [WORKER, OPERATOR])
def test_a_defect_in_any_log_is_found_and_what_is_foreseen_is_not(tmp_path: Path, name: str) -> None:
    for words in proof.DEFECTS:
        ledger = Ledger()
        log(tmp_path, name, (1.0, "INFO engine abc could not be prepared: no answer"), (2.0, f"ERROR {words}: x"))
        proof.check_logs(tmp_path, ledger)
        assert broken(ledger) == {"no defect in a log": 1}
    log(tmp_path, name, (1.0, "WARNING lease not renewed: no answer in time"))
    ledger = Ledger()
    proof.check_logs(tmp_path, ledger)
    assert broken(ledger) == {}


def test_what_pods_of_an_earlier_run_said_is_not_laid_to_this_one(tmp_path: Path) -> None:
    here = object.__new__(machine.Machine)
    here.pod_logs, here.kept_logs = tmp_path / "podlogs", tmp_path / "kept"
    here.forget_logs()
    for name in (WORKER, WORKER.replace("_u1", "_u3")):
        (here.pod_logs / name).parent.mkdir(parents=True)
        (here.pod_logs / name).write_text("")
        if name == WORKER:
            here.keep_logs(("chaos",))
            here.forget_logs()
    here.keep_logs(("chaos",))
    kept = [str(file.relative_to(here.kept_logs)) for file in here.kept_logs.glob("*/*/*.log")]
    assert kept == [WORKER.replace("_u1", "_u3")]
