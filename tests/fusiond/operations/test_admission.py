"""Buckets begin as scratch memory has room: it does not grow with their number, in whatever order they come."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from fusion_rt import codecs, wire
from fusion_rt.wire import OpKey
from fusiond.operations.admission import Admission, Room
from tests.for_each import for_each
from tests.fusiond.simulation import SimulatedJob

ELEMENTS = 1 << 16  # of a bucket, which is one tensor
ROWS = 256
RECORDS = 16 * 1024  # bytes: of an operation, its messages and the numbers of its chunks, which are no scratch memory


def proposal(buckets: int, codec: str, group: str = "opt", op: str = "average") -> wire.Proposal:
    tensors = tuple(wire.TensorSpec(f"{group}{i}", "float32", (ROWS, ELEMENTS // ROWS)) for i in range(buckets))
    return wire.Proposal(group, 0, 0, wire.Reduction(op=op, codec=codec), tensors)


def job_of(local_sizes: Sequence[int], seed: int = 0, **settings: object) -> SimulatedJob:
    return SimulatedJob(
        local_sizes, seed, fusion_threshold=4 * ELEMENTS, chunk_bytes=1 << 14, window_bytes=1 << 16, **settings
    )


class TestRoom:
    def keys(self, count: int, plan: int = 1) -> list[OpKey]:
        return [OpKey(0, plan, str(i), 0) for i in range(count)]

    def test_operations_begin_while_there_is_room_and_then_in_the_order_in_which_they_came(self) -> None:
        a, b, c, d = keys = self.keys(4)
        admission = Admission(keys, Room(100))
        assert [admission.admits(key, 50) for key in keys] == [True, True, False, False]
        assert admission.next() is None
        admission.over(a)
        assert admission.next() == c
        assert admission.admits(c, 50)
        assert (c in admission, d in admission) == (False, True)
        admission.over(b)
        assert admission.next() == d

    def test_one_that_is_larger_than_all_begins_alone(self) -> None:
        a, b = keys = self.keys(2)
        admission = Admission(keys, Room(100))
        assert admission.admits(a, 500)
        assert not admission.admits(b, 500)
        admission.over(a)
        assert admission.next() == b

    def test_each_plan_has_one_under_way(self) -> None:
        (a,), (b,) = self.keys(1), self.keys(1, plan=2)
        admission = Admission([a, b], Room(100))
        assert admission.admits(a, 100)
        assert admission.admits(b, 100)

    def test_what_the_leading_node_has_begun_begins(self) -> None:
        a, b = keys = self.keys(2)
        admission = Admission(keys, Room(100))
        assert admission.admits(a, 100)
        assert not admission.told(b)
        assert not admission.admits(b, 100)
        assert admission.told(b)
        assert admission.next() == b
        assert admission.admits(b, 100)

    def test_what_needs_nothing_never_waits(self) -> None:
        a, b = keys = self.keys(2)
        admission = Admission(keys, Room(100))
        assert admission.admits(a, 100)
        assert admission.admits(b, 0)

    def test_one_that_has_failed_leaves_its_room_and_its_place(self) -> None:
        keys = self.keys(3)
        admission = Admission(keys, Room(100))
        assert [admission.admits(key, 100) for key in keys] == [True, False, False]
        last = keys[2]
        del keys[:2]
        admission.over(None)
        assert admission.next() == last
        assert admission.statistics() == {"bytes": 0, "waiting": 1}


def peak_of_a_step(codec: str, buckets: int, op: str = "average") -> float:
    """Returns the bytes that two nodes allocate at most, at a time, in a step after the first ones, for one of them."""
    job = job_of([1, 1])
    job.borrow_from = 1  # as chunks of 1 MiB are, which are not copied
    plan = job.plan(proposal(buckets, codec, op=op))
    assert len(plan.buckets) == buckets
    memory = job.add_plan_memory(plan)
    for clock in range(3):
        for rank in job.ranks:
            memory[rank].view(np.float32)[:] = np.random.default_rng([rank, clock]).random(memory[rank].size // 4)
        if clock == 2:
            gc.collect()
            tracemalloc.start()
        try:
            handles = [(rank, job.ready(rank, plan, b, clock)) for rank in job.ranks for b in range(buckets)]
            job.settle()
        finally:
            peak = tracemalloc.get_traced_memory()[1] if clock == 2 else 0
            tracemalloc.stop()
        for rank, handle in handles:
            assert isinstance(job.answer(rank, handle)[0], wire.Done)
    return peak / 2


def said_by(codec: str) -> int:
    """Returns the bytes that an exchange of a bucket between two nodes holds, as its codec says."""
    job = job_of([1, 1])
    state = job.nodes[0].engine._plans.get(job.plan(proposal(1, codec)).id)
    return job.nodes[0].engine.exchanges.starter.scratch_nbytes(state, state.buckets[0])


@pytest.mark.parametrize("codec", sorted(codecs.CODECS))
def test_scratch_memory_does_not_grow_with_the_number_of_buckets(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusiond.engine.exchanges.SCRATCH_BYTES", 2 * said_by(codec))
    few, many = 4, 12
    assert peak_of_a_step(codec, many) - peak_of_a_step(codec, few) <= (many - few) * RECORDS + ELEMENTS


@for_each("codec", sorted(codecs.CODECS))
def test_an_exchange_holds_no_more_than_its_codec_says(codec: str) -> None:
    few, many = 1, 5
    held = (peak_of_a_step(codec, many) - peak_of_a_step(codec, few)) / (many - few)
    assert held <= said_by(codec) + RECORDS


@pytest.mark.parametrize("codec", ["int8", "fp16", "powersgd"])
@pytest.mark.parametrize("layout", [[1, 1], [2, 1, 2], [1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_nodes_whose_ranks_submit_in_any_order_do_not_wait_for_each_other(
    layout: list[int], codec: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusiond.engine.exchanges.SCRATCH_BYTES", 1)  # one at a time, but for what another node leads
    job = job_of(layout, seed)
    plans = [job.plan(proposal(4, codec, group)) for group in "ab"]
    for plan in plans:
        job.add_plan_memory(plan)
    order = random.Random(seed)
    handles: list[tuple[int, int]] = []
    for clock in range(2):
        for rank in job.ranks:
            buckets = [(plan, bucket) for plan in plans for bucket in range(4)]
            order.shuffle(buckets)
            for plan, bucket in buckets:
                job.later(
                    rank,
                    lambda rank=rank, plan=plan, bucket=bucket, clock=clock: handles.append(  # type: ignore[misc]
                        (rank, job.ready(rank, plan, bucket, clock))
                    ),
                )
        job.settle()
    assert len(handles) == 2 * 8 * job.size
    for rank, handle in handles:
        assert isinstance(job.answer(rank, handle)[0], wire.Done)
    for node in job.nodes:
        assert node.engine.exchanges.admission.statistics() == {"bytes": 0, "waiting": 0}


def test_what_waits_for_a_late_rank_takes_no_more_than_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 3 * said_by("int8")
    monkeypatch.setattr("fusiond.engine.exchanges.SCRATCH_BYTES", room)
    job = job_of([1, 1])
    plan = job.plan(proposal(12, "int8"))
    job.add_plan_memory(plan)
    handles = [(0, job.ready(0, plan, bucket, 0)) for bucket in range(12)]
    job.settle()
    assert job.nodes[0].engine.exchanges.admission.statistics() == {"bytes": room, "waiting": 9}
    job.pass_time(60)
    assert job.nodes[0].engine.exchanges.admission.statistics() == {"bytes": room, "waiting": 9}
    handles += [(1, job.ready(1, plan, bucket, 0)) for bucket in range(12)]
    job.settle()
    for rank, handle in handles:
        assert isinstance(job.answer(rank, handle)[0], wire.Done)


def test_what_waits_fails_with_the_job_and_what_fails_leaves_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 3 * said_by("int8")
    monkeypatch.setattr("fusiond.engine.exchanges.SCRATCH_BYTES", room)
    job = job_of([1, 1])
    plan = job.plan(proposal(12, "int8"))
    job.add_plan_memory(plan)
    handles = [job.ready(0, plan, bucket, 0) for bucket in range(12)]
    job.settle()
    outcomes = job.nodes[0].engine.operations
    outcomes.everywhere(OpKey(0, plan.id, "11", 0), "it waits, and fails")
    outcomes.everywhere(OpKey(0, plan.id, "0", 0), "it is under way, and fails")
    job.settle()
    assert job.error(0, handles[0]) == "it is under way, and fails"
    assert job.error(0, handles[11]) == "it waits, and fails"
    assert job.nodes[0].engine.exchanges.admission.statistics() == {"bytes": room, "waiting": 7}
    others = [job.ready(1, plan, bucket, 0) for bucket in range(1, 11)]
    job.settle()
    for rank, handle in [*((0, handle) for handle in handles[1:11]), *((1, handle) for handle in others)]:
        assert isinstance(job.answer(rank, handle)[0], wire.Done)
