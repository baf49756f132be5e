"""The signing key is exchanged: nobody ever meets a signature that it cannot verify, wherever the operator ends."""

from __future__ import annotations

import asyncio
import base64
import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
from decide_scene import MODEL, A, B, Scene, busy, canary, decide, later, obey, serving, silent, with_worker
from trtmodel_operator.adapters.signing import Ed25519Signer, Keys, SigningKeyError, load_or_create, public_half
from trtmodel_operator.model import ApplyPointer, ObservedWorker, Signal
from trtmodel_operator.ports import Conflict, Json, Key
from trtmodel_operator.rotation import ASKED, DAY, GRACE, TAKEN, Rotation, witnessed

KEY: Key = ("ml", MODEL.name)


class Ends(BaseException):
    """The operator's process ends here."""


class Secrets:
    """One Secret. `ends_at`: the process ends before (False) or after (True) the n-th write."""

    def __init__(self) -> None:
        self.held: Json | None = None
        self.version = 0
        self.writes = 0
        self.ends_at: tuple[int, bool] | None = None

    async def get_secret(self, namespace: str, name: str) -> Json | None:
        return copy.deepcopy(self.held)

    async def create_secret(self, secret: Json) -> Json:
        if self.held is not None:
            raise Conflict("exists")
        return self._store(secret)

    async def replace_secret(self, secret: Json) -> Json:
        self.writes += 1
        ends = self.ends_at if self.ends_at and self.ends_at[0] == self.writes else None
        if ends and not ends[1]:
            raise Ends
        assert self.held is not None
        if secret["metadata"]["resourceVersion"] != self.held["metadata"]["resourceVersion"]:
            raise Conflict("modified")
        stored = self._store(secret)
        if ends:
            raise Ends
        return stored

    def _store(self, secret: Json) -> Json:
        self.version += 1
        meta = (
            {"creationTimestamp": "2025-10-09T08:53:20Z"} | secret["metadata"] | {"resourceVersion": str(self.version)}
        )
        self.held = copy.deepcopy(secret) | {"metadata": meta}
        return copy.deepcopy(self.held)

    def ask(self, nonce: str) -> None:
        assert self.held is not None
        self.held["metadata"].setdefault("annotations", {})[ASKED] = nonce
        self.version += 1
        self.held["metadata"]["resourceVersion"] = str(self.version)

    @property
    def fields(self) -> set[str]:
        assert self.held is not None
        return set(self.held["data"])


class World:
    """Two models whose workers read the key files some passes after they change, and verify everything they get."""

    def __init__(self, seen: Scene | None = None, delay: int = 2) -> None:
        self.secrets = Secrets()
        self.delay = delay
        self.start()
        first = seen or serving(A)
        self.scenes: dict[Key, Scene] = {KEY: self._signed(first), ("ml", "other"): self._signed(first)}
        self.published: dict[Key, list[tuple[str, ...]]] = {key: [self.ids] for key in self.scenes}
        self.now = first.now

    def start(self) -> None:
        """The operator's process begins."""
        self.signer = asyncio.run(load_or_create(self.secrets, "ops", "keys"))
        self.again: list[Key] = []
        self.rotation = Rotation(
            self.secrets,
            "ops",
            "keys",
            self.signer,
            everyone=self._everyone,
            again=self.again.append,
            now=lambda: self.now,
        )

    async def _everyone(self) -> list[Key]:
        return list(self.scenes)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self.signer.public_keys())

    def _signed(self, seen: Scene) -> Scene:
        pointers = tuple(replace(p, key_ids=self.ids[:1]) for p in seen.pointers)
        seen = replace(seen, key_ids=self.ids, pointers=pointers, published_key_ids=self.ids)
        return replace(seen, workers=tuple(listing(w, self.ids) for w in seen.workers))

    def step(self, seconds: float = 60.0) -> None:
        """A pass of each model, the kubelets, and a look of the rotation."""
        self.now += seconds
        for key in self.scenes:
            self._pass(key)
        for key, history in self.published.items():
            history.append(history[-1] if self.scenes[key].published_key_ids is None else tuple(history[-1]))
            self._kubelet(key)
        asyncio.run(self.rotation.look())

    def _pass(self, key: Key) -> None:
        seen = replace(self.scenes[key], now=self.now, key_ids=self.ids, published_key_ids=self.published[key][-1])
        self.rotation.saw(key, seen)
        decision = decide(seen)
        trusted = {w.uid: set(w.report.key_ids) for w in seen.workers if w.report}
        for action in decision.actions:
            if isinstance(action, Signal):
                assert self.ids[0] in trusted[action.uid], "a worker was sent what it cannot verify"
        pointed = any(isinstance(a, ApplyPointer) for a in decision.actions)
        after = obey(seen, decision, seconds=0)
        pointers = tuple(replace(p, key_ids=self.ids[:1]) if pointed else p for p in after.pointers)
        if pointed:
            self.published[key].append(self.ids)
        after = replace(after, pointers=pointers)
        sequence = max((p.sequence for p in pointers), default=0)
        self.scenes[key] = replace(after, workers=tuple(having_read(w, sequence) for w in after.workers))

    def _kubelet(self, key: Key) -> None:
        history = self.published[key]
        ids = history[max(0, len(history) - 1 - self.delay)]
        self.scenes[key] = replace(self.scenes[key], workers=tuple(listing(w, ids) for w in self.scenes[key].workers))

    def until(self, holds: Callable[[], bool], most: int = 60) -> None:
        for _ in range(most):
            if holds():
                return
            self.step()
        raise AssertionError(f"it never came to that: {self.secrets.fields}")


