"""The plan of a seed."""

from __future__ import annotations

import itertools

import pytest

from chaos import actions, plan

SEEDS = range(60)


def test_a_seed_gives_the_same_plan_each_time_and_another_one_another() -> None:
    assert plan.plan(7, 10) == plan.plan(7, 10)
    assert len({plan.plan(seed, 10) for seed in SEEDS}) == len(SEEDS)


def test_a_shorter_run_of_a_seed_is_the_longer_one_without_what_ends_later() -> None:
    """So a failure can be looked for in the shortest run that shows it."""
    for seed in SEEDS:
        assert plan.plan(seed, 3) == tuple(a for a in plan.plan(seed, 10) if a.end <= 180)


@pytest.mark.parametrize("minutes", [1, 2.5, 10])
def test_all_of_a_plan_is_over_when_its_time_is_over(minutes: float) -> None:
    for seed in SEEDS:
        actions = plan.plan(seed, minutes)
        assert actions
        assert list(actions) == sorted(actions, key=lambda a: a.at)
        assert all(plan.FIRST_AT <= a.at <= a.end <= minutes * 60 for a in actions)


def test_ten_minutes_hold_every_kind_of_action() -> None:
    for seed in SEEDS:
        assert list(plan.counts(plan.plan(seed, 10))) == list(plan.DECK)


def test_kubelet_and_api_server_are_never_gone_together() -> None:
    for seed in SEEDS:
        alone = [a for a in plan.plan(seed, 10) if a.kind in plan.ALONE]
        assert all(first.end < second.at for first, second in itertools.pairwise(alone))


def test_an_action_is_about_a_model_where_its_kind_is() -> None:
    for action in plan.plan(1, 60):
        assert (action.model in plan.MODELS) == (action.kind in plan.OF_A_MODEL)
        assert (action.seconds > 0) == (action.kind in plan.LASTS)
        assert 0 <= action.pick < 1


def test_what_an_action_picks_is_among_those_that_are_there() -> None:
    for seed in range(40):  # 11 had a 1
        assert all(0 <= action.pick < 1 for action in plan.plan(seed, 10))


def test_every_kind_of_a_plan_can_be_done() -> None:
    assert actions.KINDS.keys() == plan.DECK.keys()
