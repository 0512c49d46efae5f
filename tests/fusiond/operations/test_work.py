"""The work of an exchange that touches much is done by threads, and changes no bit of any result.

The simulation runs the jobs of threads at any time, among deliveries of other messages.
"""

from __future__ import annotations

import numpy as np
import pytest

from fusion_rt import codecs, wire
from fusiond.operations import operation as running
from fusiond.operations.operation import OperationState
from tests.fusiond.simulation import Array, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
TENSORS = tuple(wire.TensorSpec(f"w{i}", "float32", shape) for i, shape in enumerate([(64, 64), (40, 60), (5000,)]))
SUMMED_AT_ONCE = [codec for codec in sorted(codecs.CODECS) if codecs.parse(codec).stateful]
STEPS = 3


def gradient(rank: int, clock: int, nbytes: int) -> Array:
    values = np.random.default_rng([rank, clock]).standard_normal(nbytes // 4).astype(np.float32)
    if (rank, clock) == (1, 1):
        values[17] = np.inf  # this step is spoiled, and undone everywhere
    return values


def train(codec: str, route: str, seed: int) -> list[bytes]:
    """Returns the results of some steps on three nodes; and in the last place all that the codecs remember."""
    job = SimulatedJob([1, 2, 1], seed, sparse_route=route)
    plan = job.plan(wire.Proposal("opt", 0, 0, wire.Reduction(codec=codec), TENSORS))
    memory, found = job.add_plan_memory(plan), []
    for clock in range(STEPS):
        for rank in job.ranks:
            memory[rank].view(np.float32)[:] = gradient(rank, clock, memory[rank].size)
        buckets = range(len(plan.buckets))
        handles = [(rank, job.ready(rank, plan, bucket, clock)) for rank in job.ranks for bucket in buckets]
        job.settle()
        for rank, handle in handles:
            assert isinstance(job.answer(rank, handle)[0], wire.Done), f"seed {seed}"
        found += [memory[rank].tobytes() for rank in job.ranks]
    job.nothing_is_left()
    saved = [node.engine.keeper.state_of_codecs((0, "opt")) for node in job.nodes]
    return [*found, repr([sorted((key, value.tobytes()) for key, value in state.items()) for state in saved]).encode()]


@pytest.mark.parametrize("codec", SUMMED_AT_ONCE)
@pytest.mark.parametrize("route", ["owners", "gather"])
def test_work_on_threads_gives_the_bits_that_work_at_once_gives(
    codec: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = train(codec, route, 0)
    monkeypatch.setattr(running, "PLAIN_WORK", 0)
    for seed in range(4):
        assert train(codec, route, seed) == at_once, f"seed {seed}"


@pytest.mark.parametrize("codec", SUMMED_AT_ONCE)
def test_an_operation_that_fails_while_a_thread_works_for_it_loses_nothing(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codecs are not touched while the thread works, and get back what they have sent afterwards."""
    monkeypatch.setattr(running, "PLAIN_WORK", 0)
    failed_while_working = 0
    for seed in range(12):
        job = SimulatedJob([1, 1], seed)
        plan = job.plan(wire.Proposal("opt", 0, 0, wire.Reduction(codec=codec), TENSORS[:1]))
        memory = job.add_plan_memory(plan)
        given = [gradient(rank, 0, memory[rank].size) for rank in job.ranks]
        for rank in job.ranks:
            memory[rank].view(np.float32)[:] = given[rank]
        handles = [job.ready(rank, plan, 0, 0) for rank in job.ranks]
        engine = job.nodes[0].engine
        left = seed  # jobs of the exchange that end before the failure
        while job.step():
            working = any(
                found.state is OperationState.EXCHANGING and found.busy
                for found in engine.operations.under_way.values()
            )
            if working and not left:
                break
            left -= working
        else:
            continue
        failed_while_working += 1
        (operation,) = engine.operations.under_way.values()
        engine.operations.everywhere(operation.key, "somebody pulled the plug")
        job.settle()
        assert "pulled the plug" in job.error(0, handles[0]), f"seed {seed}"
        if getattr(operation.exchange, "_is_applied", False):  # the result is where the gradient was
            continue
        (state,) = engine._plans
        kept = state.buckets[0].codec
        saved = engine.keeper.state_of_codecs((0, "opt"))["0:residual/w0"]
        off = min(np.abs(saved).max(), np.abs(saved - given[0][: len(saved)]).max())
        assert off < 1e-3, f"seed {seed}: the step is neither undone nor given back, by {off}"
        assert kept.step == 0, f"seed {seed}"
    assert failed_while_working, "no schedule has a failure where this test wants it"