def listing(worker: ObservedWorker, ids: tuple[str, ...]) -> ObservedWorker:
    return replace(worker, report=worker.report and replace(worker.report, key_ids=ids))


def having_read(worker: ObservedWorker, sequence: int) -> ObservedWorker:
    return replace(worker, report=worker.report and replace(worker.report, pointer_sequence=sequence))


def test_a_key_is_exchanged_in_three_steps_and_every_signature_could_be_verified() -> None:
    world = World()
    (old,) = world.ids
    world.secrets.ask("1")
    world.step()
    assert world.ids[0] == old
    assert len(world.ids) == 2
    world.until(lambda: world.ids[0] != old)
    assert old in world.ids
    world.until(lambda: len(world.ids) == 1)
    (new,) = world.ids
    assert new != old
    assert all(p.key_ids == (new,) for seen in world.scenes.values() for p in seen.pointers)
    assert world.secrets.fields == {"ed25519"}


def test_an_exchange_in_the_middle_of_a_rollout_disturbs_it_not() -> None:
    world = World(canary(serving(A)))
    world.secrets.ask("1")
    world.until(lambda: world.secrets.writes == 3)
    seen = world.scenes[KEY]
    for _ in range(80):
        decision = decide(seen)
        if decision.rule == "promote":
            break
        seen = later(busy(obey(seen, decision, seconds=5)), 0)
    assert decision.rule == "promote"
    assert seen.memory.candidate is not None
    assert seen.memory.candidate.revision == B


def test_one_wish_is_one_exchange() -> None:
    world = World()
    world.secrets.ask("1")
    world.until(lambda: world.secrets.writes == 3)
    for _ in range(5):
        world.step()
    assert world.secrets.writes == 3
    assert world.secrets.held is not None
    assert world.secrets.held["metadata"]["annotations"][TAKEN] == "1"


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("write", [1, 2, 3])
def test_an_operator_that_ends_before_or_after_any_write_is_followed_by_one_that_goes_on(
    write: int, after: bool
) -> None:
    world = World()
    (old,) = world.ids
    world.secrets.ask("1")
    world.secrets.ends_at = (write, after)
    with pytest.raises(Ends):
        world.until(lambda: False)
    world.secrets.ends_at = None
    world.start()
    world.until(lambda: len(world.ids) == 1 and world.ids != (old,) and world.secrets.fields == {"ed25519"})
    assert all(p.key_ids == world.ids for seen in world.scenes.values() for p in seen.pointers)


