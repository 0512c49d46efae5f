"""Small models, and what training them in one process on everybody's batches gives: the reference for the optimizer.

In float64, so that what adaptive optimizers and line searches make of rounding stays far below any real difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import fusion_rt.torch as hvd
from fusion_rt.torch.core import basics

BATCH = 8
MakeOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def make_model(seed: int = 0) -> torch.nn.Sequential:
    """About 1,000 parameters in six tensors, which make several buckets of 4 KiB."""
    torch.manual_seed(seed)
    layers = (
        torch.nn.Linear(16, 24),
        torch.nn.Tanh(),
        torch.nn.Linear(24, 24),
        torch.nn.Tanh(),
        torch.nn.Linear(24, 4),
    )
    return torch.nn.Sequential(*layers).double()


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs [8, 16] and labels [8] of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(BATCH, 16, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (BATCH,), generator=generator)


def my_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_of(hvd.rank(), step)


def loss_of(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def everybodys_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batches of all ranks as one."""
    inputs, labels = zip(*(batch_of(rank, step) for rank in range(hvd.size())), strict=True)
    return torch.cat(inputs), torch.cat(labels)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """On this rank's batches."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, my_batch(step)).backward()
        optimizer.step()


def train_reference(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """On everybody's, in this process."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, everybodys_batch(step)).backward()
        optimizer.step()


def assert_same(model: torch.nn.Module, reference: torch.nn.Module, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """The parameters are close to the reference's and bitwise equal on all ranks."""
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
    assert_equal_on_all_ranks(model)


def assert_equal_on_all_ranks(model: torch.nn.Module) -> None:
    flat = torch.cat([parameter.detach().reshape(-1).view(torch.uint8) for parameter in model.parameters()])
    everybodys = hvd.allgather(flat.view(1, -1))
    assert (everybodys == everybodys[0]).all(), "the ranks' parameters differ"


def in_arena(tensor: torch.Tensor) -> bool:
    return basics.runtime().client.arena.locate(tensor.data_ptr(), tensor.nbytes) is not None


def selecting_buckets(optimizer: Any) -> list[bool]:
    """Returns for each bucket of an optimizer's plan whether this worker may select from it on its GPU."""
    sync = optimizer._sync
    return [bucket.index in sync.selections.buckets for bucket in sync.plan.buckets]
