"""All-gather, all-to-all and reduce-scatter, which deal rows out."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from tests.harness import on_ranks
from tests.torch.ops.reference import DTYPES, combined, everybodys, mine, rows_of, tensor_of


@on_ranks
def test_allgather_of_different_numbers_of_rows() -> None:
    def rows(rank: int) -> list[int]:
        return [rank + 1, 0 if rank == 0 else 2, 4]

    for columns in (3, 2000):
        for index, count in enumerate(rows(hvd.rank())):
            tensor = mine((count, columns), seed=index)
            gathered = hvd.allgather(tensor, name=f"rows {index}")
            expected = torch.cat([tensor_of(r, (rows(r)[index], columns), seed=index) for r in range(hvd.size())])
            assert torch.equal(gathered, expected)
            gathered += 1  # the memory is this rank's own
            assert torch.equal(hvd.synchronize(hvd.allgather_async(tensor)), expected)


@on_ranks
def test_allgather_of_every_dtype_and_of_nothing() -> None:
    for dtype in DTYPES:
        assert torch.equal(hvd.allgather(mine(5000, dtype)), torch.cat(everybodys(5000, dtype)))
    assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4)
    assert torch.equal(hvd.allgather(mine((40, 60)).t()), torch.cat([part.t() for part in everybodys((40, 60))]))
    with pytest.raises(ValueError, match="which a scalar has not"):
        hvd.allgather(torch.tensor(1.0))


def dealt(rank: int, row: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A row of what a rank deals out."""
    return torch.full(
        (columns,), (rank * 31 + row) % 2 if dtype == torch.bool else (rank * 31 + row) % 100, dtype=dtype
    )


def tensor_to_deal(rank: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    empty = torch.empty(0, columns, dtype=dtype)
    return torch.cat([empty, *(dealt(rank, row, columns, dtype)[None] for row in range(rows))])


def splits_of(rank: int, size: int, pattern: str) -> list[int]:
    """How many rows a rank gives to each."""
    return {
        "uneven": [rank + to for to in range(size)],
        "rank 0 sends nothing": [0] * size if rank == 0 else [to + 1 for to in range(size)],
        "rank 0 receives nothing": [0 if to == 0 else rank + 1 for to in range(size)],
        "nothing": [0] * size,
    }[pattern]


def expected_of(size: int, me: int, pattern: str, columns: int, dtype: torch.dtype) -> torch.Tensor:
    rows = [torch.empty(0, columns, dtype=dtype)]
    for rank in range(size):
        splits = splits_of(rank, size, pattern)
        start = sum(splits[:me])
        rows += [dealt(rank, row, columns, dtype)[None] for row in range(start, start + splits[me])]
    return torch.cat(rows)


@on_ranks
def test_alltoall_with_splits() -> None:
    rank, size = hvd.rank(), hvd.size()
    patterns = ("uneven", "rank 0 sends nothing", "rank 0 receives nothing", "nothing")
    for pattern, columns, dtype in itertools.product(patterns, (2, 1500), DTYPES):
        splits = splits_of(rank, size, pattern)
        tensor = tensor_to_deal(rank, sum(splits), columns, dtype)
        output, received = hvd.alltoall(tensor, torch.tensor(splits, dtype=torch.int32), name="dealt")
        assert torch.equal(output, expected_of(size, rank, pattern, columns, dtype))
        assert received.dtype == torch.int32
        assert received.tolist() == [splits_of(other, size, pattern)[rank] for other in range(size)]


@on_ranks
def test_alltoall_in_all_forms() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensor = tensor_to_deal(rank, 3 * size, 4)
    expected = torch.cat([dealt(r, rank * 3 + row, 4)[None] for r in range(size) for row in range(3)])
    alone = hvd.alltoall(tensor)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, expected)
    output, received = hvd.synchronize(hvd.alltoall_async(tensor))
    assert torch.equal(output, expected)
    assert received.tolist() == [3] * size
    output, received = hvd.alltoall(tensor, splits=[3] * size)
    assert torch.equal(output, expected)
    output, received = hvd.alltoall(tensor, splits=np.full(size, 3))
    assert torch.equal(output, expected)
    output, received = hvd.alltoall(tensor, splits=[])  # as without
    assert torch.equal(output, expected)
    output, received = hvd.alltoall(tensor, splits=[1] * size)  # the other rows go nowhere
    assert torch.equal(output, torch.cat([dealt(r, rank, 4)[None] for r in range(size)]))
    assert torch.equal(hvd.alltoall(tensor.t().contiguous().t()), expected)
    assert hvd.alltoall(torch.empty(0)).shape == (0,)


