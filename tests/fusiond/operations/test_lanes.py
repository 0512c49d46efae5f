"""Chunks whose work threads do, several at a time, in any order: the same bits, and no end before the threads have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from fusion_rt import wire
from fusiond.operations import operation as running
from fusiond.operations.operation import Operation
from tests.for_each import for_each
from tests.fusiond.simulation import Array, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
COUNT = 20_001


class AnyOrder(deque[Callable[[], None]]):
    """Jobs that wait for threads, of which any may end first."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._choose = np.random.default_rng(seed)

    def popleft(self) -> Callable[[], None]:
        self.rotate(-int(self._choose.integers(len(self))))
        return super().popleft()


@pytest.fixture(autouse=True)
def long_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do the work of the chunks of 4 KiB that simulated jobs have."""
    monkeypatch.setattr(running, "INLINE_WORK", 1024)


def made(layout: list[int], seed: int, threads: int) -> SimulatedJob:
    job = SimulatedJob(layout, seed, kernel_threads=threads)
    job.deferred = AnyOrder(seed)
    return job


def results(job: SimulatedJob, signature: wire.Signature, values: list[Array]) -> list[Array]:
    handles = job.submit_all("x", signature, values)
    found = [job.result(rank, handle) for rank, handle in enumerate(handles)]
    job.nothing_is_left()
    return found


def most_lanes(job: SimulatedJob) -> int:
    found = [operation for node in job.nodes for operation in node.engine.operations.under_way.values()]
    return max((operation.lanes for operation in found), default=0)


@for_each("layout", [[1, 1], [2, 1, 3], [1, 1, 1, 1, 1]])
@for_each("codec", ["dense", "fp16"])
@for_each("seed", range(4))
def test_sums_have_the_same_bits_as_those_of_one_thread(layout: list[int], codec: str, seed: int) -> None:
    choose = np.random.default_rng(seed)
    values = [choose.standard_normal(COUNT).astype(np.float32) for _ in range(sum(layout))]
    signature = wire.Signature("allreduce", "float32", (COUNT,), "sum", codec=codec)
    alone, beside = (results(made(layout, seed, threads), signature, values) for threads in (1, 4))
    for one, other in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))


@for_each("kind", ["broadcast", "allgather"])
@for_each("seed", range(4))
def test_what_is_only_copied_comes_to_its_place(kind: str, seed: int) -> None:
    values = [np.random.default_rng([seed, rank]).standard_normal(COUNT).astype(np.float32) for rank in range(4)]
    found = results(made([1, 2, 1], seed, 4), wire.Signature(kind, "float32", (COUNT,)), values)  # type: ignore[arg-type]
    for result in found:
        expected = values[0] if kind == "broadcast" else np.concatenate(values)
        np.testing.assert_array_equal(result.reshape(-1), expected)


def test_several_chunks_of_an_operation_are_worked_on_at_a_time() -> None:
    job, most = made([1, 1], 0, 4), 0
    values = [np.ones(COUNT, np.float32)] * 2
    for rank in job.ranks:
        job.later(rank, lambda rank=rank: job.submit(rank, "x", SUM, values[rank]))  # type: ignore[misc]
    while job.step():
        most = max(most, most_lanes(job))
    assert most > 1


SUM = wire.Signature("allreduce", "float32", (COUNT,), "sum")


def test_an_operation_that_fails_gives_memory_back_once_no_thread_works_on_its_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, lanes_at_end = made([1, 1], 1, 4), []
    real = Operation._close
    monkeypatch.setattr(Operation, "_close", lambda self: (lanes_at_end.append(self.lanes), real(self))[1])  # type: ignore[func-returns-value]
    values = [np.ones(COUNT, np.float32)] * 2
    for rank in job.ranks:
        job.later(rank, lambda rank=rank: job.submit(rank, "x", SUM, values[rank]))  # type: ignore[misc]
    while most_lanes(job) < 2:
        assert job.step()
    operations = job.nodes[0].engine.operations
    operations.everywhere(next(iter(operations.under_way)), "it was given up")
    while job.step():
        pass
    assert lanes_at_end
    assert set(lanes_at_end) == {0}
    for rank in job.ranks:
        assert any(isinstance(message, wire.Failed) for message, _ in job.answers[rank])
