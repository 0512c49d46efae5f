"""A small model, and its training under torch's data parallelism."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import fusion_rt.torch as hvd

START = {"HOROVOD_START_TIMEOUT": "120"}  # seconds


@contextlib.contextmanager
def process_group(backend: str = "fusion") -> Iterator[None]:
    """A default group of the ranks of the job."""
    with tempfile.NamedTemporaryFile() as file:
        path = hvd.broadcast_object(file.name, 0)
        dist.init_process_group(backend, init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size())
        try:
            yield
        finally:
            dist.destroy_process_group()
            hvd.barrier()


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 50), torch.nn.Linear(50, 4)
    )


def batch_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 40, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def loss_of(model: Callable[..., torch.Tensor], step: int, rank: int | None = None, **options: Any) -> torch.Tensor:
    inputs, labels = batch_of(hvd.rank() if rank is None else rank, step)
    loss: torch.Tensor = torch.nn.functional.cross_entropy(model(inputs, **options), labels)
    return loss


def backward(loss: torch.Tensor, **options: bool) -> None:
    loss.backward(**options)  # type: ignore[no-untyped-call]
