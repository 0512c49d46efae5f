"""The collective operations, against numbers computed in one process from both ranks' seeds."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.errors import HorovodInternalError
from fusion_rt.torch import basics
from tests.harness import on_ranks

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
SIZES = {"inline": 7, "arena": 5001}


def tensor_of(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """What a rank contributes: small integers, so that no dtype overflows or rounds a sum."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    low = 0 if dtype in (torch.uint8, torch.bool) else -4
    return torch.randint(low, 2 if dtype == torch.bool else 5, (numel,), generator=generator).to(dtype)


def combined(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """The combination by plain torch, in float64 or int64."""
    wide = [p.double() if p.is_floating_point() else p.long() for p in parts]
    fold: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "sum": torch.add,
        "average": torch.add,
        "min": torch.minimum,
        "max": torch.maximum,
        "product": torch.mul,
    }
    result = functools.reduce(fold[op], wide)
    if op == "average":
        result = torch.div(result, len(parts), rounding_mode=None if result.is_floating_point() else "trunc")
    return result.ne(0) if parts[0].dtype == torch.bool else result.to(parts[0].dtype)


def everybodys(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    return [tensor_of(rank, numel, dtype, seed) for rank in range(hvd.size())]


def mine(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return tensor_of(hvd.rank(), numel, dtype, seed)


@pytest.mark.parametrize("size", SIZES)
@on_ranks
def test_allreduce_of_every_dtype_with_every_op(size: str) -> None:
    for dtype in DTYPES:
        for op in OPS:
            if op == hvd.Average and dtype == torch.bool:
                continue
            tensor = mine(SIZES[size], dtype)
            result = hvd.allreduce(tensor, op=op)
            assert result.dtype == dtype
            torch.testing.assert_close(result, combined(op, everybodys(SIZES[size], dtype)), rtol=0, atol=0)
            assert torch.equal(tensor, mine(SIZES[size], dtype)), "the input was changed"


@on_ranks
def test_average_is_the_default_and_truncates_integers() -> None:
    parts = [3 + rank for rank in range(hvd.size())]
    assert hvd.allreduce(torch.tensor(float(parts[hvd.rank()]))).item() == sum(parts) / len(parts)
    assert hvd.allreduce(torch.tensor(-parts[hvd.rank()])).item() == -math.floor(sum(parts) / len(parts))


@pytest.mark.parametrize("size", SIZES)
@on_ranks
def test_factors_scale_before_and_after(size: str) -> None:
    total = combined(hvd.Sum, everybodys(SIZES[size]))
    result = hvd.allreduce(mine(SIZES[size]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    torch.testing.assert_close(result, total * 1.5)
    integers = mine(SIZES[size], torch.int32)
    hvd.allreduce_(integers, op=hvd.Sum, postscale_factor=2.0)
    torch.testing.assert_close(integers, combined(hvd.Sum, everybodys(SIZES[size], torch.int32)) * 2)


@pytest.mark.parametrize("size", SIZES)
@on_ranks
def test_all_forms_of_allreduce_agree(size: str) -> None:
    numel = SIZES[size]
    expected = combined(hvd.Sum, everybodys(numel))
    tensor = mine(numel)
    handle = hvd.allreduce_async(tensor, op=hvd.Sum)
    assert isinstance(handle, int)
    torch.testing.assert_close(hvd.synchronize(handle), expected)
    assert torch.equal(tensor, mine(numel))
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
    torch.testing.assert_close(tensor, expected)
    tensor = mine(numel)
    assert hvd.synchronize(hvd.allreduce_async_(tensor, op=hvd.Sum, name="in place")) is tensor
    torch.testing.assert_close(tensor, expected)


@on_ranks
def test_grouped_allreduce_in_all_forms() -> None:
    def parts(rank: int) -> list[torch.Tensor]:
        return [tensor_of(rank, 5, seed=1), tensor_of(rank, 4000, torch.int64, 2).view(40, 100), tensor_of(rank, 1)]

    everybody = [parts(rank) for rank in range(hvd.size())]
    expected = [combined(hvd.Max, list(group)) for group in zip(*everybody, strict=True)]

    def check(results: Any) -> None:
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference)

    check(hvd.grouped_allreduce(parts(hvd.rank()), op=hvd.Max, name="group"))
    check(hvd.synchronize(hvd.grouped_allreduce_async(parts(hvd.rank()), op=hvd.Max)))
    tensors = parts(hvd.rank())
    handle = hvd.grouped_allreduce_async_(tensors, op=hvd.Max, name="group")
    assert isinstance(hvd.synchronize(handle), tuple)
    check(tensors)
    check(hvd.grouped_allreduce_(parts(hvd.rank()), op=hvd.Max))


@on_ranks
def test_tensors_of_every_layout() -> None:
    numel = 6000
    total = combined(hvd.Sum, everybodys(numel))
    transposed = mine(numel).view(60, 100).t()
    assert torch.equal(hvd.allreduce(transposed, op=hvd.Sum), total.view(60, 100).t())
    assert torch.equal(hvd.allreduce_(transposed, op=hvd.Sum), total.view(60, 100).t())
    strided = mine(numel)[::3]
    assert torch.equal(hvd.allreduce_(strided, op=hvd.Sum), total[::3])
    small = mine(12).view(3, 4)[:, 1]
    assert torch.equal(hvd.allreduce_(small, op=hvd.Sum), combined(hvd.Sum, everybodys(12)).view(3, 4)[:, 1])
    images = mine(numel).view(2, 3, 10, 100).contiguous(memory_format=torch.channels_last)
    assert torch.equal(hvd.allreduce(images, op=hvd.Sum), total.view(2, 3, 10, 100))
    scalar = hvd.allreduce(torch.tensor(2.0), op=hvd.Product)
    assert scalar.shape == ()
    assert scalar.item() == 2.0 ** hvd.size()
    assert hvd.allreduce(torch.empty(0, 3), op=hvd.Sum).shape == (0, 3)
    assert hvd.allreduce_(torch.empty(3, 0, dtype=torch.int8), op=hvd.Max).shape == (3, 0)


@on_ranks
def test_tensors_in_the_arena_are_reduced_where_they_lie() -> None:
    arena = basics.runtime().client.arena
    buffer = hvd.empty(100, 50)
    assert buffer.shape == (100, 50)
    assert arena.locate(buffer.data_ptr(), buffer.nbytes) is not None
    before = arena.statistics()
    buffer.copy_(mine(5000).view(100, 50))
    part = buffer[10:90]  # a part of it has no copies either
    hvd.allreduce_(part, op=hvd.Sum)
    assert arena.statistics() == before
    total = combined(hvd.Sum, everybodys(5000)).view(100, 50)
    assert torch.equal(part, total[10:90])
    assert torch.equal(buffer[:10], mine(5000).view(100, 50)[:10])
    assert hvd.empty((3,), dtype=torch.int16).dtype == torch.int16
    assert hvd.empty(0).shape == (0,)


@on_ranks
def test_results_lie_in_the_arena_and_their_memory_comes_back() -> None:
    arena = basics.runtime().client.arena
    tensor = torch.ones(300_000)
    result = hvd.allreduce(tensor)
    assert arena.locate(result.data_ptr(), result.nbytes) is not None
    row = result[7:9]
    del result
    for _ in range(20):
        hvd.allreduce(tensor)
    held = arena.statistics()["nbytes"]
    for _ in range(20):
        hvd.allreduce(tensor + 1)
    assert arena.statistics()["nbytes"] == held
    assert row.tolist() == [1.0, 1.0], "memory was reused while a view of it was alive"


@on_ranks
def test_allgather_of_different_numbers_of_rows() -> None:
    for columns in (3, 2000):
        rows = [hvd.rank() + 1, 0 if hvd.rank() == 0 else 2, 4]
        for index, count in enumerate(rows):
            tensor = torch.full((count, columns), 10.0 * hvd.rank() + index)
            gathered = hvd.allgather(tensor, name=f"rows {index}")
            expected = [
                torch.full(([r + 1, 0 if r == 0 else 2, 4][index], columns), 10.0 * r + index)
                for r in range(hvd.size())
            ]
            assert torch.equal(gathered, torch.cat(expected))
            gathered += 1  # the memory is this rank's own
            assert torch.equal(hvd.synchronize(hvd.allgather_async(tensor)), torch.cat(expected))


@on_ranks
def test_allgather_of_every_dtype_and_of_nothing() -> None:
    for dtype in DTYPES:
        assert torch.equal(hvd.allgather(mine(5000, dtype)), torch.cat(everybodys(5000, dtype)))
    assert hvd.allgather(torch.empty(0, 4)).shape == (0, 4)
    with pytest.raises(ValueError, match="scalar"):
        hvd.allgather(torch.tensor(1.0))


@pytest.mark.parametrize("size", SIZES)
@on_ranks
def test_broadcast_from_every_root(size: str) -> None:
    for dtype in DTYPES:
        for root in range(hvd.size()):
            expected = tensor_of(root, SIZES[size], dtype)
            tensor = mine(SIZES[size], dtype)
            assert torch.equal(hvd.broadcast(tensor, root), expected)
            assert torch.equal(tensor, mine(SIZES[size], dtype))
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(tensor, root, name="b")), expected)
            assert hvd.broadcast_(tensor, root) is tensor
            assert torch.equal(tensor, expected)
            tensor = mine(SIZES[size] * 2, dtype)[::2]
            hvd.synchronize(hvd.broadcast_async_(tensor, root))
            assert torch.equal(tensor, tensor_of(root, SIZES[size] * 2, dtype)[::2])
    with pytest.raises(ValueError, match="no rank 9"):
        hvd.broadcast(torch.ones(1), 9)


@on_ranks
def test_operations_are_differentiable() -> None:
    rank, size = hvd.rank(), hvd.size()
    for numel in SIZES.values():
        weight = torch.arange(numel, dtype=torch.float32) + rank
        mean_weight = torch.arange(numel, dtype=torch.float32) + (size - 1) / 2

        x = torch.ones(numel, requires_grad=True)
        (hvd.allreduce(x) * weight).sum().backward()
        torch.testing.assert_close(x.grad, mean_weight)

        x = torch.ones(numel, requires_grad=True)
        (hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5) * weight).sum().backward()
        torch.testing.assert_close(x.grad, mean_weight * size * 0.5)

        x, y = torch.ones(numel, requires_grad=True), torch.ones(2, requires_grad=True)
        first, second = hvd.grouped_allreduce([x, y], op=hvd.Sum)
        ((first * weight).sum() + second.sum()).backward()
        torch.testing.assert_close(x.grad, mean_weight * size)
        torch.testing.assert_close(y.grad, torch.full((2,), float(size)))

        x = torch.ones(rank + 1, numel, requires_grad=True)
        gathered = hvd.allgather(x)
        factors = torch.arange(float(len(gathered))).view(-1, 1) * (rank + 1)
        (gathered * factors).sum().backward()
        start = sum(range(rank + 1))
        mean = torch.arange(float(len(gathered))) * (size + 1) / 2
        torch.testing.assert_close(x.grad, mean[start : start + rank + 1].view(-1, 1).expand(-1, numel))

        x = torch.ones(numel, requires_grad=True)
        (hvd.broadcast(x, 1) * weight).sum().backward()
        torch.testing.assert_close(x.grad, mean_weight if rank == 1 else torch.zeros(numel))


