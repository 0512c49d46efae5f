"""Handles, names, and what happens when ranks do not agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from tests.harness import on_ranks


@on_ranks
def test_many_unnamed_operations_may_be_under_way_at_once() -> None:
    handles = [hvd.allreduce_async(torch.full((n,), float(n)), op=hvd.Sum) for n in (1, 9000, 2, 3, 5000)]
    order = reversed if hvd.rank() else list
    for handle, n in order(list(zip(handles, (1, 9000, 2, 3, 5000), strict=True))):
        assert hvd.synchronize(handle)[0].item() == n * hvd.size()


@on_ranks
def test_a_name_may_be_under_way_once() -> None:
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice")
        for operation in (hvd.allreduce_async, hvd.allreduce, lambda x, name: hvd.allreduce_async_(x, name=name)):
            with pytest.raises(ValueError, match=r"'allreduce\.twice'.*still under way"):
                operation(torch.ones(3), name="twice")
    hvd.barrier()
    other_kind = hvd.broadcast_async(torch.ones(3), 0, name="twice")
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(torch.ones(3), name="twice")
    hvd.synchronize(handle)
    hvd.synchronize(other_kind)
    hvd.allreduce(torch.ones(3), name="twice")


@on_ranks
def test_poll_and_synchronize_know_handles() -> None:
    for handle in (
        hvd.allreduce_async(torch.ones(3)),
        hvd.grouped_allreduce_async([torch.ones(3), torch.ones(9000, dtype=torch.int64)]),
        hvd.alltoall_async(torch.ones(hvd.size())),
        hvd.grouped_reducescatter_async([torch.ones(3), torch.ones(9000)]),
    ):
        while not hvd.poll(handle):
            pass
        assert hvd.synchronize(handle) is not None
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match=f"handle {handle} was not created"):
            hvd.poll(handle)


@contextlib.contextmanager
def disagreement(name: str, *said: str) -> Iterator[None]:
    """What is raised on all ranks when rank 1 submits something else: who submitted what."""
    with pytest.raises(HorovodInternalError) as caught:
        yield
    for words in (f"the ranks do not agree about tensor '{name}'", "rank 1 (host", *said):
        assert words in str(caught.value)


@on_ranks
def test_a_mismatch_fails_on_all_ranks_and_the_job_goes_on() -> None:
    odd = hvd.rank() == 1
    with disagreement("allreduce.shape", "float32 [3]", "float32 [2]"):
        hvd.allreduce(torch.ones(3 if odd else 2), name="shape")
    with disagreement("allreduce.dtype", "float64", "float32"):
        hvd.allreduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32), name="dtype")
    with disagreement("allreduce.op", "allreduce max", "allreduce min"):
        hvd.allreduce(torch.ones(2), name="op", op=hvd.Max if odd else hvd.Min)
    with disagreement("allreduce.scale", "scaled by 2"):
        hvd.allreduce(torch.ones(2), name="scale", prescale_factor=2.0 if odd else 1.0)
    with disagreement("broadcast.root", "from root 1", "from root 0"):
        hvd.broadcast(torch.ones(2), 1 if odd else 0, name="root")
    with disagreement("allgather.columns", "[2, 4]", "[2, 3]"):
        hvd.allgather(torch.ones(2, 4 if odd else 3), name="columns")
    assert hvd.allreduce(torch.ones(2), name="shape", op=hvd.Sum).tolist() == [hvd.size()] * 2
