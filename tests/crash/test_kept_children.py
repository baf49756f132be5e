"""What the operator keeps of children says the same to a pass as the whole objects."""

from __future__ import annotations

import json

import pytest
from machines import KEY
from ports import Ports
from scenarios import LOOP, begun
from trtmodel_operator.adapters.informer import pruned
from trtmodel_operator.adapters.observe import observe
from trtmodel_operator.model import Observed
from trtmodel_operator.ports import Json
from world import World


def observed(world: World, children: dict[str, list[Json]]) -> Observed:
    ports = Ports(world)
    assert world.model is not None
    seen = observe(world.model, children, workers=ports, signer=ports, default_image="worker:1", now=world.time)
    return LOOP.run_until_complete(seen)


@pytest.mark.parametrize("name", ["first rollout", "good update", "a to b to a"])
def test_at_no_moment_does_a_pass_miss_what_is_not_kept(name: str) -> None:
    run, compared = begun(name), 0
    while not run.over():
        run.step()
        if run.world.model is None:
            continue
        whole = run.world.children()
        kept = {kind: [json.loads(json.dumps(pruned(kind, item))) for item in items] for kind, items in whole.items()}
        assert observed(run.world, kept) == observed(run.world, whole), f"pass {run.passes} of {KEY[1]}"
        compared += 1
    assert compared > 3
