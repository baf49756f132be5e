"""Certificates of a private CA, and keys that change while they are used."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from storage_servers import ACCESS, PART, Answer, Stub, objects, ranged, serving
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.control import BootPointer, PointerEntry
from trtmodel_contract.identity import ModelRef, Storage
from trtmodel_contract.jobs import Reason
from trtmodel_worker.storage import ArtifactStore, StorageError, fetch_uri

BIG = hashlib.sha256(b"keys").digest() * (5 * PART // 64)


@dataclass(frozen=True)
class Authority:
    """A CA, and the certificate that it gave to localhost."""

    pem: str
    server: ssl.SSLContext


def authority(folder: Path, name: str) -> Authority:
    now = datetime.datetime.now(datetime.timezone.utc)

    def certificate(
        subject: str, key: ec.EllipticCurvePrivateKey, issuer: str, signer: ec.EllipticCurvePrivateKey, *, ca: bool
    ) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
            .sign(signer, hashes.SHA256())
        )

    root, leaf = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    pem = serialization.Encoding.PEM
    both = folder / f"{name}.pem"
    both.write_bytes(
        leaf.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate("localhost", leaf, name, root, ca=False).public_bytes(pem)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(both)
    return Authority(certificate(name, root, name, root, ca=True).public_bytes(pem).decode(), server)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("ca"), "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("ca"), "other")


@pytest.fixture
def secure(ours: Authority) -> Iterator[Stub]:
    with serving(ours.server) as found:
        found.answer = objects(m_onnx=b"model")
        yield found


def test_D06_a_private_ca_is_trusted_for_sources_behind_https(
    secure: Stub, ours: Authority, other: Authority, tmp_path: Path
) -> None:
    bundle = f"{other.pem}\n{ours.pem}"
    found = fetch_uri(f"{secure.url}/m.onnx", Storage("engines", ca_bundle=bundle), None, tmp_path / "cache")
    assert found.path.read_bytes() == b"model"


def test_D06_a_private_ca_is_trusted_for_s3(secure: Stub, ours: Authority, credentials: Path, tmp_path: Path) -> None:
    storage = Storage("engines", endpoint=secure.url, ca_bundle=ours.pem)
    assert fetch_uri("s3://models/m.onnx", storage, credentials, tmp_path / "cache").size == 5


def test_D06_another_ca_after_a_rotation_needs_no_restart(
    secure: Stub, ours: Authority, other: Authority, credentials: Path
) -> None:
    secure.answer = lambda *_: Answer(200)
    for pem, trusted in ((other.pem, False), (ours.pem, True)):
        store = ArtifactStore(Storage("engines", endpoint=secure.url, ca_bundle=pem), "ml", credentials)
        if trusted:
            store.put_bytes(b"plan")
        else:
            with pytest.raises(StorageError, match=r"spec\.storage\.caBundle"):
                store.put_bytes(b"plan")


@pytest.mark.parametrize("uri", ["{}/m.onnx", "s3://models/m.onnx"])
def test_D06_an_unknown_ca_is_a_matter_of_tls_with_the_way_out(
    secure: Stub, other: Authority, credentials: Path, tmp_path: Path, uri: str
) -> None:
    storage = Storage("engines", endpoint=secure.url, ca_bundle=other.pem)
    with pytest.raises(StorageError, match=r"TLS failed.*spec\.storage\.caBundle") as e:
        fetch_uri(uri.format(secure.url), storage, credentials, tmp_path / "cache")
    assert e.value.reason is Reason.STORAGE_UNAVAILABLE


@pytest.mark.parametrize(
    "text", ["-----BEGIN", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
@pytest.mark.parametrize("uri", ["https://localhost:1/m.onnx", "s3://models/m.onnx"])
def test_a_bundle_that_holds_no_certificate_is_named(credentials: Path, tmp_path: Path, text: str, uri: str) -> None:
    storage = Storage("engines", endpoint="https://localhost:1", ca_bundle=text)
    with pytest.raises(StorageError, match="no list of PEM certificates"):
        fetch_uri(uri, storage, credentials, tmp_path / "cache")


def test_a_document_without_a_bundle_keeps_its_bytes() -> None:
    pointer = BootPointer(ModelRef("ml", "m", "u"), Storage("engines"), 3, PointerEntry("0123456789", {}))
    assert b"caBundle" not in dumps(pointer)
    with_one = BootPointer(ModelRef("ml", "m", "u"), Storage("b", ca_bundle="pem"), 3, PointerEntry("0123456789", {}))
    assert loads(BootPointer, dumps(with_one)).storage.ca_bundle == "pem"


def refusal(code: str) -> Answer:
    return Answer(403, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>so it is</Message></Error>".encode())


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_keys_that_end_in_mid_download_are_read_again(
    stub: Stub, stub_storage: Storage, credentials: Path, tmp_path: Path, code: str
) -> None:
    """As the kubelet does it: the file is replaced, and nobody is told."""
    (tmp_path / "renewed").write_text("renewed")

    def answer(method: str, _path: str, headers: Mapping[str, str]) -> Answer:
        if len(stub.requests) > 2:
            with contextlib.suppress(FileNotFoundError):
                (tmp_path / "renewed").replace(credentials / "AWS_ACCESS_KEY_ID")
            if "Credential=renewed/" not in headers["Authorization"]:
                return refusal(code)
        return ranged(BIG, headers)

    stub.answer = answer
    assert fetch_uri("s3://models/m", stub_storage, credentials, tmp_path / "cache").path.read_bytes() == BIG


def test_keys_that_have_expired_are_not_called_wrong(
    stub: Stub, stub_storage: Storage, credentials: Path, tmp_path: Path
) -> None:
    stub.answer = lambda *_: refusal("ExpiredToken")
    with pytest.raises(StorageError, match=r"credentials have expired.*read again") as e:
        fetch_uri("s3://models/m", stub_storage, credentials, tmp_path / "cache")
    assert (e.value.reason, e.value.transient) == (Reason.STORAGE_UNAVAILABLE, True)
    assert len(stub.requests) == 3


def test_a_session_token_is_sent_with_temporary_keys(stub: Stub, stub_storage: Storage, credentials: Path) -> None:
    seen: list[tuple[bool, str | None]] = []

    def answer(_method: str, _path: str, headers: Mapping[str, str]) -> Answer:
        seen.append((f"Credential={ACCESS}/" in headers["Authorization"], headers.get("x-amz-security-token")))
        return Answer(200)

    stub.answer = answer
    (credentials / "AWS_SESSION_TOKEN").write_text("token\n")
    ArtifactStore(stub_storage, "ml", credentials).put_bytes(b"1")
    assert seen == [(True, "token")]
