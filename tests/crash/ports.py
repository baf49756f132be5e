"""What an operator in the simulator has to do with the outside: its ports, each of which leads into a world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from machines import KEY
from trtmodel_contract.codec import sha256_hex
from trtmodel_contract.control import DesiredRequest, Report
from trtmodel_contract.signing import Signature
from trtmodel_operator.model import Answer, Decision, Lookup, Observed, Query, WebhookSpec
from trtmodel_operator.ports import Json, Key
from world import World

T = TypeVar("T")


class Hooks:
    """The port Inquiries: people's own systems, which are asked beside the passes and answer before the next."""

    def __init__(self, world: World) -> None:
        self.world = world

    def answers(self, key: Key) -> tuple[Answer, ...]:
        world = self.world
        down = "it cannot be reached"
        numbers = [Answer(k, world.time, world.gives, error="" if world.gives else down) for k, q in world.asked if q]
        error = "" if world.confirms else down if world.confirms is None else "it says no"
        says = [Answer(k, world.time, yes=bool(world.confirms), error=error) for k, q in world.asked if not q]
        return (*numbers, *says)

    def follow(self, key: Key, lookups: Sequence[Lookup]) -> None:
        self.world.asked = tuple((lookup.key, isinstance(lookup, Query)) for lookup in lookups)

    def tell(self, hook: WebhookSpec, key: str, body: str) -> None:
        pass


class Ports:
    """What one operator process sees of the world: the ports Cluster, Workers, Signer, Clock and Metrics. Every call
    that leaves the process goes through `before` and `after`, which do nothing here."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def before(self, call: str) -> None:
        """The process may end or wait here, with the call not made."""

    async def after(self, call: str) -> None:
        """Or here, with the call made and its answer not seen, be it an error."""

    async def _call(self, call: str, act: Callable[[], T]) -> T:
        await self.before(call)
        try:
            return act()
        finally:
            await self.after(call)

    async def get_model(self, key: Key) -> Json | None:
        return await self._call("get_model", lambda: self.world.model)

    async def list_models(self) -> Mapping[Key, str]:
        return {KEY: str(self.world.model["metadata"]["resourceVersion"])} if self.world.model else {}

    async def children(self, key: Key) -> Mapping[str, Sequence[Json]]:
        return await self._call("children", self.world.children)

    async def write_memory(self, key: Key, resource_version: str, rollout: Json) -> str:
        return await self._call("write_memory", lambda: self.world.write_memory(resource_version, rollout))

    async def write_status(self, key: Key, status: Json) -> None:
        await self._call("write_status", lambda: self.world.write_status(status))

    async def apply(self, manifest: Json) -> None:
        await self._call("apply", lambda: self.world.apply(manifest))

    async def guard(self, key: Key, uid: str, *, on: bool) -> None:
        raise AssertionError("no scenario deletes artifacts")

    async def create_job(self, manifest: Json) -> None:
        await self._call("create_job", lambda: self.world.create_job(manifest))

    async def delete_job(self, key: Key, name: str) -> None:
        await self._call("delete_job", lambda: self.world.delete_job(name))

    async def scale_workload(self, key: Key, name: str, replicas: int) -> None:
        await self._call("scale_workload", lambda: self.world.scale_workload(name, replicas))

    async def delete_workload(self, key: Key, name: str) -> None:
        await self._call("delete_workload", lambda: self.world.delete_workload(name))

    async def post_event(self, regarding: Json, reason: str, message: str, *, warning: bool) -> None:
        self.world.events = (*self.world.events, reason)

    async def report(self, ip: str, uid: str) -> Report:
        return await self._call("report", lambda: self.world.report(uid))

    async def send(self, ip: str, uid: str, request: DesiredRequest) -> None:
        await self._call("send", lambda: self.world.send(uid, request))

    def follow(self, key: Key, workers: Mapping[str, tuple[str, int]], *, closely: bool = True) -> None:
        pass

    def sign(self, payload: bytes) -> Signature:
        return Signature("k1", sha256_hex(payload)[:16])

    def public_keys(self) -> Mapping[str, str]:
        return {"k1": "AA=="}

    def now(self) -> float:
        return self.world.time

    def persisted(self, key: Key, seen: Observed, decision: Decision, status: Mapping[str, object]) -> None:
        pass

    def forget(self, key: Key) -> None:
        pass
