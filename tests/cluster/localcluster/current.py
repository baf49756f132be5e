"""CLUSTER=current: a cluster that the user has. It is used, never changed, and only with leave by name."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from . import addons
from .addons import Kubectl
from .settings import ClusterError, Settings
from .shell import run

_GIVEN = ("S3_ENDPOINT", "S3_ENDPOINT_IN_CLUSTER", "OPERATOR_IMAGE", "WORKER_IMAGE")


class Current:
    """The current context of the user's kubeconfig, after it was allowed."""

    def __init__(self, settings: Settings) -> None:
        kubectl = shutil.which("kubectl")
        if kubectl is None:
            raise ClusterError("CLUSTER=current needs kubectl on PATH")
        self._program = kubectl
        self._kubeconfig = Path(os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
        self._context = run([kubectl, "config", "current-context"], timeout=30).strip()
        _require_leave(self._context)
        self._kubectl = Kubectl(kubectl, self._kubeconfig, self._context)

    def up(self) -> None:
        """Only look: nothing is installed into a cluster that is not ours."""
        if bad := [detail for _, well, detail in self.status() if not well]:
            raise ClusterError("; ".join(bad))

    def down(self, *, purge: bool) -> None:
        """Nothing to end."""

    def load(self, what: str) -> None:
        """Images come from a registry here."""
        raise ClusterError(f"push {what} to a registry that the nodes of {self._context} reach")

    def images(self) -> dict[str, str]:
        """The references that the user gives."""
        return {name: _given(name) for name in ("OPERATOR_IMAGE", "WORKER_IMAGE")}

    def environment(self) -> dict[str, str]:
        """What a client needs to know."""
        return {
            "KUBECONFIG": str(self._kubeconfig),
            "KUBECTL": self._program,
            "HELM": str(shutil.which("helm") or ""),
            **{name: _given(name) for name in _GIVEN},
        }

    def status(self) -> list[tuple[str, bool, str]]:
        """(name, whether it is well, a detail) of every part, as seen now."""
        nodes = (self._kubectl.get("nodes") or {}).get("items", [])
        ready = sum(addons.node_ready(n) for n in nodes)
        return [("nodes", ready > 0, f"{ready} of {len(nodes)} nodes of {self._context} are Ready")]


def _given(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise ClusterError(f"CLUSTER=current needs {', '.join(_GIVEN)} in the environment: {name} is missing")
    return value


def _require_leave(context: str) -> None:
    """Raise ClusterError unless the context's name is in TRTMODEL_ALLOW_CONTEXT or a person types it."""
    allowed = [c.strip() for c in os.environ.get("TRTMODEL_ALLOW_CONTEXT", "").split(",")]
    if context in allowed:
        return
    if sys.stdin.isatty():
        print(
            f"The current context is {context!r}. Type its name to use that cluster: ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        if sys.stdin.readline().strip() == context:
            return
    raise ClusterError(
        f"the context {context!r} is not allowed: set TRTMODEL_ALLOW_CONTEXT={context} to use that cluster"
    )