@on_ranks
def test_differentiable_results_may_be_changed_in_place() -> None:
    for numel in SIZES.values():
        for operation in (hvd.allreduce, hvd.allgather, functools.partial(hvd.broadcast, root_rank=0)):
            x = torch.ones(numel, requires_grad=True)
            result = operation(x)
            result += 1
            result.sum().backward()
            assert x.grad is not None


@on_ranks
def test_many_unnamed_operations_may_be_under_way_at_once() -> None:
    handles = [hvd.allreduce_async(torch.full((n,), float(n)), op=hvd.Sum) for n in (1, 9000, 2, 3, 5000)]
    order = reversed if hvd.rank() else list
    for handle, n in order(list(zip(handles, (1, 9000, 2, 3, 5000), strict=True))):
        assert hvd.synchronize(handle)[0].item() == n * hvd.size()


@on_ranks
def test_a_name_may_be_under_way_once() -> None:
    handle = hvd.allreduce_async(torch.ones(3), name="twice")
    with pytest.raises(HorovodInternalError, match=r"'allreduce\.twice'.*still under way"):
        hvd.allreduce_async(torch.ones(3), name="twice")
    other_kind = hvd.broadcast_async(torch.ones(3), 0, name="twice")
    hvd.synchronize(handle)
    hvd.synchronize(other_kind)
    hvd.allreduce(torch.ones(3), name="twice")


