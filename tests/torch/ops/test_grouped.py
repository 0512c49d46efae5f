"""Operations on several tensors: what comes of them, and that each dtype costs one message and completes as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.runtime import runtime
from tests.harness import on_ranks
from tests.torch.ops.reference import DTYPES, OPS, can, combined, mine, rows_of, tensor_of

# Scalars, nothing, uneven rows, two dtypes; all in messages (scale 1), and all through the arena (scale 900).
SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((5,), torch.float32),
    ((4, 3), torch.int64),
    ((), torch.float32),
    ((7, 2), torch.float32),
    ((0, 3), torch.float32),
    ((1,), torch.int64),
]
SCALES = (1, 900)


def shaped(shape: tuple[int, ...], scale: int) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * scale) if len(shape) > 1 else shape


def group_of(rank: int, scale: int, scalars: bool = True) -> list[torch.Tensor]:
    return [
        tensor_of(rank, shaped(shape, scale), dtype, seed)
        for seed, (shape, dtype) in enumerate(SHAPES)
        if scalars or shape
    ]


def everybodys_groups(scale: int, scalars: bool = True) -> list[tuple[torch.Tensor, ...]]:
    """For each tensor of the group, all ranks'."""
    return list(zip(*(group_of(rank, scale, scalars) for rank in range(hvd.size())), strict=True))


def check(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=0, atol=0)


def messages_of(function: Callable[[], Any]) -> int:
    """How many operations a function submits."""
    client, submitted = runtime().client, []
    submit = client.submit
    client.submit = lambda *args, **kwargs: submitted.append(args) or submit(*args, **kwargs)  # type: ignore
    try:
        function()
    finally:
        client.submit = submit  # type: ignore[method-assign]
    return len(submitted)


@on_ranks
def test_allreduce_in_all_forms() -> None:
    for scale in SCALES:
        for op in OPS:
            expected = [combined(op, parts) for parts in everybodys_groups(scale)]
            group = group_of(hvd.rank(), scale)
            result = hvd.grouped_allreduce(group, op=op, name="group")
            assert isinstance(result, list)
            check(result, expected)
            check(group, group_of(hvd.rank(), scale))
            result = hvd.synchronize(hvd.grouped_allreduce_async(group, op=op))
            assert isinstance(result, tuple)
            check(result, expected)
            handle = hvd.grouped_allreduce_async_(group, op=op, name="group")
            assert all(a is b for a, b in zip(hvd.synchronize(handle), group, strict=True))
            check(group, expected)
            check(hvd.grouped_allreduce_(group_of(hvd.rank(), scale), op=op), expected)


@on_ranks
def test_allreduce_of_every_dtype_scaled() -> None:
    group = [mine(3000, dtype, seed) for seed, dtype in enumerate(DTYPES) if can(hvd.Average, dtype)]
    results = hvd.grouped_allreduce(group, prescale_factor=2.0, postscale_factor=0.5)
    for seed, (result, dtype) in enumerate(zip(results, DTYPES, strict=False)):
        parts = [tensor_of(rank, 3000, dtype, seed) for rank in range(hvd.size())]
        exact = combined(hvd.Sum, [part * 2 for part in parts]).double() * (0.5 / hvd.size())
        if not dtype.is_floating_point:
            exact = exact.trunc()
        torch.testing.assert_close(result, exact.to(dtype), rtol=0, atol=0)


@on_ranks
def test_allgather_of_different_numbers_of_rows() -> None:
    def group(rank: int, columns: int) -> list[torch.Tensor]:
        rows = [rank + 1, 2 if rank else 0, 0, 3]
        dtypes = (torch.float32, torch.uint8, torch.float32, torch.float32)
        return [tensor_of(rank, (n, columns), d, s) for s, (n, d) in enumerate(zip(rows, dtypes, strict=True))]

    for columns in (2, 3001):
        expected = [torch.cat(parts) for parts in zip(*(group(r, columns) for r in range(hvd.size())), strict=True)]
        gathered = hvd.grouped_allgather(group(hvd.rank(), columns), name="group")
        assert isinstance(gathered, tuple)
        check(gathered, expected)
        check(hvd.synchronize(hvd.grouped_allgather_async(group(hvd.rank(), columns))), expected)
    for dtype in DTYPES:
        check(
            hvd.grouped_allgather([mine((3, 2), dtype)]),
            [torch.cat([tensor_of(r, (3, 2), dtype) for r in range(hvd.size())])],
        )


