"""Handles, names, and what happens when ranks do not agree."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.host import arena
from fusion_rt.torch.core.runtime import runtime
from tests.harness import Job, on_ranks
from tests.torch.conftest import START


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


SIZE = 8 << 20  # bytes


def short_of_memory(regions: int, patch: pytest.MonkeyPatch) -> int:
    """Leaves this worker's host memory for so many regions of `SIZE` bytes; returns the bytes of its arena then."""
    client = runtime().client
    client.arena.drop_spare()
    most = client.arena.statistics()["nbytes"] + regions * SIZE
    patch.setattr("fusion_rt.client.client._LEFT", arena.LEAST_LEFT)
    patch.setattr(
        arena, "available_memory", lambda: (arena.LEAST_LEFT + most - client.arena.statistics()["nbytes"], "")
    )
    return most


@on_ranks
def test_operations_in_place_give_memory_back_to_those_that_begin_while_memory_is_short() -> None:
    with pytest.MonkeyPatch.context() as patch:
        most = short_of_memory(2, patch)
        turned = [torch.full((2, SIZE // 8), float(n)).t() for n in range(6)]  # has to be copied into the arena
        handles = [hvd.allreduce_async_(tensor, op=hvd.Sum) for tensor in turned]
        handles += [hvd.grouped_allreduce_async_([tensor], op=hvd.Sum) for tensor in turned[:2]]
        handles += [hvd.reducescatter_async(torch.ones(SIZE // 4), op=hvd.Sum) for _ in range(3)]
        assert runtime().client.arena.statistics()["nbytes"] <= most
        results = [hvd.synchronize(handle) for handle in handles]
    for n, tensor in enumerate(turned):
        assert results[n] is tensor
        assert bool((tensor == n * (hvd.size() ** (2 if n < 2 else 1))).all())
    assert all(bool((result == hvd.size()).all()) for result in results[8:])


def begin_in_another_order_while_memory_is_short() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        short_of_memory(1, patch)
        names = ("a", "b") if hvd.rank() == 0 else ("b", "a")
        handles = [hvd.allreduce_async_(torch.ones((2, SIZE // 8)).t(), name=name) for name in names]
    errors = []
    for handle in handles:
        try:
            hvd.synchronize(handle)
        except HorovodInternalError as error:
            errors.append(str(error))
    return errors


def test_ranks_that_wait_for_each_others_memory_end_by_the_limit_of_a_stall() -> None:
    limits = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    with Job((2,), {**START, **limits}) as job:
        told = job.run(begin_in_another_order_while_memory_is_short)
    for errors in told:  # of one operation or both: when one has failed, memory is there for the other
        assert errors
        assert all("waited" in text for text in errors), told


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


class Own:
    """A script's own compressor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: None) -> torch.Tensor:
        return tensor


SINGLE: dict[str, tuple[Callable[..., Any], ...]] = {
    "allreduce": (
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allreduce_async,
        hvd.allreduce_async_,
        functools.partial(hvd.allreduce, compression=Own),
    ),
    "allgather": (hvd.allgather, hvd.allgather_async),
    "broadcast": tuple(
        functools.partial(operation, root_rank=0)
        for operation in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_)
    ),
    "alltoall": (hvd.alltoall, hvd.alltoall_async),
    "reducescatter": (hvd.reducescatter, hvd.reducescatter_async),
}
GROUPED: dict[str, tuple[Callable[..., Any], ...]] = {
    "allreduce": (
        hvd.grouped_allreduce,
        hvd.grouped_allreduce_,
        hvd.grouped_allreduce_async,
        hvd.grouped_allreduce_async_,
        functools.partial(hvd.grouped_allreduce, compression=Own),
    ),
    "allgather": (hvd.grouped_allgather, hvd.grouped_allgather_async),
    "reducescatter": (hvd.grouped_reducescatter, hvd.grouped_reducescatter_async),
}
NO_TENSORS: dict[str, tuple[Any, str]] = {
    "float": (3.0, r"torch\.tensor\(\.\.\.\) of it"),
    "list": ([1.0, 2.0], r"torch\.tensor\(\.\.\.\) of it"),
    "ndarray": (np.ones(2, np.float32), r"torch\.from_numpy\(\.\.\.\) of it"),
    "dict": ({}, "a function for Python objects"),
}


@on_ranks
def test_what_is_no_tensor_is_refused_by_each_operation() -> None:
    for kind, operations in SINGLE.items():
        for operation in operations:
            for what, (value, remedy) in NO_TENSORS.items():
                with pytest.raises(
                    ValueError, match=rf"takes a torch\.Tensor, not a value of type {what}; use {remedy}"
                ):
                    operation(value)
            with pytest.raises(ValueError, match=rf"use hvd\.grouped_{kind} for several tensors"):
                operation([torch.ones(1), torch.ones(1)])
    for kind, grouped in GROUPED.items():
        for operation in grouped:
            with pytest.raises(ValueError, match=rf"^{kind} takes a torch\.Tensor, not a value of type float"):
                operation([torch.ones(2), 3.0])
            for value in (torch.ones(2), 3.0):
                with pytest.raises(ValueError, match=rf"grouped_{kind} takes a list of tensors, not a value of type"):
                    operation(value)
            with pytest.raises(ValueError, match="at least one tensor"):
                operation([])
    with pytest.raises(ValueError, match=r"sparse_allreduce_async takes a torch\.Tensor"):
        hvd.sparse_allreduce_async(3.0, "x", hvd.Sum)  # type: ignore[arg-type]
    hvd.barrier()


@on_ranks
def test_operations_without_a_name_that_are_of_different_kinds_are_an_error_at_once() -> None:
    for first, second in (
        (lambda: hvd.allreduce(torch.ones(3)), lambda: hvd.allgather(torch.ones(3))),
        (lambda: hvd.broadcast(torch.ones(3), 0), hvd.barrier),
    ):
        for _ in range(2):  # also of a signature that all ranks know
            hvd.allreduce(torch.ones(3))
            with pytest.raises(
                HorovodInternalError, match=r"the ranks do not agree about operation \d+ without a name"
            ) as found:
                (first if hvd.rank() == 1 else second)()
            assert "rank 1" in str(found.value) or "other ranks" in str(found.value)
            hvd.barrier()


def _repeated(remembered: int) -> None:
    for _ in range(3):
        for step in range(2 * remembered):
            hvd.allreduce(torch.ones(1), name=f"loss.{step}")


@on_ranks
def test_names_may_be_new_in_each_step() -> None:
    """There is a bound, which is far lower here; names that are forgotten may come again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusion_rt.client.operation_clocks._REMEMBERED", 64)
        patch.setattr("fusion_rt.client.operation_clocks._SKEW", 8)
        _repeated(64)
        with pytest.raises(FusionError, match=r"'allreduce\.loss\.60' is submitted again after 6\d operations"):
            hvd.allreduce(torch.ones(1), name="loss.60")
    hvd.allreduce(torch.ones(1), name="after")
