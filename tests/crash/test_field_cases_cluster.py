"""Cases from the field (groups C and F) that take a cluster, workers and time: what other operators got wrong."""

from __future__ import annotations

import dataclasses
import json

import pytest
from scenarios import (
    SOURCES,
    A,
    Ends,
    Run,
    begun,
    check_always,
    essence,
    in_step,
    job,
    outcome,
    serving,
    stalled,
)
from test_cluster_faults import Away, Counted, one_pass, passes_of
from test_crash import ends_as, played
from trtmodel_operator.ports import ClusterError
from world import World


def until(run: Run, condition: object, passes: int = 200) -> Run:
    for _ in range(passes):
        if condition(run.world):  # type: ignore[operator]
            return run
        run.step()
    raise AssertionError(f"it never came to that: {run.world.model}")


def to_the_end(run: Run) -> World:
    while not run.over():
        run.step()
    check_always(run.world)
    return run.world


class Terminating(Counted):
    """The namespace is being deleted: nothing can be made in it any more."""

    async def before(self, call: str) -> None:
        await super().before(call)
        if call in ("apply", "create_job"):
            raise ClusterError("POST", "x", "unable to create new content because it is being terminated", 403)


class Interrupted(Counted):
    """Somebody edits the TRTModel just before one of the calls of a pass."""

    def __init__(self, world: World, at: int) -> None:
        super().__init__(world)
        self.at = at

    async def before(self, call: str) -> None:
        await super().before(call)
        if len(self.calls) == self.at + 1:
            self.world.edit(source__uri="s3://m/c")


def test_C03_without_an_operator_a_deleted_model_goes_with_everything_that_it_owned() -> None:
    for name in ("first rollout", "good update"):
        run = begun(name)
        while not run.over():
            run.step()
            assert "finalizers" not in (run.world.model or {})["metadata"]
            deleted = run.fork()
            deleted.world.delete(foreground=True)
            deleted.world.tick(1.0)
            deleted.world.tick(1.0)
            assert (deleted.world.model, deleted.world.objects, deleted.world.workers) == (None, {}, {})


@pytest.mark.parametrize("name", ["first rollout", "good update"])
def test_C05_a_namespace_that_is_being_deleted_is_not_asked_again_and_again(name: str) -> None:
    for before, calls in passes_of(name)[1]:
        if not {"apply", "create_job"} & set(calls):
            continue
        run, asked, begin = before.fork(), 0, before.world.time
        while run.world.time < begin + 60:
            ports = Terminating(run.world)
            one_pass(run, ports)
            asked += sum(call in ("apply", "create_job") for call in ports.calls)
        assert 1 <= asked <= 7
        assert "being terminated" in json.dumps((run.world.model or {})["status"]["conditions"])


@pytest.mark.long
def test_C06_an_edit_in_the_middle_of_a_pass_is_never_lost() -> None:
    whole, passes = passes_of("good update")
    ends = Ends(essence)
    for i, (before, calls) in enumerate(passes):
        for at in range(len(calls)):
            run = before.fork()
            run.idle, run.script = 0, ()
            one_pass(run, Interrupted(run.world, at))
            end = ends.of(run)
            assert ("Ready", "True", "Serving") in end["conditions"], f"edited at {calls[at]} of pass {i}"
            assert end["spec"]["source"]["uri"] == "s3://m/c"
            assert end["stable"] != whole.world.rollout["stable"]
    assert ends.runs > 200


def test_C08_at_rest_nothing_is_written() -> None:
    run = begun("good update")
    to_the_end(run)
    version = (run.world.model or {})["metadata"]["resourceVersion"]
    for _ in range(100):
        ports = Counted(run.world)
        one_pass(run, ports)
        assert set(ports.calls) == {"get_model", "children", "report"}
    assert (run.world.model or {})["metadata"]["resourceVersion"] == version


def test_C10_an_api_server_that_is_away_in_mid_rollout_neither_promotes_nor_rolls_back() -> None:
    run = until(begun("good update"), in_step(0))
    before, back = run.world.rollout, run.world.time + 120
    while run.world.time < back:
        one_pass(run, Away(run.world, back))
        assert run.world.rollout == before
    assert essence(to_the_end(run)) == essence(to_the_end(begun("good update")))


def test_C16_the_selector_of_the_scale_subresource_is_there_from_the_first_pass() -> None:
    run = begun("good update")
    run.step()
    selector = (run.world.model or {})["status"]["selector"]
    wanted = dict(term.split("=") for term in selector.split(","))
    to_the_end(run)
    matching = [p for p in run.world.children()["Pod"] if wanted.items() <= p["metadata"]["labels"].items()]
    assert {p["metadata"]["name"] for p in matching} == {w.name for w in run.world.workers.values()}
    assert (run.world.model or {})["status"]["replicas"] == 4


def test_C17_the_operator_follows_whoever_scales_and_writes_nothing_into_the_spec() -> None:
    run = until(begun("first rollout"), serving(A))
    for replicas in (5, 2, 0, 3):
        run.world.edit(serving__replicas=replicas)
        spec = json.dumps((run.world.model or {})["spec"])
        run.idle = 0
        to_the_end(run)
        assert json.dumps((run.world.model or {})["spec"]) == spec
        run.world.tick(30)
        assert len(run.world.workers) == replicas


def test_C19_a_build_that_no_node_fits_waits_says_so_and_goes_on_when_there_is_one() -> None:
    run = until(begun("first rollout"), job("build"))
    run.world.no_node = True
    until(run, lambda w: w.condition("Progressing")[1] == "Unschedulable")
    assert run.world.condition("Progressing")[0] == "False"
    assert "0/1 nodes are available" in json.dumps((run.world.model or {})["status"]["conditions"])
    run.world.no_node = False
    assert essence(to_the_end(run)) == essence(to_the_end(begun("first rollout")))


def test_C24_a_builder_that_is_killed_for_memory_is_told_as_such_and_not_started_again() -> None:
    run = until(begun("first rollout"), job("build"))
    run.world.out_of_memory = True
    until(run, stalled("OOMKilled"))
    condition = next(c for c in (run.world.model or {})["status"]["conditions"] if c["type"] == "Stalled")
    assert "limits.memory" in condition["message"]
    jobs = run.world.jobs_created
    for _ in range(20):
        run.step()
    assert run.world.jobs_created == jobs


def test_C27_killed_between_an_effect_and_its_record_nothing_is_done_twice_and_no_proof_is_left_out() -> None:
    whole, kept, _ = played("good update")
    ends, n = Ends(outcome), 0
    for where, run in kept:
        if where.startswith(("after create_job", "after send", "before write_memory", "after write_memory")):
            run.idle = 0
            ends_as("good update", ends, run, outcome(whole.world), where)
            n += 1
    assert n >= 80


def test_F14_ready_is_not_claimed_for_what_pods_do_not_run() -> None:
    run = until(begun("first rollout"), serving(A))
    digest = run.world.rollout["stable"]["artifacts"][0]["manifestDigest"]
    run.world.by_digest[digest] = dataclasses.replace(SOURCES[A], loads=False)
    for uid in list(run.world.workers):
        run.world.kill_pod(uid)
    run.idle = 0
    until(run, lambda w: w.condition("Ready")[0] == "False" and w.condition("Available")[0] == "False")
    assert (run.world.model or {})["status"]["observedGeneration"] == (run.world.model or {})["metadata"]["generation"]
    run.world.by_digest[digest] = SOURCES[A]
    until(run, serving(A))
