"""The operator's settings: environment variables, read once at start. A value that is not understood ends the start
with an error that names it (exit code 2), since a default in its place would be a surprise later."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_PREFIX = "TRTMODEL_"
_ORIGIN = re.compile(r"https?://(\*\.)?([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_KNOWN = (
    "WORKER_IMAGE",
    "NAMESPACE",
    "WATCH_NAMESPACES",
    "KEY_SECRET",
    "LEASE_NAME",
    "HTTP_PORT",
    "METRICS_PORT",
    "HOST",
    "LOG_LEVEL",
    "MAX_BUILDS",
    "JOB_PRIORITY_CLASS",
    "KEY_MAX_AGE_DAYS",
    "ALLOWED_ADDRESSES",
    "PROMETHEUS_ADDRESS",
    "COLLECT_EVERY_HOURS",
    "COLLECT_DELETE",
    "COLLECT_GRACE_HOURS",
)
# Kubernetes gives every pod variables for the Services of its namespace: TRTMODEL_OPERATOR_PORT_9090_TCP_ADDR ...
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)$")


class SettingsError(ValueError):
    """A setting is missing or not understood. The text names the variable, what was found and what is expected."""


@dataclass(frozen=True)
class Settings:
    """`worker_image` (TRTMODEL_WORKER_IMAGE, required): image of workers and Jobs whose TRTModel names none. A change
    reaches only models that are created later: the platform of a model is pinned.

    `namespace` (TRTMODEL_NAMESPACE, required): the operator's own namespace, where its Lease and its key pair lie.

    `watch_namespaces` (TRTMODEL_WATCH_NAMESPACES, comma separated): where TRTModels are looked for. Empty means the
    whole cluster, which needs a ClusterRole.

    `key_secret` (TRTMODEL_KEY_SECRET): the Secret with the signing key pair. Another name means another pair: running
    workers trust it only after their key files were updated (about a minute).

    `lease_name` (TRTMODEL_LEASE_NAME): replicas with the same Lease elect one leader; two releases in one namespace
    need two names.

    `http_port`, `metrics_port` (TRTMODEL_HTTP_PORT, TRTMODEL_METRICS_PORT): probes, and Prometheus metrics.

    `host` (TRTMODEL_HOST): the address that both listen on. Empty means all, which probes need.

    `log_level` (TRTMODEL_LOG_LEVEL): DEBUG, INFO, WARNING or ERROR. DEBUG prints a line for every pass.

    `max_builds` (TRTMODEL_MAX_BUILDS): builds that run at a time, in all namespaces; further ones are made suspended
    and take their turn. 0: no limit.

    `job_priority_class` (TRTMODEL_JOB_PRIORITY_CLASS): the PriorityClass of Jobs. One with preemptionPolicy Never
    drives no serving pod away. Empty: the cluster's default.

    `key_max_age_days` (TRTMODEL_KEY_MAX_AGE_DAYS): the signing key is exchanged when it is older. 0: only when the
    annotation trtmodel.io/rotate of its Secret asks for it.

    `collect_every_hours` (TRTMODEL_COLLECT_EVERY_HOURS): how often a Job looks in each bucket for what no TRTModel
    needs any more. 0: never.

    `collect_delete` (TRTMODEL_COLLECT_DELETE): true removes it; false only has the Job say what it would remove.

    `collect_grace_hours` (TRTMODEL_COLLECT_GRACE_HOURS): what is younger stays, and at least what a build may still
    be about to publish.

    `allowed_addresses` (TRTMODEL_ALLOWED_ADDRESSES, comma separated): the origins that queries and webhooks of models
    may name, such as https://hooks.example.com, http://prometheus.monitoring.svc:9090 or https://*.example.com. Empty:
    none is called.

    `prometheus_address` (TRTMODEL_PROMETHEUS_ADDRESS): the Prometheus of queries that name no address; it is allowed.

    `pod_name` (POD_NAME): names this replica in the Lease and in events.
    """

    worker_image: str
    namespace: str
    watch_namespaces: tuple[str, ...] = ()
    key_secret: str = "trtmodel-operator-signing"
    lease_name: str = "trtmodel-operator"
    http_port: int = 8080
    metrics_port: int = 9090
    host: str = ""
    log_level: str = "INFO"
    max_builds: int = 0
    job_priority_class: str = ""
    key_max_age_days: int = 0
    pod_name: str = "trtmodel-operator"
    collect_every_hours: int = 0
    collect_delete: bool = False
    collect_grace_hours: int = 48
    allowed_addresses: tuple[str, ...] = ()
    prometheus_address: str = ""


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Raises SettingsError with every problem that was found, not only the first."""
    problems: list[str] = []
    problems += [
        f"{name} is no setting of the operator: remove it, or correct its name ({', '.join(_KNOWN)})"
        for name in sorted(environ)
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _KNOWN and not _SERVICE_LINK.search(name)
    ]

    def text(name: str, default: str) -> str:
        return environ.get(name, "").strip() or default

    def name_of(name: str, default: str = "") -> str:
        value = text(name, default)
        if not value:
            problems.append(f"{name} is required")
        elif not _NAME.fullmatch(value):
            problems.append(f"{name} must be a Kubernetes name, not {value[:80]!r}")
        return value

    def port(name: str, default: int) -> int:
        value = text(name, str(default))
        if not value.isdecimal() or not 0 <= int(value) <= 65535:
            problems.append(f"{name} must be a port from 1 to 65535 (0: any that is free), not {value[:80]!r}")
            return default
        return int(value)

    def truth(name: str) -> bool:
        value = text(name, "false").lower()
        if value not in ("true", "false"):
            problems.append(f"{name} must be true or false, not {value[:80]!r}")
        return value == "true"

    def count(name: str, most: int, default: int = 0) -> int:
        value = text(name, str(default))
        if not value.isdecimal() or int(value) > most:
            problems.append(f"{name} must be a number from 0 to {most}, not {value[:80]!r}")
            return 0
        return int(value)

    image = text(f"{_PREFIX}WORKER_IMAGE", "")
    if not image or re.search(r"\s", image):
        problems.append(f"{_PREFIX}WORKER_IMAGE is required: the reference of the worker image, without spaces")
    level = text(f"{_PREFIX}LOG_LEVEL", "INFO").upper()
    if level not in _LEVELS:
        problems.append(f"{_PREFIX}LOG_LEVEL must be one of {', '.join(_LEVELS)}, not {level[:80]!r}")
    host = text(f"{_PREFIX}HOST", "")
    if host and not _is_address(host):
        problems.append(f"{_PREFIX}HOST must be an IP address of this machine, not {host[:80]!r}")
    watched = tuple(
        dict.fromkeys(n.strip() for n in environ.get(f"{_PREFIX}WATCH_NAMESPACES", "").split(",") if n.strip())
    )
    problems += [
        f"{_PREFIX}WATCH_NAMESPACES: {n[:80]!r} is no name of a namespace" for n in watched if not _NAME.fullmatch(n)
    ]
    priority_class = text(f"{_PREFIX}JOB_PRIORITY_CLASS", "")
    if priority_class and not _NAME.fullmatch(priority_class):
        problems.append(f"{_PREFIX}JOB_PRIORITY_CLASS must be a Kubernetes name, not {priority_class[:80]!r}")
    prometheus = text(f"{_PREFIX}PROMETHEUS_ADDRESS", "")
    allowed = tuple(
        dict.fromkeys(a.strip() for a in environ.get(f"{_PREFIX}ALLOWED_ADDRESSES", "").split(",") if a.strip())
    )
    for address in allowed:
        if not _ORIGIN.fullmatch(address):
            expected = "scheme://host[:port] without a path, such as https://hooks.example.com or https://*.example.com"
            problems.append(f"{_PREFIX}ALLOWED_ADDRESSES: {address[:80]!r} is no origin: give {expected}")
    if prometheus and not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", prometheus):
        problems.append(f"{_PREFIX}PROMETHEUS_ADDRESS must be http(s)://host[:port][/path], not {prometheus[:80]!r}")
    settings = Settings(
        worker_image=image,
        namespace=name_of(f"{_PREFIX}NAMESPACE"),
        watch_namespaces=watched,
        key_secret=name_of(f"{_PREFIX}KEY_SECRET", Settings.key_secret),
        lease_name=name_of(f"{_PREFIX}LEASE_NAME", Settings.lease_name),
        http_port=port(f"{_PREFIX}HTTP_PORT", Settings.http_port),
        metrics_port=port(f"{_PREFIX}METRICS_PORT", Settings.metrics_port),
        host=host,
        log_level=level,
        max_builds=count(f"{_PREFIX}MAX_BUILDS", 10_000),
        job_priority_class=priority_class,
        key_max_age_days=count(f"{_PREFIX}KEY_MAX_AGE_DAYS", 3650),
        collect_every_hours=count(f"{_PREFIX}COLLECT_EVERY_HOURS", 8784),
        collect_delete=truth(f"{_PREFIX}COLLECT_DELETE"),
        collect_grace_hours=count(f"{_PREFIX}COLLECT_GRACE_HOURS", 87840, Settings.collect_grace_hours),
        allowed_addresses=allowed,
        prometheus_address=prometheus,
        pod_name=text("POD_NAME", Settings.pod_name),
    )
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
