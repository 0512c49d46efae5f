"""SyncBatchNorm against torch's batch normalization of everybody's batches as one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core.process_sets import ProcessSet
from tests.harness import on_ranks

CHANNELS = 3


def batches(step: int, shape: tuple[int, ...], rows: list[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """[rows, C, *shape] of each rank, far from zero, so that a sum of squares would lose the variance."""
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(count, CHANNELS, *shape, generator=generator, dtype=torch.float64) + 50 + rank).to(dtype)
        for rank, count in enumerate(rows)
    ]


def compare(
    shape: tuple[int, ...],
    rows: list[int],
    dtype: torch.dtype = torch.float64,
    process_set: ProcessSet = hvd.global_process_set,
    layout: torch.memory_format = torch.contiguous_format,
    steps: int = 3,
    **options: Any,
) -> None:
    """Outputs, gradients of inputs and parameters, and running statistics; in training, then in evaluation."""
    plain = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}
    reference = plain[len(shape)](CHANNELS, **options).to(torch.float64)
    synced = hvd.SyncBatchNorm(CHANNELS, process_set=process_set, **options).to(torch.float64)
    position = process_set.ranks.index(hvd.rank())
    if reference.affine:
        with torch.no_grad():
            reference.weight.copy_(torch.tensor([0.5, 1.0, -2.0]))
            reference.bias.copy_(torch.tensor([0.0, 3.0, 0.1]))
    synced.load_state_dict(reference.state_dict())
    if dtype is not torch.float64:
        synced.float()
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2}[dtype]

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)

    for step in range(steps + 1):
        if step == steps:
            reference.eval()
            synced.eval()
        inputs = batches(step, shape, rows, dtype)
        whole = torch.cat(inputs).double().requires_grad_()
        mine = inputs[position].to(memory_format=layout) if shape else inputs[position]
        mine.requires_grad_()
        weights = torch.linspace(-1, 1, whole.numel(), dtype=torch.float64).view_as(whole)
        reference.zero_grad()
        synced.zero_grad()
        expected = reference(whole)
        (expected * weights).sum().backward()
        output = synced(mine)
        assert output.dtype == dtype
        (output * weights.split(rows)[position]).sum().backward()
        close(output, expected.detach().split(rows)[position])
        close(mine.grad, whole.grad.split(rows)[position])
        if reference.affine:
            for name in ("weight", "bias"):
                gradient = getattr(synced, name).grad
                total = hvd.allreduce(gradient, op=hvd.Sum, process_set=process_set)
                close(total / max(1.0, total.abs().max()), getattr(reference, name).grad / max(1.0, total.abs().max()))
        for name, buffer in reference.named_buffers():
            close(synced.get_buffer(name), buffer.double())


CASES: dict[str, dict[str, Any]] = {
    "1-D": {"shape": ()},
    "sequences": {"shape": (7,)},
    "images": {"shape": (4, 3)},
    "channels last": {"shape": (4, 3), "layout": torch.channels_last},
    "volumes in single precision": {"shape": (2, 3, 2), "dtype": torch.float32},
    "half precision": {"shape": (4, 3), "dtype": torch.bfloat16},
    "without parameters": {"shape": (5,), "affine": False},
    "cumulative average": {"shape": (5,), "momentum": None, "eps": 1e-3},
    "without running statistics": {"shape": (5,), "track_running_stats": False},
}


@pytest.mark.parametrize("case", CASES)
@on_ranks
def test_it_is_batch_norm_of_all_batches(case: str) -> None:
    compare(rows=[2 + 3 * rank for rank in range(hvd.size())], **CASES[case])


def second_derivatives(layer: torch.nn.Module, inputs: torch.Tensor, own: slice) -> list[torch.Tensor]:
    """Gradients of a penalty on gradients of inputs, as WGAN-GP, R1 and MAML have it: of the inputs, and parameters."""
    inputs = inputs.detach().clone().requires_grad_()
    weights = torch.linspace(-1, 2, 10_000, dtype=torch.float64)[own.start :][: inputs.numel()].view_as(inputs)
    first = torch.autograd.grad((layer(inputs).tanh() * weights).sum(), inputs, create_graph=True)[0]
    loss = (first.double() * weights.flip(-1)).sin().square().sum()
    found = torch.autograd.grad(loss, [inputs, *layer.parameters()], allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient.double() for gradient in found]


@pytest.mark.parametrize("case", [*CASES, "an empty batch"])
@on_ranks
def test_its_second_derivatives_are_those_of_batch_norm_of_all_batches(case: str) -> None:
    options = {"shape": (3,), **CASES.get(case, {})}
    shape, dtype = options.pop("shape"), options.pop("dtype", torch.float64)
    layout = options.pop("layout", torch.contiguous_format)
    kind = (torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)[len(shape)]
    rows = [0 if case == "an empty batch" and rank == 1 else 2 + 3 * rank for rank in range(hvd.size())]
    inputs = [batch - 50 for batch in batches(0, shape, rows, torch.float64)]
    reference, synced = kind(CHANNELS, **options).double(), hvd.SyncBatchNorm(CHANNELS, **options)
    synced.to(torch.float64 if dtype is torch.float64 else torch.float32)
    mine = inputs[hvd.rank()].to(dtype).contiguous(memory_format=layout)
    sizes = [batch.numel() for batch in inputs]
    starts = [sum(sizes[:rank]) for rank in range(hvd.size())]
    found = second_derivatives(synced, mine, slice(starts[hvd.rank()], None))
    expected = second_derivatives(reference, torch.cat([each.to(dtype).double() for each in inputs]), slice(0, None))
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    places = expected[0].split(rows)
    scale = max(1.0, float(expected[0].abs().max()))
    torch.testing.assert_close(found[0] / scale, places[hvd.rank()] / scale, rtol=tolerance, atol=tolerance)
    for own, whole in zip(found[1:], expected[1:], strict=True):
        total = hvd.allreduce(own, op=hvd.Sum)
        torch.testing.assert_close(total / scale, whole / scale, rtol=tolerance, atol=tolerance, check_dtype=False)


def normalized(inputs: torch.Tensor) -> torch.Tensor:
    """The definition: torch's own normalization takes statistics for constants in third derivatives."""
    return (inputs - inputs.mean(0)) / (inputs.var(0, correction=0) + 1e-5).sqrt()


