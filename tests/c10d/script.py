"""A small model, and its training under torch's data parallelism."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fusion_rt.torch as hvd

TOPK = "topk(density=0.05, value='fp32', scope='tensor', minimum=100)"
START = {"HOROVOD_START_TIMEOUT": "120"}  # seconds


# gloo's groups of this rank. DDP's reducer holds the last reference to one after `destroy_process_group`, and ends it
# with Python's lock held. gloo's destructor waits for its threads then, one of which may need the lock to drop the
# tensors of its last work: both wait forever (https://github.com/pytorch/pytorch/issues/56297).
KEPT: list[Any] = []


@contextlib.contextmanager
def process_group(backend: str = "fusion") -> Iterator[None]:
    """A default group of the ranks of the job."""
    with tempfile.TemporaryDirectory() as directory:  # torch may delete the file in it, when its last store is gone
        path = hvd.broadcast_object(f"{directory}/store", 0)
        dist.init_process_group(backend, init_method=f"file://{path}", rank=hvd.rank(), world_size=hvd.size())
        if backend == "gloo":
            KEPT.append(dist.group.WORLD)
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


def bits(model: torch.nn.Module) -> bytes:
    whole = [parameter.detach().contiguous().view(-1).view(torch.uint8) for parameter in model.parameters()]
    return b"".join(value.numpy().tobytes() for value in whole)


def train(model: Any, steps: Iterable[int], rate: float = 0.1, **options: Any) -> list[bytes]:
    """Returns the parameters after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    after = []
    for step in steps:
        optimizer.zero_grad()
        backward(loss_of(model, step, **options))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        after.append(bits(model))
    return after


SCALES = [65536.0 / 2**k for k in range(7)] + [2.0**k for k in range(11)]
"""Loss scales, by step: the scale halves six times, and then doubles ten times."""


def train_scaled(model: Any, scales: Iterable[float], state: Any = None) -> list[list[torch.Tensor]]:
    """Returns the parameters after each step, whose loss has that scale: a scaler's, or, with the state of a hook, one
    that the script says itself."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    scaler = torch.amp.GradScaler("cpu", growth_interval=10**6)
    scaler.scale(torch.ones(1))  # it can be given a scale from now on
    after = []
    for step, scale in enumerate(scales):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if state is None:
            scaler.update(scale)
            backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
        else:
            state.loss_scale = scale
            backward(loss * scale)
            for parameter in model.parameters():
                parameter.grad /= scale
            optimizer.step()
        after.append([getattr(p, "_local_tensor", p).detach().clone() for p in model.parameters()])
    return after


class ErrorFeedback:
    """Top-k of each tensor with error feedback on two ranks, in one process, by numpy.

    Args:
        model: the ranks' common start; trained here.
        ranks: the two.
    """

    def __init__(self, model: torch.nn.Module, ranks: tuple[int, int] = (0, 1), rate: float = 0.1) -> None:
        self.model = model
        self._ranks = ranks
        self._rate = rate
        self._left: dict[tuple[int, str], Any] = {}

    def step(self, losses: Callable[[int], torch.Tensor]) -> None:
        """Takes a step with the mean of what two ranks send of their gradients; `losses`: by rank."""
        sums = {name: np.zeros(p.numel(), np.float32) for name, p in self.model.named_parameters()}
        for rank in self._ranks:
            self.model.zero_grad()
            backward(losses(rank))
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    sums[name] += self._sent(rank, name, parameter)
        self.model.zero_grad()
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.from_numpy(sums[name] / 2).view(parameter.shape)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        torch.optim.SGD(self.model.parameters(), lr=self._rate).step()

    def _sent(self, rank: int, name: str, parameter: torch.Tensor) -> Any:
        given = np.zeros(parameter.numel(), np.float32) if parameter.grad is None else parameter.grad.numpy().ravel()
        if parameter.numel() < 100 or name.endswith("bias"):
            return given
        total = given + self._left.get((rank, name), np.zeros_like(given))
        largest = np.argsort(-np.abs(total), kind="stable")[: max(1, round(0.05 * total.size))]
        sent = np.zeros_like(total)
        sent[largest] = total[largest]
        self._left[rank, name] = total - sent
        return sent
