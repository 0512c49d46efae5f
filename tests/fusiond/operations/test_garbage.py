"""Nothing of an operation that is over waits for Python's garbage collector: it would hold a bucket's scratch memory.

Reference cycles are looked for, since a cycle is what reference counting does not free. The collector runs by the
number of objects, not by their size, so buffers of gigabytes may lie in a few dozen of them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from fusion_rt import codecs, wire
from fusiond.collectives.base import Exchange
from fusiond.operations.operation import Operation
from fusiond.transport.flow_control import FlowPort
from tests.for_each import for_each
from tests.fusiond.simulation import SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
TENSORS = tuple(wire.TensorSpec(f"w{i}", "float32", shape) for i, shape in enumerate([(64, 64), (40, 60), (5000,)]))
LAYOUTS = for_each("layout", [[2], [1, 1], [2, 1, 3]])


@contextmanager
def cycles(job: SimulatedJob) -> Iterator[list[str]]:
    """Yields a list that has the names of classes in cycles once the block has ended."""
    found: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield found
        job.nothing_is_left()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [type(o).__name__ for o in gc.garbage if isinstance(o, (Exchange, Operation, FlowPort))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@LAYOUTS
@for_each("codec", sorted(codecs.CODECS))
@for_each("route", ["owners", "gather"])
def test_a_step_of_a_plan_leaves_no_cycle(layout: list[int], codec: str, route: str) -> None:
    job = SimulatedJob(layout, sparse_route=route)
    plan = job.plan(wire.Proposal("opt", 0, 0, wire.Reduction(codec=codec), TENSORS))
    memory = job.add_plan_memory(plan)
    with cycles(job) as found:
        for clock in range(2):
            for rank in job.ranks:
                memory[rank].view(np.float32)[:] = np.random.default_rng([rank, clock]).random(memory[rank].size // 4)
            handles = [
                (rank, job.ready(rank, plan, bucket, clock))
                for rank in job.ranks
                for bucket in range(len(plan.buckets))
            ]
            job.settle()
            for rank, handle in handles:
                assert isinstance(job.answer(rank, handle)[0], wire.Done)
    assert not found


@LAYOUTS
@for_each("kind", ["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"])
def test_an_operation_outside_of_plans_leaves_no_cycle(layout: list[int], kind: wire.Kind) -> None:
    job = SimulatedJob(layout)
    values = [np.ones((12 * job.size, 40), np.float32) for _ in job.ranks]
    signature = wire.Signature(kind, "float32", values[0].shape, "sum")
    with cycles(job) as found:
        splits = (12,) * job.size if kind == "alltoall" else ()
        handles = [job.submit(rank, "x", signature, values[rank], splits=splits) for rank in job.ranks]
        job.settle()
        for rank, handle in enumerate(handles):
            assert isinstance(job.answer(rank, handle)[0], wire.Done)
    assert not found


def test_an_operation_that_failed_leaves_no_cycle() -> None:
    job = SimulatedJob([1, 1])
    values = [np.ones(3000, np.float32), np.ones(3001, np.float32)]
    with cycles(job) as found:
        handles = [
            job.submit(rank, "x", wire.Signature("allreduce", "float32", values[rank].shape, "sum"), values[rank])
            for rank in job.ranks
        ]
        job.settle()
        for rank, handle in enumerate(handles):
            job.error(rank, handle)
    assert not found
