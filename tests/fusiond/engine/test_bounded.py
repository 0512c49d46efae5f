"""The memory of a daemon for operations does not grow with their number, and what it forgets does no harm."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest

from fusion_rt import wire
from fusiond.algorithms import allreduce
from fusiond.control.negotiation import Approved
from fusiond.engine import agreement
from tests.fusiond.simulation import SimulatedJob


def sum_up(job: SimulatedJob, elements: int, clock: int, ranks: int | None = None) -> None:
    """An all-reduce of ones by all ranks, or by the first ones."""
    signature = wire.Signature("allreduce", "float32", (elements,), op="sum")
    values = np.ones(elements, np.float32)
    handles = {}
    for rank in range(ranks or job.size):
        job.later(rank, lambda rank=rank: handles.update({rank: job.submit(rank, "x", signature, values, clock)}))  # type: ignore[misc]
    job.settle()
    for rank, handle in handles.items():
        np.testing.assert_array_equal(job.result(rank, handle), len(handles))
    job.answers.clear()
    job.sent.clear()


@pytest.mark.parametrize("seed", range(5))
def test_signatures_that_nodes_have_forgotten_are_agreed_upon_again(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MAX_APPROVED", 8)
    job = SimulatedJob([1, 2, 1], seed)
    clocks = list(range(60))
    for clock in clocks:
        sum_up(job, 1 + job._random.choice([clock, clock % 20, clock % 5]), clock)
    job.nothing_is_left()


@pytest.mark.parametrize("seed", range(5))
def test_a_node_whose_ranks_have_joined_passes_on_what_it_has_forgotten(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_MAX_APPROVED", 8)
    job = SimulatedJob([1, 1, 1], seed)
    sum_up(job, 5, 0)
    job.submit(2, "join", wire.Signature("join"))
    job.settle()
    for clock in range(1, 30):
        sum_up(job, 5 if clock % 10 == 0 else 10 + clock, clock, ranks=2)


def test_memory_does_not_grow_with_the_number_of_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did by more than 1000 bytes for each."""
    monkeypatch.setattr(agreement, "_MAX_APPROVED", 64)
    monkeypatch.setattr(agreement, "_MAX_RECIPES", 64)
    monkeypatch.setattr("fusiond.operations.operation._COMPLETED", 64)
    job = SimulatedJob([1, 1])

    def memory_after(first: int, last: int) -> int:
        for elements in range(first, last):
            sum_up(job, elements, elements)
        job.urgencies.clear()
        for cache in (wire.digest, allreduce._cheapest):  # bounded themselves, and not full yet
            cache.cache_clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    grown = -memory_after(1, 300) + memory_after(300, 500)
    tracemalloc.stop()
    assert grown < 200 * 700


def test_what_was_approved_is_always_found_and_little_else() -> None:
    approved = Approved()
    agreed = [(0, wire.digest(wire.Signature("allreduce", "float32", (n,)))) for n in range(3000)]
    for each in agreed[:2000]:
        approved.add(each)
    assert all(each in approved for each in agreed[:2000])
    assert sum(each in approved for each in agreed[2000:]) < 20
    assert 1980 < len(approved) <= 2000
