"""Sums of sparse tensors, beside the sum of the dense ones; members are threads, and gathering is a list."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fusion_rt.c10d.process_group import replace_by_sum

SHAPE = (7, 5, 3)


def _sparse(member: int, dimensions: int) -> torch.Tensor:
    """A tensor with as many indices as the member's number, some of them twice."""
    generator = torch.Generator().manual_seed(member)
    indices = torch.stack([torch.randint(0, size, (member,), generator=generator) for size in SHAPE[:dimensions]])
    values = torch.randn(member, *SHAPE[dimensions:], generator=generator, dtype=torch.float64)
    return torch.sparse_coo_tensor(indices, values, SHAPE, check_invariants=True)


def _summed(tensors: Sequence[torch.Tensor]) -> None:
    given: list[Sequence[torch.Tensor]] = [[] for _ in tensors]
    all_there = threading.Barrier(len(tensors), timeout=60)

    def run(member: int) -> None:
        def gather(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
            given[member] = inputs
            all_there.wait()
            for output, *parts in zip(outputs, *given, strict=True):
                output.copy_(torch.stack(parts).view(output.shape))
            all_there.wait()

        replace_by_sum(tensors[member], len(tensors), gather)

    with ThreadPoolExecutor(len(tensors)) as threads:
        list(threads.map(run, range(len(tensors))))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("members", [(0, 0), (0, 3), (4, 9, 1)])
def test_each_member_gets_the_coalesced_sum(members: tuple[int, ...], dimensions: int) -> None:
    tensors = [_sparse(member, dimensions) for member in members]
    expected = torch.stack([tensor.to_dense() for tensor in tensors]).sum(0)
    indices = torch.cat([tensor._indices() for tensor in tensors], 1).unique(dim=1)
    _summed(tensors)
    for tensor in tensors:
        torch.testing.assert_close(tensor.to_dense(), expected)
        assert tensor.is_coalesced()
        assert torch.equal(tensor.indices(), indices)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_other_sparse_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.sparse_coo, not torch\.sparse_csr"):
        replace_by_sum(torch.eye(3).to_sparse_csr(), 2, lambda *_: None)
