"""Complex tensors in every collective, and integers that are averaged, against numbers computed in one process."""

from __future__ import annotations

import pytest
import torch

import fusion_rt.torch as hvd
from tests.harness import on_ranks

DTYPES = [torch.complex64, torch.complex128]
SHAPES = [(3,), (40, 500)]  # in a message, and in the arena


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes: small integers, so that sums are exact."""
    generator = torch.Generator().manual_seed(rank)
    real, imaginary = (torch.randint(-9, 10, shape, generator=generator).double() for _ in range(2))
    return torch.complex(real, imaginary).to(dtype)


def everybodys(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    return [part(rank, shape, dtype) for rank in range(hvd.size())]


@on_ranks
def test_complex_tensors_are_summed_and_averaged() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            mine, total = part(hvd.rank(), shape, dtype), torch.stack(everybodys(shape, dtype)).sum(0)
            torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Sum), total)
            torch.testing.assert_close(hvd.allreduce(mine), total / hvd.size())
            for tensor in (mine.clone(), mine.conj().clone().conj()):
                assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
                torch.testing.assert_close(tensor, total)
            pair = [mine.clone(), torch.ones(2)]
            reduced = hvd.grouped_allreduce(pair, op=hvd.Sum)
            torch.testing.assert_close(reduced[0], total)
            assert hvd.grouped_allreduce_(pair, op=hvd.Sum)[0] is pair[0]
            torch.testing.assert_close(pair[0], total)
            handle = hvd.allreduce_async(mine, op=hvd.Sum)
            torch.testing.assert_close(hvd.synchronize(handle), total)


@on_ranks
def test_complex_tensors_are_gathered_dealt_out_scattered_and_broadcast() -> None:
    for dtype in DTYPES:
        for columns in (1, 3000):
            rows, size = 2 * hvd.size(), hvd.size()
            mine, everyone = part(hvd.rank(), (rows, columns), dtype), everybodys((rows, columns), dtype)
            torch.testing.assert_close(hvd.allgather(mine), torch.cat(everyone))
            torch.testing.assert_close(hvd.grouped_allgather([mine])[0], torch.cat(everyone))
            here = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
            torch.testing.assert_close(hvd.alltoall(mine), torch.cat([each[here] for each in everyone]))
            total = torch.stack(everyone).sum(0)
            torch.testing.assert_close(hvd.reducescatter(mine, op=hvd.Sum), total[here])
            torch.testing.assert_close(hvd.grouped_reducescatter([mine])[0], total[here] / size)
            torch.testing.assert_close(hvd.broadcast(mine, 1), everyone[1])
            assert hvd.broadcast_(mine, 1) is mine
            torch.testing.assert_close(mine, everyone[1])


@on_ranks
def test_gradients_of_complex_tensors() -> None:
    tensor = part(hvd.rank(), (3,), torch.complex64).requires_grad_()
    hvd.allreduce(tensor, op=hvd.Sum).abs().square().sum().backward()
    total = torch.stack(everybodys((3,), torch.complex64)).sum(0)
    torch.testing.assert_close(tensor.grad, 2 * hvd.size() * total)


@on_ranks
def test_models_with_complex_parameters_and_buffers_are_broadcast() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("phases", part(hvd.rank(), (5,), torch.complex64))
    model.register_parameter("mix", torch.nn.Parameter(part(hvd.rank(), (2, 2), torch.complex128)))
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_parameters(model.named_parameters(), 0)
    assert torch.equal(model.phases, part(0, (5,), torch.complex64))
    assert torch.equal(model.mix.detach(), part(0, (2, 2), torch.complex128))
    assert model.mix.requires_grad


@on_ranks
def test_what_complex_tensors_do_not_have_is_refused() -> None:
    tensor = part(0, (3,), torch.complex64)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        with pytest.raises(ValueError, match=f"complex tensors travel as pairs of numbers, which {op} cannot combine"):
            hvd.allreduce(tensor, op=op)
    with pytest.raises(ValueError, match="which a scalar has not"):
        hvd.allgather(torch.tensor(1j))


@on_ranks
def test_averages_of_integers_do_not_overflow() -> None:
    for dtype, value in [(torch.uint8, 200), (torch.int8, -128), (torch.int16, 32767), (torch.int32, -(2**31))]:
        for numel in (2, 20_000):
            tensor = torch.full((numel,), value, dtype=dtype)
            assert torch.equal(hvd.allreduce(tensor), tensor)
            assert torch.equal(hvd.grouped_allreduce([tensor])[0], tensor)
            rows = torch.full((hvd.size(), numel), value, dtype=dtype)
            assert torch.equal(hvd.reducescatter(rows), rows[:1])
            wrapped = torch.stack([tensor] * hvd.size()).sum(0, dtype=dtype)
            assert torch.equal(hvd.allreduce(tensor, op=hvd.Sum), wrapped)


def negative(values: torch.Tensor, in_order: bool = True) -> torch.Tensor:
    """Values as a view of their negatives, whose negative bit alone turns them round; in order, or every second one."""
    view = torch._neg_view(-values) if in_order else torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg()
    return view


@pytest.mark.parametrize("in_order", [True, False])
@on_ranks
def test_negative_views_are_reduced_and_broadcast_with_their_sign(in_order: bool) -> None:
    for shape in SHAPES:
        own, *everyone = (
            each.real.clone() for each in (part(hvd.rank(), shape, DTYPES[1]), *everybodys(shape, DTYPES[1]))
        )
        total = torch.stack(everyone).sum(0)
        assert torch.equal(hvd.allreduce(negative(own, in_order), op=hvd.Sum), total)
        assert torch.equal(hvd.grouped_allreduce([negative(own, in_order)], op=hvd.Sum)[0], total)
        assert torch.equal(hvd.broadcast(negative(own, in_order), 1), everyone[1])
        for in_place, expected in (
            (lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum), total),
            (lambda tensor: hvd.grouped_allreduce_([tensor], op=hvd.Sum)[0], total),
            (lambda tensor: hvd.broadcast_(tensor, 1), everyone[1]),
        ):
            view = negative(own, in_order)
            assert in_place(view) is view
            assert torch.equal(view, expected)


@pytest.mark.parametrize("in_order", [True, False])
@on_ranks
def test_negative_views_are_gathered_dealt_out_and_scattered_with_their_sign(in_order: bool) -> None:
    for columns in (1, 3000):
        shape, size = (2 * hvd.size(), columns), hvd.size()
        own, *everyone = (
            each.real.clone() for each in (part(hvd.rank(), shape, DTYPES[1]), *everybodys(shape, DTYPES[1]))
        )
        here = slice(2 * hvd.rank(), 2 * hvd.rank() + 2)
        assert torch.equal(hvd.allgather(negative(own, in_order)), torch.cat(everyone))
        assert torch.equal(hvd.grouped_allgather([negative(own, in_order)])[0], torch.cat(everyone))
        assert torch.equal(hvd.alltoall(negative(own, in_order)), torch.cat([each[here] for each in everyone]))
        total = torch.stack(everyone).sum(0)[here]
        assert torch.equal(hvd.reducescatter(negative(own, in_order), op=hvd.Sum), total)
        assert torch.equal(hvd.grouped_reducescatter([negative(own, in_order)])[0], total / size)


@on_ranks
def test_a_negative_view_of_complex_numbers_is_reduced_with_its_sign() -> None:
    for shape in SHAPES:
        total = torch.stack(everybodys(shape, DTYPES[1])).sum(0)
        view = negative(part(hvd.rank(), shape, DTYPES[1]))
        torch.testing.assert_close(hvd.allreduce(view, op=hvd.Sum), total)
        torch.testing.assert_close(hvd.allreduce_(view, op=hvd.Sum), total)
        torch.testing.assert_close(view, total)
