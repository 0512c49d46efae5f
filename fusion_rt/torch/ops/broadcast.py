"""Broadcast (every rank gets the tensor of one), and the operations without tensors: barrier and join."""

from __future__ import annotations

import torch

from fusion_rt import wire
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.core.runtime import Runtime, after_join, before_join, runtime
from fusion_rt.torch.ops.gradients import differentiable
from fusion_rt.torch.ops.handles import hold
from fusion_rt.torch.ops.reduce import allreduce
from fusion_rt.torch.ops.signatures import Average, as_real, id_of, signature_of, tensor_name
from fusion_rt.torch.ops.transfers import Complex, Transfer


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Broadcasts the tensor of rank `root_rank`, as a new tensor. Differentiable.

    Args:
        tensor: this rank's; on ranks other than the root only its shape and dtype count.
        root_rank: the rank whose tensor is broadcast, among all ranks of the job.
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Returns:
        The tensor of the root.

    Raises:
        ValueError: before `init`, there is no such root in the process set, or this rank is not in it.
        HorovodInternalError: the operation failed, on all ranks.
    """
    here = runtime()
    is_root = here.rank == root_rank

    def run(tensor: torch.Tensor) -> torch.Tensor:
        return _cast(here, tensor, root_rank, name, process_set, in_place=False).result(here)

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:  # as Horovod defines it: the average on the root
        averaged = allreduce(gradient, op=Average, process_set=process_set)
        return [averaged if is_root else torch.zeros_like(averaged)]

    return differentiable("broadcast", run, back, tensor)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a `broadcast`; `synchronize` returns the new tensor."""
    here = runtime()
    return hold(here, _cast(here, tensor, root_rank, name, process_set, in_place=False))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Does a `broadcast` with the result in the tensor's place; returns the tensor."""
    here = runtime()
    return _cast(here, tensor, root_rank, name, process_set, in_place=True).result(here)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a `broadcast_`; the tensor must be left alone until `synchronize`, which returns it."""
    here = runtime()
    return hold(here, _cast(here, tensor, root_rank, name, process_set, in_place=True))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it.

    Raises:
        ValueError: before `init`, or this rank is not in the process set.
        HorovodInternalError: the barrier failed, on all ranks.
    """
    here = runtime()
    signature = wire.Signature("barrier", process_set=id_of(here, process_set, "barrier"))
    here.client.wait(here.client.submit(None, signature))


def join(device: int = -1) -> int:
    """Announces that this rank has no more data, and waits until every rank has called it.

    Until then this rank contributes zeros to the others' all-reduces, and is left out of means of parameters. Other
    operations are not possible meanwhile: a broadcast, for example, fails on all ranks.

    Args:
        device: accepted for Horovod's sake, and ignored.

    Returns:
        The last rank that joined.

    Raises:
        ValueError: before `init`.
        HorovodInternalError: the join failed, on all ranks.
    """
    here = runtime()
    for stand_in in before_join:
        stand_in(here)
    last = here.client.join()
    for agree in after_join:
        agree(last)
    return last


def _cast(
    here: Runtime, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> Transfer | Complex:
    process_set_id = id_of(here, process_set, "broadcast")
    ranks = here.client.process_sets[process_set_id].ranks
    if root not in ranks:
        raise ValueError(
            f"broadcast received invalid root rank {root} for provided process set, whose ranks are {list(ranks)}"
        )
    real = as_real(tensor, "broadcast")
    signature = signature_of("broadcast", real.dtype, real.shape, root=root, process_set=process_set_id)
    transfer = Transfer(here, tensor_name("broadcast", name), signature, real, in_place, send=root == here.rank)
    return transfer if real is tensor else Complex(transfer, tensor, in_place)
