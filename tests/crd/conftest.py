"""A namespace of our own on the real API server of the local cluster."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping

import pytest
from crd_api import CALL_SECONDS, Api
from crd_manifests import DEFINITION
from kubernetes import client, config


@pytest.fixture(scope="session")
def api(cluster_environment: Mapping[str, str]) -> Iterator[Api]:
    """With today's definition applied. The namespace is removed at the end."""
    connection = config.new_client_from_config(cluster_environment["KUBECONFIG"])
    found = Api(client.CustomObjectsApi(connection), f"crd-{secrets.token_hex(4)}", cluster_environment)
    core = client.CoreV1Api(connection)
    found.kubectl("apply", "-f", str(DEFINITION))
    found.kubectl("wait", "--for=condition=Established", "crd/trtmodels.trtmodel.io", "--timeout=30s")
    core.create_namespace({"metadata": {"name": found.namespace}}, _request_timeout=CALL_SECONDS)
    try:
        yield found
    finally:
        core.delete_namespace(found.namespace, _request_timeout=CALL_SECONDS)
