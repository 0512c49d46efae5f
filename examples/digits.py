"""A small convolutional net learns to read handwritten digits: scikit-learn's, 1797 images of 8 x 8 pixels.

    python examples/digits.py
    fusionrun -np 2 python examples/digits.py
    fusionrun -H host1:2,host2:2 python examples/digits.py

The script is the same on one process and on many hosts: each rank trains on its share of the images, and the optimizer
averages the gradients of all ranks before each step. The lines for that are marked with an arrow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import fusion_rt.torch as hvd

TEST_SHARE = 0.2
MAX_LR_SCALE = 4  # beyond batches of 64 these few images no longer bear a learning rate that grows with the batch


@dataclass(frozen=True)
class Result:
    """The result of a training run.

    Attributes:
        accuracy: share of the test images that are read correctly.
        samples_per_second: training images, all ranks together.
        step_seconds, waited_seconds: mean duration of a step, and how much of it this rank spent waiting for the
            averaged gradients, which includes waiting for slower ranks.
        buckets, nbytes: buckets and bytes of gradients that a step reduces.
    """

    accuracy: float
    samples_per_second: float
    step_seconds: float
    waited_seconds: float
    buckets: int
    nbytes: int


def load() -> tuple[TensorDataset, TensorDataset]:
    """Returns training data and test data: images (N, 1, 8, 8), float32 in 0..1, and labels (N,), int64."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    split = random_split(data, [1 - TEST_SHARE, TEST_SHARE], torch.Generator().manual_seed(0))
    train, test = (TensorDataset(*data[part.indices]) for part in split)
    return train, test


def make_model() -> nn.Module:
    """Makes a net of two convolutions and two dense layers, with 38 thousand parameters.

    It is smooth, without ReLU and max pooling: sums over another number of ranks are rounded differently, and where one
    bit of difference can flip a decision, the losses of two runs diverge.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
    return model


def train(options: argparse.Namespace, after_step: Callable[[nn.Module, float], None] | None = None) -> Result:
    """Trains and tests; `after_step` is called with the model and this rank's loss after each step."""
    torch.manual_seed(options.seed)
    train_data, test_data = load()
    # -> Each rank gets every size-th image of the same permutation.
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(
        train_data, num_replicas=hvd.size(), rank=hvd.rank(), seed=options.seed
    )
    loader = DataLoader(train_data, options.batch_size, sampler=sampler, drop_last=True)
    if not len(loader):
        raise SystemExit(f"{len(sampler)} images for each of {hvd.size()} ranks do not fill a batch of "
                         f"{options.batch_size}; choose a smaller --batch-size")  # fmt: skip

    model = make_model()
    lr = options.lr * min(hvd.size(), MAX_LR_SCALE)  # -> a batch that is larger by so much bears longer steps
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    # -> Gradients are averaged over all ranks, and all ranks start from rank 0's parameters and state.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    steps = options.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.2, cycle_momentum=False)

    bar = progress_bar()
    task = bar.add_task("", total=options.epochs, loss="")
    step, began, waited = 0, time.perf_counter(), 0.0
    with bar:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            total = torch.zeros(())
            for images, labels in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                scheduler.step()
                total += loss.detach()
                step += 1
                if step == 1:  # it has also made the plan, and so it counts for nothing below
                    began, waited = time.perf_counter(), optimizer.statistics().waited_seconds
                if after_step is not None:
                    after_step(model, loss.item())
            average = hvd.allreduce(total / len(loader), name="loss")  # -> over all ranks
            bar.update(task, advance=1, loss=f"loss {average.item():.4f}")
            show(bar)
    seconds = (time.perf_counter() - began) / max(step - 1, 1)
    statistics = optimizer.statistics()
    return Result(
        test(model, test_data),
        options.batch_size * hvd.size() / seconds,
        seconds,
        (statistics.waited_seconds - waited) / max(step - 1, 1),
        statistics.buckets,
        statistics.nbytes,
    )


def test(model: nn.Module, data: TensorDataset) -> float:
    """Returns the share of the images that the model reads correctly."""
    images, labels = data[hvd.rank() :: hvd.size()]  # -> each rank tests on its share
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).sum()
    total = hvd.allreduce(correct, op=hvd.Sum, name="correct")  # -> over all ranks
    return float(total) / len(data)


def progress_bar() -> Progress:
    """Makes a progress bar, which is shown on rank 0 only."""
    console = Console()
    return Progress(
        TextColumn("epoch {task.completed:2.0f} of {task.total}"),
        BarColumn(24),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=console.is_terminal,
        transient=not console.is_terminal,
        disable=hvd.rank() != 0,
    )


def show(bar: Progress) -> None:
    """Prints the bar on a new line where the output is no terminal (under fusionrun), and it cannot be redrawn."""
    if not bar.disable and not bar.console.is_terminal:
        bar.console.print(bar.get_renderable())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Learns to read handwritten digits, on one process or on many hosts.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a step, on each rank (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate for one rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of parameters and order of images (%(default)s)")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    hvd.init()  # ->
    torch.set_num_threads(1)  # -> the ranks of a host share its cores, and so small a net gains nothing by more
    result = train(options)
    if hvd.rank() == 0:
        print(f"accuracy       {result.accuracy:.2%} of the test images")
        print(f"speed          {result.samples_per_second:,.0f} samples/s on {hvd.size()} ranks")
        print(
            f"communication  {result.waited_seconds * 1e3:.2f} ms of each step of {result.step_seconds * 1e3:.2f} ms "
            f"({result.waited_seconds / result.step_seconds:.1%}): {result.nbytes / 1e3:.0f} kB of gradients, "
            f"{result.buckets} message{'' if result.buckets == 1 else 's'}"
        )


if __name__ == "__main__":
    main()
