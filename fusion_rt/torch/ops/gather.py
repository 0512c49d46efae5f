"""All-gather: every rank gets all ranks' tensors, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.ops.fused import FusedGather, fuse
from fusion_rt.torch.ops.gradients import differentiable
from fusion_rt.torch.ops.handles import Group, hold
from fusion_rt.torch.ops.reduce import allreduce, grouped_allreduce
from fusion_rt.torch.ops.signatures import Average, Sum, as_real, id_of, listed, signature_of, tensor_name
from fusion_rt.torch.ops.transfers import Complex, Rows


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Gathers all ranks' tensors, concatenated along the first dimension in the order of ranks. Differentiable.

    Args:
        tensor: this rank's, of at least one dimension; ranks may differ in the first one.
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Raises:
        ValueError: before `init`, the tensor is a scalar, or this rank is not in the process set.
        HorovodInternalError: the operation failed, on all ranks.
    """
    sizes: Sequence[int] = ()

    def run(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal sizes
        here = runtime()
        gathering = gather(here, tensor, name, process_set)
        gathered = gathering.result(here)
        sizes = gathering.operation.sizes
        return gathered

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        averaged = allreduce(gradient, op=Average, process_set=process_set)
        return [_own_rows(averaged, sizes, process_set)]

    return differentiable("allgather", run, back, tensor)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an `allgather`; `synchronize` returns the new tensor."""
    here = runtime()
    return hold(here, gather(here, tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Does an `allgather` of several tensors, which may differ in shape and dtype, in one operation for each dtype.

    `name` is a common base. Differentiable. Raises as `allgather` does.
    """
    tensors = listed(tensors, "allgather")
    rows: dict[int, Sequence[int]] = {}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = runtime()
        gathering = _gather_group(here, tensors, name, process_set)
        gathered = gathering.result(here)
        for part, places in gathering.parts:
            rows.update(zip(places, part.rows, strict=True))
        return gathered

    def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
        averaged = grouped_allreduce(gradients, op=Average, process_set=process_set)
        return [_own_rows(mean, rows[place], process_set) for place, mean in enumerate(averaged)]

    return differentiable("allgather", run, back, *tensors)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a `grouped_allgather`; `synchronize` returns the tuple of new tensors."""
    here = runtime()
    return hold(here, _gather_group(here, tensors, name, process_set))


def gather(here: Runtime, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Rows | Complex:
    """Starts an all-gather; its operation's `sizes` are the rows that came from each rank."""
    real = as_real(tensor, "allgather")
    signature = signature_of("allgather", real.dtype, real.shape, process_set=id_of(here, process_set, "allgather"))
    rows = Rows(here, tensor_name("allgather", name), signature, real)
    return rows if real is tensor else Complex(rows, tensor)


def _gather_group(
    here: Runtime, tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet
) -> Group[FusedGather]:
    chosen_set = id_of(here, process_set, "allgather")

    def make(own_name: str | None, chosen: list[torch.Tensor]) -> FusedGather:
        return FusedGather(here, own_name, chosen, chosen_set)

    return fuse("allgather", name, tensors, Sum, make)


def _own_rows(averaged: torch.Tensor, rows: Sequence[int], process_set: ProcessSet) -> torch.Tensor:
    """Returns the gradient as Horovod defines it: this rank's rows of the average. `rows`: how many are each rank's."""
    position = process_set.rank()
    assert position is not None
    return averaged.narrow(0, sum(rows[:position]), rows[position])
