"""Participants: ranks that have joined, and process sets that come and go, over every order of events."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from fusion_rt import wire
from tests.for_each import for_each
from tests.fusiond.simulation import SimulatedJob

SEEDS = range(12)
SUM = wire.Signature("allreduce", "float32", (300,), "sum")
JOIN = wire.Signature("join")
JOBS = [[2, 1, 3], [1, 1], [1, 1, 1, 1, 1], [3]]


def values_of(rank: int, step: int, elements: int = 300) -> np.ndarray:  # type: ignore[type-arg]
    return (np.arange(elements) % 7 + 10 * step + 100 * rank).astype(np.float32)


def uneven(job: SimulatedJob, seed: int) -> list[int]:
    """Returns how many steps each rank takes before it joins; some take none."""
    return np.random.default_rng(seed).integers(0, 4, job.size).tolist()  # type: ignore[no-any-return]


# --- join -------------------------------------------------------------------------------------------------------------


@for_each("local_sizes", JOBS)
def test_all_reduces_go_on_without_the_ranks_that_have_joined(local_sizes: list[int]) -> None:
    for seed in SEEDS:
        job = SimulatedJob(local_sizes, seed)
        steps = uneven(job, seed)
        handles: dict[tuple[int, int], int] = {}

        def act(rank: int, step: int) -> None:
            handles[rank, step] = job.submit(rank, "x", SUM, values_of(rank, step), step)  # noqa: B023

        for rank in job.ranks:
            for step in range(steps[rank]):
                job.later(rank, lambda rank=rank, step=step: act(rank, step))  # type: ignore[misc]
        joins = job.on_all_ranks(lambda rank: job.submit(rank, "join", JOIN))  # noqa: B023
        for (rank, step), handle in handles.items():
            expected = sum(values_of(r, step) for r in job.ranks if steps[r] > step)
            np.testing.assert_array_equal(job.result(rank, handle), expected, err_msg=f"{seed=} {rank=} {step=}")
        last = {job.answer(rank, handle)[0].sizes for rank, handle in enumerate(joins)}  # type: ignore[union-attr]
        assert len(last) == 1
        assert len(last.pop()) == 1
        job.nothing_is_left()
        # Everybody is back.
        again = job.submit_all("x", SUM, [values_of(rank, 0) for rank in job.ranks], clock=1 << 24)
        expected = sum(values_of(r, 0) for r in job.ranks)
        np.testing.assert_array_equal(job.result(0, again[0]), expected)


@for_each("local_sizes", JOBS)
@for_each("with_plan", [True, False])
def test_planned_buckets_go_on_too_even_when_the_plan_is_made_without_some_ranks(
    local_sizes: list[int], with_plan: bool
) -> None:
    specs = (wire.TensorSpec("a", "float32", (300,)), wire.TensorSpec("b", "float32", (100,)))
    proposal = wire.Proposal("opt", 0, 0, wire.Reduction("sum"), specs)
    for seed in SEEDS:
        job = SimulatedJob(local_sizes, seed)
        steps = uneven(job, seed)
        if not any(steps):
            steps[0] = 2
        plan: wire.Plan | None = job.plan(proposal) if with_plan else None
        memory = dict(enumerate(job.add_plan_memory(plan))) if plan else {}
        proposals: dict[int, int] = {}
        if plan is None:
            for rank in job.ranks:
                if steps[rank]:
                    job.later(rank, lambda rank=rank: proposals.__setitem__(rank, job.propose(rank, proposal)))  # type: ignore[misc]  # noqa: B023
                else:
                    job.later(rank, lambda rank=rank: job.submit(rank, "join", JOIN))  # type: ignore[misc]  # noqa: B023
            job.settle()
            plans = [job.answer(rank, handle)[0].plan for rank, handle in proposals.items()]  # type: ignore[union-attr]
            plan = plans[0]
            assert plan is not None
            for rank in proposals:
                memory[rank] = np.zeros(plan.nbytes, np.uint8)
                job.engine(rank).add_plan_memory(rank, plan.id, memory[rank])
        training = [rank for rank in job.ranks if steps[rank]]
        for step in range(max(steps)):
            active = [rank for rank in training if steps[rank] > step]
            for rank in job.ranks if with_plan else training:
                if steps[rank] == step:
                    job.later(rank, lambda rank=rank: job.submit(rank, "join", JOIN))  # type: ignore[misc]  # noqa: B023
            for rank in active:
                memory[rank].view(np.float32)[:] = rank + 10 * step
                for bucket in range(len(plan.buckets)):
                    job.later(rank, lambda rank=rank, b=bucket, s=step, p=plan: job.ready(rank, p, b, s))  # type: ignore[misc]  # noqa: B023
            job.settle()
            for rank in active:
                assert memory[rank].view(np.float32)[0] == sum(r + 10 * step for r in active), f"{seed=} {step=}"
        assert all(not isinstance(m, wire.Failed) for answers in job.answers.values() for m, _ in answers)


@pytest.mark.parametrize("codec", ["powersgd(rank=1, minimum=0)", "topk(density=0.1, minimum=0)"])
def test_a_node_without_ranks_takes_one_step_of_a_bucket_after_the_other(codec: str) -> None:
    """Peers may have begun the next step of a bucket when the last data of the one before is still on its way here."""
    proposal = wire.Proposal(
        "opt", 0, 0, wire.Reduction("sum", codec=codec), (wire.TensorSpec("a", "float32", (32, 32)),)
    )
    for seed in SEEDS:
        job = SimulatedJob([1, 1, 1], seed)
        plan = job.plan(proposal)
        memory = job.add_plan_memory(plan)
        job.submit(2, "join", JOIN)
        job.settle()
        for step in range(6):
            for rank in (0, 1):
                memory[rank].view(np.float32)[:1024] = values_of(rank, step, 1024)
            handles = [job.ready(rank, plan, 0, step) for rank in (0, 1)]
            while not all(job.is_answered(rank, handle) for rank, handle in enumerate(handles)):
                assert job.step(), f"{seed=} {step=}: nothing happens any more"
        job.settle()
        assert all(not isinstance(m, wire.Failed) for answers in job.answers.values() for m, _ in answers), seed
        assert not job.engine(2).participants.lost
        assert np.array_equal(memory[0], memory[1]), f"{seed=}"


def test_a_rank_that_joined_before_the_plan_was_made_gets_the_one_in_force() -> None:
    proposal = wire.Proposal("opt", 0, 0, wire.Reduction("sum"), (wire.TensorSpec("a", "float32", (8,)),))
    job = SimulatedJob([2, 2])
    job.submit(3, "join", JOIN)
    job.submit(2, "join", JOIN)
    handles = [job.propose(rank, proposal) for rank in (0, 1)]
    job.settle()
    plan = job.answer(0, handles[0])[0].plan  # type: ignore[union-attr]
    assert plan is not None
    for rank in (0, 1):
        job.submit(rank, "join", JOIN)
    job.settle()
    late = job.propose(2, proposal)
    job.settle()
    assert job.answer(2, late)[0].plan == plan  # type: ignore[union-attr]
    other = replace(proposal, tensors=(wire.TensorSpec("a", "float32", (9,)),))
    refused = job.propose(3, other)
    job.settle()
    assert "tensor 'a' of 'opt' differs between rank 0 (host host0) and rank 3 (host host1)" in job.error(3, refused)


def test_who_has_returned_is_not_taken_for_joined_by_a_node_that_hears_of_it_late() -> None:
    for seed in range(30):
        job = SimulatedJob([1, 1, 1], seed)
        for clock in range(
            3
        ):  # node 1 may hear from the coordinator that all have joined before it hears that rank 2 has
            for rank in job.ranks:
                job.later(rank, lambda rank=rank: job.submit(rank, "join", JOIN, clock=clock))  # type: ignore[misc]  # noqa: B023
            job.settle()
        assert [node.engine.participants.joined for node in job.nodes] == [[]] * 3


@for_each("local_sizes", [[2, 2], [1, 1, 1], [3]])
@for_each("kind", ["allgather", "broadcast", "alltoall", "reducescatter"])
@for_each("known", [False, True])
def test_what_needs_every_rank_fails_while_some_have_joined(local_sizes: list[int], kind: str, known: bool) -> None:
    for seed in SEEDS:
        job = SimulatedJob(local_sizes, seed)
        signature = wire.Signature(kind, "float32", (job.size,))  # type: ignore[arg-type]
        splits = (1,) * job.size if kind == "alltoall" else ()
        values = np.ones(job.size, np.float32)
        if known:
            job.on_all_ranks(lambda rank: job.submit(rank, "x", signature, values, 0, splits))  # noqa: B023
        job.later(job.size - 1, lambda: job.submit(job.size - 1, "join", JOIN))  # noqa: B023
        handles = {}
        for rank in range(job.size - 1):
            job.later(
                rank,
                lambda rank=rank: handles.__setitem__(rank, job.submit(rank, "x", signature, values, 1, splits)),  # type: ignore[misc]  # noqa: B023
            )
        job.settle()
        for rank, handle in handles.items():
            error = job.error(rank, handle)
            assert f"{kind} is not possible while some ranks have joined: rank {job.size - 1}" in error


def test_a_process_set_does_not_wait_for_a_rank_that_has_joined() -> None:
    for local_sizes in ([3], [1, 1, 1], [2, 1]):
        for seed in SEEDS:
            job = SimulatedJob(local_sizes, seed)
            job.on_all_ranks(lambda r: job.submit(r, "s", wire.Signature("add_process_set", ranks=(0, 2))))  # noqa: B023
            inside = replace(SUM, process_set=1)
            job.later(2, lambda: job.submit(2, "join", JOIN))  # noqa: B023
            handles = []
            job.later(0, lambda: handles.append(job.submit(0, "x", inside, values_of(0, 0))))  # noqa: B023
            job.settle()
            assert "rank 2 (host host" in job.error(0, handles[0])
            assert "cannot take part in process set 1 after join()" in job.error(0, handles[0])


@for_each("op", ["min", "max", "product", "average"])
@for_each("dtype", ["float32", "float16", "bfloat16", "int32", "bool"])
def test_a_rank_that_has_joined_changes_nothing_of_the_others(op: str, dtype: str) -> None:
    if (op, dtype) == ("average", "bool"):
        return
    ones = {"float32": 1.0, "float16": 0x3C00, "bfloat16": 0x3F80, "int32": 1, "bool": 1}
    storage = np.uint16 if "16" in dtype else np.uint8 if dtype == "bool" else np.dtype(dtype)
    job = SimulatedJob([1, 1, 1])
    values = np.full(5, ones[dtype], storage)
    job.submit(1, "join", JOIN)
    signature = wire.Signature("allreduce", dtype, (5,), op)  # type: ignore[arg-type]
    handles = {rank: job.submit(rank, "x", signature, values) for rank in (0, 2)}
    job.settle()
    if op == "average":  # of three ranks, as when the third had contributed zeros
        expected = {"float32": np.float32(2 / 3), "float16": 0x3955, "bfloat16": 0x3F2B, "int32": 0}[dtype]
        np.testing.assert_array_equal(job.result(0, handles[0], dtype), np.full(5, expected, storage))
    else:
        np.testing.assert_array_equal(job.result(0, handles[0], dtype), values)


def test_a_join_inside_a_process_set_is_refused() -> None:
    job = SimulatedJob([2, 1])
    job.on_all_ranks(lambda rank: job.submit(rank, "s", wire.Signature("add_process_set", ranks=(0, 1))))
    handle = job.submit(0, "join", replace(JOIN, process_set=1))
    assert "join concerns all ranks and cannot be done in process set 1" in job.error(0, handle)


# --- process sets -----------------------------------------------------------------------------------------------------


@for_each("local_sizes", JOBS)
def test_process_sets_come_and_go_while_others_work(local_sizes: list[int]) -> None:
    for seed in SEEDS:
        job = SimulatedJob(local_sizes, seed)
        everyone = tuple(job.ranks)
        sets = [everyone[: job.size // 2 + 1], everyone[1:], everyone[:1]]
        reduced: dict[tuple[int, int, int], int] = {}
        for rank in job.ranks:
            for number, ranks in enumerate(sets, 1):

                def use(rank: int = rank, number: int = number, ranks: tuple[int, ...] = ranks) -> None:
                    for clock in range(2):
                        inside = replace(SUM, process_set=number)
                        reduced[number, rank, clock] = job.submit(rank, "x", inside, values_of(rank, clock), clock)  # noqa: B023

                add = wire.Signature("add_process_set", ranks=ranks)
                job.later(rank, lambda rank=rank, add=add, n=number: job.submit(rank, "s", add, clock=n))  # type: ignore[misc]  # noqa: B023
                if number == 1:
                    job.later(rank, lambda rank=rank: job.submit(rank, "g", SUM, values_of(rank, 0)))  # type: ignore[misc]  # noqa: B023
            job.settle() if rank == job.size - 1 else None
        for rank in job.ranks:
            for number, ranks in enumerate(sets, 1):
                if rank in ranks:
                    for clock in range(2):
                        job.later(
                            rank,
                            lambda k=(number, rank, clock): reduced.__setitem__(  # type: ignore[misc]  # noqa: B023
                                k,
                                job.submit(k[1], "x", replace(SUM, process_set=k[0]), values_of(k[1], k[2]), k[2]),  # noqa: B023
                            ),
                        )
        job.settle()
        for (number, rank, clock), handle in reduced.items():
            expected = sum(values_of(r, clock) for r in sets[number - 1])
            np.testing.assert_array_equal(job.result(rank, handle), expected, err_msg=f"{seed=} {number=} {rank=}")
        gone = wire.Signature("remove_process_set", ranks=sets[1])
        job.on_all_ranks(lambda rank: job.submit(rank, "s", gone, clock=9))  # noqa: B023
        member = sets[1][0] if sets[1] else 0
        late = job.submit(member, "x", replace(SUM, process_set=2), values_of(member, 0), 2)
        assert "there is no process set 2" in job.error(member, late)
        added = job.on_all_ranks(lambda rank: job.submit(rank, "s", replace(gone, kind="add_process_set"), clock=10))  # noqa: B023
        assert {job.answer(rank, handle)[0].sizes for rank, handle in enumerate(added)} == {(4,)}  # type: ignore[union-attr]
        job.nothing_is_left()


def test_ranks_that_add_different_process_sets_are_told_so() -> None:
    for seed in SEEDS:
        job = SimulatedJob([2, 1], seed)
        handles = job.on_all_ranks(
            lambda rank: job.submit(rank, "s", wire.Signature("add_process_set", ranks=(0, 1) if rank else (0,)))  # noqa: B023
        )
        for rank, handle in enumerate(handles):
            error = job.error(rank, handle)
            assert "the ranks do not agree about tensor 's'" in error
            assert "add_process_set of the ranks [0, 1]" in error


@for_each("ranks", [(), (1, 0), (0, 0), (0, 3)])
def test_a_process_set_of_ranks_that_there_are_not_is_refused(ranks: tuple[int, ...]) -> None:
    job = SimulatedJob([2, 1])
    handle = job.submit(0, "s", wire.Signature("add_process_set", ranks=ranks))
    assert "a process set has different ranks of 0 to 2" in job.error(0, handle)


def test_what_is_under_way_in_a_process_set_that_is_removed_fails() -> None:
    job = SimulatedJob([2, 1])
    job.on_all_ranks(lambda rank: job.submit(rank, "s", wire.Signature("add_process_set", ranks=(0, 2))))
    handle = job.submit(0, "x", replace(SUM, process_set=1), values_of(0, 0))
    job.on_all_ranks(lambda rank: job.submit(rank, "s", wire.Signature("remove_process_set", ranks=(0, 2)), clock=1))
    assert "tensor 'x' was under way when process set 1 was removed" in job.error(0, handle)
    job.nothing_is_left()


# --- stalls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_sizes", [[3], [1, 2]])
def test_people_are_warned_once_of_an_operation_that_waits_for_ranks(local_sizes: list[int]) -> None:
    job = SimulatedJob(local_sizes, stall_warning_time=5.0, operation_timeout=30.0)
    job.submit(0, "x", SUM, values_of(0, 0))
    job.pass_time(4)
    assert job.warnings == []
    job.pass_time(10)
    assert len(job.warnings) == 1
    assert "tensor 'x' waited" in job.warnings[0]
    assert "rank 2" in job.warnings[0] or "ranks 1-2" in job.warnings[0]
    for rank in (1, 2):
        job.submit(rank, "x", SUM, values_of(rank, 0))
    job.settle()
    job.nothing_is_left()


def test_people_are_warned_of_a_plan_that_waits_for_ranks() -> None:
    job = SimulatedJob([1, 1], stall_warning_time=5.0, operation_timeout=30.0)
    job.propose(0, wire.Proposal("opt", 0, 0, wire.Reduction(), (wire.TensorSpec("a", "float32", (8,)),)))
    job.pass_time(10)
    (warning,) = job.warnings
    assert warning.startswith("the plan of 'opt' waited 6 s for rank 1 (host host1), which did not propose it")
