"""Operations go through their states in order, whatever the order of events, and none goes where it may not."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from fusion_rt import wire
from fusiond.operations import operation as running
from fusiond.operations.operation import Operation, OperationState
from tests.fusiond.simulation import SimulatedJob

SUM = wire.Signature("allreduce", "float32", (6000,), "sum")


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[OperationState]]:
    """The states that each operation has entered."""
    found: dict[int, list[OperationState]] = defaultdict(list)
    kept: list[Operation] = []
    enter = Operation._enter

    def note(self: Operation, state: OperationState) -> None:
        enter(self, state)
        kept.append(self)  # so that no other one gets its id
        found[id(self)].append(state)

    monkeypatch.setattr(Operation, "_enter", note)
    return found


@pytest.mark.parametrize("layout", [[2], [1, 1], [2, 1, 1]], ids=str)
def test_states_come_in_their_order(
    layout: list[int], entered: dict[int, list[OperationState]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "INLINE_WORK", 0)  # all local parts are done by threads
    monkeypatch.setattr(running, "PLAIN_WORK", 0)
    for seed in range(10):
        job = SimulatedJob(layout, seed, by_address=[0])
        handles = job.submit_all("x", SUM, [np.full(6000, rank, np.float32) for rank in job.ranks])
        for rank in job.ranks:
            assert (job.result(rank, handles[rank]) == sum(job.ranks)).all(), f"seed {seed}"
    ways = {tuple(states) for states in entered.values()}
    assert len(entered) == 10 * len(layout)
    assert all(list(way) == sorted(way) for way in ways)
    assert {way[-1] for way in ways} == {OperationState.DELIVERED}
    assert all(OperationState.ASKED in way for way in ways) == (len(layout) > 1)
    assert any(OperationState.WRITING in way for way in ways) == (len(layout) > 1)


def test_an_operation_that_fails_does_so_once_and_is_over(entered: dict[int, list[OperationState]]) -> None:
    for seed in range(10):
        job = SimulatedJob([1, 1], seed)
        values = [np.ones(6000, np.float32), np.ones(6001, np.float32)]
        signatures = [SUM, wire.Signature("allreduce", "float32", (6001,), "sum")]
        handles = [job.submit(rank, "x", signatures[rank], values[rank]) for rank in job.ranks]
        job.settle()
        for rank in job.ranks:
            assert "do not agree" in job.error(rank, handles[rank]), f"seed {seed}"
        job.nothing_is_left()
    assert {states[-1] for states in entered.values()} == {OperationState.FAILED}
    assert all(states.count(OperationState.FAILED) == 1 for states in entered.values())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (OperationState.DELIVERED, OperationState.FAILED),
        (OperationState.FAILED, OperationState.EXCHANGING),
        (OperationState.EXCHANGING, OperationState.ASKED),
        (OperationState.GATHERING, OperationState.EXCHANGING),
        (OperationState.PREPARING, OperationState.DELIVERED),
    ],
)
def test_a_step_that_makes_no_sense_is_a_mistake_of_the_program(before: OperationState, after: OperationState) -> None:
    job = SimulatedJob([1])
    engine = job.nodes[0].engine
    operation = engine.operations.begin(wire.OpKey(0, 0, "x", 0), engine.participants.everyone)
    operation.state = before
    with pytest.raises(AssertionError, match=f"from {before.name} to {after.name}"):
        operation._enter(after)
