"""The product, installed once; a namespace for each subject. TRTMODEL_E2E_KEEP=1 leaves all of it to be looked at."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from . import models, sources
from .cluster import Cluster
from .install import RELEASE, SYSTEM, Images, Operator, build_images
from .s3 import DATA, ENGINES, MODELS, Store
from .world import World

NAMESPACES = (
    "e2e-first",
    "e2e-canary",
    "e2e-steps",
    "e2e-gates",
    "e2e-bad",
    "e2e-builds",
    "e2e-platform",
    "e2e-cli",
    "e2e-watched",
    "e2e-gone",
    "e2e-keys",
    "e2e-targets",
    "e2e-faults",
    "e2e-memory",
    "e2e-mishaps",
    "e2e-scenarios",
    "e2e-more",
)
KEEP = os.environ.get("TRTMODEL_E2E_KEEP") == "1"
DELETE_SECONDS = 120


@pytest.fixture(scope="session")
def cluster(cluster_environment: Mapping[str, str]) -> Iterator[Cluster]:
    found = Cluster(cluster_environment)
    yield found
    found.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and data sets: tiny/ and magika/."""
    out = tmp_path_factory.mktemp("sources")
    for name, write in (("tiny", sources.write_tiny), ("magika", sources.write_magika)):
        (out / name).mkdir()
        write(out / name)
    return out


@pytest.fixture(scope="session")
def store(cluster: Cluster, files: Path) -> Store:
    """With everything uploaded, and no engine of an earlier run."""
    found = Store(cluster.environment)
    found.make_buckets()
    for file in sorted(files.glob("*/*")):
        found.put(MODELS if file.suffix == ".onnx" else DATA, f"{file.parent.name}/{file.name}", file)
    for namespace in NAMESPACES:
        found.delete(ENGINES, f"trtmodel/{namespace}/")
    return found


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Images:
    return build_images()


@pytest.fixture(scope="session")
def operator(cluster: Cluster, images: Images) -> Iterator[Operator]:
    _delete_namespaces(cluster)
    for namespace in (SYSTEM, *NAMESPACES):
        cluster.kubectl("create", "namespace", namespace)
    for namespace in NAMESPACES:
        make_secrets(cluster, namespace)
    found = Operator(cluster, images, NAMESPACES)
    found.install()
    yield found
    if not KEEP:
        _delete_namespaces(cluster, wait=False)


@pytest.fixture(scope="session")
def endpoint(cluster: Cluster) -> str:
    """Of S3, as pods reach it."""
    return cluster.environment["S3_ENDPOINT_IN_CLUSTER"]


@pytest.fixture(scope="session")
def world_of(cluster: Cluster, operator: Operator, store: Store) -> Callable[[str], World]:
    return lambda namespace: World(cluster, namespace, (SYSTEM, RELEASE))


def make_secrets(cluster: Cluster, namespace: str) -> None:
    """The credentials that are right, and others that S3 does not know."""
    key, secret = cluster.environment["AWS_ACCESS_KEY_ID"], cluster.environment["AWS_SECRET_ACCESS_KEY"]
    world = World(cluster, namespace, (SYSTEM, RELEASE))
    world.apply(models.secret(models.SECRET, key, secret), models.secret("s3-wrong", key, "not-the-secret"))


def _delete_namespaces(cluster: Cluster, *, wait: bool = True) -> None:
    cluster.kubectl(
        "delete", "namespace", SYSTEM, *NAMESPACES, "--ignore-not-found", f"--wait={str(wait).lower()}",
        f"--timeout={DELETE_SECONDS}s", seconds=DELETE_SECONDS + 10,
    )  # fmt: skip