@on_ranks
def test_poll_and_synchronize_know_handles() -> None:
    handle = hvd.allreduce_async(torch.ones(3))
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [1.0] * 3
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match=f"handle {handle} was not created"):
        hvd.poll(handle)
    group = hvd.grouped_allreduce_async([torch.ones(3), torch.ones(9000)])
    while not hvd.poll(group):
        pass
    hvd.synchronize(group)
    with pytest.raises(ValueError, match="at least one tensor"):
        hvd.grouped_allreduce_async([])


@on_ranks
def test_a_mismatch_fails_on_all_ranks_and_the_job_goes_on() -> None:
    rank = hvd.rank()
    with pytest.raises(HorovodInternalError, match=r"'allreduce\.shape'"):
        hvd.allreduce(torch.ones(2 + rank), name="shape")
    with pytest.raises(HorovodInternalError, match=r"(?s)'allreduce\.dtype'.*float32.*float64"):
        hvd.allreduce(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]), name="dtype")
    with pytest.raises(HorovodInternalError, match=r"(?s)'allreduce\.op'.*min.*max"):
        hvd.allreduce(torch.ones(2), name="op", op=(hvd.Min, hvd.Max)[rank])
    with pytest.raises(HorovodInternalError, match=r"'broadcast\.root'"):
        hvd.broadcast(torch.ones(2), rank, name="root")
    with pytest.raises(HorovodInternalError, match=r"'allgather\.columns'"):
        hvd.allgather(torch.ones(2, 3 + rank), name="columns")
    assert hvd.allreduce(torch.ones(2), name="shape", op=hvd.Sum).tolist() == [2.0, 2.0]


