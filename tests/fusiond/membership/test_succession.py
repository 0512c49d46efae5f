"""The coordinator dies, at any point: what the others were about goes on, or fails on all of them with one sentence."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fusion_rt import wire
from tests.for_each import for_each
from tests.fusiond.simulation import Array
from tests.fusiond.view_simulation import ViewJob

pytestmark = pytest.mark.usefixtures("small_loans")
LAYOUT = [1, 1, 2, 1]
SUM = wire.Signature("allreduce", "float32", (6,))
VALUES: Array = np.arange(6, dtype=np.float32)
TENSORS = (wire.TensorSpec("w", "float32", (40,)), wire.TensorSpec("b", "float32", (3,)))
GOSSIP = wire.Reduction(algorithm="dpsgd")


def proposal(group: str, process_set: int = 0, clock: int = 0, reduction: wire.Reduction = GOSSIP) -> wire.Proposal:
    return wire.Proposal(group, process_set, clock, reduction, TENSORS)


def gossiping(seed: int, layout: Sequence[int] = LAYOUT) -> ViewJob:
    """A job that can go on without any node."""
    job = ViewJob(layout, seed)
    job.plan(proposal("model"))
    return job


def soon(job: ViewJob, ranks: Iterable[int], action: Callable[[int], int]) -> dict[int, int]:
    """Ranks do something at some time, which returns a handle; the handles, once they are there."""
    handles: dict[int, int] = {}

    def act(rank: int) -> None:
        handles[rank] = action(rank)

    for rank in ranks:
        job.later(rank, partial(act, rank))
    return handles


def add_set(job: ViewJob, ranks: Sequence[int], submitters: Sequence[int], clock: int = 0) -> dict[int, int]:
    """Ranks add a process set; their handles."""
    signature = wire.Signature("add_process_set", ranks=tuple(ranks))
    return {rank: job.submit(rank, "process sets", signature, clock=clock) for rank in submitters}


def set_of(job: ViewJob, ranks: Sequence[int], clock: int = 0) -> int:
    """The id of a new process set, which all ranks that are left have added."""
    handles = add_set(job, ranks, job.ranks_left, clock)
    job.go_on()
    ids = {outcome.sizes for rank, h in handles.items() if isinstance(outcome := job.outcome(rank, h), wire.Done)}
    assert len(ids) == 1, [job.outcome(rank, h) for rank, h in handles.items()]
    return int(ids.pop()[0])


def all_agree(job: ViewJob) -> None:
    """The nodes that are left are in one view and wait for nothing; those with workers know the same process sets."""
    assert len({node.view for node in job.left}) == 1
    assert {node.node for node in job.left} == set(job.left[0].view.nodes)
    working = [node for node in job.left if node.membership.awaited]
    sets = {tuple(sorted(node.engine.participants.sets().items())) for node in working}
    assert len(sets) == 1, sets
    assert len({node.engine.participants.next_set for node in working}) == 1
    for node in job.left:
        assert node.engine.statistics()["under_way"] == 0
        assert (node.engine.coordinator is not None) == (node.node == node.losses.views.coordinator)
    assert not any(node.failure for node in job.members if not node.dead)


def kill_after(job: ViewJob, steps: int, victim: int) -> None:
    """So many things happen, and then a daemon dies."""
    for _ in range(steps):
        job.step()
    job.kill(victim)


# --- what goes on -----------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, tuple[wire.Signature, Array, Callable[[int], Array] | None]] = {
    "allreduce": (SUM, VALUES, lambda n: n * VALUES),
    "allgather": (wire.Signature("allgather", "float32", (6,)), VALUES, lambda n: np.tile(VALUES, n)),
    "broadcast": (wire.Signature("broadcast", "float32", (6,), root=2), VALUES, lambda n: VALUES),
    "reducescatter": (wire.Signature("reducescatter", "float32", (6,)), VALUES, None),
}


@for_each("victim", [0, 1])
@for_each("kind", OPERATIONS)
def test_an_operation_that_does_not_need_the_lost_node_completes_wherever_it_was(kind: str, victim: int) -> None:
    signature, values, expected = OPERATIONS[kind]

    def scenario(seed: int) -> None:
        job = gossiping(seed)
        members = [rank for rank in job.ranks if job.topology.node_of(rank) != victim]
        process_set = set_of(job, members)
        here = replace(signature, process_set=process_set)
        handles = soon(job, members, lambda rank: job.submit(rank, "x", here, values))
        kill_after(job, seed // 2, victim)
        job.go_on()
        all_agree(job)
        for rank in members:
            if expected is not None:
                np.testing.assert_array_equal(job.result(rank, handles[rank]), expected(len(members)))
            else:
                assert isinstance(job.outcome(rank, handles[rank]), wire.Done)

    for seed in range(40):
        scenario(seed)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_plan_that_does_not_need_the_lost_node_is_made_once(victim: int) -> None:
    def scenario(seed: int) -> None:
        job = gossiping(seed)
        members = [rank for rank in job.ranks if job.topology.node_of(rank) != victim]
        process_set = set_of(job, members)
        asked = proposal("opt", process_set, 0, wire.Reduction())
        handles = soon(job, members, lambda rank: job.propose(rank, asked))
        kill_after(job, seed // 2, victim)
        job.go_on()
        all_agree(job)
        plans = [job.outcome(rank, handles[rank]) for rank in members]
        assert all(isinstance(plan, wire.Planned) for plan in plans), plans
        assert len({plan.plan.id for plan in plans}) == 1  # type: ignore[union-attr]
        before = plans[0].plan.id  # type: ignore[union-attr]
        # And the next one has an id of its own, the same everywhere.
        handles2 = {rank: job.propose(rank, replace(asked, clock=1)) for rank in members}
        job.go_on()
        ids = {job.outcome(rank, handle).plan.id for rank, handle in handles2.items()}  # type: ignore[union-attr]
        assert len(ids) == 1
        assert ids.pop() > before

    for seed in range(60):
        scenario(seed)


@pytest.mark.parametrize("victim", [0, 3])
def test_gossip_among_all_ranks_goes_on_and_so_does_a_new_plan_of_it(victim: int) -> None:
    def scenario(seed: int) -> None:
        job = gossiping(seed)
        plan = next(iter(job.nodes[1].engine._plans)).plan
        memory = job.add_plan_memory(plan)
        job.kill(victim)
        job.go_on()
        for clock in range(5):
            for rank in job.ranks_left:
                memory[rank][:] = 0
            handles = {rank: job.ready(rank, plan, 0, clock) for rank in job.ranks_left}
            job.go_on()
            assert all(isinstance(job.outcome(rank, h), wire.Done) for rank, h in handles.items())
        handles = {rank: job.propose(rank, proposal("model", clock=1)) for rank in job.ranks_left}
        job.go_on()
        all_agree(job)
        plans = {job.outcome(rank, handle).plan.id for rank, handle in handles.items()}  # type: ignore[union-attr]
        assert len(plans) == 1
        assert plans.pop() > plan.id

    for seed in range(20):
        scenario(seed)


@for_each("victim", range(4))
def test_nodes_that_have_no_part_in_any_plan_do_not_end_the_job(victim: int) -> None:
    for seed in range(20):
        job = ViewJob([1, 1, 1, 1, 0], seed)  # the first has the coordinator, the last no workers
        members = (1, 2, 3)
        process_set = set_of(job, members)
        handles = {rank: job.propose(rank, proposal("model", process_set)) for rank in members}
        job.go_on()
        assert all(isinstance(job.outcome(rank, handle), wire.Planned) for rank, handle in handles.items())
        job.kill(victim)
        job.go_on()
        all_agree(job)
        assert len(job.left) == 4


def test_a_job_without_any_plan_ends_with_its_first_loss() -> None:
    job = ViewJob([1, 1, 1])
    job.kill(1)
    job.go_on()
    assert job.left == []
    (why,) = {node.failure for node in job.members if not node.dead}
    assert why.endswith("the job cannot go on without it: pending operations need every rank")


def test_ranks_that_do_not_agree_are_told_so_by_the_next_coordinator() -> None:
    def scenario(seed: int) -> None:
        job = gossiping(seed)
        process_set = set_of(job, [1, 2, 3, 4])

        def submit(rank: int) -> int:
            elements = 5 if rank == 2 else 6
            return job.submit(rank, "x", replace(SUM, shape=(elements,), process_set=process_set), VALUES[:elements])

        handles = soon(job, (1, 2, 3, 4), submit)
        kill_after(job, seed // 2, 0)
        job.go_on()
        all_agree(job)
        errors = {job.error(rank, handles[rank]) for rank in (1, 2, 3, 4)}
        assert len(errors) == 1, errors
        assert "the ranks do not agree about tensor 'x'" in errors.pop()

    for seed in range(40):
        scenario(seed)


# --- what does not ----------------------------------------------------------------------------------------------------


@for_each("victim", [0, 2])
@for_each("kind", ["allreduce", "allgather"])
def test_an_operation_that_needs_the_lost_ranks_fails_on_all_others_with_one_sentence(kind: str, victim: int) -> None:
    signature, values, _ = OPERATIONS[kind]

    def scenario(seed: int) -> None:
        job = gossiping(seed)
        late = job.topology.ranks[victim][-1]
        early = [rank for rank in job.ranks if rank != late]
        handles = soon(job, early, lambda rank: job.submit(rank, "x", signature, values))
        kill_after(job, seed, victim)
        job.go_on()
        all_agree(job)
        errors = {job.error(rank, handles[rank]) for rank in job.ranks_left}
        assert all(f"(host host{victim})" in error and "lost" in error for error in errors), errors
        # Who submits it later is told as well, and what is without data goes on.
        later = {rank: job.submit(rank, "y", signature, values) for rank in job.ranks_left}
        barrier = {rank: job.submit(rank, "b", wire.Signature("barrier")) for rank in job.ranks_left}
        job.go_on()
        sentences = {job.error(rank, handle) for rank, handle in later.items()}
        assert len(sentences) == 1
        assert f"tensor 'y': {kind} needs all ranks, and rank" in sentences.pop()
        assert all(isinstance(job.outcome(rank, handle), wire.Done) for rank, handle in barrier.items())

    for seed in range(30):
        scenario(seed)


def test_a_synchronous_plan_of_all_ranks_is_refused_when_some_are_lost() -> None:
    job = gossiping(1)
    job.kill(0)
    job.go_on()
    handles = {rank: job.propose(rank, proposal("opt", reduction=wire.Reduction())) for rank in job.ranks_left}
    job.go_on()
    errors = {job.error(rank, handle) for rank, handle in handles.items()}
    assert errors == {
        "no plan for 'opt': allreduce needs all ranks, and rank 0 (host host0) is lost (node 0 (host host0) is lost: "
        "its connection was closed); add a process set of those that are left"
    }


@pytest.mark.parametrize("victim", [0, 1])
def test_process_sets_are_the_same_on_all_nodes_and_no_id_is_used_twice(victim: int) -> None:
    def scenario(seed: int) -> None:
        job = gossiping(seed)
        first = set_of(job, [1, 2])
        used = {0, first}
        signature = wire.Signature("add_process_set", ranks=(2, 3))
        handles = soon(job, job.ranks, lambda rank: job.submit(rank, "process sets", signature, clock=1))
        kill_after(job, seed, victim)
        job.go_on()
        all_agree(job)
        outcomes = [job.outcome(rank, handles[rank]) for rank in job.ranks_left]
        assert all(isinstance(o, (wire.Done, wire.Failed)) for o in outcomes), outcomes
        used.update(outcome.sizes[0] for outcome in outcomes if isinstance(outcome, wire.Done))
        third = set_of(job, [3, 4], clock=2)
        assert third not in used
        all_agree(job)
        handles = {rank: job.submit(rank, "z", replace(SUM, process_set=third), VALUES) for rank in (3, 4)}
        job.go_on()
        for rank, handle in handles.items():
            np.testing.assert_array_equal(job.result(rank, handle), 2 * VALUES)

    for seed in range(60):
        scenario(seed)


def test_a_join_ends_when_all_that_are_left_have_joined() -> None:
    def scenario(seed: int) -> None:
        job = gossiping(seed)
        handles = soon(job, job.ranks[1:], lambda rank: job.submit(rank, "join", wire.Signature("join")))
        kill_after(job, seed, 0)
        job.go_on()
        all_agree(job)
        outcomes = [job.outcome(rank, handles[rank]) for rank in job.ranks_left]
        assert all(isinstance(outcome, wire.Done) for outcome in outcomes), outcomes
        assert all(node.engine.participants.joined == [] for node in job.left)

    for seed in range(40):
        scenario(seed)


# --- workers that leave and come back ---------------------------------------------------------------------------------


def come_back_and_work(job: ViewJob, epoch: int) -> None:
    """All ranks that are left leave and come back, each in its own time, and then make a process set and use it."""
    left = job.ranks_left
    assert left
    clock = epoch * wire.CLOCKS_OF_AN_EPOCH
    added: dict[int, int] = {}

    def work(rank: int) -> None:
        added.update(add_set(job, left, [rank], clock))

    for rank in left:
        job.later(rank, partial(job.leave, rank))
        job.later(rank, partial(job.come_back, rank, partial(work, rank)))
    job.go_on(10)
    assert {node.failure for node in job.members if not node.dead} == {""}
    assert [(node.membership.epoch, node.membership.started) for node in job.left] == [(epoch, True)] * len(job.left)
    outcomes = {rank: job.outcome(rank, handle) for rank, handle in added.items()}
    assert all(isinstance(outcome, wire.Done) for outcome in outcomes.values()), outcomes
    (process_set,) = {outcome.sizes[0] for outcome in outcomes.values() if isinstance(outcome, wire.Done)}
    handles = {rank: job.submit(rank, "x", replace(SUM, process_set=process_set), VALUES, clock) for rank in left}
    job.go_on()
    all_agree(job)
    for rank, handle in handles.items():
        np.testing.assert_array_equal(job.result(rank, handle), len(left) * VALUES)


LAYOUTS = st.sampled_from([[1, 1, 1], LAYOUT, [2, 1, 2], [1, 1, 1, 1, 1]])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), layout=LAYOUTS, victim=st.integers(0, 2))
def test_who_is_left_may_leave_and_come_back_in_any_order(seed: int, layout: list[int], victim: int) -> None:
    job = gossiping(seed, layout)
    job.kill(victim)
    job.go_on()
    for epoch in (1, 2):
        come_back_and_work(job, epoch)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), layout=LAYOUTS, victim=st.integers(0, 2), steps=st.integers(0, 60))
def test_so_may_the_others_of_a_lost_worker(seed: int, layout: list[int], victim: int, steps: int) -> None:
    job = gossiping(seed, layout)
    for name in "abcdef":
        soon(job, job.ranks, partial(job.submit, name=name, signature=wire.Signature("barrier")))
    for _ in range(steps):
        job.step()
    job._scripts.pop(victim, None)
    job.kill_worker(victim)
    job.go_on()
    assert {node.view.number for node in job.left} == {1}
    for epoch in (1, 2):
        come_back_and_work(job, epoch)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), layout=st.sampled_from([[2], [2, 1], [3, 1, 2], [1, 2, 1]]), quickly=st.booleans())
def test_others_that_are_back_do_not_wait_for_one_that_is_lost_meanwhile(
    seed: int, layout: list[int], quickly: bool
) -> None:
    """Of the first node with several ranks, the last one dies when the others have come back for the next epoch."""
    job = gossiping(seed, layout)
    ranks = next(ranks for ranks in job.topology.ranks if len(ranks) > 1)
    welcomed: list[int] = []

    def again(rank: int) -> None:
        job.leave(rank)
        job.come_back(rank, partial(welcomed.append, rank))

    for rank in ranks[:-1]:
        again(rank)
    job.go_on()
    assert not welcomed
    job.kill_worker(ranks[-1])
    if not quickly:  # else the other nodes' come back before the loss is known everywhere
        job.go_on()
    for rank in job.ranks_left:
        if rank not in ranks:
            job.later(rank, partial(again, rank))
    job.go_on(10)
    if any(node.failure for node in job.members):  # it may be lost while the next epoch comes up on other nodes
        assert quickly
        assert {node.failure for node in job.members} == {f"rank {ranks[-1]} died"}
    else:
        assert sorted(welcomed) == job.ranks_left


@for_each("tolerant", [True, False])
@for_each("victim", [0, 1, 2])
def test_a_node_that_dies_when_all_have_left_is_missed_when_the_others_come_back(victim: int, tolerant: bool) -> None:
    for seed in range(10):
        job = ViewJob([1, 1, 1], seed, tolerate_losses=tolerant)
        for rank in job.ranks:
            job.leave(rank)
        job.go_on()
        job.kill(victim)
        job.go_on()
        assert {node.failure for node in job.members} == {""}
        welcomed: list[int] = []
        for rank in job.ranks_left:
            job.later(rank, partial(job.come_back, rank, partial(welcomed.append, rank)))
        job.go_on()
        assert welcomed == []
        failures = {node.failure for node in job.members if not node.dead}
        assert failures == {f"node {victim} (host host{victim}) is lost: its connection was closed"}


# --- several faults ---------------------------------------------------------------------------------------------------


@for_each("seed", range(60))
def test_two_coordinators_may_die_one_after_the_other(seed: int) -> None:
    chance = random.Random(seed)
    job = gossiping(seed, [1, 1, 1, 1, 1])
    process_set = set_of(job, [2, 3, 4])
    gather = replace(OPERATIONS["allgather"][0], process_set=process_set)
    asked = proposal("opt", process_set, 0, wire.Reduction())
    handles = soon(job, (2, 3, 4), lambda rank: job.submit(rank, "x", gather, VALUES))
    plans = soon(job, (2, 3, 4), lambda rank: job.propose(rank, asked))
    kill_after(job, chance.randrange(20), 0)
    job.timers.append((job.now + chance.uniform(0, 1.0), lambda: job.kill(1)))
    job.go_on(10)
    all_agree(job)
    assert [node.node for node in job.left] == [2, 3, 4]
    for rank in (2, 3, 4):
        np.testing.assert_array_equal(job.result(rank, handles[rank]), np.tile(VALUES, 3))
    assert len({job.outcome(rank, plans[rank]).plan.id for rank in (2, 3, 4)}) == 1  # type: ignore[union-attr]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 120), victim=st.integers(0, 3), many=st.integers(1, 6))
def test_whatever_was_under_way_everybody_gets_an_answer(seed: int, steps: int, victim: int, many: int) -> None:
    chance = random.Random(seed)
    job = gossiping(seed)
    members = [rank for rank in job.ranks if job.topology.node_of(rank) != victim]
    process_set = set_of(job, members)
    asked = []
    for clock in range(many):
        kind = chance.choice([*OPERATIONS, "plan"])
        where = chance.choice([0, process_set])
        ranks = list(job.ranks) if where == 0 else members
        if kind == "plan":
            asked.append(soon(job, ranks, partial(job.propose, proposal=proposal(f"opt{clock}", where, 0, GOSSIP))))
            continue
        root = members[0] if kind == "broadcast" else 0
        signature = replace(OPERATIONS[kind][0], process_set=where, root=root)
        submit = partial(job.submit, name=f"x{clock}", signature=signature, values=VALUES)
        asked.append(soon(job, ranks, submit))
    kill_after(job, steps, victim)
    job.go_on(10)
    all_agree(job)
    for handles in asked:
        for rank in set(handles).intersection(job.ranks_left):
            assert job.is_answered(rank, handles[rank])
