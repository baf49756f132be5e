"""Certificates and kubeconfigs, made with openssl once and kept with the state."""

from __future__ import annotations

from pathlib import Path

from .settings import API_PORT, NODE, NODE_IP, SERVICE_API, Settings
from .shell import run

_OPENSSL_SECONDS = 60.0
_DAYS = "3650"
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_API_NAMES = ",".join(
    [f"IP:{NODE_IP}", f"IP:{SERVICE_API}", "IP:127.0.0.1", "DNS:localhost"]
    + [f"DNS:kubernetes{s}" for s in ("", ".default", ".default.svc", ".default.svc.cluster.local")]
)
CONTEXT = "trtmodel-local"


def _openssl(*args: str | Path) -> None:
    run(["openssl", *args], timeout=_OPENSSL_SECONDS)


def create(settings: Settings) -> None:
    """Make whatever is missing below run/pki."""
    pki = settings.run / "pki"
    pki.mkdir(parents=True, exist_ok=True)
    pki.chmod(0o700)
    if not (pki / "ca.crt").exists():
        _openssl("req", "-x509", *_CURVE, "-days", _DAYS, "-subj", "/CN=trtmodel-local-ca",
                 "-addext", "basicConstraints=critical,CA:true",
                 "-addext", "keyUsage=critical,keyCertSign,digitalSignature",
                 "-keyout", pki / "ca.key", "-out", pki / "ca.crt")  # fmt: skip
    if not (pki / "sa.pub").exists():
        _openssl("genrsa", "-out", pki / "sa.key", "2048")
        _openssl("rsa", "-in", pki / "sa.key", "-pubout", "-out", pki / "sa.pub")
    _certificate(pki, "apiserver", "/CN=kube-apiserver", _API_NAMES)
    _certificate(pki, "kubelet-client", "/O=system:masters/CN=apiserver-kubelet-client")
    _certificate(pki, "kubelet-serving", f"/CN={NODE}", f"IP:{NODE_IP},DNS:{NODE}")
    _certificate(pki, "front-proxy", "/CN=front-proxy-client")
    for name, subject in (
        ("admin", "/O=system:masters/CN=admin"),
        ("kube-controller-manager", "/CN=system:kube-controller-manager"),
        ("kube-scheduler", "/CN=system:kube-scheduler"),
        ("kubelet", f"/O=system:nodes/CN=system:node:{NODE}"),
        ("kube-proxy", "/CN=system:kube-proxy"),
    ):
        _certificate(pki, name, subject)
        _kubeconfig(pki, name)
    for private in pki.glob("*.key"):
        private.chmod(0o600)


def _certificate(pki: Path, name: str, subject: str, names: str = "") -> None:
    if (pki / f"{name}.crt").exists():
        return
    request, extensions = pki / f"{name}.csr", pki / f"{name}.ext"
    _openssl("req", "-new", *_CURVE, "-subj", subject, "-keyout", pki / f"{name}.key", "-out", request)
    extensions.write_text("extendedKeyUsage=clientAuth,serverAuth\n" + (f"subjectAltName={names}\n" if names else ""))
    _openssl("x509", "-req", "-in", request, "-CA", pki / "ca.crt", "-CAkey", pki / "ca.key",
             "-CAcreateserial", "-days", _DAYS, "-extfile", extensions, "-out", pki / f"{name}.crt")  # fmt: skip
    request.unlink()
    extensions.unlink()


def _kubeconfig(pki: Path, name: str) -> None:
    path = pki / f"{name}.conf"
    if path.exists():
        return
    path.write_text(
        f"""apiVersion: v1
kind: Config
clusters: [{{name: c, cluster: {{server: "https://{NODE_IP}:{API_PORT}", certificate-authority: {pki}/ca.crt}}}}]
users: [{{name: u, user: {{client-certificate: {pki}/{name}.crt, client-key: {pki}/{name}.key}}}}]
contexts: [{{name: {CONTEXT}, context: {{cluster: c, user: u}}}}]
current-context: {CONTEXT}
"""
    )
    path.chmod(0o600)
