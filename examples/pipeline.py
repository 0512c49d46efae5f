"""Training of a network that is split between ranks: its layers into stages of a pipeline, or their units, or both.

    fusionrun -np 4 python examples/pipeline.py --stages 2
    fusionrun -np 4 python examples/pipeline.py --stages 4 --schedule 1f1b
    fusionrun -np 4 python examples/pipeline.py --stages 1 --tensor-parallel 2
    fusionrun -np 8 python examples/pipeline.py --stages 2 --tensor-parallel 2

It learns to read the handwritten digits of digits.py. Ranks form a grid of stages x replicas x parts; there are as many
replicas as ranks allow. Each row of that grid in any direction is a process set:

- the two ranks on both sides of a border between stages exchange activations and their gradients, for each micro-batch;
- the parts of a stage have a share of the hidden units each, and add up what these contribute;
- the replicas of a stage (and part) train on different images, and the optimizer averages their gradients.

No rank has the whole network: each has the layers of its stage, and of their hidden units the share of its part.

Schedules of a step: `gpipe` is all forward passes, then all backward passes (Huang et al., arXiv 1811.06965); `1f1b`
alternates between the two as soon as it can (Narayanan et al., arXiv 2104.04473, section 2.2.1), which takes as long,
and keeps the activations of at most `stages` micro-batches. Both give the same bits. The split of hidden units is that
of Shoeybi et al., arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from digits import load, progress_bar, show
from torch import nn

import fusion_rt.torch as hvd

PIXELS, CLASSES = 64, 10


# --- the grid of ranks ------------------------------------------------------------------------------------------------


@functools.cache
def set_of(*ranks: int) -> hvd.ProcessSet:
    """Returns the process set of these ranks, ascending; all ranks of the job have to ask for the same sets, in order.

    The set of all ranks of the job exists from the beginning, and cannot be added again.
    """
    everyone = hvd.global_process_set
    return everyone if list(ranks) == everyone.ranks else hvd.add_process_set(ranks)


@dataclass(frozen=True)
class Place:
    """This rank's place in the grid.

    Attributes:
        stage, replica, part: indices of this rank.
        stages, replicas, parts: their numbers.
        same_stage: the parts of this stage and replica.
        same_layers: the replicas of this stage and part, which have the same parameters.
        before, after: this rank and the one of the stage before or after; None where there is none.
    """

    stage: int
    replica: int
    part: int
    stages: int
    replicas: int
    parts: int
    same_stage: hvd.ProcessSet
    same_layers: hvd.ProcessSet
    before: hvd.ProcessSet | None
    after: hvd.ProcessSet | None

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


def find_place(stages: int, parts: int) -> Place:
    """Registers the process sets, and returns this rank's place.

    Parts are neighbours, then replicas: where a stage fills a host, they meet in its memory, and only activations and
    their gradients cross the network.

    Raises:
        SystemExit: the ranks of the job do not fill such a grid.
    """
    if stages < 1 or parts < 1 or hvd.size() % (stages * parts):
        raise SystemExit(f"{hvd.size()} ranks cannot be divided into {stages} stages of {parts} parts; start a "
                         "multiple of stages times parts, both at least 1")  # fmt: skip
    replicas = hvd.size() // (stages * parts)
    rank_of = {
        place: rank for rank, place in enumerate(itertools.product(range(stages), range(replicas), range(parts)))
    }
    same_stage = {
        (s, r): set_of(*(rank_of[s, r, p] for p in range(parts)))
        for s, r in itertools.product(range(stages), range(replicas))
    }
    same_layers = {
        (s, p): set_of(*(rank_of[s, r, p] for r in range(replicas)))
        for s, p in itertools.product(range(stages), range(parts))
    }
    after = {(s, r, p): set_of(rank_of[s, r, p], rank_of[s + 1, r, p]) for s, r, p in rank_of if s + 1 < stages}
    stage, replica, part = next(place for place, rank in rank_of.items() if rank == hvd.rank())
    return Place(
        stage, replica, part, stages, replicas, parts,
        same_stage[stage, replica], same_layers[stage, part],
        after.get((stage - 1, replica, part)), after.get((stage, replica, part)),
    )  # fmt: skip


# --- the network ------------------------------------------------------------------------------------------------------


class Copied(torch.autograd.Function):
    """The identity forward, and the sum of all parts' gradients backward: for an input that all parts read.

    This and `Summed` differ from the gradients of `hvd.allreduce`, which counts a loss of each rank: these parts have
    one loss together, which each of them computes.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, parts: hvd.ProcessSet) -> torch.Tensor:
        ctx.name, ctx.parts = name, parts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return hvd.allreduce(gradients[0], op=hvd.Sum, name=f"{ctx.name}.back", process_set=ctx.parts), None, None


