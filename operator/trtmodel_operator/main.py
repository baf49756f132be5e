"""The operator's process. kopf is its informer only: handlers put keys on a queue, and kopf writes nothing.

settings, probes, CRD seen -> Lease -> key pair -> workers of the queue -> kopf's watches
SIGTERM -> watches and workers end -> Lease released -> exit 0
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import kopf
from trtmodel_contract.version import product_version

from trtmodel_operator import logs
from trtmodel_operator.adapters.addresses import Addresses, origins
from trtmodel_operator.adapters.api import Api, configuration
from trtmodel_operator.adapters.calls import Calls
from trtmodel_operator.adapters.cluster import PLURAL, KubernetesCluster
from trtmodel_operator.adapters.inquiries import HttpInquiries
from trtmodel_operator.adapters.progress import HttpProgress
from trtmodel_operator.adapters.prometheus import Prometheus
from trtmodel_operator.adapters.signing import SigningKeyError, installation_id, load_or_create
from trtmodel_operator.adapters.webhooks import Webhooks
from trtmodel_operator.adapters.workers import HttpWorkers
from trtmodel_operator.buildqueue import BuildQueue
from trtmodel_operator.collector import Collector, CollectPolicy
from trtmodel_operator.controller import Controller, Witness
from trtmodel_operator.health import Health
from trtmodel_operator.lease import Lease
from trtmodel_operator.manifests import API_VERSION, GROUP, LABEL_MODEL, LABEL_WAITING, VERSION, JobPolicy
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.ports import ClusterError
from trtmodel_operator.queue import WorkQueue
from trtmodel_operator.reconcile import Reconciler
from trtmodel_operator.rotation import DAY, Rotation
from trtmodel_operator.settings import Settings, SettingsError, from_environment

EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
LIST_PAGE = 500
HOUR = 3600
CHILDREN = (("", "v1", "pods"), ("batch", "v1", "jobs"), ("apps", "v1", "deployments"))  # watched by label

log = logging.getLogger("trtmodel_operator.main")  # also when run as __main__


class SystemClock:
    def now(self) -> float:
        return time.time()


def informer_settings() -> kopf.OperatorSettings:
    """kopf as an informer: no peering (the Lease elects), no scanning (fewer rights), no events, no finalizer."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    # kopf removes a finalizer of this name from every object, since nothing needs it: it must be nobody's.
    settings.persistence.finalizer = f"kopf.{GROUP}/unused"
    # Keys of three parts: 'v1/pods', as kopf's documentation has it, is read as a group named v1 and selects nothing.
    for group, version, plural in CHILDREN:
        settings.watching.label_selectors[group, version, plural] = LABEL_MODEL
    settings.watching.chunk_size = LIST_PAGE
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 30
    return settings


def handlers(
    queue: WorkQueue,
    witness: Witness,
    metrics: OperatorMetrics,
    stop: Callable[[], Awaitable[None]],
    job_changed: Callable[[], None] = lambda: None,
) -> kopf.OperatorRegistry:
    """Handlers that only enqueue: what they raise would be swallowed, and what they miss the resync finds. `stop` ends
    everything that acts; `job_changed` is called for every event of a Job."""
    registry = kopf.OperatorRegistry()

    def login(**kwargs: Any) -> Any:
        return kopf.login_with_service_account(**kwargs) or kopf.login_with_kubeconfig(**kwargs)

    async def model(type: str | None, namespace: str, name: str, meta: Any, **_: Any) -> None:  # noqa: A002
        metrics.events.labels("TRTModel").inc()
        wishes = (
            meta.get("uid"),
            meta.get("generation"),
            meta.get("deletionTimestamp"),
            dict(meta.get("annotations", {})),
        )
        news = witness.deliver((namespace, name), meta.get("resourceVersion", ""), wishes)
        if news or type != "MODIFIED":
            queue.add((namespace, name))

    async def child(namespace: str, labels: Any, resource: Any, **_: Any) -> None:
        metrics.events.labels(resource.kind).inc()
        for owner in waiting_for(labels):
            queue.add((namespace, owner))
        if resource.plural == "jobs":
            job_changed()

    async def cleanup(**_: Any) -> None:
        # kopf waits five seconds for every task that was made since it began, then cancels it: ours end before.
        await stop()

    kopf.on.login(registry=registry)(login)
    kopf.on.cleanup(registry=registry)(cleanup)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(model)
    for group, version, plural in CHILDREN:
        kopf.on.event(group, version, plural, registry=registry)(child)
    return registry


def waiting_for(labels: Mapping[str, str]) -> set[str]:
    """The TRTModels that a child is of: one, or for a build all that wait for it."""
    waiting = {name.removeprefix(LABEL_WAITING) for name in labels if name.startswith(LABEL_WAITING)}
    return waiting | {labels[LABEL_MODEL]} if LABEL_MODEL in labels else waiting


