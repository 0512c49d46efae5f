"""All-reduce of sparse tensors, by gathering their indices and values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion_rt import wire
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.ops.gather import allgather_async
from fusion_rt.torch.ops.handles import synchronize
from fusion_rt.torch.ops.signatures import Average, Sum, check_tensor


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: wire.Op, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts an all-reduce of a sparse tensor.

    Args:
        tensor: in coordinate format, of the same size on all ranks; which elements are there may differ.
        name: pairs the ranks' operations.
        op: `Average` or `Sum`.
        process_set: the ranks that take part.

    Returns:
        A function, not a handle: it waits, and returns the new sparse tensor, which is not coalesced.

    Raises:
        ValueError: before `init`, the tensor is not in coordinate format, another op, or this rank is not in the
            process set.
        HorovodInternalError: from the function; the operation failed, on all ranks.
    """
    check_tensor(tensor, "sparse_allreduce_async")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async takes a sparse tensor in coordinate format, not {tensor.layout}")
    if op not in (Average, Sum):
        raise ValueError(f"sparse tensors can be combined by Average or Sum, not by {op!r}; use tensor.to_dense()")
    detached = tensor.detach()
    base = name or None
    indices = allgather_async(detached._indices().t().contiguous(), base and f"{base}.indices", process_set)
    values = allgather_async(detached._values(), base and f"{base}.values", process_set)

    def wait() -> torch.Tensor:
        gathered_values, gathered_indices = synchronize(values), synchronize(indices)
        if op == Average:
            members = process_set.size()
            assert members is not None
            gathered_values = gathered_values / members
        # Checked, since nothing else has noticed tensors of different sizes.
        return torch.sparse_coo_tensor(gathered_indices.t(), gathered_values, tensor.shape, check_invariants=True)

    return wait
