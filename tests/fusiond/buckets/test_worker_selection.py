"""Trays of workers that have selected themselves, at the engine: which are taken, and what becomes of them when the
operation fails. A whole job in one thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.codecs.worker_selection import ALIGNMENT, HEADER, Tray
from fusion_rt.wire import OpKey
from fusiond.core.errors import RequestError
from tests.fusiond.buckets.test_codec_state import PROPOSAL, load, save
from tests.fusiond.simulation import SimulatedJob

REST = 2.5  # what the worker has taken of its residual


class Job(SimulatedJob):
    """A job with a plan of one bucket, and a tray on rank 0."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks, fusion_threshold=1 << 20)
        self.planned = self.plan(PROPOSAL)
        self.memory = self.add_plan_memory(self.planned)
        found = self.engine(0)._plans.find(wire.OpKey(0, self.planned.id, "0", 0))
        assert found is not None
        codec: Any = found[1].codec
        shape = codec.tray()
        self.offset = -(-self.planned.nbytes // ALIGNMENT) * ALIGNMENT
        self.segment = np.zeros(self.offset + shape.nbytes, np.uint8)
        self.engine(0).add_plan_memory(0, self.planned.id, self.segment)
        self.tray = Tray(shape, self.segment[self.offset :])
        (words,), (room,) = self.tray.groups, shape.rooms
        words[0], words[HEADER] = 1, 7
        words[HEADER + room : HEADER + room + 1] = np.array([REST], np.float32).view(np.int32)

    def send(self, offset: int = -1, rank: int = 0, clock: int = 0) -> int:
        self._handles += 1
        tray = self.offset if offset < 0 else offset
        self.engine(rank).ready(rank, wire.Ready(self._handles, self.planned.id, 0, clock, tray=tray))
        return self._handles


def test_what_a_worker_has_selected_is_its_nodes_contribution() -> None:
    job = Job([1, 1])
    job.memory[1][:] = 0
    mine, other = job.send(), job.ready(1, job.planned, 0, 0)
    job.settle()
    assert isinstance(job.answer(0, mine)[0], wire.Done)
    assert isinstance(job.answer(1, other)[0], wire.Done)
    expected = np.zeros(job.planned.nbytes // 4, np.float32)
    expected[7] = REST
    for memory in (job.segment[: job.planned.nbytes], job.memory[1]):
        assert np.array_equal(memory.view(np.float32), expected)
    indices, _, step, undone = job.tray.answered()
    assert (len(indices), step, undone) == (0, 1, False), "all of it was sent"


def test_a_worker_whose_gradient_is_zero_has_selected_nothing() -> None:
    job = Job([1, 1])
    job.tray.groups[0][0] = 0
    job.memory[1][:] = 0
    mine, other = job.send(), job.ready(1, job.planned, 0, 0)
    job.settle()
    assert isinstance(job.answer(0, mine)[0], wire.Done)
    assert isinstance(job.answer(1, other)[0], wire.Done)
    for memory in (job.segment[: job.planned.nbytes], job.memory[1]):
        assert not memory.any()


def test_trays_that_cannot_be_are_refused_with_their_place() -> None:
    job = Job([1, 1])
    for offset in (64, job.offset + 64, job.offset + 1):
        with pytest.raises(RequestError, match=rf"bucket 0 of plan 1 on rank 0 was selected .* into byte {offset} of"):
            job.send(offset)
    shared = SimulatedJob([2, 1])
    plan = shared.plan(PROPOSAL)
    shared.add_plan_memory(plan)
    with pytest.raises(
        RequestError, match=r"bucket 0 of plan 1 on rank 0 was .*, which is not the only one of its node"
    ):
        shared.engine(0).ready(0, wire.Ready(1, plan.id, 0, 0, tray=plan.nbytes))


def test_what_was_selected_for_an_operation_that_has_failed_is_kept() -> None:
    job = Job([1, 1])
    job.engine(0).peer_message(1, wire.OpFailed(OpKey(0, job.planned.id, "0", 0), "something"))
    assert job.error(0, job.send()) == "something"
    state = save(job, 0)
    name, at = ("a", 7) if state["0:residual/a"].any() else ("b", 7)
    assert state[f"0:residual/{name}"][at] == REST
    assert sum(np.count_nonzero(value) for key, value in state.items() if ":residual/" in key) == 1
    assert load(job, 0, state) == ""
    assert save(job, 0)[f"0:residual/{name}"][at] == REST
