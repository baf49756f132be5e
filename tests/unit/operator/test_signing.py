from __future__ import annotations

import asyncio
import base64
import copy
import json

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from trtmodel_contract.codec import decode, dumps, loads
from trtmodel_contract.control import POINTER_FILE, POINTER_SIGNATURE_FILE, BootPointer, DesiredRequest, Fence, Role
from trtmodel_contract.identity import ModelRef, Storage
from trtmodel_contract.signing import Signature, artifact_payload, key_id, pointer_payload
from trtmodel_operator.adapters import signing
from trtmodel_operator.model import ApplyPointer, Artifact, Deployed, PlannedEngine, Signal
from trtmodel_operator.ports import Conflict, Json

MODEL = ModelRef("ml", "magika", "uid-1")
STABLE, CANDIDATE = "a" * 64, "b" * 64


class Secrets:
    def __init__(self) -> None:
        self.held: Json | None = None
        self.created = 0

    async def get_secret(self, namespace: str, name: str) -> Json | None:
        await asyncio.sleep(0)
        return copy.deepcopy(self.held)

    async def create_secret(self, secret: Json) -> Json:
        await asyncio.sleep(0)
        if self.held is not None:
            raise Conflict("exists")
        self.created += 1
        self.held = copy.deepcopy(secret)
        return secret

    async def replace_secret(self, secret: Json) -> Json:
        raise AssertionError("nothing is exchanged here")


def signer(secrets: Secrets | None = None) -> signing.Ed25519Signer:
    return asyncio.run(signing.load_or_create(secrets or Secrets(), "ops", "keys"))


def verify(keys: dict[str, str], signature: Signature, payload: bytes) -> None:
    public = Ed25519PublicKey.from_public_bytes(base64.b64decode(keys[signature.key_id]))
    public.verify(base64.b64decode(signature.value), payload)


def test_the_key_pair_is_made_once_and_read_afterwards() -> None:
    secrets = Secrets()
    first, second = signer(secrets), signer(secrets)
    assert first.public_keys() == second.public_keys()
    assert secrets.created == 1


def test_two_replicas_that_begin_together_end_with_one_key_pair() -> None:
    async def go() -> list[signing.Ed25519Signer]:
        secrets = Secrets()
        return list(await asyncio.gather(*(signing.load_or_create(secrets, "ops", "keys") for _ in range(2))))

    first, second = asyncio.run(go())
    assert first.public_keys() == second.public_keys()


@pytest.mark.parametrize("data", [{}, {"ed25519": ""}, {"ed25519": "AAAA"}, {"ed25519": "no base64!"}, None])
def test_a_secret_without_a_usable_key_is_named_with_the_way_out(data: Json | None) -> None:
    secrets = Secrets()
    secrets.held = {"metadata": {}, "data": data}
    with pytest.raises(signing.SigningKeyError, match=r"ops/keys .* restore it, or delete it"):
        signer(secrets)


def test_the_installation_is_named_by_its_secret() -> None:
    secrets = Secrets()
    assert asyncio.run(signing.installation_id(secrets, "ops", "keys")) == ""
    signer(secrets)
    assert secrets.held is not None
    secrets.held["metadata"]["uid"] = "uid-7"
    assert asyncio.run(signing.installation_id(secrets, "ops", "keys")) == "uid-7"


def test_the_key_id_is_made_of_the_public_key() -> None:
    ((name, public),) = signer().public_keys().items()
    assert name == key_id(base64.b64decode(public))


def test_a_desired_request_carries_the_fence_and_an_engine_signature_that_verifies_for_this_model_only() -> None:
    held = signer()
    engines = (PlannedEngine(Role.STABLE, "r1", STABLE), PlannedEngine(Role.CANDIDATE, "r2", CANDIDATE))
    signal = Signal("pod", "pod-uid", "10.0.0.1", engines, STABLE, CANDIDATE, 100, "w1", may_drain=True)
    request = loads(DesiredRequest, dumps(signing.desired_request(held, MODEL, 7, signal)))
    assert request.desired.fence == Fence("uid-1", 7)
    asked = request.desired.models["magika"]
    assert (asked.routes.stable, asked.routes.candidate, asked.routes.weight) == (STABLE, CANDIDATE, 100)
    assert (asked.window, asked.may_drain) == ("w1", True)
    assert [(e.role, e.artifact.revision, e.artifact.manifest_digest) for e in asked.engines] == [
        (Role.STABLE, "r1", STABLE),
        (Role.CANDIDATE, "r2", CANDIDATE),
    ]
    keys = dict(held.public_keys())
    for engine in asked.engines:
        verify(keys, engine.artifact.signature, artifact_payload(MODEL, engine.artifact.manifest_digest))
    other = ModelRef("ml", "other", "uid-2")
    with pytest.raises(InvalidSignature):
        verify(keys, asked.engines[0].artifact.signature, artifact_payload(other, STABLE))


def stored(held: signing.Ed25519Signer) -> Json:
    stable = Deployed("r1", (Artifact("a10", "key-a10", STABLE), Artifact("l4", "key-l4", "c" * 64)))
    standby = Deployed("r0", (Artifact("a10", "key-a10", CANDIDATE),))
    action = ApplyPointer("magika-a10-1234", "a10", 3, stable, standby, Storage("bucket"))
    return signing.pointer_config_map(held, MODEL, action)


def test_a_pointer_names_the_engines_of_its_own_target_only() -> None:
    found = loads(BootPointer, stored(signer())["data"][POINTER_FILE])
    assert found.stable.artifacts.keys() == {"key-a10"}
    assert found.stable.artifacts["key-a10"].manifest_digest == STABLE
    assert found.standby is not None
    assert found.standby.artifacts["key-a10"].manifest_digest == CANDIDATE


def test_the_pointers_signature_is_over_the_exact_text_that_is_stored() -> None:
    held = signer()
    data = stored(held)["data"]
    text, found = data[POINTER_FILE], decode(Signature, json.loads(data[POINTER_SIGNATURE_FILE]))
    keys = dict(held.public_keys())
    verify(keys, found, pointer_payload(text.encode()))
    with pytest.raises(InvalidSignature):
        verify(keys, found, pointer_payload(text.replace('"sequence":3', '"sequence":4').encode()))


def test_what_did_not_change_is_signed_the_same() -> None:
    held = signer()
    assert stored(held) == stored(held)
