"""What a training step costs beside the computation: 25.6 M parameters in 161 tensors, those of ResNet-50.

    python -m benchmarks.step
    python -m benchmarks.step --ranks 4 --steps 20
    python -m benchmarks.step --overlap
    python -m benchmarks.step --overlap --hosts 4 --rate 1gbit --compute 1.5 --steps 3 --rounds 5

With `--overlap` it is measured how much of the communication is exposed when there is something to hide it behind, with
each way of overlap; what is said below does not apply then, but what `benchmarks/overlap.py` says.

There is no network behind the tensors: the backward pass hands out gradients of the right shapes in the right order,
the last layer's first, and does nothing else, so that communication has nothing to hide behind. A step is then filling
the gradients, averaging them, and an update by SGD. The gradients' memory is used again in each step, because the
allocator's work (new pages, and giving them back) is not what is measured here. Rounds of fusion_rt alternate with
rounds of torch's DistributedDataParallel on gloo, in the same processes; a step takes as long as on the slowest rank.
Printed are medians; those of the parts of a step are the largest of any rank.

Messages and the daemon's CPU time are differences of `fusiond status`. *Python in the worker* is the time inside the
hooks on the gradients and in `step()` and `zero_grad()` of the distributed optimizer, less the script's own optimizer,
which they call, less the copies of gradients into the arena, and less the time for which the worker does not run: it
waits for a message, or has sent one, and the daemon that this wakes takes its core. What it computes while it sends
and receives stays in.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launch import MARK, fusionrun

LR = 1e-3


def shapes() -> list[tuple[int, ...]]:
    """The parameters of ResNet-50 in the order of their use: 161 tensors, 25,557,032 elements."""
    found: list[tuple[int, ...]] = []

    def convolution(inputs: int, outputs: int, size: int) -> None:
        found.extend([(outputs, inputs, size, size), (outputs,), (outputs,)])  # with its batch norm's scale and shift

    convolution(3, 64, 7)
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            convolution(inputs, width, 1)
            convolution(width, width, 3)
            convolution(width, 4 * width, 1)
            if block == 0:
                convolution(inputs, 4 * width, 1)
            inputs = 4 * width
    found.extend([(1000, 2048), (1000,)])
    return found


class Clock:
    """Exclusive times of functions that call each other: what a function takes less what those take that it calls.

    Attributes:
        seconds: by label, since the last `take`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]  # time spent in measured functions called by the one on top of the stack

    def measure(self, owner: Any, name: str, label: str, busy: str = "") -> None:
        """Puts a stopwatch around the function `name` of a class or module.

        With `busy`, the time for which this thread computed in it counts under that label, and only the rest under
        `label`. (Not everywhere: reading a thread's CPU time takes as long as a hook.)
        """
        function = getattr(owner, name)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            computed = time.thread_time() if busy else 0.0
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - began
                own = elapsed - self._inner.pop()
                if busy:
                    computed = min(time.thread_time() - computed, own)
                    self._add(busy, computed)
                self._add(label, own - computed)
                self._inner[-1] += elapsed

        setattr(owner, name, measured)

    def take(self) -> dict[str, float]:
        """Seconds by label; starts again at zero."""
        taken, self.seconds = self.seconds, {}
        return taken

    def _add(self, label: str, seconds: float) -> None:
        self.seconds[label] = self.seconds.get(label, 0.0) + seconds