@on_ranks
def test_wrong_splits_are_refused() -> None:
    size = hvd.size()
    for splits, text in (
        ([2] * (size + 1), f"Number of entries in splits .{size + 1}. does not equal number of workers .{size}"),
        ([3] * size, "Sum of splits entries .* is greater than the first dimension"),
        ([-1] + [1] * (size - 1), "fewer than 0 rows"),
        (torch.ones(size), "32-bit integer"),
        (torch.ones(size, dtype=torch.int64), "32-bit integer"),
        (torch.ones(1, size, dtype=torch.int32), "1D splits tensor"),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.alltoall(torch.ones(2 * size, 3), splits)
    with pytest.raises(ValueError, match="not an even multiple of the number of workers"):
        hvd.alltoall(torch.ones(2 * size + 1))
    with pytest.raises(ValueError, match="which a scalar has not"):
        hvd.alltoall(torch.tensor(1))
    with pytest.raises(ValueError, match="sparse"):
        hvd.alltoall(torch.eye(size).to_sparse())
    with pytest.raises(HorovodInternalError, match=r"'alltoall\.columns'"):
        hvd.alltoall(torch.ones(size, 2 + (hvd.rank() == 1)), name="columns")


@on_ranks
def test_reducescatter_of_every_dtype_and_number_of_rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    for columns, dtype in itertools.product((2, 1500), DTYPES):
        for rows in (size, 2 * size + 1, 1, 0):
            total = combined(hvd.Sum, everybodys((rows, columns), dtype))
            mean = total if dtype == torch.bool else combined(hvd.Average, everybodys((rows, columns), dtype))
            tensor = mine((rows, columns), dtype)
            own = rows_of(rank, rows, size)
            assert torch.equal(hvd.reducescatter(tensor, op=hvd.Sum), total[own])
            assert torch.equal(tensor, mine((rows, columns), dtype)), "the input was changed"
            if dtype != torch.bool:
                torch.testing.assert_close(hvd.reducescatter(tensor, name="mean"), mean[own], rtol=0, atol=0)
    flat = mine(5001)
    handle = hvd.reducescatter_async(flat, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    expected = combined(hvd.Sum, everybodys(5001))[rows_of(rank, 5001, size)] * 1.5
    torch.testing.assert_close(hvd.synchronize(handle), expected)


@on_ranks
def test_reducescatter_refuses_what_horovod_refuses() -> None:
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(HorovodInternalError, match="only supports Average and Sum"):
            hvd.reducescatter(torch.ones(4), op=op)
        with pytest.raises(HorovodInternalError, match="only supports Average and Sum"):
            hvd.grouped_reducescatter([torch.ones(4)], op=op)
    with pytest.raises(ValueError, match="which a scalar has not"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(HorovodInternalError, match=r"'reducescatter\.rows'"):
        hvd.reducescatter(torch.ones(4 + (hvd.rank() == 1)), name="rows")


@on_ranks
def test_sparse_tensors_are_added_up() -> None:
    rank, size = hvd.rank(), hvd.size()

    def sparse(of: int, nnz: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(of)
        rows = torch.randint(0, 50, (nnz,), generator=generator)  # some of them twice
        values = torch.rand(nnz, 8, generator=generator)
        return torch.sparse_coo_tensor(rows[None], values, (50, 8), check_invariants=True)

    for counts in ([3 + r for r in range(size)], [400 + r for r in range(size)], [0] * size, [0, *[5] * (size - 1)]):
        total = sum(sparse(r, counts[r]).to_dense() for r in range(size))
        for op, expected in ((hvd.Sum, total), (hvd.Average, total / size)):
            wait = hvd.sparse_allreduce_async(sparse(rank, counts[rank]), name="sparse", op=op)
            result = wait()
            assert result.layout is torch.sparse_coo
            torch.testing.assert_close(result.to_dense(), expected)
    first = hvd.sparse_allreduce_async(sparse(rank, 3), None, hvd.Sum)
    second = hvd.sparse_allreduce_async(sparse(rank, 3), None, hvd.Sum)
    assert torch.equal(second().to_dense(), first().to_dense())
    with pytest.raises(ValueError, match="not by 'max'"):
        hvd.sparse_allreduce_async(sparse(rank, 3), "s", hvd.Max)
    with pytest.raises(ValueError, match=r"not torch\.strided"):
        hvd.sparse_allreduce_async(torch.ones(3), "s", hvd.Sum)
