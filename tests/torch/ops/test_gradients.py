"""What an operation does to its input's gradient, as Horovod defines it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import fusion_rt.torch as hvd
from tests.harness import on_ranks
from tests.torch.ops.reference import SIZES, combined, everybodys, mine, rows_of

Operation = Callable[[torch.Tensor], Any]


def gradient_of(operation: Operation, tensor: torch.Tensor, incoming: torch.Tensor) -> torch.Tensor:
    """What reaches the input when `incoming` comes from behind an operation."""
    x = tensor.requires_grad_()
    operation(x).backward(incoming)
    assert x.grad is not None
    return x.grad


@on_ranks
def test_of_allreduce_is_the_allreduce() -> None:
    for numel in SIZES.values():
        total = combined(hvd.Sum, everybodys(numel, seed=1))
        for how, factor in (
            ({}, 1 / hvd.size()),
            ({"op": hvd.Sum}, 1.0),
            ({"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 3.0}, 1.5),
        ):
            gradient = gradient_of(functools.partial(hvd.allreduce, **how), mine(numel), mine(numel, seed=1))
            torch.testing.assert_close(gradient, total * factor)


@on_ranks
def test_of_a_grouped_allreduce() -> None:
    x, y, n = mine(5000).requires_grad_(), mine((2, 3)).requires_grad_(), torch.ones(2, dtype=torch.int64)
    first, second, third = hvd.grouped_allreduce([x, y, n], op=hvd.Sum, prescale_factor=2.0)
    assert third.tolist() == [2 * hvd.size()] * 2
    ((first * mine(5000, seed=1)).sum() + (second * mine((2, 3), seed=2)).sum()).backward()
    torch.testing.assert_close(x.grad, combined(hvd.Sum, everybodys(5000, seed=1)) * 2)
    torch.testing.assert_close(y.grad, combined(hvd.Sum, everybodys((2, 3), seed=2)) * 2)


@on_ranks
def test_of_allgather_is_the_average_of_this_ranks_rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows, start = size * (size + 1) // 2, rank * (rank + 1) // 2
    for columns in SIZES.values():
        incoming = mine((rows, columns), seed=1)
        expected = combined(hvd.Average, everybodys((rows, columns), seed=1))[start : start + rank + 1]
        torch.testing.assert_close(gradient_of(hvd.allgather, mine((rank + 1, columns)), incoming), expected)

        x, y = mine((rank + 1, columns)).requires_grad_(), mine((2, 3)).requires_grad_()
        first, second = hvd.grouped_allgather([x, y])
        ((first * incoming).sum() + (second * mine((2 * size, 3), seed=2)).sum()).backward()
        torch.testing.assert_close(x.grad, expected)
        mean = combined(hvd.Average, everybodys((2 * size, 3), seed=2))
        torch.testing.assert_close(y.grad, mean[2 * rank : 2 * rank + 2])


@on_ranks
def test_of_broadcast_is_the_average_on_the_root() -> None:
    for numel in SIZES.values():
        gradient = gradient_of(functools.partial(hvd.broadcast, root_rank=1), mine(numel), mine(numel, seed=1))
        mean = combined(hvd.Average, everybodys(numel, seed=1))
        torch.testing.assert_close(gradient, mean if hvd.rank() == 1 else torch.zeros(numel))


@on_ranks
def test_of_alltoall_goes_back_the_way_the_rows_came() -> None:
    rank, size = hvd.rank(), hvd.size()
    splits = torch.tensor([rank + to for to in range(size)], dtype=torch.int32)
    for columns in SIZES.values():
        x = torch.ones(int(splits.sum()) + 1, columns, requires_grad=True)  # the last row goes nowhere
        output, received = hvd.alltoall(x, splits)
        assert not received.requires_grad
        output.backward(torch.full_like(output, rank + 1.0))
        expected = [to + 1.0 for to in range(size) for _ in range(int(splits[to]))] + [0.0]
        assert x.grad is not None
        assert torch.equal(x.grad, torch.tensor(expected)[:, None].expand_as(x))
    x = torch.ones(2 * size, requires_grad=True)
    alone = hvd.alltoall(x)
    assert isinstance(alone, torch.Tensor)
    alone.backward(torch.full((2 * size,), rank + 1.0))
    assert x.grad is not None
    assert x.grad.tolist() == [to + 1.0 for to in range(size) for _ in range(2)]


@on_ranks
def test_of_reducescatter_is_what_all_ranks_have_gathered_and_scaled() -> None:
    rank, size = hvd.rank(), hvd.size()
    rows = 2 * size + 1
    own = rows_of(rank, rows, size)
    for columns in SIZES.values():
        for op, factor in ((hvd.Average, 1.5), (hvd.Sum, 1.5 * size)):
            how = {"op": op, "prescale_factor": 0.5, "postscale_factor": 3.0}
            tensor = mine((rows, columns)).requires_grad_()
            result = hvd.reducescatter(tensor, **how)
            incoming = torch.arange(float(rows))[:, None].expand(rows, columns)
            result.backward(incoming[own])
            torch.testing.assert_close(tensor.grad, incoming * factor)

            x, y = mine((rows, columns)).requires_grad_(), mine((size, 2)).requires_grad_()
            first, second = hvd.grouped_reducescatter([x, y], **how)
            ((first * incoming[own]).sum() + second.sum()).backward()
            torch.testing.assert_close(x.grad, incoming * factor)
            torch.testing.assert_close(y.grad, torch.full((size, 2), factor))


@on_ranks
def test_differentiable_results_may_be_changed_in_place() -> None:
    def first_of(operation: Callable[..., Any]) -> Operation:
        return lambda x: operation([x, torch.ones(4)])[0]

    for numel in (8, 5000):
        for operation in (
            hvd.allreduce,
            hvd.allgather,
            hvd.alltoall,
            hvd.reducescatter,
            functools.partial(hvd.broadcast, root_rank=0),
            first_of(hvd.grouped_allreduce),
            first_of(hvd.grouped_allgather),
            first_of(hvd.grouped_reducescatter),
        ):
            x = torch.ones(numel, requires_grad=True)
            result = operation(x)
            result += 1
            result.sum().backward()
            assert x.grad is not None


@on_ranks
def test_nothing_is_tracked_without_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    assert not hvd.allreduce(torch.ones(3)).requires_grad