def worker(steps: int, rounds: int) -> None:
    """What each rank runs; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    clock = _measure_fusion()
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
    ours, theirs, alone = _model(torch), _model(torch), _model(torch)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), LR), ours.named_parameters())
    parallel = torch.nn.parallel.DistributedDataParallel(theirs, gradient_as_bucket_view=True)
    runs = {
        "fusion_rt": (ours, optimizer),
        "gloo": (parallel, torch.optim.SGD(theirs.parameters(), LR)),
        "no communication": (alone, torch.optim.SGD(alone.parameters(), LR)),
    }

    def step(model: Any, its_optimizer: Any) -> None:
        its_optimizer.zero_grad()
        model().backward()
        its_optimizer.step()

    times: dict[str, list[float]] = {name: [] for name in runs}
    parts: list[dict[str, float]] = []
    spent = {"messages": 0.0, "cpu_seconds": 0.0}
    for number in range(rounds + 1):  # the first one is for warming up: plans, caches, memory
        for name, run in runs.items():
            before = _daemon() if hvd.rank() == 0 and name == "fusion_rt" else None
            for _ in range(steps):
                dist.barrier()
                clock.take()
                began = time.perf_counter()
                step(*run)
                elapsed = time.perf_counter() - began
                if number:
                    times[name].append(elapsed)
                    if name == "fusion_rt":
                        parts.append(clock.take())
            dist.barrier()
            if before is not None and number:
                after = _daemon()
                again = _daemon()  # what asking costs
                for key in spent:
                    spent[key] += after[key] - before[key] - (again[key] - after[key])
            dist.barrier()
    slowest = torch.tensor([times[name] for name in runs])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    labels = ("python", "copy", "wait", "script")
    by_part = torch.tensor([[part.get(label, 0.0) for part in parts] for label in labels]).median(dim=1).values
    dist.all_reduce(by_part, op=dist.ReduceOp.MAX)
    count = steps * rounds
    if hvd.rank() == 0:
        result = {
            "ranks": hvd.size(),
            "tensors": len(list(ours.parameters())),
            "parameters": sum(parameter.numel() for parameter in ours.parameters()),
            "buckets": optimizer.statistics().buckets,
            "messages": spent["messages"] / count,
            "daemon": spent["cpu_seconds"] / count,
            "steps": dict(zip(runs, slowest.median(dim=1).values.tolist(), strict=True)),
            "parts": dict(zip(labels, by_part.tolist(), strict=True)),
        }
        print(MARK + json.dumps(result), flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


def _measure_fusion() -> Clock:
    """Has the parts of fusion_rt that run in a step measured."""
    import torch

    from fusion_rt import client, local
    from fusion_rt.torch import slots, synchronous

    clock = Clock()
    clock.measure(slots.Slot, "arrived", "python")
    clock.measure(synchronous.Distributed, "step", "python")
    clock.measure(synchronous.Distributed, "zero_grad", "python")
    clock.measure(torch, "_foreach_copy_", "copy")
    clock.measure(local, "receive", "wait", busy="python")
    clock.measure(client.Client, "ready", "wait", busy="python")
    clock.measure(torch.optim.SGD, "step", "script")
    clock.measure(torch.optim.SGD, "zero_grad", "script")
    return clock


def _model(torch: Any) -> Any:
    """A module with the parameters, whose forward pass gives a number and whose backward pass gives their gradients."""

    class Touch(torch.autograd.Function):  # type: ignore[misc]
        """Passes a number on, as if it depended on the parameter, whose gradient is made in `memory`."""

        @staticmethod
        def forward(context: Any, value: Any, parameter: Any, memory: Any) -> Any:
            context.memory = memory
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            context.memory.fill_(1e-3)
            return gradient, context.memory.view_as(context.memory), None

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape)) for shape in shapes())
            self.memory = [torch.zeros(shape) for shape in shapes()]

        def forward(self) -> Any:
            value = torch.zeros(())
            for parameter, memory in zip(self.layers, self.memory, strict=True):
                value = Touch.apply(value, parameter, memory)
            return value

    return Model()


def _daemon() -> dict[str, float]:
    """Messages that the daemon has received from workers so far, and seconds of CPU time that it has used."""
    command = [sys.executable, "-m", "fusiond", "status", "--json", "--job", os.environ["FUSION_JOB_ID"]]
    (found,) = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {"messages": found["workers"]["received"], "cpu_seconds": found["cpu_seconds"]}


def show(result: dict[str, Any]) -> None:
    """Two tables: the steps, and what fusion_rt's consists of."""
    ranks, steps, parts = result["ranks"], result["steps"], result["parts"]
    title = f"{result['parameters'] / 1e6:.1f} M parameters in {result['tensors']} tensors, {ranks} ranks on one host"
    table = Table(title=title)
    table.add_column("runtime")
    table.add_column("ms a step", justify="right")
    table.add_column("gloo / this", justify="right")
    for name, seconds in steps.items():
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{steps['gloo'] / seconds:.2f}")
    Console(width=100).print(table)
    table = Table(title="fusion_rt, each step")
    table.add_column("what")
    table.add_column("how much", justify="right")
    rows: list[tuple[str, str]] = [
        ("buckets", f"{result['buckets']}"),
        ("messages from workers to the daemon", f"{result['messages']:.2f}"),
        ("messages per bucket, rank and step", f"{result['messages'] / (result['buckets'] * ranks):.3f}"),
        ("CPU time of the daemon", f"{result['daemon'] * 1e3:.1f} ms"),
        ("Python in the worker", f"{parts['python'] * 1e3:.2f} ms"),
        ("copies into the arena", f"{parts['copy'] * 1e3:.1f} ms"),
        ("waiting for the daemon", f"{parts['wait'] * 1e3:.1f} ms"),
        ("the script's own optimizer", f"{parts['script'] * 1e3:.1f} ms"),
    ]
    for row in rows:
        table.add_row(*row)
    Console(width=100).print(table)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, default=2, help="ranks, on one host (%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each runtime (%(default)s)")
    parser.add_argument("--overlap", action="store_true", help="measure what is exposed, with each way of overlap")
    parser.add_argument(
        "--compute", type=float, default=0.3, metavar="S", help="of a step, to hide behind (%(default)s)"
    )
    parser.add_argument("--hosts", type=int, default=1, help="netlab hosts with one rank each (root needed)")
    parser.add_argument("--rate", default="", help="of their links, such as 1gbit")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of results of --overlap, which are added to it")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    turns = ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    if arguments.overlap:
        from benchmarks import overlap

        if arguments.worker:
            overlap.worker(arguments.steps, arguments.rounds, arguments.compute)
            return
        turns += ["--compute", str(arguments.compute)]
        measured = overlap.measure(arguments.hosts, arguments.rate, arguments.ranks, turns)
        if arguments.out:
            overlap.keep(arguments.out, measured)
        overlap.show(measured)
        return
    if arguments.worker:
        worker(arguments.steps, arguments.rounds)
        return
    show(fusionrun(arguments.ranks, ["-m", "benchmarks.step", "--worker", *turns]))


if __name__ == "__main__":
    main()
