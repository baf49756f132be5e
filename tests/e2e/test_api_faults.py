"""The operator's way to the API server leads through a proxy that fails on purpose, under steady traffic."""

from __future__ import annotations

import base64
import json
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faulty.proxy import Fault, FaultProxy, Request, lease

from . import models
from .cluster import Cluster, Json
from .conftest import NAMESPACES
from .install import RELEASE, SYSTEM, Images, Operator
from .rolling import NAME, Rolling, served
from .world import World, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.night, pytest.mark.timeout(900)]

NAMESPACE = "e2e-faults"
SECRET = "api-by-proxy"
FOLDER = "/etc/api-by-proxy"
OUTAGE_SECONDS = 30.0
REPLICAS = 2
STREAMS = 6  # TRTModels and five kinds of children, in each namespace that is looked after
# Requests in any second: at most each stream of each namespace is listed and watched, as when it begins.
MOST_IN_ONE = 2 * STREAMS * len(NAMESPACES) + 60


@pytest.fixture(scope="module")
def proxy(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    """Where pods reach this machine, which is the cluster's only node."""
    (node,) = cluster.items("/api/v1/nodes")
    address = next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP")
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json"))
    server = config["clusters"][0]["cluster"]
    authority = base64.b64decode(server["certificate-authority-data"]).decode()
    trust = ssl.create_default_context(cadata=authority)
    with FaultProxy(server["server"], tmp_path_factory.mktemp("proxy"), address, trust) as running:
        yield running


@pytest.fixture(scope="module")
def behind(cluster: Cluster, operator: Operator, proxy: FaultProxy) -> Iterator[None]:
    """The operator's pod has a kubeconfig that names the proxy, and its service account's own token."""
    (account,) = cluster.items(f"/api/v1/namespaces/{SYSTEM}/serviceaccounts", f"app.kubernetes.io/instance={RELEASE}")
    token = cluster.kubectl("create", "token", account["metadata"]["name"], "-n", SYSTEM, "--duration=1h").strip()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "proxy",
        "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "operator"}}],
        "users": [{"name": "operator", "user": {"token": token}}],
        "clusters": [
            {
                "name": "proxy",
                "cluster": {
                    "server": proxy.url,
                    "certificate-authority-data": base64.b64encode(proxy.ca.encode()).decode(),
                },
            }
        ],
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": SECRET},
        "stringData": {"kubeconfig": json.dumps(config)},
    }
    cluster.kubectl("apply", "-n", SYSTEM, "-f", "-", text=json.dumps(secret))
    patch_pod(cluster)
    until("it leads through the proxy", 60, lambda: any(lease(r) and r.verb == "PUT" for r in proxy.seen))
    yield
    proxy.recover()
    cluster.kubectl("rollout", "undo", "-n", SYSTEM, f"deployment/{RELEASE}")
    wait_rolled_out(cluster)


def patch_pod(cluster: Cluster) -> None:
    container = {
        "name": "operator",
        "env": [{"name": "KUBECONFIG", "value": f"{FOLDER}/kubeconfig"}],
        "volumeMounts": [{"name": SECRET, "mountPath": FOLDER, "readOnly": True}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [{"name": SECRET, "secret": {"secretName": SECRET}}],
    }
    patch = json.dumps({"spec": {"template": {"spec": pod}}})
    cluster.kubectl("patch", "-n", SYSTEM, f"deployment/{RELEASE}", "-p", patch)
    wait_rolled_out(cluster)


def wait_rolled_out(cluster: Cluster) -> None:
    cluster.kubectl("rollout", "status", "-n", SYSTEM, f"deployment/{RELEASE}", "--timeout=90s", seconds=100)


@pytest.fixture(scope="module")
def rolling(
    world_of: Callable[[str], World], images: Images, files: Path, endpoint: str, behind: None
) -> Iterator[Rolling]:
    manifest = models.magika(NAME, endpoint, REPLICAS)
    with served(world_of(NAMESPACE), images, files, manifest, REPLICAS) as found:
        yield found


def jobs_of(rolling: Rolling) -> dict[str, int]:
    return {kind: len(rolling.world.children("Job", NAME, f"kind={kind}")) for kind in ("resolve", "build")}


def restarts(cluster: Cluster) -> int:
    pods: list[Json] = cluster.items(f"/api/v1/namespaces/{SYSTEM}/pods", f"app.kubernetes.io/instance={RELEASE}")
    return sum(s["restartCount"] for p in pods for s in p["status"].get("containerStatuses", ()))


def report(proxy: FaultProxy, began: float) -> str:
    asked = len([r for r in proxy.seen if r.at > began])
    return f"{asked} requests in {time.monotonic() - began:.0f} s, {proxy.most_in(1, began)} in one second at most"


def test_a_rollout_ends_well_although_every_fifth_call_fails(
    rolling: Rolling, proxy: FaultProxy, cluster: Cluster
) -> None:
    def a_call(request: Request) -> bool:
        return not request.is_watch and not lease(request)

    began, begin, lives, jobs = time.monotonic(), rolling.traffic.now(), restarts(cluster), jobs_of(rolling)
    proxy.faults = (
        Fault(500, share=0.05, hits=a_call),
        Fault(429, share=0.05, hits=a_call, retry_after=1),
        Fault(409, share=0.05, hits=lambda r: a_call(r) and r.verb != "GET"),
        Fault(500, share=0.05, hits=lambda r: a_call(r) and r.verb != "GET", after=True),
    )
    candidate = rolling.roll_out()
    rolling.wait_promoted(candidate)
    proxy.recover()
    print(f"\n{proxy.hit} faults, {report(proxy, began)}")
    assert proxy.hit > 5
    assert restarts(cluster) == lives
    assert jobs_of(rolling) == {kind: count + 1 for kind, count in jobs.items()}
    assert proxy.most_in(1, began) <= MOST_IN_ONE
    rolling.traffic.assert_none_failed(begin, least=100)


def test_an_outage_of_thirty_seconds_in_mid_canary_costs_no_request_and_no_rollout(
    rolling: Rolling, proxy: FaultProxy, cluster: Cluster
) -> None:
    begin, lives = rolling.traffic.now(), restarts(cluster)
    candidate = rolling.roll_out(steps=[{"workers": 1, "hold": "8s"}])
    rolling.wait_canary()
    jobs, began = jobs_of(rolling), time.monotonic()
    assert proxy.cut_watches() >= STREAMS
    until("the watches are open again", 30, lambda: proxy.watching() >= STREAMS)
    proxy.refuse()
    away = time.monotonic()
    while time.monotonic() - away < OUTAGE_SECONDS:
        now = rolling.traffic.now()
        assert not rolling.traffic.between(now - 2, now)["failed"], rolling.traffic.failures()
        time.sleep(1.0)
    assert rolling.on_candidate(rolling.world.model(NAME)) == 1
    proxy.recover()
    rolling.wait_promoted(candidate)
    print(
        f"\nback in service {time.monotonic() - away - OUTAGE_SECONDS:.0f} s after the outage, {report(proxy, began)}"
    )
    assert restarts(cluster) == lives + 1  # it gave up its lease, and the next one waited for the server
    assert jobs_of(rolling) == jobs
    assert proxy.most_in(1, began) <= MOST_IN_ONE
    rolling.traffic.assert_none_failed(begin, least=500)
