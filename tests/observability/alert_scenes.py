"""Worlds in which alerts fire: series by the minute, as promtool writes them. All is well in CALM; a scene changes some
of it, from minute 30 on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MODEL = 'namespace="ml",name="m"'
POD = 'namespace="ml",model="m",pod="m-a-1"'
OPERATOR = 'namespace="ops",pod="op-1"'
LAST = 240  # minutes of each world

_P = "trtmodel_operator_"
CALM: Mapping[str, str] = {
    f'{_P}model_revision{{{MODEL},role="stable",revision="aaaaaaaaaa"}}': f"1x{LAST}",
    f'{_P}model_stage{{{MODEL},stage="Serving"}}': f"1x{LAST}",
    f'{_P}model_standby_missing{{{MODEL},target="a"}}': f"0x{LAST}",
    # Scaled to zero, and rolled back by a person: both as they were asked for.
    f'{_P}model_trouble{{namespace="ml",name="zero",condition="Available",reason="ScaledToZero"}}': f"1x{LAST}",
    f'{_P}model_revision{{namespace="ml",name="zero",role="stable",revision="bbbbbbbbbb"}}': f"1x{LAST}",
    f'{_P}model_rolled_back_timestamp_seconds{{namespace="ml",name="zero",reason="RolledBackByCommand"}}': "1800x240",
    # The first engine is being built.
    f'{_P}model_trouble{{namespace="ml",name="new",condition="Available",reason="NoWorkerServes"}}': "1x60",
    f'{_P}model_stage{{namespace="ml",name="new",stage="Building"}}': "1x60",
    f'{_P}leader{{{OPERATOR}}}': f"1x{LAST}",
    f'{_P}leader{{namespace="ops",pod="op-2"}}': f"0x{LAST}",
    f'{_P}signing_keys{{{OPERATOR}}}': f"1x{LAST}",
    f'{_P}queue_oldest_seconds{{{OPERATOR}}}': f"0.2x{LAST}",
    f'{_P}worker_requests_total{{{OPERATOR},verb="GET",result="ok"}}': f"0+60x{LAST}",
    f'{_P}worker_requests_total{{{OPERATOR},verb="GET",result="unauthorized"}}': f"0x{LAST}",
    f'{_P}api_requests_total{{{OPERATOR},verb="GET",resource="pods",code="200"}}': f"0+60x{LAST}",
    f'{_P}api_requests_total{{{OPERATOR},verb="PATCH",resource="trtmodels/status",code="409"}}': f"0+1x{LAST}",
    f'{_P}reconcile_total{{{OPERATOR},result="done"}}': f"0+60x{LAST}",
    f'{_P}reconcile_total{{{OPERATOR},result="conflict"}}': f"0+1x{LAST}",
    f'{_P}reconcile_total{{{OPERATOR},result="bug"}}': f"0x{LAST}",
    f'trtmodel_responses_total{{{POD},revision="aaaaaaaaaa",status="200"}}': f"0+6000x{LAST}",
    f'trtmodel_responses_total{{{POD},revision="aaaaaaaaaa",status="400"}}': f"0+600x{LAST}",
    f'trtmodel_responses_total{{{POD},revision="aaaaaaaaaa",status="500"}}': f"0+6x{LAST}",
    f'trtmodel_retries_denied_total{{{POD},revision="aaaaaaaaaa"}}': f"0x{LAST}",
    f'trtmodel_host_deaths_total{{{POD},revision="aaaaaaaaaa"}}': f"0x30 1x{LAST}",  # one is no pattern
    f'trtmodel_queue_length{{{POD},revision="aaaaaaaaaa"}}': f"0x{LAST}",
    f'trtmodel_lanes{{{POD},revision="aaaaaaaaaa"}}': f"4x{LAST}",
    f'trtmodel_refused_requests_total{{{POD},revision="aaaaaaaaaa"}}': f"0x{LAST}",
    f'trtmodel_untrusted_total{{{POD},what="request"}}': f"0x{LAST}",
    f'trtmodel_untrusted_total{{{POD},what="pointer"}}': f"0x{LAST}",
}  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """`changes` go over CALM; '' takes a series away. `alerts` fire then and no others: labels and the sentence that a
    person reads. `by` is the minute when they are there, `not_yet` one when nothing fires."""

    name: str
    changes: Mapping[str, str]
    by: int
    not_yet: int
    alerts: Mapping[str, tuple[Mapping[str, str], str]] = field(default_factory=dict)


_MODEL = {"namespace": "ml", "name": "m"}
_POD = {"namespace": "ml", "model": "m", "pod": "m-a-1"}
_OPERATOR = {"namespace": "ops", "pod": "op-1"}
_SINCE_30 = f"_x29 1x{LAST}"


def _stage(stage: str) -> dict[str, str]:
    return {
        f'{_P}model_stage{{{MODEL},stage="Serving"}}': "1x29",
        f'{_P}model_stage{{{MODEL},stage="{stage}"}}': _SINCE_30,
    }


def _trouble(condition: str, reason: str) -> dict[str, str]:
    return {f'{_P}model_trouble{{{MODEL},condition="{condition}",reason="{reason}"}}': _SINCE_30}


SCENES = (
    Scene("all is well", {},
        by=LAST, not_yet=LAST),
    Scene(
        "no worker serves any more", _trouble("Available", "NoWorkerServes"), by=34, not_yet=30,
        alerts={"TRTModelUnavailable": (
            {**_MODEL, "condition": "Available", "reason": "NoWorkerServes", "severity": "critical"},
            "ml/m does not serve: NoWorkerServes",
        )},
    ),
    Scene(
        "a candidate was too slow",
        {f'{_P}model_rolled_back_timestamp_seconds{{{MODEL},reason="TooSlow"}}': f"_x29 1800x{LAST}"},
        by=31, not_yet=27,
        alerts={"TRTModelRolledBack": (
            {**_MODEL, "reason": "TooSlow", "severity": "warning"},
            "the last rollout of ml/m was rolled back: TooSlow",
        )},
    ),
    Scene(
        "a roll-back is an hour old",
        {f'{_P}model_rolled_back_timestamp_seconds{{{MODEL},reason="TooSlow"}}': f"_x29 1800x{LAST}"},
        by=91, not_yet=27,
    ),
    *(
        Scene(
            f"a build ends with {stage}", _stage(stage), by=36, not_yet=33,
            alerts={"TRTModelBuildFailing": (
                {**_MODEL, "stage": stage, "severity": "warning"},
                f"what ml/m asks for cannot be had: {stage}",
            )},
        )
        for stage in ("Invalid", "GateFailed", "GateInconclusive", "Stalled")
    ),
    Scene(
        "a build waits for a node", _stage("Building"), by=151, not_yet=145,
        alerts={"TRTModelBuildSlow": (
            {**_MODEL, "stage": "Building", "severity": "warning"}, "ml/m is Building for two hours",
        )},
    ),
    Scene(
        "an engine host stays down", _trouble("Degraded", "EngineHostDown"), by=41, not_yet=38,
        alerts={"TRTModelDegraded": (
            {**_MODEL, "condition": "Degraded", "reason": "EngineHostDown", "severity": "warning"},
            "ml/m serves, but not as asked: EngineHostDown",
        )},
    ),
    Scene(
        "workers hold no standby",
        {
            f'{_P}model_standby_missing{{{MODEL},target="a"}}': f"0x29 2x{LAST}",
            **_trouble("Degraded", "StandbyMissing"),
        },
        by=62, not_yet=58,
        alerts={"TRTModelStandbyMissing": (
            {**_MODEL, "target": "a", "severity": "info"},
            "2 workers of ml/m (a) hold no standby: going back would take a load",
        )},
    ),
    Scene(
        "the storage's certificate is not trusted", _trouble("Stalled", "StorageUnavailable"), by=41, not_yet=38,
        alerts={"TRTModelStorageTrouble": (
            {**_MODEL, "condition": "Stalled", "reason": "StorageUnavailable", "severity": "warning"},
            "the storage of ml/m cannot be used (address, certificate, credentials): StorageUnavailable",
        )},
    ),
    Scene(
        "two of a hundred answers are errors",
        {f'trtmodel_responses_total{{{POD},revision="aaaaaaaaaa",status="500"}}': f"0x29 0+140x{LAST}"},
        by=45, not_yet=33,
        alerts={"TRTModelRequestsFail": (
            {"namespace": "ml", "model": "m", "severity": "critical"}, "2.077% of the answers of ml/m are errors",
        )},
    ),
    Scene(
        "an engine fails more than may be retried",
        {f'trtmodel_retries_denied_total{{{POD},revision="aaaaaaaaaa"}}': f"0x29 0+10x{LAST}"},
        by=40, not_yet=33,
        alerts={"TRTModelRetryBudgetSpent": (
            {**_POD, "severity": "warning"}, "worker ml/m-a-1 fails more often than its retry budget covers",
        )},
    ),
    Scene(
        "an engine host dies again and again",
        {f'trtmodel_host_deaths_total{{{POD},revision="aaaaaaaaaa"}}': f"0x30 1x2 3x{LAST}"},
        by=40, not_yet=31,
        alerts={"TRTModelHostRestarts": (
            {**_POD, "severity": "warning"}, "engine hosts of worker ml/m-a-1 died 3 times in 15 minutes",
        )},
    ),
    Scene(
        "more requests come than are answered",
        {f'trtmodel_queue_length{{{POD},revision="aaaaaaaaaa"}}': f"0x29 0+5x{LAST}"},
        by=42, not_yet=34,
        alerts={"TRTModelQueueGrowing": (
            {**_POD, "severity": "warning"}, "60 requests wait in worker ml/m-a-1, and they become more",
        )},
    ),
    Scene(
        "a queue is long and becomes shorter",
        {f'trtmodel_queue_length{{{POD},revision="aaaaaaaaaa"}}': f"500-2x{LAST}"},
        by=60, not_yet=10,
    ),
    Scene(
        "a queue is full",
        {
            f'trtmodel_queue_length{{{POD},revision="aaaaaaaaaa"}}': f"512x{LAST}",
            f'trtmodel_refused_requests_total{{{POD},revision="aaaaaaaaaa"}}': f"0x29 0+100x{LAST}",
        },
        by=40, not_yet=29,
        alerts={"TRTModelRequestsRefused": (
            {**_POD, "severity": "warning"}, "worker ml/m-a-1 refuses requests: its queue is full or too long",
        )},
    ),
    Scene(
        "somebody else writes pointers",
        {f'trtmodel_untrusted_total{{{POD},what="pointer"}}': f"0x29 1x{LAST}"},
        by=40, not_yet=33,
        alerts={"TRTModelSignatureRefused": (
            {**_POD, "what": "pointer", "severity": "warning"},
            "worker ml/m-a-1 was given a pointer that the operator did not sign, or whose signature it does not know",
        )},
    ),
    Scene(
        "nobody takes the Lease", {f"{_P}leader{{{OPERATOR}}}": f"1x29 0x{LAST}"},
        by=33, not_yet=31,
        alerts={"TRTModelNoLeader": (
            {"severity": "critical"}, "no operator leads: workers serve on, and nothing changes",
        )},
    ),
    Scene(
        "the operator's pods are gone", dict.fromkeys((k for k in CALM if OPERATOR in k or '"op-2"' in k), "1x29"),
        by=37, not_yet=33,
        alerts={"TRTModelNoLeader": (
            {"severity": "critical"}, "no operator leads: workers serve on, and nothing changes",
        )},
    ),
    Scene(
        "workers know another key",
        {f'{_P}worker_requests_total{{{OPERATOR},verb="GET",result="unauthorized"}}': f"0x29 0+60x{LAST}"},
        by=38, not_yet=33,
        alerts={"TRTModelOperatorUntrusted": (
            {**_OPERATOR, "severity": "critical"},
            "workers do not believe the operator ops/op-1: they know another key, or a clock is wrong",
        )},
    ),
    Scene(
        "a worker does not list the next key", {f"{_P}signing_keys{{{OPERATOR}}}": f"1x29 2x{LAST}"},
        by=92, not_yet=85,
        alerts={"TRTModelKeyExchangeStuck": (
            {**_OPERATOR, "severity": "warning"},
            "the signing key is being exchanged for an hour: a worker does not list the next one",
        )},
    ),
    Scene(
        "the API server's certificate has expired",
        {f'{_P}api_requests_total{{{OPERATOR},verb="GET",resource="pods",code="error"}}': f"0x29 0+9x{LAST}"},
        by=45, not_yet=38,
        alerts={"TRTModelApiTrouble": (
            {**_OPERATOR, "code": "error", "severity": "warning"},
            "calls of the operator ops/op-1 to the Kubernetes API fail: error",
        )},
    ),
    Scene(
        "passes meet a bug", {f'{_P}reconcile_total{{{OPERATOR},result="bug"}}': f"0x29 0+2x{LAST}"},
        by=50, not_yet=43,
        alerts={"TRTModelPassesFail": (
            {**_OPERATOR, "result": "bug", "severity": "warning"}, "passes of the operator ops/op-1 fail: bug",
        )},
    ),
    Scene(
        "the operator cannot keep up", {f"{_P}queue_oldest_seconds{{{OPERATOR}}}": f"0x29 300x{LAST}"},
        by=37, not_yet=33,
        alerts={"TRTModelOperatorBehind": (
            {**_OPERATOR, "severity": "warning"}, "models wait 5m 0s for the operator ops/op-1",
        )},
    ),
)  # fmt: skip