@on_ranks
def test_its_third_derivatives_are_those_of_the_definition() -> None:
    whole = torch.randn(2 * hvd.size(), CHANNELS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for layer, inputs in (
        (hvd.SyncBatchNorm(CHANNELS).double(), whole.chunk(hvd.size())[hvd.rank()]),
        (normalized, whole),
    ):
        inputs = inputs.clone().requires_grad_()
        value = layer(inputs).pow(3).sum()
        for _ in range(3):
            gradient = torch.autograd.grad(value, inputs, create_graph=True)[0]
            value = gradient.pow(2).sum()
        found.append(gradient.detach())
    torch.testing.assert_close(found[0], found[1].chunk(hvd.size())[hvd.rank()], rtol=1e-8, atol=1e-8)


@on_ranks
def test_empty_batches_and_single_elements() -> None:
    compare((3,), [0] + [4] * (hvd.size() - 1))
    compare((), [1] * hvd.size(), steps=2)
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1 on all ranks"):
        layer(torch.ones(int(hvd.rank() == 0), CHANNELS))
    with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
        layer(torch.ones(CHANNELS))


@on_ranks
def test_a_part_of_the_ranks() -> None:
    rest = hvd.add_process_set(range(1, hvd.size()))
    if rest.included():
        compare((3,), [2 + rank for rank in range(rest.size() or 0)], process_set=rest)
    else:
        local, plain = hvd.SyncBatchNorm(CHANNELS, process_set=rest), torch.nn.BatchNorm1d(CHANNELS)
        inputs = torch.randn(4, CHANNELS)
        assert torch.equal(local(inputs), plain(inputs))
        assert torch.equal(local.running_var, plain.running_var)
    hvd.remove_process_set(rest)


@on_ranks
def test_training_a_network_with_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, CHANNELS), hvd.SyncBatchNorm(CHANNELS), torch.nn.Linear(3, 1)
    ).double()
    reference = torch.nn.Sequential(copy.deepcopy(model[0]), torch.nn.BatchNorm1d(CHANNELS), copy.deepcopy(model[2]))
    reference.double()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        whole = torch.randn(6 * hvd.size(), 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for net, chosen, inputs in ((model, optimizer, whole.chunk(hvd.size())[hvd.rank()]), (reference, plain, whole)):
            chosen.zero_grad()
            net(inputs).square().mean().backward()
            chosen.step()
    for name, expected in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], expected)
    assert copy.deepcopy(model[1])(torch.ones(2, CHANNELS, dtype=torch.float64)).shape == (2, CHANNELS)
