"""Sums of sparse tensors, as `all_reduce` gives them: DDP has such gradients for embeddings that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Gather = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Fills each of the outputs, with one row for each member, by the members' tensors, and returns when that is done."""


def replace_by_sum(tensor: torch.Tensor, members: int, gather: Gather) -> None:
    """Replaces a sparse tensor by the sum of all members' tensors, which is coalesced.

    All members' indices and values are gathered, with places for as many as the member with most has, after their
    numbers: sums of indices that differ from member to member cannot be formed on the way.

    Args:
        tensor: in the layout `torch.sparse_coo`.
        members: how many members take part.
        gather: called twice, by all members.

    Raises:
        ValueError: the tensor has another layout.
    """
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"allreduce: sparse tensors need the layout torch.sparse_coo, not {tensor.layout}")
    with torch.no_grad():
        mine = tensor.detach().coalesce()
        counts = torch.empty(members, dtype=torch.int64)
        gather([counts], [torch.tensor([mine._nnz()])])
        found = [int(count) for count in counts]
        most, own = max(found), mine._nnz()
        indices = mine.indices().new_zeros((most, mine.sparse_dim()))
        indices[:own] = mine.indices().t()
        values = mine.values().new_zeros((most, *mine.values().shape[1:]))
        values[:own] = mine.values()
        all_indices = indices.new_empty((members, *indices.shape))
        all_values = values.new_empty((members, *values.shape))
        if most:
            gather([all_indices, all_values], [indices, values])
        total = torch.sparse_coo_tensor(
            torch.cat([each[:count] for each, count in zip(all_indices, found, strict=True)]).t(),
            torch.cat([each[:count] for each, count in zip(all_values, found, strict=True)]),
            tensor.shape,
            check_invariants=True,  # a member's tensor may be larger
        )
        tensor.copy_(total.coalesce())  # a detached one would have indices of its own
