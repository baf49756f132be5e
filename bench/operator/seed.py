"""Thousands of TRTModels that all serve, without the hour that it takes to bring them there: one is brought there by a
real operator, and what lies in etcd of it is copied under other names.

A copy is what the operator would have left behind a day ago: its Jobs are gone, and the hashes are the operator's own
for its name. That nothing is written when an operator starts beside the copies shows that they are right.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import urllib.request
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hollow.operators import NAMESPACE
from hollow.workers import HollowWorker
from trtmodel_contract.codec import dumps, loads
from trtmodel_contract.control import POINTER_FILE, BootPointer, Report
from trtmodel_contract.identity import ModelRef
from trtmodel_operator import manifests
from trtmodel_operator.adapters.observe import observe
from trtmodel_operator.adapters.signing import Ed25519Signer, read_keys
from trtmodel_operator.decide import decide
from trtmodel_operator.decide.jobs import resolve_key
from trtmodel_operator.decide.turn import Turn
from trtmodel_operator.model import ApplyWorkload, Decision, Observed

Json = dict[str, Any]
Pairs = dict[str, bytes]  # etcd's keys and values

SECRET = "trtmodel-operator-signing"
TEMPLATE = ("template-team", "template-model")
KINDS = ("trtmodel.io/trtmodels", "pods", "deployments", "configmaps", "services/specs", "poddisruptionbudgets")
GONE = ("/registry/events/", "/registry/jobs/")
ROLE_JOB = b'"trtmodel.io/role":"job"'
FIRST_WORKER = 0x7F400001  # 127.64.0.1
FIRST_SERVICE = 0x0A640001  # 10.100.0.1
IN_ONE = 100  # etcd takes 128 operations at once
_UID = re.compile(rb'"uid":"([0-9a-f-]{36})"')


class Etcd:
    """Through its JSON gateway."""

    def __init__(self, url: str) -> None:
        self._url = url

    def all(self, prefix: str = "/registry/") -> Pairs:
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self._call("range", {"key": _b64(prefix), "range_end": _b64(end)})
        return {base64.b64decode(kv["key"]).decode(): base64.b64decode(kv["value"]) for kv in found.get("kvs") or ()}

    def put(self, pairs: Iterable[tuple[str, bytes]]) -> None:
        batch: list[Json] = []
        for key, value in pairs:
            batch.append({"requestPut": {"key": _b64(key), "value": base64.b64encode(value).decode()}})
            if len(batch) == IN_ONE:
                self._call("txn", {"success": batch})
                batch = []
        if batch:
            self._call("txn", {"success": batch})

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._call("deleterange", {"key": _b64(key)})

    def _call(self, what: str, body: Json) -> Json:
        request = urllib.request.Request(f"{self._url}/v3/kv/{what}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return dict(json.loads(answer.read()))


@dataclass(frozen=True)
class Template:
    """What lies in etcd of the one model, as one text: a copy is made of it by putting other names into it."""

    pairs: Pairs
    signer: Ed25519Signer
    installation: str
    image: str

    @classmethod
    def of(cls, etcd: Etcd, secret: str, image: str) -> Template:
        everything = etcd.all()
        namespace, name = (text.encode() for text in TEMPLATE)
        mine = {
            key: value
            for key, value in everything.items()
            if name in value and namespace in value and not key.startswith(GONE) and ROLE_JOB not in value
        }
        kept = json.loads(everything[f"/registry/secrets/{NAMESPACE}/{secret}"])
        return cls(mine, Ed25519Signer(read_keys(kept, NAMESPACE, secret)), kept["metadata"]["uid"], image)

    def addresses(self) -> tuple[list[str], str]:
        """Of its workers, and of its Service."""
        pods = [json.loads(value) for key, value in self.pairs.items() if key.startswith("/registry/pods/")]
        service = next(json.loads(v) for k, v in self.pairs.items() if k.startswith("/registry/services/specs/"))
        return sorted(ip for p in pods if (ip := p["status"].get("podIP"))), service["spec"]["clusterIP"]

    def copies(self, keys: Iterable[tuple[str, str]]) -> Iterator[tuple[str, bytes]]:
        workers, cluster_ip = self.addresses()
        uids = sorted({uid for value in self.pairs.values() for uid in _UID.findall(value)})
        glue = b"\x00"
        text = glue.join(part for key, value in self.pairs.items() for part in (key.encode(), value))
        loop = asyncio.new_event_loop()
        try:
            for number, key in enumerate(keys):
                new = {TEMPLATE[0]: key[0], TEMPLATE[1]: key[1], cluster_ip: _ip(FIRST_SERVICE + number)}
                new |= {ip: _ip(FIRST_WORKER + number * len(workers) + i) for i, ip in enumerate(workers)}
                new |= {uid.decode(): str(uuid.uuid5(uuid.UUID(uid.decode()), key[1])) for uid in uids}
                pattern = re.compile("|".join(rf"{re.escape(old)}(?![0-9])" for old in new).encode())
                parts = pattern.sub(lambda m, new=new: new[m[0].decode()].encode(), text).split(glue)  # type: ignore[misc]
                pairs = {k.decode(): v for k, v in zip(parts[::2], parts[1::2], strict=True)}
                yield from loop.run_until_complete(self._made_steady(pairs, check=number == 0)).items()
        finally:
            loop.close()

    async def _made_steady(self, pairs: Pairs, *, check: bool) -> Pairs:
        """With the operator's own hashes for these names."""
        objects = {k: json.loads(v) for k, v in pairs.items() if any(f"/registry/{kind}/" in k for kind in KINDS)}
        by_kind: dict[str, list[Json]] = {}
        for found in objects.values():
            by_kind.setdefault(found["kind"], []).append(found)
        model = by_kind["TRTModel"][0]
        for config_map in by_kind["ConfigMap"]:
            if text := config_map["data"].get(POINTER_FILE):
                # A worker that starts holds the pointer's sequence: with today's it need not be told anything.
                pointer = json.loads(text) | {"sequence": model["status"]["rollout"]["sequence"]}
                config_map["data"][POINTER_FILE] = dumps(loads(BootPointer, json.dumps(pointer))).decode()
        rollout = model["status"]["rollout"]
        seen, _ = await self._decided(by_kind)
        for resolved in filter(None, (rollout.get("resolved"), rollout.get("stableResolved"))):
            resolved["key"] = resolve_key(Turn(seen, seen.memory))
        seen, decision = await self._decided(by_kind)
        assert seen.spec is not None
        rollout["plan"] = decision.memory.plan
        _annotate(by_kind["Service"], manifests.service_fingerprint(seen.model, seen.spec))
        for action in decision.actions:
            if isinstance(action, ApplyWorkload):
                _annotate(by_kind["Deployment"], manifests.workload_fingerprint(seen.model, seen.spec, action))
        if check:
            seen, decision = await self._decided(by_kind)
            if decision.actions or decision.memory != seen.memory:
                raise RuntimeError(f"a copy is not steady: {decision.rule}, {decision.actions}")
        return pairs | {key: json.dumps(found, separators=(",", ":")).encode() for key, found in objects.items()}

    async def _decided(self, by_kind: dict[str, list[Json]]) -> tuple[Observed, Decision]:
        seen = await observe(
            by_kind["TRTModel"][0],
            by_kind,
            workers=_Booted(by_kind),  # type: ignore[arg-type]
            signer=self.signer,
            default_image=self.image,
            now=0.0,
            cluster=self.installation,
        )
        return seen, decide(seen)


class _Booted:
    """What the hollow workers will report when they have booted from their pointer."""

    def __init__(self, by_kind: dict[str, list[Json]]) -> None:
        meta = by_kind["TRTModel"][0]["metadata"]
        self._model = ModelRef(meta["namespace"], meta["name"], meta["uid"])
        texts = (c["data"].get(POINTER_FILE) for c in by_kind["ConfigMap"])
        self._pointer = loads(BootPointer, next(text for text in texts if text))

    async def report(self, ip: str, uid: str) -> Report:
        worker = HollowWorker(ip, uid, self._model.name, self._model.uid, 0.0)
        worker.boot(self._pointer)
        for _ in range(3):
            await asyncio.sleep(0)
        return worker.report()


def _annotate(items: list[Json], fingerprint: str) -> None:
    for item in items:
        item["metadata"]["annotations"][manifests.ANNOTATION_FINGERPRINT] = fingerprint


def _ip(number: int) -> str:
    return ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
