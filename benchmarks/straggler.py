"""One slow worker: pace, and loss against time, of every training algorithm.

    python -m benchmarks.straggler
    python -m benchmarks.straggler --seconds 60 --seeds 1 --families bsp,asp,adpsgd
    python -m benchmarks.straggler --table

Four workers on one host learn a GPT of 22 thousand parameters, character by character; the last one is five times as
slow as the others. Slowness is *slept*, so that few cores are enough: a worker sleeps until its computation, of which
forward and backward pass are a millisecond or two, has taken 25 ms, and the slow one until it has taken 125 ms.

Every family trains for the same time, after a few steps that do not count. In families in which no rank can be more
than a bounded number of steps ahead for long, all ranks take the number of steps that the slow one has time for; in the
others each rank goes on until the time is over, and then joins (`hvd.join`).

All use SGD without momentum, whose learning rate is chosen such that a sample has the same weight everywhere: LR where
a step applies a mean over all ranks, or a rank's own gradient to its own copy; LR / ranks where a step applies one
rank's gradient to the common parameters.

*Pace* is steps (one gradient of one rank) per second: of all ranks together, and of a fast rank. With a rank that is
5 times slower, and communication that takes no time, nothing can have more than 4 times (3 + 1/5 over 4/5) the pace of
bsp over all ranks, or more than 5 times that of a fast rank.

*Loss* is over held-out text. At the end it is that of the one model that `hvd.consensus` makes. During training, ranks
only keep copies of their parameters, and the loss computed afterwards is that of rank 0's copy where the parameters
come from shards, and of the ranks' mean otherwise (for elastic averaging that is not the home's copy). *Loss at bsp's
samples* is read off this curve where all ranks together have learned from as many samples as bsp has at its end, and
*time to bsp's loss* is when the curve comes down to bsp's there. As a single loss goes up and down with the last
batches, both are averages from 4/5 of these samples on.

Each run is written to the file of results as soon as it has ended, and is not repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, runs, tables
from benchmarks.common.launch import fusionrun
from benchmarks.common.runs import Result
from benchmarks.common.tables import Table

NAME = "straggler"

RANKS = 4
SLOWER = 5
COMPUTE_S = 0.025  # a fast rank's computation
LR = 0.3
SIZES = {"width": 32, "layers": 1, "batch": 4, "context": 32}
WARM_UP = 4  # steps
COPIES = 80  # of the parameters, over the run
KNOWN_BY = ("family", "seed", "seconds")
RESULTS = results.RESULTS / "straggler.json"


@dataclass(frozen=True)
class Family:
    """An algorithm that is compared.

    Attributes:
        algorithm: its spec.
        lr: learning rate.
        lockstep: all ranks take the same number of steps.
        momentum: of each rank's optimizer.
    """

    algorithm: str
    lr: float = LR
    lockstep: bool = False
    momentum: float = 0.0


@dataclass(frozen=True)
class Setup:
    """The model that ranks train, and the duration of its computation.

    Attributes:
        compute: a fast rank's computation in a step (s).
        slower: factor by which the last rank's takes longer.
        sizes: of the model and a rank's batch.
    """

    compute: float = COMPUTE_S
    slower: int = SLOWER
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)


FAMILIES = {
    "allreduce": Family("allreduce", lockstep=True),
    "bsp": Family("bsp", lockstep=True),
    "ssp": Family("ssp(staleness=4)", LR / RANKS, lockstep=True),
    "asp": Family("asp", LR / RANKS),
    "softsync": Family("softsync(contributions=2, aware=False)", LR * 2 / RANKS),
    "dc_asgd": Family("dc_asgd", LR / RANKS),
    "hogwild": Family("hogwild", LR / RANKS),
    "partial": Family("partial(backup=1)"),
    "easgd": Family("easgd(steps=4)"),
    "easgd-sync": Family("easgd(steps=4, synchronous_home=True)", lockstep=True),
    "ea_wild": Family("ea_wild(steps=4)"),
    "dpsgd": Family("dpsgd(topology='ring')", lockstep=True),
    "adpsgd": Family("adpsgd(topology='ring')"),
    "sgp": Family("sgp", lockstep=True),
    "local_sgd": Family("local_sgd(steps=16)", lockstep=True),
    "diloco": Family("diloco(steps=16, outer_rate=0.5, outer_momentum=0.5)", lockstep=True),
}
WAIT_FREE = ("asp", "adpsgd", "partial", "easgd")  # the families with goals
# A run has its settings (`family`, `algorithm`, `lr`, `seed`, `seconds`), the number of `steps` of each rank and the
# seconds that they `took`, `loss` at the end, `curve`, rows of time (s), samples and loss, and `staleness`: mean and
# largest version lag.


def train(name: str, family: Family, setup: Setup, seed: int, seconds: float) -> Result:
    """Trains on each rank; returns the same result on all."""
    import torch

    import fusion_rt.torch as hvd
    from benchmarks.common import training

    torch.manual_seed(seed)
    task = training.char_gpt_task(seed, hvd.rank(), hvd.size(), **setup.sizes, tests=128)
    sgd = torch.optim.SGD(task.model.parameters(), family.lr, momentum=family.momentum)
    optimizer = hvd.DistributedOptimizer(sgd, task.model.named_parameters(), algorithm=family.algorithm)
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    parameters = list(task.model.parameters())
    computation = setup.compute * (setup.slower if hvd.rank() == hvd.size() - 1 else 1)
    copies: list[tuple[int, torch.Tensor]] = []
    own = 0.0  # seconds of forward and backward pass

    def step(computation: float) -> None:
        nonlocal own
        time.sleep(max(0.0, computation - own))
        began = time.perf_counter()
        optimizer.zero_grad()
        task.loss(task.model).backward()  # type: ignore[no-untyped-call]
        took = time.perf_counter() - began
        own = took if not own else own + 0.1 * (min(took, 3 * own) - own)
        optimizer.step()

    for _ in range(WARM_UP):
        step(0.0)
    hvd.barrier()
    began = time.perf_counter()
    for _ in range(WARM_UP):
        step(computation)
    of_a_step = hvd.allreduce(torch.tensor((time.perf_counter() - began) / WARM_UP), op=hvd.Max).item()
    began, steps, elapsed = time.perf_counter(), 0, 0.0
    most = max(1, round(seconds / of_a_step)) if family.lockstep else sys.maxsize
    while steps < most and (family.lockstep or elapsed < seconds):
        if elapsed * COPIES >= len(copies) * seconds:
            copies.append((steps, torch.nn.utils.parameters_to_vector(parameters).detach().clone()))
        step(computation)
        steps += 1
        elapsed = time.perf_counter() - began
    if not family.lockstep:
        hvd.join()
    hvd.consensus(optimizer)
    counted = hvd.allgather(torch.tensor([[steps, elapsed]], dtype=torch.float64))
    loss, _ = hvd.allreduce(torch.tensor(task.test(), dtype=torch.float64)).tolist()
    lag = hvd.staleness()["version_lag"]
    curve = _curve(task, copies, elapsed, of_rank_0=_is_pulled(family.algorithm))
    return {
        "family": name, "algorithm": family.algorithm, "lr": family.lr, "seed": seed, "seconds": seconds,
        "steps": [int(count) for count in counted[:, 0]], "took": [round(value, 3) for value in counted[:, 1].tolist()],
        "loss": round(loss, 4), "curve": curve, "staleness": [round(lag["mean"], 2), lag["max"]],
    }  # fmt: skip


def _is_pulled(algorithm: str) -> bool:
    """Returns whether ranks have the homes' parameters."""
    from fusion_rt.algorithms import Place, Signal, parse

    spec = parse(algorithm)
    return spec.place is Place.SHARD and spec.signal is Signal.GRADIENT