@on_ranks
def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.complex64 cannot be communicated"):
        hvd.allreduce(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="bool tensors have no average"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="'adasum' is not an op"):
        hvd.allreduce(torch.ones(2), op="adasum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sparse"):
        hvd.allreduce(torch.eye(3).to_sparse())


@on_ranks
def test_the_deprecated_average_argument_still_works() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total = hvd.allreduce(torch.ones(2), average=False)
        mean = hvd.allreduce(torch.ones(2), average=True)
    assert (total.tolist(), mean.tolist()) == ([2.0, 2.0], [1.0, 1.0])
    assert [warning.category for warning in caught] == [DeprecationWarning] * 2
    assert caught[0].filename == __file__


class Doubling:
    """A compressor as a script may bring one: reduces half of the values, as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        return (tensor / 2).half(), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        assert tensor.dtype == torch.float16
        return tensor.to(ctx) * 2


@on_ranks
def test_compression_by_codec_and_by_the_scripts_own_class() -> None:
    exact = combined(hvd.Sum, everybodys(3000))
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16, Doubling):
        result = hvd.allreduce(mine(3000), op=hvd.Sum, compression=compression)
        assert result.dtype == torch.float32
        assert torch.equal(result, exact)
        first, second = hvd.grouped_allreduce([mine(3000), mine(4)], op=hvd.Sum, compression=compression)
        assert torch.equal(first, exact)
        assert second.shape == (4,)
    third = torch.full((3000,), 1 / 3)
    assert torch.equal(hvd.allreduce(third, compression=hvd.Compression.fp16), third), "one node sends nothing"
    assert not torch.equal(hvd.allreduce(third, compression=Doubling), third)
    integers = mine(10, torch.int32)
    assert hvd.allreduce(integers, op=hvd.Sum, compression=hvd.Compression.fp16).dtype == torch.int32


@on_ranks
def test_a_barrier_waits_for_all() -> None:
    hvd.barrier()
    hvd.barrier(process_set=hvd.global_process_set)


@on_ranks
def test_parameters_can_be_reduced_in_place() -> None:
    for numel in SIZES.values():
        parameter = torch.nn.Parameter(mine(numel))
        assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
        torch.testing.assert_close(parameter.detach(), combined(hvd.Sum, everybodys(numel)))
