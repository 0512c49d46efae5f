"""What people read when something waits: who is missing, where these are, and which link is late."""

from __future__ import annotations

import numpy as np

from fusion_rt import wire
from tests.for_each import for_each
from tests.fusiond.simulation import Array, SimulatedJob

SUM = wire.Signature("allreduce", "float32", (6,))
VALUES: Array = np.arange(6, dtype=np.float32)
LARGE = wire.Signature("allreduce", "float32", (60_000,))
LARGE_VALUES: Array = np.ones(60_000, np.float32)
PROPOSAL = wire.Proposal("opt", 0, 0, wire.Reduction(), (wire.TensorSpec("w", "float32", (4,)),))
STACK = (
    "\nrank 2 (host host1, pid 102, sleeping (S)), most recent call first:\n    /train.py:12 in slow: time.sleep(300)"
)


def located(rank: int) -> wire.Whereabouts:
    frame = wire.Frame("/train.py", 12, "slow", "time.sleep(300)")
    return wire.Whereabouts(rank, 100 + rank, "sleeping (S)", "", wire.Stack((frame,)))


def job_of(*nodes: int, seed: int = 0) -> SimulatedJob:
    job = SimulatedJob(nodes, seed, stall_warning_time=5.0, operation_timeout=20.0)
    job.whereabouts = {rank: located(rank) for rank in job.ranks}
    return job


@for_each("seed", range(4))
def test_the_warning_and_the_end_say_where_the_missing_rank_is(seed: int) -> None:
    job = job_of(2, 1, seed=seed)
    handles = {rank: job.submit(rank, "x", SUM, VALUES) for rank in (0, 1)}
    job.pass_time(8)
    (warning,) = job.warnings
    assert warning.startswith("tensor 'x' waited 6 s for rank 2 (host host1), which did not submit it")
    assert warning.endswith(STACK)
    job.pass_time(20)
    for rank, handle in handles.items():
        assert "tensor 'x' waited 21 s for rank 2 (host host1)" in job.error(rank, handle)
        assert job.error(rank, handle).endswith(STACK)
    assert job.warnings == [warning]
    job.nothing_is_left()


def test_a_planned_bucket_says_where_the_rank_is_that_never_came_to_it() -> None:
    job = job_of(2, 1)
    plan = job.plan(PROPOSAL)
    job.add_plan_memory(plan)
    handles = {rank: job.ready(rank, plan, 0, 0) for rank in (0, 1)}
    job.pass_time(30)
    assert job.warnings[0].startswith(f"bucket 0 of plan {plan.id} waited 6 s for rank 2 (host host1)")
    assert job.warnings[0].endswith(STACK)
    for rank, handle in handles.items():
        assert job.error(rank, handle).endswith(STACK)
    job.nothing_is_left()


def test_a_plan_says_where_the_rank_is_that_did_not_propose_it() -> None:
    job = job_of(2, 1)
    handles = {rank: job.propose(rank, PROPOSAL) for rank in (0, 1)}
    job.pass_time(8)
    sentence = "waited {} s for rank 2 (host host1), which did not propose it (proposed by ranks 0-1 (host host0))"
    assert job.warnings == [f"the plan of 'opt' {sentence.format(6)}{STACK}"]
    job.pass_time(20)
    for rank, handle in handles.items():
        assert job.error(rank, handle) == f"the plan of 'opt' {sentence.format(21)}{STACK}"
    job.nothing_is_left()


def test_a_node_that_does_not_say_where_its_ranks_are_is_named_and_delays_the_end_by_seconds_only() -> None:
    job = job_of(2, 1)
    job.nodes[1].locate = lambda ranks, then: None  # type: ignore[method-assign]
    handle = job.submit(0, "x", SUM, VALUES)
    job.submit(1, "x", SUM, VALUES)
    job.pass_time(26)
    assert "\nhost host1 (node 1) did not report where its ranks are" in job.warnings[0]
    assert "did not report where" in job.error(0, handle)


def test_what_comes_while_it_is_asked_where_the_missing_are_is_not_lost() -> None:
    job = job_of(2, 1)
    handles = [job.submit(rank, "x", SUM, VALUES) for rank in (0, 1)]
    job.pass_time(20)
    job.nodes[1].locate = lambda ranks, then: job.timers.append((job.now + 2, lambda: then([])))  # type: ignore[method-assign]
    job.pass_time(1)  # the time is up, and it is being asked
    assert not job.is_answered(0, handles[0])
    handles.append(job.submit(2, "x", SUM, VALUES))
    job.pass_time(10)
    for rank, handle in enumerate(handles):
        np.testing.assert_array_equal(job.result(rank, handle), 3 * VALUES)
    job.nothing_is_left()


def test_a_plan_that_is_proposed_while_it_is_asked_is_made() -> None:
    job = job_of(2, 1)
    handles = [job.propose(rank, PROPOSAL) for rank in (0, 1)]
    job.pass_time(20)
    job.nodes[1].locate = lambda ranks, then: job.timers.append((job.now + 2, lambda: then([])))  # type: ignore[method-assign]
    job.pass_time(1)
    handles.append(job.propose(2, PROPOSAL))
    job.pass_time(10)
    for rank, handle in enumerate(handles):
        assert isinstance(job.answer(rank, handle)[0], wire.Planned)


def test_a_link_that_loses_what_it_carries_is_named() -> None:
    job = job_of(1, 1, 1)
    job.submit_all("before", LARGE, [LARGE_VALUES] * 3)
    job.lost.add((1, 2))
    handles = [job.submit(rank, "x", LARGE, LARGE_VALUES) for rank in job.ranks]
    job.settle()
    job.pass_time(30)
    assert "although every rank has submitted it" in job.warnings[0]
    assert "from host host1 (node 1) to host host2 (node 2) are under way" in job.warnings[0]
    assert "that link is the straggler" in job.warnings[0]
    assert "from host host0" not in job.warnings[0]
    assert "to host host2 (node 2) are under way" in job.error(0, handles[0])


def test_homes_say_where_the_rank_is_that_they_wait_for() -> None:
    from tests.fusiond.algorithms.training import Workers

    job = job_of(2, 2)
    workers = Workers([2, 2], "bsp", VALUES, 0.1, job=job)
    for rank in (0, 1, 3):
        workers.post(rank, VALUES)
    job.pass_time(30)
    of_homes = [text for text in job.warnings if "for the home of bucket" in text]
    shown = [text for text in of_homes if text.endswith(STACK)]
    assert all("it waits for rank 2 (host host1)" in text for text in of_homes), of_homes
    assert len(of_homes) == 3 * len(workers.plan.buckets)
    assert len(shown) == 2  # once on each node
    for rank in (0, 1, 3):
        for handle in workers._handles[rank]:
            assert job.error(rank, handle).endswith(STACK)
    job.nothing_is_left()


def test_a_contribution_that_is_late_while_the_nodes_are_asked_about_another_is_not_forgotten() -> None:
    from tests.fusiond.algorithms.training import Workers

    job = job_of(2, 2)
    job.nodes[1].locate = lambda ranks, then: job.timers.append((job.now + 2, lambda: then([])))  # type: ignore[method-assign]
    workers = Workers([2, 2], "bsp", VALUES, 0.1, job=job)
    for rank in (0, 1):
        workers.post(rank, VALUES)
        job.pass_time(1)
    job.pass_time(14)
    for rank in (0, 1):
        warned = [text for text in job.warnings if text.startswith(f"rank {rank} has waited")]
        assert len(warned) == len(workers.plan.buckets), job.warnings
