"""The API server, seen by a program and by a person."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from crd_manifests import Json
from kubernetes import client
from kubernetes.client.exceptions import ApiException

CALL_SECONDS = 60
REFUSALS = (400, 422, 500)  # 500: an apply of a field that the schema does not have
GROUP, VERSION, PLURAL = "trtmodel.io", "v1alpha1", "trtmodels"


@dataclass(frozen=True)
class Api:
    """One namespace of the local cluster."""

    models: client.CustomObjectsApi
    namespace: str
    environment: Mapping[str, str]

    def create(self, body: Json, *, dry_run: bool = True) -> Json:
        """As kubectl does it: unknown fields are an error."""
        options: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
        made: Json = self.models.create_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, body,
            field_validation="Strict", _request_timeout=CALL_SECONDS, **options,
        )  # fmt: skip
        return made

    def patch(self, name: str, body: Json) -> Json:
        made: Json = self.models.patch_namespaced_custom_object(
            GROUP, VERSION, self.namespace, PLURAL, name, body,
            field_validation="Strict", _request_timeout=CALL_SECONDS, _content_type="application/merge-patch+json",
        )  # fmt: skip
        return made

    def apply_status(self, name: str, status: Json, manager: str = "test") -> Json:
        """Server-side, as the operator writes it."""
        body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "TRTModel", "status": status}
        made: Json = self.models.patch_namespaced_custom_object_status(
            GROUP, VERSION, self.namespace, PLURAL, name, body, field_manager=manager, force=True,
            _request_timeout=CALL_SECONDS, _content_type="application/apply-patch+yaml",
        )  # fmt: skip
        return made

    def refusal(self, body: Json) -> str:
        """What the API server says to `body`; empty if it accepts it."""
        return refusal_of(lambda: self.create(body))

    def kubectl(self, *arguments: str) -> str:
        """Output of kubectl in our namespace. Raises AssertionError with what it said when it fails."""
        done = subprocess.run(
            [*shlex.split(self.environment["KUBECTL"]), "--namespace", self.namespace, *arguments],
            capture_output=True, text=True, timeout=CALL_SECONDS, check=False,
            env={**os.environ, **self.environment},
        )  # fmt: skip
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr or done.stdout}"
        return done.stdout


def refusal_of(call: Callable[[], Any]) -> str:
    """What the API server says to `call`; empty if it accepts it. Raises ApiException when it is not about the body."""
    try:
        call()
    except ApiException as e:
        if e.status in REFUSALS:
            return str(json.loads(e.body)["message"])
        raise
    return ""