def test_a_worker_that_cannot_be_asked_is_waited_for() -> None:
    world = World()
    (old,) = world.ids
    world.secrets.ask("1")
    seen = world.scenes[KEY]
    answers = next(w for w in seen.workers if w.uid == "w1")
    world.scenes[KEY] = silent(seen, "w1")
    for _ in range(20):
        world.step()
    assert world.ids[0] == old
    world.scenes[KEY] = with_worker(world.scenes[KEY], "w1", report=answers.report, silence="")
    world.until(lambda: world.ids[0] != old)


def test_a_container_that_does_not_run_is_not_waited_for() -> None:
    seen = with_worker(serving(A), "w1", report=None, running=False)
    seen = replace(seen, published_key_ids=("k1",))
    assert witnessed(seen).trusted == {"k1"}
    assert witnessed(replace(seen, published_key_ids=())).trusted == set()


def test_the_former_key_stays_for_a_while_for_pods_that_start() -> None:
    world = World()
    world.secrets.ask("1")
    world.until(lambda: world.secrets.writes == 2)
    began = world.now
    world.until(lambda: world.secrets.writes == 3)
    assert world.now - began >= GRACE


def test_a_pointer_by_the_former_key_is_not_signed_yet() -> None:
    seen = replace(serving(A), key_ids=("k1", "k0"), published_key_ids=("k0", "k1"))
    seen = replace(seen, workers=tuple(listing(w, ("k0", "k1")) for w in seen.workers))
    old = replace(seen, pointers=tuple(replace(p, key_ids=("k0",)) for p in seen.pointers))
    assert not witnessed(old).signed
    read = tuple(having_read(w, p.sequence) for w in seen.workers for p in seen.pointers)
    assert witnessed(replace(seen, workers=read)).signed
    ahead = tuple(replace(p, sequence=p.sequence + 1) for p in seen.pointers)
    named = tuple(replace(w, pod=f"{ahead[0].name}-{w.uid}") for w in read)
    assert not witnessed(replace(seen, workers=named, pointers=ahead)).signed


def test_a_model_that_was_not_looked_at_under_these_keys_is_waited_for() -> None:
    world = World()
    world.secrets.ask("1")
    world.step()
    asyncio.run(world.rotation.look())
    assert len(world.ids) == 2
    assert set(world.again) == set(world.scenes)


def test_a_key_that_is_too_old_is_exchanged_by_itself() -> None:
    world = World()
    world.rotation = Rotation(
        world.secrets,
        "ops",
        "keys",
        world.signer,
        everyone=world._everyone,
        again=world.again.append,
        now=lambda: world.now,
        max_age=30 * DAY,
    )
    world.step()
    assert world.secrets.writes == 0
    world.now += 30 * DAY
    world.step()
    assert world.secrets.writes == 1


def test_a_secret_that_was_deleted_is_written_again_with_the_keys_in_use() -> None:
    world = World()
    world.secrets.held = None
    world.step()
    assert world.secrets.fields == {"ed25519"}
    before = world.ids
    world.start()
    assert world.ids == before


def test_keys_that_somebody_else_wrote_are_taken() -> None:
    world = World()
    assert world.secrets.held is not None
    other = Keys.made()
    world.secrets.held["data"] = other.data()
    world.step()
    assert world.signer.keys == other


@pytest.mark.parametrize("field", ["ed25519-next", "ed25519-previous-public"])
def test_a_second_key_that_is_none_is_named(field: str) -> None:
    world = World()
    assert world.secrets.held is not None
    world.secrets.held["data"][field] = base64.b64encode(b"short").decode()
    with pytest.raises(SigningKeyError, match="no usable key"):
        world.start()


def test_the_key_that_signs_stands_first_and_a_former_one_is_public_only() -> None:
    one, two = Keys.made(), Keys.made()
    signer = Ed25519Signer(Keys(one.signing, next=two.signing))
    first, second = signer.public_keys()
    assert signer.sign(b"x").key_id == first
    signer.hold(Keys(two.signing, previous=public_half(one.signing)))
    assert tuple(signer.public_keys()) == (second, first)
    assert signer.sign(b"x").key_id == second
    assert base64.b64encode(one.signing).decode() not in signer.keys.data().values()
