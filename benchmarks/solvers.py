"""Classical solvers where a step is mostly computation, and where it is mostly communication.

    python -m benchmarks.solvers
    python -m benchmarks.solvers --seconds 60 --seeds 1,2,3
    python -m benchmarks.solvers --table

After "Rethinking the Value of Asynchronous Solvers for Distributed Deep Learning" (HPC Asia 2020, doi
10.1145/3368474.3368498), with its variants: synchronous and asynchronous SGD, Hogwild SGD, synchronous and asynchronous
elastic averaging, that with momentum (EAMSGD), and EA-wild, which is Hogwild EASGD; beside them the all-reduce, with
momentum and without.

Four equal workers on one host learn a GPT of 475 thousand parameters, character by character, for the same time. The
computation of a step is slept, as in `benchmarks.straggler`: `HIGH` seconds a step where computation dominates, `LOW`
seconds where communication does. In the latter case the four workers, and the daemon's threads that sum 1.9 MB a rank
and step, need more than two cores; so the comparison is of the work of a step, and not of how well it hides behind
computation.

*Time to the loss*: until the loss over held-out text is that which the all-reduce with momentum has at half its time.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import straggler
from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, runs
from benchmarks.common.launch import fusionrun
from benchmarks.common.runs import Result
from benchmarks.common.tables import Table
from benchmarks.straggler import RANKS, Family, Setup

NAME = "solvers"
KNOWN_BY = ("family", "ratio", "seed", "seconds")

SIZES = {"width": 96, "layers": 4, "batch": 1, "context": 16}
LOW, HIGH = 0.005, 0.1  # seconds of computation in a step
SETUPS = {"low": Setup(LOW, 1, SIZES), "high": Setup(HIGH, 1, SIZES)}
LR = 0.2
_OWN_MOMENTUM = 0.9
FAMILIES = {
    "all-reduce, momentum": Family("allreduce", LR * (1 - _OWN_MOMENTUM), True, _OWN_MOMENTUM),
    "all-reduce": Family("allreduce", LR, True),
    "sync SGD": Family("bsp", LR, True),
    "async SGD": Family("asp", LR / RANKS),
    "Hogwild SGD": Family("hogwild", LR / RANKS),
    "sync EASGD": Family("easgd(steps=4, synchronous_home=True)", LR, True),
    "async EASGD": Family("easgd(steps=4)", LR),
    "async EAMSGD": Family("easgd(steps=4)", LR * (1 - _OWN_MOMENTUM), momentum=_OWN_MOMENTUM),
    "EA-wild": Family("ea_wild(steps=4)", LR),
}
RESULTS = results.RESULTS / "solvers.json"


def worker(name: str, ratio: str, seed: int, seconds: float) -> None:
    """Trains on each rank; rank 0 prints the result."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    result = straggler.train(name, FAMILIES[name], SETUPS[ratio], seed, seconds)
    for row in result["curve"]:
        row[0] = round(row[0] * seconds / straggler.COPIES, 3)
    if hvd.rank() == 0:
        launch.tell({**result, "ratio": ratio})
    hvd.shutdown()


def run(out: Path, ratio: str, seed: int, seconds: float) -> None:
    """Makes the runs that the file does not have yet."""
    wanted = {name: {"family": name, "ratio": ratio, "seed": seed, "seconds": seconds} for name in FAMILIES}
    for name in runs.missing(out, wanted):
        arguments = ["-m", "benchmarks.solvers", "--worker", name, "--ratio", ratio, "--seeds", str(seed)]
        arguments += ["--seconds", str(seconds)]
        result = runs.attempt(f"{name}, seed {seed}", partial(fusionrun, RANKS, arguments))
        if result is not None:
            keep(out, result)
            told = f"{straggler.pace(result):.1f} steps/s, loss {result['loss']:.3f}"
            print(f"{ratio} {name}: {told}", file=sys.stderr)


def keep(out: Path, result: Result) -> None:
    """Adds a run to a file."""
    numbers = {"steps/s of all ranks": (straggler.pace(result), "more", False), "loss": (result["loss"], "less", True)}
    results.keep(out, NAME, runs.record(KNOWN_BY, result, numbers))


Groups = dict[tuple[str, float], dict[str, list[Result]]]


def groups(found: Iterable[Result]) -> Groups:
    """Groups runs by ratio and duration, and by family."""
    made: Groups = defaultdict(lambda: defaultdict(list))
    for result in found:
        made[result["ratio"], result["seconds"]][result["family"]].append(result)
    return dict(sorted(made.items()))


def target(made: Mapping[str, list[Result]]) -> float:
    """Returns the loss to reach: that of the all-reduce with momentum at half its samples."""
    reference = made.get("all-reduce, momentum", [])
    return _middle([straggler.loss_after(each, straggler.samples(each) / 2) for each in reference])


def cells(found: list[Result], loss: float) -> tuple[str, str, str]:
    """Formats steps a second, the loss at the end, and seconds to `loss`: medians over seeds."""
    reached = [straggler.time_to(each, loss) for each in found]
    return (
        f"{_middle([straggler.pace(each) for each in found]):.0f}",
        f"{_middle([each['loss'] for each in found]):.3f}",
        "never" if any(map(math.isnan, reached)) else f"{_middle(reached):.1f}",
    )


def show(found: Iterable[Result], console: Console) -> None:
    """Prints a table for each ratio and duration: medians over seeds."""
    for (ratio, seconds), made in groups(found).items():
        what = f"{1000 * SETUPS[ratio].compute:g} ms of computation a step"
        loss = target(made)
        table = Table(
            ["solver", "lr", "seeds", "steps/s", "loss at the end", f"s to loss {loss:.3f}", "version lag"],
            title=f"{ratio} ratio: {what}, {RANKS} workers, {seconds:g} s",
        )
        for name, each in made.items():
            lag = f"{_middle([run['staleness'][0] for run in each]):.1f}"
            table.add(name, f"{FAMILIES[name].lr:g}", str(len(each)), *cells(each, loss), lag)
        table.show(console)


def _middle(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in each run (%(default)s)")
    parser.add_argument("--seeds", default="1", help="(%(default)s)")
    shared.add_out(parser, RESULTS)
    shared.add_table(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ratio", choices=SETUPS, help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    seeds = shared.numbers(arguments.seeds)
    if arguments.worker:
        worker(arguments.worker, arguments.ratio, seeds[0], arguments.seconds)
        return
    for seed in () if arguments.table else seeds:
        for ratio in SETUPS:
            run(arguments.out, ratio, seed, arguments.seconds)
    show(runs.load(arguments.out), Console())


if __name__ == "__main__":
    main()
