"""The operator's process. kopf is the informer of TRTModels only: its handler puts keys on a queue, and it writes
nothing. Children are watched and kept by `adapters.children`.

settings, probes, CRD seen -> Lease -> key pair -> workers of the queue -> kopf's watches
SIGTERM -> watches and workers end -> Lease released -> events posted -> exit 0
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import resource
import signal
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import kopf
from trtmodel_contract.version import product_version

from trtmodel_operator import logs
from trtmodel_operator.adapters.addresses import Addresses, origins
from trtmodel_operator.adapters.api import Api, configuration, resource_of
from trtmodel_operator.adapters.calls import Calls
from trtmodel_operator.adapters.children import KeptChildren
from trtmodel_operator.adapters.cluster import PLURAL, KubernetesCluster
from trtmodel_operator.adapters.informing import informer_settings, session
from trtmodel_operator.adapters.inquiries import HttpInquiries
from trtmodel_operator.adapters.models import KeptModels
from trtmodel_operator.adapters.pacing import Pace
from trtmodel_operator.adapters.progress import HttpProgress
from trtmodel_operator.adapters.prometheus import Prometheus
from trtmodel_operator.adapters.refusals import EventRefusals
from trtmodel_operator.adapters.signing import SigningKeyError, installation_id, load_or_create
from trtmodel_operator.adapters.webhooks import Webhooks
from trtmodel_operator.adapters.workers import HttpWorkers
from trtmodel_operator.buildqueue import BuildQueue
from trtmodel_operator.collector import Collector, CollectPolicy
from trtmodel_operator.controller import Controller, Witness
from trtmodel_operator.health import Health
from trtmodel_operator.lease import Lease
from trtmodel_operator.manifests import API_VERSION, GROUP, VERSION, JobPolicy
from trtmodel_operator.metrics import OperatorMetrics
from trtmodel_operator.ports import ClusterError, Key
from trtmodel_operator.queue import ASKED, CHANGED, WorkQueue
from trtmodel_operator.reconcile import Reconciler
from trtmodel_operator.rotation import DAY, Rotation
from trtmodel_operator.settings import Settings, SettingsError, from_environment

EXIT_FAILED = 1
EXIT_MISCONFIGURED = 2
HOUR = 3600
WAIT_FIRST, WAIT_MOST = 1.0, 8.0  # seconds until an API server that does not answer is asked again at the start
TOO_BUSY, SERVER_FAILED = 429, 500
DESCRIPTORS = 65536  # 2,048 workers may be followed, each by a connection: more than the usual soft limit of 1,024

T = TypeVar("T")

log = logging.getLogger("trtmodel_operator.main")  # also when run as __main__


class SystemClock:
    def now(self) -> float:
        return time.time()


def handlers(
    queue: WorkQueue,
    witness: Witness,
    metrics: OperatorMetrics,
    models: KeptModels,
    pace: Pace,
    stop: Callable[[], Awaitable[None]],
) -> kopf.OperatorRegistry:
    """Handlers that only keep and enqueue: what they raise would be swallowed, and what they miss the resync finds.
    `stop` ends everything that acts."""
    registry = kopf.OperatorRegistry()

    async def login(**kwargs: Any) -> Any:
        return session(pace, **kwargs)

    async def model(type: str | None, namespace: str, name: str, body: Any, meta: Any, status: Any, **_: Any) -> None:  # noqa: A002
        metrics.events.labels("TRTModel").inc()
        key, version = (namespace, name), meta.get("resourceVersion", "")
        if type is None and witness.delivered(key) == version:
            return  # all are listed again: this one did not change
        if type == "DELETED":
            models.drop(key)
        else:
            models.put(dict(body))
        annotations = tuple(sorted(meta.get("annotations", {}).items()))  # may be large, so only their hash is kept
        wishes = hash((meta.get("uid"), meta.get("generation"), meta.get("deletionTimestamp"), annotations))
        news = witness.deliver(key, version, wishes)
        if news or type != "MODIFIED":
            # Of the thousands that a new leader is shown first, those go ahead that changed while nobody led.
            asked = news and (type is not None or status.get("observedGeneration") != meta.get("generation"))
            queue.add(key, ASKED if asked else CHANGED)

    async def cleanup(**_: Any) -> None:
        # kopf waits five seconds for every task that was made since it began, then cancels it: ours end before.
        await stop()

    kopf.on.login(registry=registry)(login)
    kopf.on.cleanup(registry=registry)(cleanup)
    kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)(model)
    return registry


class Herald:
    """Hears of every change of a child, and has its TRTModel looked at. `job` is called for every change of a Job."""

    def __init__(self, queue: WorkQueue, metrics: OperatorMetrics) -> None:
        self._queue, self._metrics = queue, metrics
        self.job: Callable[[], None] = lambda: None

    def __call__(self, kind: str, key: Key) -> None:
        self._metrics.events.labels(kind).inc()
        self._queue.add(key)
        if kind == "Job":
            self.job()


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
        clock, queue, witness = SystemClock(), WorkQueue(), Witness()
        herald = Herald(queue, metrics)
        kept = KeptChildren(api, settings.watch_namespaces, herald)
        models, pace = KeptModels(), Pace(answered=_counted(metrics))
        cluster = KubernetesCluster(api, settings.watch_namespaces, settings.pod_name, kept, models)

        await patiently(cluster.require_crd, health)
        health.waiting_for = ""
        identity = f"{settings.pod_name}_{uuid.uuid4()}"
        lease = Lease(cluster, settings.namespace, settings.lease_name, identity)
        api.may_write = lambda: not lease.expired()
        health.watch_over(lease.trouble)
        health.needs(lease.refused, kept.refused, pace.refused)
        metrics.watch_rights(lambda: len(health.refused()))
        log.info("waiting for the lease %s/%s as %s", settings.namespace, settings.lease_name, identity)
        await lease.acquire()
        stack.push_async_callback(lease.release)
        holding = asyncio.create_task(lease.hold(), name="lease")
        holding.add_done_callback(_no_leader_without_lease)
        stack.callback(holding.cancel)
        metrics.leader.set(1)
        log.info("leading")

        key_pair = settings.namespace, settings.key_secret
        signer = await patiently(lambda: load_or_create(cluster, *key_pair), health)
        installation = await patiently(lambda: installation_id(cluster, *key_pair), health)
        health.waiting_for = ""
        workers = HttpWorkers(signer, clock, queue.add, on_call=metrics.asked_worker)
        metrics.watch(queue.depth, queue.oldest, lambda: workers.following, lambda: len(signer.public_keys()))
        builds = BuildQueue(cluster, settings.max_builds, clock.now, metrics.count_builds)
        herald.job = builds.call
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
            refusals=EventRefusals(api),
            keys=rotation,
            inquiries=inquiries,
            job_policy=job_policy,
            turns=queue,
            installation=installation,
        )
        controller = Controller(
            queue,
            reconciler.reconcile,
            cluster,
            metrics,
            witness,
            broken=lambda: os._exit(EXIT_FAILED),
            beside={
                "children": kept.run,
                "builds": _after(kept.ready, builds.run),
                "signing keys": rotation.run,
                "collector": collector.run,
            },
            before=kept.ready,
        )
        health.watch_over(controller.trouble, lease.trouble, kept.trouble)

        async def stop() -> None:
            await controller.stop()
            await workers.close()
            await inquiries.close()
            # The next one begins now: what is left of this process is to post events, and to close connections.
            holding.cancel()
            await lease.release()
            await cluster.close()

        controller.start()
        stack.push_async_callback(stop)
        scope: dict[str, Any] = (
            {"namespaces": settings.watch_namespaces} if settings.watch_namespaces else {"clusterwide": True}
        )
        registry = handlers(queue, witness, metrics, models, pace, stop)
        await kopf.operator(registry=registry, settings=informer_settings(), **scope)
        log.info("stopping")


async def patiently(ask: Callable[[], Awaitable[T]], health: Health, pause: float = WAIT_FIRST) -> T:
    """The answer, asked for until the API server is there and not too busy: a process that ended instead would be begun
    again ever more seldom, and so come back minutes after the server. Raises ClusterError if it refuses."""
    while True:
        try:
            return await ask()
        except ClusterError as e:
            if e.status and e.status != TOO_BUSY and e.status < SERVER_FAILED:
                raise
            health.waiting_for = f"the API server: {e}"
            log.warning("not begun yet: %s", e)
            await asyncio.sleep(max(e.retry_after, pause * random.uniform(0.75, 1.0)))  # noqa: S311 - spreads load
        pause = min(WAIT_MOST, pause * 2)


def _counted(metrics: OperatorMetrics) -> Callable[[bool, str, int], None]:
    """kopf's calls are calls like our own."""
    return lambda is_watch, path, code: metrics.called("WATCH" if is_watch else "GET", resource_of(path), str(code))


def _after(ready: Callable[[], Awaitable[None]], run: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    async def both() -> None:
        await ready()
        await run()

    return both


def _no_leader_without_lease(holding: asyncio.Task[None]) -> None:
    if not holding.cancelled():
        log.error("the lease is not renewed any more: this process ends now", exc_info=holding.exception())
        os._exit(EXIT_FAILED)


def allow_descriptors() -> None:
    """As many as it may need, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Console entry. Exit codes: 0 after a signal, 1 when it could not begin or a watch ended, 2 for bad settings."""
    try:
        settings = from_environment(os.environ)
    except SettingsError as e:
        print(e, file=sys.stderr)
        sys.exit(EXIT_MISCONFIGURED)
    logs.set_up(settings.log_level)
    log.info("starting: %s, worker image %s", API_VERSION, settings.worker_image)
    allow_descriptors()
    try:
        # What is loaded stays, and what a pass makes goes with it: to look for cycles at every 700 objects is in vain.
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
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