class Summed(torch.autograd.Function):
    """The sum over all parts forward, and the same gradient for each of them backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, parts: hvd.ProcessSet) -> torch.Tensor:
        return hvd.allreduce(x, op=hvd.Sum, name=name, process_set=parts)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None, None


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), of which this rank has a share of the hidden units between up and down.

    It is smooth, without ReLU, as the net of digits.py, so that runs on other grids can be compared.

    Args:
        width: of x, (rows, width).
        hidden: units, of all parts together.
        name: of its messages.
        part, parts: index of this rank's share, and the number of shares.
        ranks: process set of the ranks that have the shares.
    """

    def __init__(self, width: int, hidden: int, name: str, part: int, parts: int, ranks: hvd.ProcessSet) -> None:
        super().__init__()
        own = slice(part * hidden // parts, (part + 1) * hidden // parts)
        up, down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.up_weight = nn.Parameter(up.weight.detach()[own].clone())
        self.up_bias = nn.Parameter(up.bias.detach()[own].clone())
        self.down_weight = nn.Parameter(down.weight.detach()[:, own].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())
        self._name, self._ranks = name, ranks if parts > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm(x)
        if self._ranks is not None:
            inner = Copied.apply(inner, self._name, self._ranks)  # type: ignore[no-untyped-call]
        inner = F.linear(F.gelu(F.linear(inner, self.up_weight, self.up_bias)), self.down_weight)
        if self._ranks is not None:
            inner = Summed.apply(inner, self._name, self._ranks)  # type: ignore[no-untyped-call]
        outer: torch.Tensor = x + inner + self.down_bias
        return outer


def make_stage(options: argparse.Namespace, place: Place) -> nn.Module:
    """Makes this rank's layers, named by their numbers in the whole network.

    Parameters depend on the seed and the number of the layer, and not on the grid.

    Raises:
        SystemExit: there is not a block for each stage, or a hidden unit for each part.
    """
    if options.blocks < place.stages or options.hidden < place.parts:
        raise SystemExit(f"{options.blocks} blocks of {options.hidden} hidden units do not suffice for {place.stages} "
                         f"stages of {place.parts} parts; see --blocks and --hidden")  # fmt: skip
    width, end = options.width, options.blocks + 1
    makers: dict[int, Callable[[], nn.Module]] = {}
    if place.first:
        makers[0] = lambda: nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, width))
    own_blocks = (options.blocks * (place.stage + more) // place.stages for more in (0, 1))
    for number in range(*own_blocks):
        makers[number + 1] = functools.partial(
            Block, width, options.hidden, f"block.{number}", place.part, place.parts, place.same_stage
        )
    if place.last:
        makers[end] = lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, make in makers.items():
        torch.manual_seed(options.seed * (end + 1) + number)
        layers[str(number)] = make()
    return nn.Sequential(layers)


# --- a step -----------------------------------------------------------------------------------------------------------


class Link:
    """A link for tensors to and from one rank of a neighbouring stage.

    Each transfer is a broadcast in the process set of the two: only they wait for it, and it is sent as it is. (An
    all-to-all took twice as long.) Sending does not wait, and expected tensors come during computation.

    Args:
        ranks: this rank and the other.
        outgoing, incoming: name the messages.

    Attributes:
        waited: seconds spent until expected tensors had come.
    """

    def __init__(self, ranks: hvd.ProcessSet, outgoing: str, incoming: str) -> None:
        self.waited = 0.0
        self._ranks, self._outgoing, self._incoming = ranks, outgoing, incoming
        (self._other,) = (rank for rank in ranks.ranks if rank != hvd.rank())
        self._sent: list[int] = []
        self._expected: dict[int, int] = {}

    def expect(self, numbers: range, rows: int, width: int) -> None:
        """Begins to receive tensors (rows, width) of these numbers."""
        for number in numbers:
            name = f"{self._incoming}.{number}"
            self._expected[number] = hvd.broadcast_async_(torch.empty(rows, width), self._other, name, self._ranks)

    def take(self, number: int) -> torch.Tensor:
        """Waits for an expected tensor, and returns it."""
        began = time.perf_counter()
        tensor: torch.Tensor = hvd.synchronize(self._expected.pop(number))
        self.waited += time.perf_counter() - began
        return tensor

    def send(self, number: int, tensor: torch.Tensor) -> None:
        """Begins to send a tensor."""
        self._sent.append(hvd.broadcast_async(tensor, hvd.rank(), f"{self._outgoing}.{number}", self._ranks))

    def flush(self) -> None:
        """Waits until all sent tensors have arrived."""
        for handle in self._sent:
            hvd.synchronize(handle)
        self._sent.clear()


def schedule(kind: str, place: Place, micro_batches: int) -> list[tuple[str, int]]:
    """Returns the passes of a stage in a step, in order: ("forward" or "backward", micro-batch).

    Forward passes run ahead of backward passes: by all micro-batches with "gpipe"; with "1f1b" by the number of later
    stages, whose passes come before the first gradient.
    """
    ahead = micro_batches if kind == "gpipe" else min(place.stages - 1 - place.stage, micro_batches)
    passes = [("forward", number) for number in range(ahead)]
    for number in range(micro_batches):
        if number + ahead < micro_batches:
            passes.append(("forward", number + ahead))
        passes.append(("backward", number))
    return passes


class Stage:
    """This rank's layers, and its links to the stages before and after."""

    def __init__(self, options: argparse.Namespace, place: Place) -> None:
        self.model = make_stage(options, place)
        self._width = options.width
        self._micro_batches = options.micro_batches
        self._passes = schedule(options.schedule, place, options.micro_batches)
        self._before = None if place.before is None else Link(place.before, "gradient", "activation")
        self._after = None if place.after is None else Link(place.after, "activation", "gradient")

    @property
    def waited(self) -> float:
        """Seconds spent waiting for other stages."""
        return sum(link.waited for link in (self._before, self._after) if link is not None)

    def train(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Passes a batch through the pipeline, forward and backward.

        Args:
            images: (N, 1, 8, 8), read by the first stage; N is a multiple of the number of micro-batches.
            labels: (N,), read by the last stage.

        Returns:
            The loss in the last stage, a scalar; 0 in others.
        """
        numbers, rows = range(self._micro_batches), len(images) // self._micro_batches
        parts = images.split(rows)  # type: ignore[no-untyped-call]
        targets = labels.split(rows)  # type: ignore[no-untyped-call]
        for link in (self._before, self._after):
            if link is not None:
                link.expect(numbers, rows, self._width)
        total = torch.zeros(())
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for kind, number in self._passes:
            if kind == "forward":
                x = parts[number] if self._before is None else self._before.take(number).requires_grad_()
                y = self.model(x)
                if self._after is None:
                    # Gradients of the passes are added up, and so the mean over micro-batches is divided here.
                    y = F.cross_entropy(y, targets[number]) / self._micro_batches
                    total += y.detach()
                else:
                    self._after.send(number, y.detach())
                kept[number] = x, y
            else:
                x, y = kept.pop(number)
                y.backward(None if self._after is None else self._after.take(number))  # type: ignore[no-untyped-call]
                if self._before is not None:
                    assert x.grad is not None
                    self._before.send(number, x.grad)
        return total

    def flush(self) -> None:
        """Waits until the neighbours have received everything."""
        for link in (self._before, self._after):
            if link is not None:
                link.flush()

    def predict(self, images: torch.Tensor) -> torch.Tensor | None:
        """Returns the classes (N,) of the images in the last stage, None in others."""
        with torch.no_grad():
            if self._before is not None:
                self._before.expect(range(1), len(images), self._width)
                images = self._before.take(0)
            y = self.model(images)
            if self._after is None:
                return y.argmax(1)  # type: ignore[no-any-return]
            self._after.send(0, y)
        self.flush()
        return None


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The result of a training run.

    Attributes:
        accuracy: share of the test images that are read correctly.
        place: of this rank.
        samples_per_second: training images, all replicas together.
        step_seconds, waited_seconds, averaging_seconds: mean duration of a step, and how much of it this rank spent
            waiting for other stages and for averaged gradients.
        parameters: elements that this rank has.
    """

    accuracy: float
    place: Place
    samples_per_second: float
    step_seconds: float
    waited_seconds: float
    averaging_seconds: float
    parameters: int


def batches(options: argparse.Namespace, place: Place, epoch: int, images: int) -> list[torch.Tensor]:
    """Returns the indices (--batch-size,) of this replica's images in each step of an epoch."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(options.seed * options.epochs + epoch))
    together = order.split(options.batch_size * place.replicas)  # type: ignore[no-untyped-call]
    return [batch[place.replica :: place.replicas] for batch in together if len(batch) == len(together[0])]


def train(options: argparse.Namespace, after_step: Callable[[nn.Module], None] | None = None) -> Result:
    """Trains and tests; `after_step` is called with this rank's layers after each step.

    Raises:
        SystemExit: options that do not fit each other, or the number of ranks.
    """
    place = find_place(options.stages, options.tensor_parallel)
    train_data, test_data = load()
    images, labels = train_data.tensors
    if options.micro_batches < 1 or options.batch_size % options.micro_batches:
        raise SystemExit(f"a batch of {options.batch_size} cannot be divided into {options.micro_batches} equal "
                         "micro-batches; see --batch-size and --micro-batches")  # fmt: skip
    if len(images) < options.batch_size * place.replicas:
        raise SystemExit(f"{len(images)} images do not fill a batch of {options.batch_size} for each of "
                         f"{place.replicas} replicas; choose a smaller --batch-size")  # fmt: skip

    stage = Stage(options, place)
    model = stage.model
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, nesterov=True)
    # Once in a step, after the backward passes of all its micro-batches, gradients are averaged over replicas.
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=options.micro_batches,
        process_set=place.same_layers,
    )  # fmt: skip
    hvd.broadcast_parameters(model.state_dict(), place.same_layers.ranks[0], process_set=place.same_layers)
    steps = options.epochs * len(batches(options, place, 0, len(images)))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, steps, pct_start=0.2, cycle_momentum=False)

    bar = progress_bar()
    task = bar.add_task("", total=options.epochs, loss="")
    step, began, waited, averaged = 0, time.perf_counter(), 0.0, 0.0
    with bar:
        for epoch in range(options.epochs):
            total = torch.zeros(())
            chosen = batches(options, place, epoch, len(images))
            for batch in chosen:
                optimizer.zero_grad()
                total += stage.train(images[batch], labels[batch])
                optimizer.step()
                scheduler.step()
                stage.flush()
                step += 1
                if step == 1:  # it has also made the plan, and so it counts for nothing below
                    began, waited = time.perf_counter(), stage.waited
                    averaged = optimizer.statistics().waited_seconds
                if after_step is not None:
                    after_step(model)
            # Only last stages have a loss, each part of them the same.
            loss = hvd.allreduce(total / len(chosen), op=hvd.Sum, name="loss") / (place.replicas * place.parts)
            bar.update(task, advance=1, loss=f"loss {loss.item():.4f}")
            show(bar)
    counted = max(step - 1, 1)
    seconds = (time.perf_counter() - began) / counted
    return Result(
        test(stage, place, *test_data.tensors),
        place,
        options.batch_size * place.replicas / seconds,
        seconds,
        (stage.waited - waited) / counted,
        (optimizer.statistics().waited_seconds - averaged) / counted,
        sum(parameter.numel() for parameter in model.parameters()),
    )


def test(stage: Stage, place: Place, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Returns the share of the images that the network reads correctly; each replica tests on its share."""
    own = slice(place.replica, None, place.replicas)
    predicted = stage.predict(images[own])
    correct = torch.tensor(0)
    if predicted is not None and place.part == 0:
        correct = predicted.eq(labels[own]).sum()
    return float(hvd.allreduce(correct, op=hvd.Sum, name="correct")) / len(labels)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Learns to read handwritten digits, with a network spread over ranks.")
    parser.add_argument("--stages", type=int, default=1, help="that layers are divided into (%(default)s)")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="parts that hidden units are divided into (%(default)s)"
    )
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="gpipe", help="(%(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="that a batch is divided into (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="images in a step, of each replica (%(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="layers to divide into stages (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the activations (%(default)s)")
    parser.add_argument("--hidden", type=int, default=256, help="units in each block (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of parameters and order of images (%(default)s)")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    hvd.init()
    torch.set_num_threads(1)  # the ranks of a host share its cores, and so small a net gains nothing by more
    result = train(options)
    if hvd.rank() == 0:
        place, passes = result.place, options.micro_batches + options.stages - 1
        print(f"accuracy  {result.accuracy:.2%} of the test images")
        print(
            f"speed     {result.samples_per_second:,.0f} samples/s on {place.stages} x {place.replicas} x "
            f"{place.parts} ranks (stages x replicas x parts), rank 0 with {result.parameters:,} parameters"
        )
        print(
            f"waiting   {result.waited_seconds * 1e3:.2f} ms of rank 0's step of {result.step_seconds * 1e3:.2f} ms "
            f"({result.waited_seconds / result.step_seconds:.1%}; at least {(options.stages - 1) / passes:.1%} if "
            f"stages are equal) for other stages, {result.averaging_seconds * 1e3:.2f} ms for other replicas"
        )


if __name__ == "__main__":
    main()
