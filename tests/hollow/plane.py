"""etcd and kube-apiserver alone, on loopback ports of their own, with their state in one folder.

No controllers, no scheduler, no kubelet: what they would do, `hollow` does or leaves out. Nothing is shared with the
local cluster, so both may run at once. Users: `operator`, who is nobody special to the API server's priority and
fairness, and `hollow`, who is exempt from it. Everybody may do everything, unless `authorization` is RBAC.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cluster"))

from free_ports import free_port
from localcluster import binaries, settings

Json = dict[str, Any]

READY_SECONDS = 90.0
STOP_SECONDS = 15.0
CRD = Path(__file__).resolve().parents[2] / "crds" / "trtmodel.yaml"
USERS = {"operator": "system:serviceaccounts", "hollow": "system:masters"}


class ControlPlane:
    """Use as a context manager. The API server may be killed and started again in between, with other `options`."""

    def __init__(self, folder: Path, *options: str, authorization: str = "AlwaysAllow") -> None:
        self.options, self._authorization = options, authorization
        self._folder, self._programs = folder, binaries.build(settings.from_environment(), ("kubernetes",))
        self._etcd = f"http://127.0.0.1:{free_port()}"
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ControlPlane:
        self._folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop)
            self._write_identities()
            self._start_etcd()
            self.start_server()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for name in ("kube-apiserver", "etcd"):
            self._end(name, signal.SIGTERM)

    def kill_server(self) -> None:
        self._end("kube-apiserver", signal.SIGKILL)

    def pid(self, name: str) -> int:
        """Of etcd or kube-apiserver."""
        return self._running[name].pid

    @property
    def etcd(self) -> str:
        """Its address."""
        return self._etcd

    def start_server(self) -> None:
        """Returns when it answers. Raises RuntimeError with the end of its log."""
        folder = self._folder
        self._start(
            "kube-apiserver",
            "--etcd-servers", self._etcd, "--bind-address", "127.0.0.1", "--advertise-address", "127.0.0.1",
            "--secure-port", str(self.port), "--cert-dir", str(folder / "certificates"),
            "--token-auth-file", str(folder / "tokens.csv"), "--authorization-mode", self._authorization,
            "--service-account-issuer", "https://kubernetes.default.svc",
            "--service-account-key-file", str(folder / "sa.key"),
            "--service-account-signing-key-file", str(folder / "sa.key"),
            "--service-cluster-ip-range", "10.96.0.0/12", "--endpoint-reconciler-type", "none",
            "--disable-admission-plugins", "ServiceAccount", "--profiling=false", *self.options,
        )  # fmt: skip
        deadline = time.monotonic() + READY_SECONDS
        while not self._answers("/readyz"):
            if self._running["kube-apiserver"].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the API server did not become ready:\n{self._tail('kube-apiserver')}")
            time.sleep(0.1)

    def kubeconfig(self, user: str) -> Path:
        return self._folder / f"{user}.kubeconfig"

    def kubectl(self, *args: str, text: str | None = None) -> str:
        """Raises CalledProcessError; what kubectl said is in it."""
        command = [str(self._programs.kubernetes("kubectl")), "--kubeconfig", str(self.kubeconfig("hollow")), *args]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def install_crd(self, *namespaces: str) -> None:
        """And the namespaces."""
        self.kubectl("apply", "--server-side", "-f", str(CRD))
        deadline = time.monotonic() + READY_SECONDS
        while not self._established():
            if time.monotonic() > deadline:
                raise RuntimeError("the API server does not serve TRTModels")
            time.sleep(0.1)
        for namespace in namespaces:
            self.kubectl("create", "namespace", namespace)

    def _established(self) -> bool:
        crd = json.loads(self.kubectl("get", "crd/trtmodels.trtmodel.io", "-o", "json"))
        conditions = {c["type"]: c["status"] for c in crd["status"].get("conditions") or ()}
        return conditions.get("Established") == "True"

    def _write_identities(self) -> None:
        tokens = [f"{user}-token,{user},{user},{group}" for user, group in USERS.items()]
        (self._folder / "tokens.csv").write_text("\n".join(tokens) + "\n")
        key = self._folder / "sa.key"
        subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True, timeout=60)
        for user in USERS:
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "plane",
                "contexts": [{"name": "plane", "context": {"cluster": "plane", "user": user}}],
                "clusters": [{"name": "plane", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
                "users": [{"name": user, "user": {"token": f"{user}-token"}}],
            }
            self.kubeconfig(user).write_text(json.dumps(config))

    def _start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{free_port()}"
        self._start(
            "etcd",
            "--name", "plane", "--data-dir", str(self._folder / "etcd"), "--unsafe-no-fsync", "--log-level", "warn",
            "--listen-client-urls", self._etcd, "--advertise-client-urls", self._etcd,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"plane={peer}",
            "--quota-backend-bytes", str(8 << 30),
        )  # fmt: skip

    def _start(self, name: str, *args: str) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [str(self._programs.kubernetes(name)), *args]
            self._running[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _end(self, name: str, how: signal.Signals) -> None:
        process = self._running.pop(name, None)
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _answers(self, path: str) -> bool:
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        request = urllib.request.Request(f"{self.url}{path}", headers={"Authorization": "Bearer hollow-token"})
        try:
            with urllib.request.urlopen(request, timeout=5, context=trusting) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def _tail(self, name: str) -> str:
        with (self._folder / f"{name}.log").open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 3000))
            return log.read().decode(errors="replace")