def _curve(task: Any, copies: Sequence[tuple[int, Any]], elapsed: float, *, of_rank_0: bool) -> list[list[float]]:
    """Returns time (as index of the copy), samples and loss at each of the copies that all ranks have."""
    import torch

    import fusion_rt.torch as hvd

    parameters = list(task.model.parameters())
    number = int(hvd.allreduce(torch.tensor(len(copies)), op=hvd.Min))
    curve = []
    for index, (steps, values) in enumerate(copies[:number]):
        samples = SIZES["batch"] * hvd.allreduce(torch.tensor(float(steps)), op=hvd.Sum).item()
        mean = hvd.broadcast(values, root_rank=0) if of_rank_0 else hvd.allreduce(values)
        torch.nn.utils.vector_to_parameters(mean, parameters)
        loss, _ = hvd.allreduce(torch.tensor(task.test(), dtype=torch.float64)).tolist()
        curve.append([index, samples, round(loss, 4)])
    return curve


def worker(name: str, seed: int, seconds: float) -> None:
    """Trains on each rank; rank 0 prints the result."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    result = train(name, FAMILIES[name], Setup(), seed, seconds)
    for row in result["curve"]:
        row[0] = round(row[0] * seconds / COPIES, 3)
    if hvd.rank() == 0:
        launch.tell(result)
    hvd.shutdown()


# --- measures of a run ------------------------------------------------------------------------------------------------


def pace(result: Result) -> float:
    """Returns the steps per second of all ranks together."""
    return float(sum(steps / took for steps, took in zip(result["steps"], result["took"], strict=True)))


def fast_pace(result: Result) -> float:
    """Returns the mean steps per second of a fast rank."""
    paces = [steps / took for steps, took in zip(result["steps"], result["took"], strict=True)]
    return statistics.fmean(paces[:-1])


def samples(result: Result) -> int:
    """Returns the number of samples that all ranks together have learned from."""
    return SIZES["batch"] * int(sum(result["steps"]))


def points(result: Result) -> list[list[float]]:
    """Returns the curve with the end of the run."""
    return [*result["curve"], [max(result["took"]), samples(result), result["loss"]]]


def loss_after(result: Result, count: float) -> float:
    """Returns the loss after `count` samples; NaN if the run has fewer.

    It is the mean from 4/5 of them on, since a single loss goes up and down with the last batches.
    """
    rows = points(result)
    if count > 1.02 * rows[-1][1]:
        return math.nan
    return statistics.fmean(_between(rows, count * (0.8 + 0.02 * part)) for part in range(11))


def _between(rows: Sequence[Sequence[float]], count: float) -> float:
    """Interpolates the loss after `count` samples between two points of the curve."""
    for (_, before, one), (_, after, other) in pairwise(rows):
        if before <= count < after:
            return float(one + (other - one) * (count - before) / (after - before))
    return float(rows[-1][2])


def time_to(result: Result, loss: float) -> float:
    """Returns the time (s) at which the loss was at most `loss`, between points of the curve; NaN if it never was."""
    rows = points(result)
    for (since, _, one), (until, _, other) in pairwise(rows):
        if other <= loss:
            return float(until if one <= loss else since + (until - since) * (one - loss) / (one - other))
    return math.nan


class Runs:
    """Runs of one duration, by family and seed; each is compared with the run of bsp with the same seed."""

    def __init__(self, made: Iterable[Result]) -> None:
        found: dict[str, dict[int, Result]] = defaultdict(dict)
        for result in made:
            found[result["family"]][result["seed"]] = result
        self.families = {name: found[name] for name in FAMILIES if name in found}

    def compared(self, name: str) -> list[dict[str, float]]:
        """Returns for each seed that bsp has, too, its pace and loss, and their ratios to bsp's."""
        rows = []
        for seed, run in sorted(self.families[name].items()):
            bsp = self.families.get("bsp", {}).get(seed)
            if bsp is None:
                continue
            usual, at_samples = loss_after(bsp, samples(bsp)), loss_after(run, samples(bsp))
            reached = time_to(run, usual)
            rows.append({
                "pace": pace(run), "pace/bsp": pace(run) / pace(bsp), "fast": fast_pace(run),
                "fast/bsp": fast_pace(run) / fast_pace(bsp), "loss": run["loss"], "loss/bsp": run["loss"] / bsp["loss"],
                "at samples": at_samples, "at samples/bsp": at_samples / usual, "to loss": reached,
                "faster": time_to(bsp, usual) / reached, "lag": run["staleness"][0],
            })  # fmt: skip
        return rows


