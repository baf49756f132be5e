from __future__ import annotations

import resource

import pytest
from trtmodel_operator.main import DESCRIPTORS, allow_descriptors
from trtmodel_operator.settings import Settings, SettingsError, from_environment

LEAST = {"TRTMODEL_WORKER_IMAGE": "worker:1", "TRTMODEL_NAMESPACE": "ops"}


def test_the_least_environment_gives_the_documented_defaults() -> None:
    assert from_environment(LEAST) == Settings(
        worker_image="worker:1",
        namespace="ops",
        watch_namespaces=(),
        key_secret="trtmodel-operator-signing",
        lease_name="trtmodel-operator",
        http_port=8080,
        metrics_port=9090,
        host="",
        log_level="INFO",
        max_builds=0,
        job_priority_class="",
        key_max_age_days=0,
        pod_name="trtmodel-operator",
    )


def test_every_setting_is_read() -> None:
    found = from_environment(
        {
            "TRTMODEL_WORKER_IMAGE": " registry:5000/worker@sha256:ab ",
            "TRTMODEL_NAMESPACE": "ops",
            "TRTMODEL_WATCH_NAMESPACES": "ml, vision,,ml",
            "TRTMODEL_KEY_SECRET": "keys",
            "TRTMODEL_LEASE_NAME": "lease",
            "TRTMODEL_HTTP_PORT": "1",
            "TRTMODEL_METRICS_PORT": "65535",
            "TRTMODEL_HOST": "::1",
            "TRTMODEL_LOG_LEVEL": "debug",
            "TRTMODEL_MAX_BUILDS": "4",
            "TRTMODEL_JOB_PRIORITY_CLASS": "builds",
            "TRTMODEL_KEY_MAX_AGE_DAYS": "90",
            "TRTMODEL_COLLECT_EVERY_HOURS": "24",
            "TRTMODEL_COLLECT_DELETE": "true",
            "TRTMODEL_COLLECT_GRACE_HOURS": "72",
            "TRTMODEL_ALLOWED_ADDRESSES": "https://*.example.com, http://prometheus.monitoring.svc:9090",
            "TRTMODEL_PROMETHEUS_ADDRESS": "http://mimir.monitoring.svc/prometheus",
            "POD_NAME": "operator-1",
        }
    )
    assert found == Settings(
        "registry:5000/worker@sha256:ab",
        "ops",
        ("ml", "vision"),
        "keys",
        "lease",
        1,
        65535,
        "::1",
        "DEBUG",
        4,
        "builds",
        90,
        "operator-1",
        24,
        True,
        72,
        ("https://*.example.com", "http://prometheus.monitoring.svc:9090"),
        "http://mimir.monitoring.svc/prometheus",
    )


def test_an_empty_value_is_the_default() -> None:
    assert from_environment(LEAST | {"TRTMODEL_HTTP_PORT": "", "TRTMODEL_KEY_SECRET": " "}) == from_environment(LEAST)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("TRTMODEL_WORKER_IMAGE", "", "TRTMODEL_WORKER_IMAGE is required"),
        ("TRTMODEL_ALLOWED_ADDRESSES", "hooks.example.com", "'hooks.example.com' is no origin: give scheme://host"),
        ("TRTMODEL_ALLOWED_ADDRESSES", "https://a.example.com/x", "'https://a.example.com/x' is no origin"),
        ("TRTMODEL_ALLOWED_ADDRESSES", "https://me:secret@example.com", "is no origin"),
        ("TRTMODEL_ALLOWED_ADDRESSES", "https://*", "is no origin"),
        ("TRTMODEL_PROMETHEUS_ADDRESS", "prometheus:9090", "must be http"),
        ("TRTMODEL_WORKER_IMAGE", "a b", "without spaces"),
        ("TRTMODEL_NAMESPACE", "", "TRTMODEL_NAMESPACE is required"),
        ("TRTMODEL_NAMESPACE", "Ops", "must be a Kubernetes name, not 'Ops'"),
        ("TRTMODEL_WATCH_NAMESPACES", "ml,A_B", "'A_B' is no name of a namespace"),
        ("TRTMODEL_HTTP_PORT", "65536", "must be a port"),
        ("TRTMODEL_METRICS_PORT", "-1", "must be a port"),
        ("TRTMODEL_LOG_LEVEL", "LOUD", "must be one of DEBUG, INFO, WARNING, ERROR"),
        ("TRTMODEL_HOST", "localhost", "must be an IP address"),
        ("TRTMODEL_WORKERS", "8", "TRTMODEL_WORKERS is no setting of the operator"),
    ],
)
def test_a_value_that_is_not_understood_is_named(name: str, value: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        from_environment(LEAST | {name: value})


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        from_environment({"TRTMODEL_HTTP_PORT": "x"})
    assert len(str(caught.value).splitlines()) == 3


def test_variables_that_kubernetes_makes_of_services_are_no_settings() -> None:
    links = {
        "TRTMODEL_OPERATOR_SERVICE_HOST": "10.0.0.1",
        "TRTMODEL_OPERATOR_SERVICE_PORT": "9090",
        "TRTMODEL_OPERATOR_SERVICE_PORT_METRICS": "9090",
        "TRTMODEL_OPERATOR_PORT": "tcp://10.0.0.1:9090",
        "TRTMODEL_OPERATOR_PORT_9090_TCP": "tcp://10.0.0.1:9090",
        "TRTMODEL_OPERATOR_PORT_9090_TCP_ADDR": "10.0.0.1",
    }
    assert from_environment(LEAST | links) == from_environment(LEAST)


def test_the_process_takes_the_descriptors_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, DESCRIPTORS) if hard != resource.RLIM_INFINITY else DESCRIPTORS
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - 1, hard))
        allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
        allow_descriptors()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