@on_ranks
def test_reducescatter_of_uneven_rows() -> None:
    for scale in SCALES:
        for op in (hvd.Sum, hvd.Average):
            expected = [
                combined(op, parts)[rows_of(hvd.rank(), len(parts[0]), hvd.size())]
                for parts in everybodys_groups(scale, scalars=False)
            ]
            group = group_of(hvd.rank(), scale, scalars=False)
            result = hvd.grouped_reducescatter(group, op=op, name="group")
            assert isinstance(result, list)
            check(result, expected)
            check(group, group_of(hvd.rank(), scale, scalars=False))
            check(hvd.synchronize(hvd.grouped_reducescatter_async(group, op=op)), expected)
        scaled = hvd.grouped_reducescatter(
            group_of(hvd.rank(), scale, False), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5
        )
        check(scaled, [
            combined(hvd.Sum, parts)[rows_of(hvd.rank(), len(parts[0]), hvd.size())]
            for parts in everybodys_groups(scale, scalars=False)
        ])  # fmt: skip


@on_ranks
def test_each_dtype_costs_one_message() -> None:
    group = group_of(hvd.rank(), 900, scalars=False)
    assert messages_of(lambda: hvd.grouped_allreduce(group, op=hvd.Sum)) == 2
    assert messages_of(lambda: hvd.grouped_allgather(group)) == 2
    assert messages_of(lambda: hvd.grouped_reducescatter(group, op=hvd.Sum)) == 2
    assert messages_of(lambda: hvd.grouped_allreduce_([torch.ones(3)] * 200)) == 1


@on_ranks
def test_results_are_tensors_of_their_own() -> None:
    group = [mine(3000, seed=seed) for seed in range(3)]
    for operation in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        first, second, third = operation(group)
        kept = second.clone()
        first.zero_()
        third += 1
        assert torch.equal(second, kept)
        assert not second._is_view()
        assert second.untyped_storage().nbytes() == second.nbytes
        del first, third
        for _ in range(3):
            operation([torch.full((3000,), 9.0)] * 3)
        assert torch.equal(second, kept), "memory was reused while a result lay in it"


@on_ranks
def test_a_disagreement_about_one_tensor_fails_the_group_and_changes_nothing() -> None:
    rank = hvd.rank()
    for scale in (1, 2000):
        group = [torch.ones(2 * scale), torch.ones(3 * scale + (rank == 1), dtype=torch.int64)]
        with pytest.raises(HorovodInternalError, match=r"'grouped_allreduce\.shapes\.2'.*rank 1 \(host"):
            hvd.grouped_allreduce_(group, op=hvd.Sum, name="shapes")
        assert [tensor.float().mean() for tensor in group] == [1, 1], "the other tensor was reduced"
    swapped = [torch.ones(3, 2), torch.ones(2, 3)][:: 1 if rank else -1]  # as many elements
    with pytest.raises(HorovodInternalError, match=r"'grouped_allreduce\.swapped'"):
        hvd.grouped_allreduce(swapped, name="swapped")
    with pytest.raises(HorovodInternalError, match=r"'grouped_allgather\.columns'"):
        hvd.grouped_allgather([torch.ones(1), torch.ones(2, 6 if rank else 3)], name="columns")
    with pytest.raises(HorovodInternalError, match=r"'grouped_reducescatter\.rows'"):
        hvd.grouped_reducescatter([torch.ones(4, 2), torch.ones(8 if rank else 4)], name="rows")
    assert hvd.grouped_allreduce([torch.ones(2)], name="swapped", op=hvd.Sum)[0].tolist() == [hvd.size()] * 2


@on_ranks
def test_groups_that_make_no_sense_are_refused_before_anything_is_submitted() -> None:
    def refused() -> None:
        for operation in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            with pytest.raises(ValueError, match="at least one tensor"):
                operation([])
            with pytest.raises(ValueError, match="not supported"):
                operation([torch.ones(2), torch.empty(2, dtype=torch.uint16)])
            with pytest.raises(ValueError, match="sparse"):
                operation([torch.ones(2), torch.eye(2).to_sparse()])
        for operation in (hvd.grouped_allgather, hvd.grouped_reducescatter):
            with pytest.raises(ValueError, match="which a scalar has not"):
                operation([torch.ones(2), torch.tensor(1)])
        with pytest.raises(ValueError, match="bool tensors have no average"):
            hvd.grouped_allreduce([torch.ones(2), torch.ones(2, dtype=torch.bool)])

    assert messages_of(refused) == 0
