"""All-to-all: every rank deals the rows of its tensor out to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_rt.client import Operation
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.core.tensors import nbytes_of
from fusion_rt.torch.ops.gradients import differentiable
from fusion_rt.torch.ops.handles import hold
from fusion_rt.torch.ops.signatures import as_real, id_of, signature_of, tensor_name
from fusion_rt.torch.ops.transfers import Complex, Rows

Splits = torch.Tensor | Sequence[int] | None


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Deals rows out to the ranks, and returns those that come from them, in the order of ranks. Differentiable.

    Args:
        tensor: this rank's, of at least one dimension; ranks may differ in the first one.
        splits: how many rows each rank of the process set gets, as int32; rows beyond their sum go nowhere. None: the
            same number each.
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Returns:
        The rows received; if there were splits, with an int32 tensor of how many came from each rank.

    Raises:
        ValueError: before `init`, the splits do not fit, or this rank is not in the process set.
        HorovodInternalError: the operation failed, on all ranks.
    """
    rows, sizes = 0, tuple[int, ...]()

    def run(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal rows, sizes
        here = runtime()
        dealt = _deal(here, tensor, splits, name, process_set)
        output, received = dealt.result(here)
        rows, sizes = len(tensor), dealt.operations[0].sizes
        return output, received

    def back(gradient: torch.Tensor, _: torch.Tensor) -> list[torch.Tensor]:  # goes back the way that the rows came
        returned, _ = alltoall(gradient, sizes, process_set=process_set)
        if len(returned) < rows:  # some went nowhere
            returned = torch.cat([returned, returned.new_zeros(rows - len(returned), *returned.shape[1:])])
        return [returned]

    output, received = differentiable("alltoall", run, back, tensor)
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an `alltoall`; `synchronize` returns the rows received and how many came from each rank, in any case."""
    here = runtime()
    return hold(here, _deal(here, tensor, splits, name, process_set))


class _Dealt:
    """An all-to-all under way; `like`: a tensor on the device for the received splits, or None: the host."""

    def __init__(self, rows: Rows | Complex, like: torch.Tensor | None) -> None:
        self._rows = rows
        self._like = like

    @property
    def operations(self) -> Sequence[Operation]:
        return self._rows.operations

    def result(self, here: Runtime) -> tuple[torch.Tensor, torch.Tensor]:
        output = self._rows.result(here)
        where = None if self._like is None else self._like.device
        return output, torch.tensor(self._rows.operation.sizes, dtype=torch.int32, device=where)


def _deal(here: Runtime, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> _Dealt:
    process_set_id = id_of(here, process_set, "alltoall")
    whole = as_real(tensor, "alltoall")
    nbytes_of(tensor)
    signature_of("alltoall", whole.dtype, whole.shape)  # refuses scalars
    shares = _checked(splits, len(tensor), len(here.client.process_sets[process_set_id].ranks))
    dealt = whole.detach()[: sum(shares)]
    signature = signature_of("alltoall", dealt.dtype, dealt.shape, process_set=process_set_id)
    rows = Rows(here, tensor_name("alltoall", name), signature, dealt, shares)
    dealt_out = rows if whole is tensor else Complex(rows, tensor)
    return _Dealt(dealt_out, splits if isinstance(splits, torch.Tensor) else None)


def _checked(splits: Splits, rows: int, members: int) -> tuple[int, ...]:
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1:
            raise ValueError(f"alltoall expects a 1D splits tensor, not one of {splits.dim()} dimensions")
        if splits.dtype != torch.int32 and splits.numel():
            raise ValueError(f"alltoall expects splits to contain 32-bit integer elements, not {splits.dtype}")
        shares = tuple(splits.tolist())
    else:
        shares = tuple(int(share) for share in (() if splits is None else splits))
    if not shares:
        if rows % members:
            raise ValueError(
                f"splits not provided, but first dimension of tensor ({rows}) is not an even multiple of the number of "
                f"workers ({members})."
            )
        return (rows // members,) * members
    if len(shares) != members:
        raise ValueError(f"Number of entries in splits ({len(shares)}) does not equal number of workers ({members}).")
    if any(share < 0 for share in shares):
        raise ValueError(f"a rank cannot get fewer than 0 rows, but splits are {list(shares)}")
    if sum(shares) > rows:
        raise ValueError(
            f"Sum of splits entries ({sum(shares)}) is greater than the first dimension of tensor ({rows})."
        )
    return shares
