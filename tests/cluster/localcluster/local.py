"""The default mode: every component a process of this machine."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import addons, binaries, controlplane, host, lock, network, node, pki
from .addons import Kubectl
from .images import PRODUCTS, Images
from .processes import Components
from .runtime import Runtime
from .settings import (
    GPU_COUNT,
    NODE,
    S3_IN_CLUSTER,
    S3_PORT,
    SERVICE_DNS,
    SERVICE_S3,
    ClusterError,
    Settings,
)
from .shell import say, wait_for

COMPONENTS = (
    "containerd",
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
)
S3_ENDPOINT = f"http://{SERVICE_S3}:{S3_PORT}"
_S3_NAME = "s3.s3.svc.cluster.local"


class Local:
    """The cluster of this machine."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._components = Components(settings.run)
        self._runtime = Runtime(settings, self._components)
        self._images = Images(settings)
        self._kubectl = Kubectl(binaries.located(settings).kubernetes("kubectl"), settings.kubeconfig)

    def up(self) -> None:
        """Start or heal the cluster and return when it serves: node Ready, DNS and S3 answering, GPUs counted."""
        host.require_root()
        with lock.exclusive(self._settings):
            self._claim()
            built = binaries.build(self._settings)
            own = self._images.infrastructure(built)
            base = self._images.base()
            network.set_up()
            pki.create(self._settings)
            self._link_tools(built)
            self._runtime.start(own["pause"])
            loading = _Background(lambda: self._load([*own.values(), base]))
            controlplane.start_storage(self._settings, self._components, built)
            self._wait("API server ready", self._api_ready, "etcd", "kube-apiserver")
            controlplane.start_controllers(self._settings, self._components, built)
            self._wait(
                "default service account",
                lambda: self._kubectl.get("-n", "default", "serviceaccount", "default") is not None,
                "kube-controller-manager",
                "kube-scheduler",
            )
            addons.apply_dns(self._kubectl, own["coredns"])
            addons.apply_s3(self._kubectl, own["versitygw"], self._settings.run / "s3", SERVICE_S3)
            loading.join()
            node.start(self._settings, self._components, built)
            self._wait("node Ready", lambda: addons.node_ready(self._node()), "containerd", "kubelet", "kube-proxy")
            addons.give_gpus(self._kubectl, NODE)
            self._wait("DNS answers", lambda: addons.dns_answers(SERVICE_DNS, _S3_NAME), *COMPONENTS)
            self._wait("S3 answers", lambda: addons.s3_answers(S3_ENDPOINT), *COMPONENTS)

    def down(self, *, purge: bool) -> None:
        """End everything that `up` started and put the host back. With purge, delete the state too."""
        host.require_root()
        with lock.exclusive(self._settings):
            self._stop()
            if purge:
                self._delete_state()
                lock.release(self._settings)
        say(
            "the cluster is down" + (", its state deleted" if purge else f"; its state is kept in {self._settings.run}")
        )

    def load(self, what: str) -> None:
        """Load an image of the cache by name, or an image archive by path."""
        host.require_root()
        with lock.exclusive(self._settings):
            self._require_containerd()
            if Path(what).is_file():
                say(self._runtime.load_archive(Path(what)).strip())
            elif self._images.store.digest(what) is not None:
                if not self._runtime.load(self._images.store, what):
                    say(f"{what} is there already")
            else:
                raise ClusterError(f"{what} is neither an image archive nor an image of {self._images.store.path}")

    def images(self) -> dict[str, str]:
        """Build the product's images, load them if the cluster is up, and return their references."""
        host.require_root()
        with lock.exclusive(self._settings):
            self._claim()
            refs = {p.name: self._images.product(p) for p in PRODUCTS}
            if self._components.alive("containerd"):
                self._load(list(refs.values()))
        return {f"{name.upper()}_IMAGE": ref for name, ref in refs.items()}

    def environment(self) -> dict[str, str]:
        """What a client needs to know. Raises ClusterError when the cluster is another clone's."""
        lock.refuse_another_clones(self._settings)
        tools = self._settings.bin
        return {
            "KUBECONFIG": str(self._settings.kubeconfig),
            "KUBECTL": str(tools / "kubectl"),
            "HELM": str(tools / "helm"),
            "S3_ENDPOINT": S3_ENDPOINT,
            "S3_ENDPOINT_IN_CLUSTER": S3_IN_CLUSTER,
            "BASE_IMAGE": self._images.base_ref(),
            "PATH": f"{tools}:{os.environ.get('PATH', '')}",
        }

    def status(self) -> list[tuple[str, bool, str]]:
        """(name, whether it is well, a detail) of every part, as seen now."""
        if not self._settings.run.exists():
            return [("cluster", False, "down: nothing of it is on this machine")]
        rows = [("owner", True, lock.owner(self._settings) or "nobody")]
        for name in COMPONENTS:
            known = self._components.identity(name)
            alive = known is not None and known.alive()
            detail = "not started" if known is None else f"pid {known.pid}" if alive else "DIED"
            rows.append(
                (name, alive, detail if alive or known is None else f"{detail}, log: {self._components.log(name)}")
            )
        api = self._components.alive("kube-apiserver") and self._api_ready()
        rows.append(("api", api, "ready" if api else "does not answer"))
        found = self._node() if api else None
        # A dead kubelet's last word stays Ready for 40 s.
        ready = addons.node_ready(found) and self._components.alive("kubelet")
        rows.append(("node", ready, f"{NODE} Ready" if ready else "not Ready"))
        gpus = addons.node_gpus(found)
        rows.append(("gpus", gpus == GPU_COUNT, f"{gpus} allocatable"))
        dns = addons.dns_answers(SERVICE_DNS, _S3_NAME)
        rows.append(("dns", dns, "answers" if dns else "does not answer"))
        s3 = addons.s3_answers(S3_ENDPOINT)
        rows.append(("s3", s3, f"answers at {S3_ENDPOINT}" if s3 else "does not answer"))
        return rows

    def _node(self) -> dict[str, Any] | None:
        return self._kubectl.get("node", NODE)

    def _api_ready(self) -> bool:
        try:
            return self._kubectl("get", "--raw", "/readyz", "--request-timeout=3s") == "ok"
        except ClusterError:
            return False

    def _wait(self, what: str, condition: Callable[[], bool], *names: str) -> None:
        wait_for(what, condition, seconds=120, check=lambda: self._components.require_alive(*names))

    def _require_containerd(self) -> None:
        if not self._components.alive("containerd"):
            raise ClusterError("the cluster is down: tests/cluster/cluster up")

    def _load(self, refs: list[str]) -> None:
        wait_for("containerd answers", self._runtime.answers, seconds=60,
                 check=lambda: self._components.require_alive("containerd"))  # fmt: skip
        for ref in refs:
            self._runtime.load(self._images.store, ref)

    def _link_tools(self, built: binaries.Binaries) -> None:
        self._settings.bin.mkdir(parents=True, exist_ok=True)
        for name, target in (("kubectl", built.kubernetes("kubectl")), ("helm", built.path("helm", "helm"))):
            link = self._settings.bin / name
            if not (link.is_symlink() and link.readlink() == target):
                link.unlink(missing_ok=True)
                link.symlink_to(target)

    def _claim(self) -> None:
        """Make the machine this clone's, after the packages that tell about it are there."""
        host.install_packages()
        held = lock.owner(self._settings)
        if held is not None and held != str(self._settings.clone):
            say(f"the clone {held} is gone: its cluster is removed")
            self._stop()
            self._delete_state()
        network.claim(self._settings)
        lock.take(self._settings)

    def _stop(self) -> None:
        # The kubelet first: it would start again what is ended. containerd last: it ends the containers.
        self._components.stop("kubelet")
        self._runtime.end_containers()
        for name in reversed(COMPONENTS):
            self._components.stop(name)
        self._runtime.unmount()
        network.put_back(self._settings)

    def _delete_state(self) -> None:
        for links in (Path("/var/log/containers"), Path("/var/log/pods")):
            for link in links.glob("*"):
                if link.is_symlink() and str(link.readlink()).startswith(f"{self._settings.run}/"):
                    link.unlink()
        say(f"deleting {self._settings.run}")
        shutil.rmtree(self._settings.run, ignore_errors=True)
        if self._settings.run.exists():
            raise ClusterError(f"{self._settings.run} could not be deleted whole: see what is mounted or open there")


class _Background(threading.Thread):
    """A step beside the main one; `join` raises what it raised."""

    def __init__(self, step: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._step = step
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._step()
        except BaseException as e:  # handed to the thread that joins
            self._error = e

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._error is not None:
            raise self._error
