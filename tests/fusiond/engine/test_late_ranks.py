"""A late rank costs nothing but time: what waits for it at its daemon is bounded, and no number of operations or bytes
under way ends the job."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from fusion_rt import wire
from fusiond.engine import exchanges
from fusiond.operations import starter
from fusiond.transport import early_credit
from tests.for_each import for_each
from tests.fusiond.simulation import Array, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
CREDIT = 96 * 1024
CHUNK = 4096


@pytest.fixture(autouse=True)
def little_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much that three operations of the least charge, or 24 chunks, may wait."""
    monkeypatch.setattr(starter, "EARLY_BYTES", CREDIT)


def waiting_at(job: SimulatedJob, node: int) -> int:
    """Bytes of chunks that wait at a node for operations that its workers have not submitted."""
    operations = job.nodes[node].engine.operations.under_way.values()
    return sum(len(payload) for found in operations if not found.takes_chunks for _, _, payload in found.early)


def submit(job: SimulatedJob, rank: int, number: int, elements: int, kind: wire.Kind = "allreduce") -> int:
    """A rank submits the operation of this number, of values that follow from both."""
    return job.submit(
        rank, f"x{number}", wire.Signature(kind, "float32", (elements,)), values_of(rank, number, elements)
    )


def values_of(rank: int, number: int, elements: int) -> Array:
    return np.full(elements, (rank + 1) * (number + 1), np.float32)


def run(job: SimulatedJob, late: int, limit: int) -> None:
    """Runs until nothing happens any more; what waits at the late rank's node stays within the limit."""
    node = job.topology.node_of(late)
    while job.step():
        assert waiting_at(job, node) <= limit
        assert not any(each.failure for each in job.nodes)