def middle(rows: Sequence[Mapping[str, float]], key: str, digits: int) -> str:
    """Formats the median, and the range where there are several; empty if it was not reached with every seed."""
    values = [row[key] for row in rows]
    if not values or any(math.isnan(value) for value in values):
        return ""
    text = f"{statistics.median(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):.{digits}f}-{max(values):.{digits}f})"


PACES = {
    "steps/s of all ranks": ("pace", 1), "/ bsp": ("pace/bsp", 2), "of a fast rank": ("fast", 1),
    "/ bsp ": ("fast/bsp", 2), "version lag": ("lag", 1),
}  # fmt: skip
LOSSES = {
    "loss at the end": ("loss", 3), "/ bsp": ("loss/bsp", 3), "at bsp's samples": ("at samples", 3),
    "/ bsp ": ("at samples/bsp", 3), "s to bsp's loss": ("to loss", 1), "times as soon": ("faster", 2),
}  # fmt: skip


def durations(found: Iterable[Result]) -> dict[float, Runs]:
    """Groups runs by their duration."""
    groups: dict[float, list[Result]] = defaultdict(list)
    for result in found:
        groups[result["seconds"]].append(result)
    return {seconds: Runs(each) for seconds, each in sorted(groups.items())}


def show(found: Iterable[Result], console: Console) -> None:
    """Prints tables of the families for each duration, and one of the goals."""
    for seconds, made in durations(found).items():
        for what, columns in (("pace", PACES), ("loss", LOSSES)):
            title = f"{what}: {RANKS} workers, the last {SLOWER} times slower, {seconds:g} s of training each"
            table = Table(["family", "lr", "seeds", *columns], title=title)
            for name in made.families:
                rows = made.compared(name)
                cells = [middle(rows, key, digits) for key, digits in columns.values()]
                table.add(name, f"{FAMILIES[name].lr:g}", str(len(rows)), *cells)
            table.show(console)
        tables.goals(goals(made), f"goals, {seconds:g} s").show(console)


