"""All-reduce, against numbers computed in one process from all ranks' seeds."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core.runtime import runtime
from tests.harness import on_ranks
from tests.torch.ops.reference import DTYPES, OPS, SIZES, can, combined, everybodys, mine


@on_ranks
def test_every_dtype_with_every_op() -> None:
    for numel in SIZES.values():
        for dtype in DTYPES:
            for op in (op for op in OPS if can(op, dtype)):
                tensor = mine(numel, dtype)
                result = hvd.allreduce(tensor, op=op)
                torch.testing.assert_close(result, combined(op, everybodys(numel, dtype)), rtol=0, atol=0)
                assert torch.equal(tensor, mine(numel, dtype)), "the input was changed"


@on_ranks
def test_average_is_the_default_and_truncates_integers() -> None:
    parts = [3 + rank for rank in range(hvd.size())]
    assert hvd.allreduce(torch.tensor(float(parts[hvd.rank()]))).item() == sum(parts) / len(parts)
    assert hvd.allreduce(torch.tensor(-parts[hvd.rank()])).item() == -math.floor(sum(parts) / len(parts))


@on_ranks
def test_factors_scale_before_and_after() -> None:
    for numel in SIZES.values():
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            result = hvd.allreduce(mine(numel, dtype), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
            exact = combined(hvd.Sum, everybodys(numel, dtype)).double() * 1.5
            torch.testing.assert_close(result, exact.to(dtype), rtol=1e-2, atol=0)
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8):  # in float64, truncated each time
            before = hvd.allreduce(mine(numel, dtype), op=hvd.Sum, prescale_factor=0.7)
            scaled = [(part.double() * 0.7).to(dtype) for part in everybodys(numel, dtype)]
            assert torch.equal(before, combined(hvd.Sum, scaled))
            after = hvd.allreduce_(mine(numel, dtype), op=hvd.Sum, postscale_factor=0.7)
            assert torch.equal(after, (combined(hvd.Sum, everybodys(numel, dtype)).double() * 0.7).to(dtype))


@on_ranks
def test_all_forms_agree() -> None:
    for numel in SIZES.values():
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
    arena = runtime().client.arena
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
    arena = runtime().client.arena
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
def test_parameters_can_be_reduced_in_place() -> None:
    for numel in SIZES.values():
        parameter = torch.nn.Parameter(mine(numel))
        assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
        torch.testing.assert_close(parameter.detach(), combined(hvd.Sum, everybodys(numel)))


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The formula of Adasum for two vectors."""
    a, b = a.double(), b.double()
    dot = (a * b).sum()
    return (1 - dot / (2 * a.square().sum())) * a + (1 - dot / (2 * b.square().sum())) * b


@on_ranks
def test_adasum_of_each_tensor() -> None:
    # Ranks 0 and 1 are a pair, and the vectors of all other ranks are orthogonal to everything, so they just add up.
    def part(rank: int, numel: int) -> torch.Tensor:
        own = torch.zeros(numel)
        if rank > 1:
            own[rank] = 3.0
        else:
            own[:2] = torch.tensor([1.0, 2.0]) if rank == 0 else torch.tensor([2.0, 0.5])
        return own

    def expected(numel: int) -> torch.Tensor:
        parts = [part(rank, numel) for rank in range(hvd.size())]
        return (adasum(parts[0], parts[1]) + sum(part.double() for part in parts[2:])).float()

    for numel in SIZES.values():
        torch.testing.assert_close(hvd.allreduce(part(hvd.rank(), numel), op=hvd.Adasum), expected(numel))
    group = [part(hvd.rank(), numel) * factor for numel, factor in ((7, 1.0), (5001, 100.0), (9, 0.1))]
    for result, numel, factor in zip(
        hvd.grouped_allreduce(group, op=hvd.Adasum), (7, 5001, 9), (1, 100, 0.1), strict=True
    ):
        torch.testing.assert_close(result, expected(numel) * factor)
    with pytest.raises(ValueError, match=r"Adasum combines floating-point tensors, not torch\.int32"):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)


@on_ranks
def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.uint16 is not supported"):
        hvd.allreduce(torch.empty(2, dtype=torch.uint16))
    with pytest.raises(ValueError, match="bool tensors have no average"):
        hvd.allreduce(torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="supersedes average"):
        hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="'mean' is not an op"):
        hvd.allreduce(torch.ones(2), op="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SparseFloatTensor is not supported.*sparse_allreduce_async|sparse"):
        hvd.allreduce(torch.eye(3).to_sparse())
    with pytest.raises(ValueError, match="the name of a tensor may have"):
        hvd.allreduce(torch.ones(2), name="n" * 2000)


@on_ranks
def test_the_deprecated_average_argument_still_works() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        total = hvd.allreduce(torch.ones(2), average=False)
        mean = hvd.allreduce(torch.ones(2), average=True)
        hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2)], average=True))
    assert (total.tolist(), mean.tolist()) == ([hvd.size()] * 2, [1.0, 1.0])
    assert [warning.category for warning in caught] == [DeprecationWarning] * 3
    assert {warning.filename for warning in caught} == {__file__}


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
        rows = hvd.reducescatter(mine((hvd.size(), 750)), op=hvd.Sum, compression=compression)
        assert torch.equal(rows[0], combined(hvd.Sum, everybodys((hvd.size(), 750)))[hvd.rank()])
        only = hvd.grouped_reducescatter([mine(hvd.size())], op=hvd.Sum, compression=compression)
        assert torch.equal(only[0], combined(hvd.Sum, everybodys(hvd.size()))[hvd.rank() :][:1])
    third = torch.full((3000,), 1 / 3)
    assert torch.equal(hvd.allreduce(third, compression=hvd.Compression.fp16), third), "one node sends nothing"
    assert not torch.equal(hvd.allreduce(third, compression=Doubling), third)
    integers = mine(10, torch.int32)
    assert hvd.allreduce(integers, op=hvd.Sum, compression=hvd.Compression.fp16).dtype == torch.int32
