"""Training tasks of the benchmarks: the examples' two models, the same for every codec.

The optimizer is SGD with momentum, so that momentum correction matters. A codec that has a momentum of its own replaces
that of the optimizer, and the formula stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from examples import char_gpt, digits

MOMENTUM = 0.9


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        model: with parameters drawn from torch's generator.
        loss: computes the loss of this rank's next batch, given the model or a wrapper of it.
        test: computes the mean loss and the accuracy over this rank's part of the held-out data; parts are equal, so
            that the mean over ranks is that of all.
    """

    model: torch.nn.Module
    loss: Callable[[Any], torch.Tensor]
    test: Callable[[], tuple[float, float]]


def digits_task(seed: int, rank: int, size: int, *, batch: int = 16) -> Task:
    """Makes the task of `examples/digits.py`: a convolutional net with 38 thousand parameters."""
    train, held_out = digits.load()
    model = digits.make_model()

    def batches() -> Iterator[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)  # the same permutation on all ranks
        while True:
            mine = torch.randperm(len(train), generator=generator)[rank::size]
            for places in torch.split(mine, batch):
                if len(places) == batch:
                    yield train[places]

    drawn = batches()

    def loss(model: Any) -> torch.Tensor:
        images, labels = next(drawn)
        return F.cross_entropy(model(images), labels)

    per_rank = len(held_out) // size
    return Task(model, loss, lambda: _test(model, *held_out[rank * per_rank : (rank + 1) * per_rank]))


def char_gpt_task(
    seed: int,
    rank: int,
    size: int = 4,
    *,
    width: int = 96,
    layers: int = 4,
    batch: int = 4,
    context: int = 32,
    tests: int = 64,
) -> Task:
    """Makes the task of `examples/char_gpt.py`, by default with 475 thousand parameters.

    `tests`: number of pieces of text that are held out for each rank, the same for every seed.
    """
    text, held_out = char_gpt.load()
    model = char_gpt.Gpt(context, width, layers, heads=4)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    held = char_gpt.draw(held_out, tests, context, torch.Generator().manual_seed(rank))
    return Task(
        model,
        lambda model: char_gpt.loss_of(model, char_gpt.draw(text, batch, context, generator)),
        lambda: _test(model, held[0], held[1].flatten()),
    )


@torch.no_grad()
def _test(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    guesses = model(inputs).view(len(targets), -1)
    return F.cross_entropy(guesses, targets).item(), (guesses.argmax(1) == targets).float().mean().item()


def sgd(model: torch.nn.Module, lr: float, codec: str = "dense") -> torch.optim.SGD:
    """Makes the optimizer, without momentum when the codec that it will be distributed with has one."""
    return torch.optim.SGD(model.parameters(), lr, momentum=0.0 if "momentum" in codec else MOMENTUM)


def scheduler(optimizer: Any, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Makes the schedule of the learning rate: a linear rise, and then a fall along a cosine to a tenth."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: char_gpt.schedule(step, steps))
