"""Tensors in the workers' own memory: results are those of tensors in the arena, and what fails says whose it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.host import process_memory
from tests.for_each import for_each
from tests.fusiond.simulation import Array, SimulatedJob

pytestmark = pytest.mark.usefixtures("small_loans")
LAYOUTS = [[2], [3, 1], [1, 2, 2]]
EVERYBODY = range(9)
SOME = (0, 2, 3)


@pytest.fixture(autouse=True)
def closed_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes the descriptors of processes, as the end of a connection does."""
    made: list[process_memory.Process] = []
    begin = process_memory.Process.__init__

    def noted(self: process_memory.Process, pid: int, who: str) -> None:
        begin(self, pid, who)
        made.append(self)

    monkeypatch.setattr(process_memory.Process, "__init__", noted)
    yield
    for process in made:
        process.end()


def values_of(dtype: str, shape: Sequence[int], rank: int) -> Array:
    made = np.random.default_rng(rank).integers(1, 100, shape)
    return made.astype(np.float16).view(np.uint16) if dtype == "float16" else made.astype(DTYPES[dtype].storage)


def run(
    layout: Sequence[int], by_address: Sequence[int], signature: wire.Signature, splits: Callable[[int], Any]
) -> list[bytes]:
    """What each rank gets of one operation."""
    job = SimulatedJob(layout, seed=len(layout), by_address=by_address)
    shape = signature.shape

    def submit(rank: int) -> int:
        return job.submit(rank, "x", signature, values_of(signature.dtype, shape, rank), splits=splits(job.size))

    handles = job.on_all_ranks(submit)
    return [job.result(rank, handles[rank], signature.dtype).tobytes() for rank in job.ranks]


@for_each("layout", LAYOUTS)
@for_each("by_address", [EVERYBODY, SOME])
@for_each(
    "signature",
    [
        wire.Signature("allreduce", "float32", (5000,), "average", 0.5, 3.0),
        wire.Signature("allreduce", "float16", (5000,), "sum"),
        wire.Signature("allreduce", "int32", (5000,), "average"),
        wire.Signature("allreduce", "float64", (333,), "max"),
        wire.Signature("allreduce", "float32", (5000,), "adasum"),
        wire.Signature("allreduce", "float32", (5000,), "sum", codec="fp16"),
        wire.Signature("allreduce", "float32", (5000,), "sum", codec="topk(density=0.05)"),
        wire.Signature("allreduce", "float32", (100_000,), "sum"),
        wire.Signature("broadcast", "int64", (5000,), root=1),
        wire.Signature("allgather", "float32", (500, 3)),
        wire.Signature("reducescatter", "float32", (60, 50), "average", 0.5),
        wire.Signature("reducescatter", "int32", (60, 50), "average"),
        wire.Signature("alltoall", "float32", (60, 50)),
    ],
)
def test_every_kind_gives_the_same_bits_as_in_the_arena(
    layout: list[int], by_address: Sequence[int], signature: wire.Signature
) -> None:
    def splits(size: int) -> tuple[int, ...]:
        return (60 // size,) * (size - 1) + (60 - 60 // size * (size - 1),) if signature.kind == "alltoall" else ()

    assert run(layout, by_address, signature, splits) == run(layout, (), signature, splits)


@for_each("layout", LAYOUTS)
@for_each("by_address", [EVERYBODY, SOME])
@for_each("kind", ["allreduce", "broadcast", "allgather", "reducescatter", "alltoall", "reduce"])
def test_results_of_groups_go_to_other_addresses(layout: list[int], by_address: Sequence[int], kind: wire.Kind) -> None:
    def results(addresses: Sequence[int]) -> list[bytes]:
        job = SimulatedJob(layout, by_address=addresses)
        group, members = job.open_group("g", job.ranks), job.size
        signature = wire.Signature(kind, "float32", (60, 50), "average", root=1, process_set=group)
        rows = {"allgather": 60 * members, "reducescatter": 60 // members, "alltoall": 60}.get(kind, 60)
        even = (60 // members,) * members if kind == "alltoall" else ()

        def submit(rank: int) -> int:
            values, into = values_of("float32", (60, 50), rank), rows * 50 * 4
            own = None if kind == "reduce" and rank != 1 else into
            return job.submit(rank, "g", signature, values, splits=even, receives=even, into=own)

        handles = job.on_all_ranks(submit)
        return [job.result(rank, handles[rank]).tobytes() for rank in job.ranks if kind != "reduce" or rank == 1]

    found = results(by_address)
    assert found == results(())
    assert len(found[0]) in (60 * 50 * 4, 60 * sum(layout) * 50 * 4, 60 // sum(layout) * 50 * 4)


@for_each("layout", LAYOUTS)
@for_each("kind", ["allreduce", "broadcast", "allgather", "reducescatter"])
def test_a_wrong_address_fails_the_operation_on_all_ranks_and_nothing_else(layout: list[int], kind: wire.Kind) -> None:
    job = SimulatedJob(layout, by_address=EVERYBODY)
    signature = wire.Signature(kind, "float32", (5000,), root=1 if kind == "broadcast" else 0)

    def submit(rank: int) -> int:
        if rank == 1:
            return job.submit_at(rank, "x", signature, 4096)
        return job.submit(rank, "x", signature, values_of("float32", (5000,), rank))

    handles = job.on_all_ranks(submit)
    for rank in job.ranks:
        said = job.error(rank, handles[rank])
        assert "tensor 'x' failed on node" in said
        assert "000 of a worker cannot be read: not all of them are memory of its process" in said
    ones = job.submit_all("y", wire.Signature("allreduce", "float32", (5000,)), [np.ones(5000, np.float32)] * job.size)
    assert job.result(0, ones[0])[0] == job.size