def goals(made: Runs) -> list[tuple[str, str, bool]]:
    """Lists goals: goal, what was measured (median over seeds), and whether it holds, where there are runs."""
    found = []
    wanted = (
        ("fast/bsp", "a fast rank's pace at least 4 times bsp's", 4.0, True),
        ("pace/bsp", "the pace of all ranks at least 4 times bsp's (about the most there can be)", 4.0, True),
        ("loss/bsp", "loss after the same time at most 1.02 of bsp's", 1.02, False),
        ("at samples/bsp", "loss after the same number of samples at most 1.02 of bsp's", 1.02, False),
    )
    for name in WAIT_FREE:
        rows = made.compared(name) if name in made.families else []
        for key, goal, bound, above in wanted if rows else ():
            value = statistics.median(row[key] for row in rows)
            holds = value >= bound if above else value <= bound
            found.append((f"{name}: {goal}", middle(rows, key, 3), holds))
    return found


def keep(out: Path, result: Result) -> None:
    """Adds a run to a file."""
    numbers = {"steps/s of all ranks": (pace(result), "more", False), "loss": (result["loss"], "less", True)}
    results.keep(out, NAME, runs.record(KNOWN_BY, result, numbers))


def run(out: Path, families: Iterable[str], seed: int, seconds: float) -> None:
    """Makes the runs that the file does not have yet."""
    wanted = {name: {"family": name, "seed": seed, "seconds": seconds} for name in families}
    for name in runs.missing(out, wanted):
        arguments = ["-m", "benchmarks.straggler", "--worker", "--families", name, "--seeds", str(seed)]
        arguments += ["--seconds", str(seconds)]
        result = runs.attempt(f"{name}, seed {seed}", partial(fusionrun, RANKS, arguments))
        if result is not None:
            keep(out, result)
            print(f"{name}, seed {seed}: {pace(result):.1f} steps/s, loss {result['loss']:.3f}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of training in each run (%(default)s)")
    parser.add_argument("--families", default=",".join(FAMILIES), help="of %(default)s")
    parser.add_argument("--seeds", default="1,2,3", help="(%(default)s)")
    shared.add_out(parser, RESULTS)
    shared.add_table(parser)
    shared.add_worker(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    commands = parser()
    arguments = commands.parse_args(argv)
    families = shared.chosen(commands, "family", arguments.families.split(","), FAMILIES)
    if arguments.seconds < 1:
        commands.error(f"{arguments.seconds:g} s are too few; take 1 at least")
    seeds = shared.numbers(arguments.seeds)
    if arguments.worker:
        worker(families[0], seeds[0], arguments.seconds)
        return
    for seed in () if arguments.table else seeds:
        run(arguments.out, families, seed, arguments.seconds)
    show(runs.load(arguments.out), Console(width=200))


if __name__ == "__main__":
    main()