async def run(settings: Settings) -> None:
    """Runs until SIGTERM or SIGINT. Raises ClusterError, SigningKeyError or OSError if it cannot begin."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)  # until kopf puts its own in their place
    async with AsyncExitStack() as stack:
        metrics = OperatorMetrics()
        metrics.describe(product_version())
        stack.callback(metrics.serve(settings.host, settings.metrics_port))
        health = Health()
        await health.start(settings.host, settings.http_port)
        stack.push_async_callback(health.stop)
        api = Api(await configuration(), on_call=metrics.called)
        stack.push_async_callback(api.close)
        cluster = KubernetesCluster(api, settings.watch_namespaces, settings.pod_name)

        await cluster.require_crd()
        health.waiting_for = ""
        identity = f"{settings.pod_name}_{uuid.uuid4()}"
        lease = Lease(cluster, settings.namespace, settings.lease_name, identity)
        log.info("waiting for the lease %s/%s as %s", settings.namespace, settings.lease_name, identity)
        await lease.acquire()
        stack.push_async_callback(lease.release)
        holding = asyncio.create_task(lease.hold(), name="lease")
        holding.add_done_callback(_no_leader_without_lease)
        stack.callback(holding.cancel)
        metrics.leader.set(1)
        log.info("leading")

        signer = await load_or_create(cluster, settings.namespace, settings.key_secret)
        installation = await installation_id(cluster, settings.namespace, settings.key_secret)
        clock, queue, witness = SystemClock(), WorkQueue(), Witness()
        workers = HttpWorkers(signer, clock, queue.add, on_call=metrics.asked_worker)
        metrics.watch(queue.depth, queue.oldest, lambda: workers.following, lambda: len(signer.public_keys()))
        builds = BuildQueue(cluster, settings.max_builds, clock.now, metrics.count_builds)
        rotation = Rotation(
            cluster,
            settings.namespace,
            settings.key_secret,
            signer,
            everyone=cluster.list_models,
            again=queue.add,
            now=clock.now,
            max_age=settings.key_max_age_days * DAY,
        )
        job_policy = JobPolicy(settings.max_builds > 0, settings.job_priority_class)
        collecting = CollectPolicy(
            settings.collect_every_hours * HOUR, settings.collect_delete, settings.collect_grace_hours * HOUR
        )
        collector = Collector(cluster, collecting, job_policy, settings.worker_image, installation, clock.now)
        progress = HttpProgress()
        stack.push_async_callback(progress.close)
        calls = Calls(Addresses([*settings.allowed_addresses, *origins(settings.prometheus_address)]))
        stack.push_async_callback(calls.close)
        inquiries = HttpInquiries(
            Prometheus(calls, settings.prometheus_address), Webhooks(calls, signer, clock), clock, queue.add
        )
        reconciler = Reconciler(
            cluster,
            workers,
            signer,
            clock,
            metrics,
            settings.worker_image,
            progress=progress,
            keys=rotation,
            inquiries=inquiries,
            job_policy=job_policy,
            installation=installation,
        )
        controller = Controller(
            queue,
            reconciler.reconcile,
            cluster,
            metrics,
            witness,
            broken=lambda: os._exit(EXIT_FAILED),
            beside={"builds": builds.run, "signing keys": rotation.run, "collector": collector.run},
        )
        health.trouble = controller.trouble

        async def stop() -> None:
            await controller.stop()
            await workers.close()
            await inquiries.close()
            await cluster.close()

        controller.start()
        stack.push_async_callback(stop)
        scope: dict[str, Any] = (
            {"namespaces": settings.watch_namespaces} if settings.watch_namespaces else {"clusterwide": True}
        )
        registry = handlers(queue, witness, metrics, stop, builds.call)
        await kopf.operator(registry=registry, settings=informer_settings(), **scope)
        log.info("stopping")


def _no_leader_without_lease(holding: asyncio.Task[None]) -> None:
    if not holding.cancelled():
        log.error("the lease is not renewed any more: this process ends now", exc_info=holding.exception())
        os._exit(EXIT_FAILED)


def main() -> None:
    """Console entry. Exit codes: 0 after a signal, 1 when it could not begin or a watch ended, 2 for bad settings."""
    try:
        settings = from_environment(os.environ)
    except SettingsError as e:
        print(e, file=sys.stderr)
        sys.exit(EXIT_MISCONFIGURED)
    logs.set_up(settings.log_level)
    log.info("starting: %s, worker image %s", API_VERSION, settings.worker_image)
    try:
        asyncio.run(run(settings))
    except asyncio.CancelledError:
        log.info("stopped while it was starting or waiting")
    except SigningKeyError as e:
        log.error("%s", e)
        sys.exit(EXIT_MISCONFIGURED)
    except (ClusterError, OSError) as e:
        log.error("%s", e)
        sys.exit(EXIT_FAILED)
    except Exception:
        log.exception("the operator failed")
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
