"""After a model that serves and one whose credentials are refused: no secret stands where people or programs read."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator

import pytest

from . import models
from .cluster import Cluster, Json
from .install import RELEASE, SYSTEM, Operator
from .world import World, until

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

NAMESPACE = "e2e-cli"
PUBLIC = ("AWS_ACCESS_KEY_ID", "ed25519-previous-public")
KINDS = "trtmodels,jobs,deployments,replicasets,pods,configmaps,services,poddisruptionbudgets,events"


@pytest.fixture(scope="module")
def world(world_of: Callable[[str], World], endpoint: str) -> Iterator[World]:
    """`open` serves, and `shut` was told that S3 does not know it."""
    found = world_of(NAMESPACE)
    wrong = {**models.storage(endpoint), "credentialsSecret": "s3-wrong"}
    found.apply(models.tiny("open", endpoint), models.tiny("shut", endpoint, storage=wrong))
    found.wait_ready("open", 120)
    until("shut is refused", 90, lambda: "AccessDenied" in json.dumps(found.model("shut").get("status", {})))
    yield found
    found.kubectl("delete", "trtmodel/open", "trtmodel/shut", "--wait=false")


def secrets(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """(what it is, how it could stand somewhere) of each value: as it is, in base64, in hexadecimal."""
    for namespace, name in ((NAMESPACE, models.SECRET), (NAMESPACE, "s3-wrong"), (SYSTEM, f"{RELEASE}-signing")):
        found: Json = json.loads(cluster.kubectl("get", "secret", name, "-n", namespace, "-o", "json"))
        for key, coded in found["data"].items():
            if key in PUBLIC:
                continue
            value = base64.b64decode(coded)
            yield f"{name} {key}", value.decode(errors="backslashreplace")
            yield f"{name} {key} in base64", base64.b64encode(value).decode().rstrip("=")
            yield f"{name} {key} in hexadecimal", value.hex()


def test_no_secret_is_in_logs_events_status_or_any_object_but_secrets(
    world: World, cluster: Cluster, operator: Operator
) -> None:
    hidden = list(secrets(cluster))
    assert len(hidden) == 9
    told = {"objects": cluster.kubectl("get", KINDS, "-n", NAMESPACE, "-o", "json", seconds=90)}
    told["objects of the operator"] = cluster.kubectl("get", "all,configmaps,events,leases", "-n", SYSTEM, "-o", "json")
    for namespace in (NAMESPACE, SYSTEM):
        for pod in cluster.items(f"/api/v1/namespaces/{namespace}/pods"):
            name = pod["metadata"]["name"]
            told[f"log of {name}"] = cluster.kubectl(
                "logs", name, "-n", namespace, "--all-containers", "--ignore-errors", seconds=70
            )
    assert [f"{what} in {where}" for what, text in hidden for where, page in told.items() if text in page] == []