def all_wait_for_the_last_rank(layout: list[int], operations: int, elements: int, kind: wire.Kind, seed: int) -> None:
    """Each operation is agreed upon before, so that the others need not ask whether it may begin."""
    job = SimulatedJob(layout, seed)
    late = job.size - 1
    for number in range(operations):
        job.on_all_ranks(lambda rank, number=number: submit(job, rank, number, elements, kind))  # type: ignore[misc]
    job.settle()
    ahead = [rank for rank in job.ranks if rank != late]
    again: dict[tuple[int, int], int] = {}

    def next_run(rank: int, number: int) -> None:
        signature = wire.Signature(kind, "float32", (elements,))
        again[rank, number] = job.submit(rank, f"x{number}", signature, values_of(rank, number, elements), clock=1)

    for rank in ahead:
        for number in range(operations):
            job.later(rank, lambda rank=rank, number=number: next_run(rank, number))  # type: ignore[misc]
    others = len(layout) - 1
    run(job, late, others * (CREDIT // others + CHUNK))
    order = list(range(operations))
    random.Random(seed).shuffle(order)  # not that in which the others have begun them
    for number in order:
        job.later(late, lambda number=number: next_run(late, number))  # type: ignore[misc]
    run(job, late, others * (CREDIT // others + CHUNK))
    for (rank, number), handle in again.items():
        found = job.result(rank, handle)
        parts = [values_of(each, number, elements) for each in job.ranks]
        expected = {"allreduce": np.sum(parts, axis=0), "broadcast": parts[0], "allgather": np.concatenate(parts)}[kind]
        np.testing.assert_array_equal(found, expected)
    job.nothing_is_left()


@for_each("layout", [[1, 1], [1, 1, 1], [2, 1, 2]])
@for_each(("operations", "elements"), [(40, 10_000), (100, 5)])
@for_each("kind", ["allreduce", "broadcast", "allgather"])
@for_each("seed", range(2))
def test_what_waits_for_a_late_rank_is_bounded(
    layout: list[int], operations: int, elements: int, kind: wire.Kind, seed: int
) -> None:
    all_wait_for_the_last_rank(layout, operations, elements, kind, seed)


def test_a_single_peer_of_a_late_rank_uses_all_that_may_wait() -> None:
    job = SimulatedJob([1, 1])
    for ranks in (job.ranks, [0]):  # agreed upon, and then begun by the first rank alone
        for number in range(10):
            for rank in ranks:
                signature = wire.Signature("allreduce", "float32", (5,))
                job.submit(rank, f"x{number}", signature, values_of(rank, number, 5), clock=len(ranks))
        job.settle()
    early = job.nodes[0].engine.exchanges.starter.early.statistics()
    assert early == {"early_bytes": CREDIT, "held": 10 - CREDIT // early_credit.LEAST_CHARGE}


@for_each("seed", range(20))
def test_ranks_that_begin_operations_in_different_orders_do_not_wait_for_each_other(seed: int) -> None:
    job = SimulatedJob([1, 1, 1, 1], seed)
    operations = range(24)
    for number in operations:
        job.on_all_ranks(lambda rank, number=number: submit(job, rank, number, 6000))  # type: ignore[misc]
    job.settle()
    handles: dict[tuple[int, int], int] = {}

    def next_run(rank: int, number: int) -> None:
        signature = wire.Signature("allreduce", "float32", (6000,))
        handles[rank, number] = job.submit(rank, f"x{number}", signature, values_of(rank, number, 6000), clock=1)

    for rank in job.ranks:
        for number in _shuffled(operations, [seed, rank]):
            job.later(rank, lambda rank=rank, number=number: next_run(rank, number))  # type: ignore[misc]
    job.settle()
    for (rank, number), handle in handles.items():
        np.testing.assert_array_equal(job.result(rank, handle), 10 * (number + 1))
    job.nothing_is_left()


def test_no_number_of_operations_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than a daemon keeps records of for its late workers."""
    monkeypatch.setattr(exchanges, "_MAX_EARLY", 4)
    all_wait_for_the_last_rank([1, 1], 200, 5, "allreduce", 0)


@pytest.mark.parametrize("codec", ["topk(density=0.1, minimum=0)", "int8", "powersgd(rank=2)"])
def test_buckets_of_many_steps_wait_for_a_late_rank(codec: str) -> None:
    job = SimulatedJob([1, 1, 1])
    tensors = tuple(wire.TensorSpec(f"w{i}", "float32", (100, 60)) for i in range(12))
    plan = job.plan(wire.Proposal("opt", 0, 0, wire.Reduction("average", codec=codec), tensors))
    memory = job.add_plan_memory(plan)
    for rank in job.ranks:
        memory[rank].view(np.float32)[:] = 1.0
    handles = [(rank, job.ready(rank, plan, b, 0)) for rank in (0, 1) for b in range(len(plan.buckets))]
    run(job, 2, CREDIT + 2 * CHUNK)
    handles += [(2, job.ready(2, plan, bucket, 0)) for bucket in reversed(range(len(plan.buckets)))]
    run(job, 2, CREDIT + 2 * CHUNK)
    for rank, handle in handles:
        assert isinstance(job.answer(rank, handle)[0], wire.Done)
    job.nothing_is_left()


def test_operations_that_failed_use_up_no_credit() -> None:
    """Below half of it nothing is asked, so that much may stay in use for good."""
    job = SimulatedJob([1, 1])
    for number in range(40):
        job.on_all_ranks(lambda rank, number=number: submit(job, rank, number, 5000))  # type: ignore[misc]
    job.settle()
    for clock in range(1, 4):
        for number in range(40):
            signature = wire.Signature("allreduce", "float32", (5000,))
            job.submit(0, f"x{number}", signature, values_of(0, number, 5000), clock=clock)
        job.settle()
        engine = job.nodes[1].engine
        for number in range(40):
            engine.operations.everywhere(wire.OpKey(0, 0, f"x{number}", clock), "no")
        job.settle()
        early = job.nodes[0].engine.exchanges.starter.early.statistics()
        assert early["early_bytes"] <= CREDIT // 2 + early_credit.LEAST_CHARGE
        assert early["held"] == 0


def _shuffled(numbers: Sequence[int], seed: list[int]) -> list[int]:
    found = list(numbers)
    random.Random(str(seed)).shuffle(found)
    return found


def test_the_least_charge_bounds_the_records_that_a_daemon_keeps() -> None:
    assert early_credit.EARLY_BYTES // early_credit.LEAST_CHARGE + 1024 <= exchanges._MAX_EARLY


def test_a_chunk_of_another_epoch_is_counted_and_told() -> None:
    job = SimulatedJob([1, 1])
    engine = job.nodes[0].engine
    foreign = wire.OpKey(0, 0, "x", wire.CLOCKS_OF_AN_EPOCH + 1)
    for _ in range(3):
        engine.peer_message(1, wire.Chunk(foreign, 7, 0, 0, 1), memoryview(bytes(8)))
    assert engine.statistics()["foreign_chunks"] == 3
    (said,) = job.warnings
    assert "node 1 (host host1)" in said or "host1" in said
    assert "in another membership epoch, which is dropped" in said
    job.nothing_is_left()
