"""The classical solvers where a step is mostly computation, and where it is mostly communication.

    python -m benchmarks.solvers
    python -m benchmarks.solvers --seconds 60 --seeds 1,2,3
    python -m benchmarks.solvers --table

After "Rethinking the Value of Asynchronous Solvers for Distributed Deep Learning" (HPC Asia 2020, doi
10.1145/3368474.3368498), with its variants: synchronous and asynchronous SGD, Hogwild SGD, synchronous and asynchronous
elastic averaging, that with momentum (EAMSGD), and EA-wild, which is Hogwild EASGD; beside them the all-reduce, with
momentum and without.

Four equal workers on one host learn a GPT of 475 thousand parameters, character by character, for the same time. What a
step computes is slept, as in `benchmarks.straggler`: `HIGH` ms a step where computation dominates, `LOW` ms where
communication does. There the four workers, and the daemon's threads that add up 1.9 MB a rank and step, want more than
two cores have; so what is compared is how much work a step makes, and not how well it hides behind computation.

*Time to the loss*: until the loss over held-out text is that which the all-reduce with momentum has at half its time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import straggler
from benchmarks.launch import MARK, fusionrun
from benchmarks.straggler import RANKS, Family, Result, Setup

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
RESULTS = Path(__file__).parent / "results" / "solvers.jsonl"


def worker(name: str, ratio: str, seed: int, seconds: float) -> None:
    """One run; rank 0 prints the result."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    result = straggler.train(name, FAMILIES[name], SETUPS[ratio], seed, seconds)
    for row in result["curve"]:
        row[0] = round(row[0] * seconds / straggler.COPIES, 3)
    if hvd.rank() == 0:
        print(MARK + json.dumps({**result, "ratio": ratio}), flush=True)
    hvd.shutdown()


def run(out: Path, ratio: str, seed: int, seconds: float) -> None:
    """Makes the runs that the file does not have yet."""
    done = {(each["family"], each["ratio"], each["seed"], each["seconds"]) for each in straggler.load(out)}
    for name in FAMILIES:
        if (name, ratio, seed, seconds) in done:
            continue
        arguments = ["-m", "benchmarks.solvers", "--worker", name, "--ratio", ratio, "--seeds", str(seed)]
        try:
            result = fusionrun(RANKS, [*arguments, "--seconds", str(seconds)])
        except subprocess.CalledProcessError as error:
            print(f"{name}, seed {seed}: the job failed with status {error.returncode}", file=sys.stderr)
            continue
        out.parent.mkdir(exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{ratio} {name}: {straggler.pace(result):.1f} steps/s, loss {result['loss']:.3f}", file=sys.stderr)


def show(results: Iterable[Result], console: Console) -> None:
    """A table for each ratio and duration: medians over seeds."""
    groups: dict[tuple[str, float], dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        groups[result["ratio"], result["seconds"]][result["family"]].append(result)
    for (ratio, seconds), runs in sorted(groups.items()):
        what = f"{1000 * SETUPS[ratio].compute:g} ms of computation a step"
        table = Table(title=f"{ratio} ratio: {what}, {RANKS} workers, {seconds:g} s")
        for title in ("solver", "lr", "seeds", "steps/s", "loss at the end", "s to the loss", "version lag"):
            table.add_column(title, justify="left" if title == "solver" else "right")
        reference = runs.get("all-reduce, momentum", [])
        target = _middle([straggler.loss_after(each, straggler.samples(each) / 2) for each in reference])
        for name, found in runs.items():
            reached = [straggler.time_to(each, target) for each in found]
            table.add_row(
                name, f"{FAMILIES[name].lr:g}", str(len(found)),
                f"{_middle([straggler.pace(each) for each in found]):.0f}",
                f"{_middle([each['loss'] for each in found]):.3f}",
                "never" if any(map(math.isnan, reached)) else f"{_middle(reached):.1f}",
                f"{_middle([each['staleness'][0] for each in found]):.1f}",
            )  # fmt: skip
        table.caption = f"the loss: {target:.3f}"
        console.print(table)


def _middle(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in each run (%(default)s)")
    parser.add_argument("--seeds", default="1", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="of results (%(default)s)")
    parser.add_argument("--table", action="store_true", help="only show what is in the file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--ratio", choices=SETUPS, help=argparse.SUPPRESS)
    arguments: Any = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.worker:
        worker(arguments.worker, arguments.ratio, seeds[0], arguments.seconds)
        return
    for seed in () if arguments.table else seeds:
        for ratio in SETUPS:
            run(arguments.out, ratio, seed, arguments.seconds)
    show(straggler.load(arguments.out), Console())


if __name__ == "__main__":
    main()
