"""What a pass leaves in the metrics."""

from __future__ import annotations

import datetime
import threading
from dataclasses import replace
from typing import Any

import pytest
from decide_scene import NOW, A, B, canary, deployed, edited, obey, serving, with_engine
from trtmodel_contract.control import EngineState
from trtmodel_operator import conditions, reasons
from trtmodel_operator.decide import decide
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.model import Decision, HistoryEntry, Observed
from trtmodel_operator.spec import parse_command

KEY = ("ml", "magika")
NAMES = {"namespace": "ml", "name": "magika"}


def told(metrics: OperatorMetrics, seen: Observed, decision: Decision | None = None) -> Decision:
    """A pass was persisted."""
    decision = decision or decide(seen)
    metrics.persisted(KEY, seen, decision, conditions.status(seen, decision, {}))
    return decision


def samples(metrics: OperatorMetrics, name: str) -> dict[tuple[str, ...], float]:
    """Of a metric of models, by the labels after namespace and name, in their order."""
    found: dict[tuple[str, ...], float] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name == f"trtmodel_operator_model_{name}":
                assert NAMES.items() <= sample.labels.items()
                found[tuple(v for k, v in sample.labels.items() if k not in NAMES)] = sample.value
    return found


def ended(seen: Any, outcome: str, reason: str) -> Any:
    """The same, after a rollout that ended."""
    at = datetime.datetime.fromtimestamp(NOW, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    history = (HistoryEntry(B, outcome, reason, at), *seen.memory.history)
    return replace(seen, memory=replace(seen.memory, history=history))


def test_a_model_that_serves_has_a_stage_its_workers_and_its_revision_and_no_trouble() -> None:
    metrics = OperatorMetrics()
    told(metrics, serving(A, replicas=4))
    assert samples(metrics, "stage") == {("Serving",): 1}
    counted = {("default", "desired"): 4, ("default", "ready"): 4, ("default", "stable"): 4}
    assert samples(metrics, "workers") == counted | {("default", "candidate"): 0, ("default", "standby"): 0}
    assert samples(metrics, "revision") == {("stable", A): 1}
    assert samples(metrics, "trouble") == samples(metrics, "rolled_back_timestamp_seconds") == {}
    assert samples(metrics, "standby_missing") == {("default",): 0}  # there is none that could be held


def test_a_trial_shows_both_revisions_and_who_is_on_it() -> None:
    metrics = OperatorMetrics()
    told(metrics, canary(serving(A, replicas=4)))
    assert samples(metrics, "revision") == {("stable", A): 1, ("candidate", B): 1}
    assert samples(metrics, "workers")["default", "candidate"] == 1
    assert samples(metrics, "stage") == {("Canary",): 1}


def test_a_trouble_goes_when_it_is_over() -> None:
    metrics, well = OperatorMetrics(), serving(A, replicas=4)
    told(metrics, with_engine(well, "w0", A, state=EngineState.DOWN, message="it died"))
    assert ("Degraded", reasons.HOST_DOWN) in samples(metrics, "trouble")
    told(metrics, well)
    assert samples(metrics, "trouble") == {}


def test_a_roll_back_is_counted_once_and_its_time_stays_until_the_next_rollout_ends() -> None:
    metrics, before = OperatorMetrics(), serving(A, replicas=4)
    decision = decide(before)
    after = replace(decision, memory=ended(before, reasons.ROLLED_BACK, reasons.TOO_SLOW).memory)
    count = {"reason": reasons.TOO_SLOW}
    assert metrics.registry.get_sample_value("trtmodel_operator_rollbacks_total", count) == 0  # before the first one
    told(metrics, before, after)
    assert metrics.registry.get_sample_value("trtmodel_operator_rollbacks_total", count) == 1
    assert metrics.registry.get_sample_value("trtmodel_operator_swaps_total", {"result": "RolledBack"}) == 1
    assert samples(metrics, "rolled_back_timestamp_seconds") == {(reasons.TOO_SLOW,): NOW}
    seen = replace(before, memory=after.memory)
    told(metrics, seen)
    assert metrics.registry.get_sample_value("trtmodel_operator_rollbacks_total", count) == 1
    told(metrics, ended(seen, reasons.PROMOTED, reasons.PROMOTED))
    assert samples(metrics, "rolled_back_timestamp_seconds") == {}


def test_another_leader_tells_of_a_roll_back_that_it_did_not_see() -> None:
    metrics = OperatorMetrics()
    told(metrics, ended(serving(A), reasons.ROLLED_BACK, reasons.ENGINE_DIED))
    assert samples(metrics, "rolled_back_timestamp_seconds") == {(reasons.ENGINE_DIED,): NOW}


@pytest.mark.parametrize(("policy", "missing"), [("Auto", 4), ("Availability", 4), ("Resource", 0)])
def test_a_standby_is_missed_unless_one_engine_at_a_time_is_what_the_user_wants(policy: str, missing: int) -> None:
    metrics = OperatorMetrics()
    seen = edited(serving(A, replicas=4), rollout__memoryPolicy=policy)
    told(metrics, replace(seen, memory=replace(seen.memory, standby=deployed(B))))
    assert samples(metrics, "standby_missing") == {("default",): missing}


def test_a_model_that_is_gone_leaves_no_series() -> None:
    metrics = OperatorMetrics()
    told(metrics, serving(A))
    metrics.forget(KEY)
    for name in ("stage", "trouble", "workers", "standby_missing", "revision"):
        assert samples(metrics, name) == {}


def test_an_aborted_rollout_is_no_roll_back() -> None:
    metrics = OperatorMetrics()
    seen = replace(canary(serving(A)), command=parse_command("abort#1"))
    decision = told(metrics, seen)
    told(metrics, obey(seen, decision))
    assert samples(metrics, "rolled_back_timestamp_seconds") == {}


def test_metrics_can_be_read_while_models_come_and_go() -> None:
    metrics, well = OperatorMetrics(), serving(A)
    decision = decide(well)
    status = conditions.status(well, decision, {})
    problems: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(30):
                list(metrics.registry.collect())
        except BaseException as e:
            problems.append(e)

    reader = threading.Thread(target=read)
    reader.start()
    n = 0
    while reader.is_alive():
        metrics.persisted(("ml", f"m{n % 500}"), well, decision, status)
        metrics.forget(("ml", f"m{(n + 250) % 500}"))
        n += 1
    reader.join()
    assert problems == []
