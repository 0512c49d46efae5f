"""The loss with each training algorithm, everything else being equal: samples, batches, initial parameters.

    python -m benchmarks.algorithms
    python -m benchmarks.algorithms --out results.json --models digits --algorithms bsp,asp --seeds 1 --rates 0.5,1
    python -m benchmarks.algorithms --table benchmarks/results/algorithms.json

The digits' ConvNet and a GPT of 475 thousand parameters learn on four ranks of one host, by SGD. Each rank takes as
many steps with every algorithm. Synchronous algorithms, and those in which ranks have models of their own, have a
momentum of 0.9 and the model's learning rate; asynchronous ones that post gradients have no momentum, and the rate in
`ALGORITHMS`, as a multiple of the synchronous one, chosen by `--rates` on one seed. The test loss is that of the common
model: after `hvd.consensus()`.

Each run is written to the file as soon as it has ended, and is not repeated.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import results, runs
from benchmarks.common.runs import Result
from benchmarks.common.tables import Table

NAME = "algorithms"
RANKS = 4
MODELS = {"digits": (440, 0.12), "char-gpt": (400, 0.15)}  # steps and learning rate
# Spec, momentum, and multiple of the learning rate.
ALGORITHMS = {
    "allreduce": ("allreduce", 0.9, 1.0),
    "bsp": ("bsp", 0.9, 1.0),
    "ssp-4": ("ssp(staleness=4)", 0.0, 0.5),
    "asp": ("asp", 0.0, 0.5),
    "hogwild": ("hogwild", 0.0, 0.5),
    "softsync-2": ("softsync(contributions=2)", 0.0, 2.0),
    "dc-asgd": ("dc_asgd", 0.0, 1.0),
    "partial-1": ("partial(backup=1)", 0.9, 1.0),
    "easgd-4": ("easgd(steps=4)", 0.9, 1.0),
    "easgd-sync-4": ("easgd(steps=4, synchronous_home=True)", 0.9, 1.0),
    "ea-wild-4": ("ea_wild(steps=4)", 0.9, 1.0),
    "dpsgd-ring": ("dpsgd(topology='ring')", 0.9, 1.0),
    "adpsgd-ring": ("adpsgd(topology='ring')", 0.9, 1.0),
    "sgp-exponential": ("sgp(topology='exponential')", 0.9, 1.0),
    "local-sgd-8": ("local_sgd(steps=8)", 0.9, 1.0),
    "sparseloco-8": ("sparseloco(steps=8)", 0.9, 1.0),
    "diloco-8": ("diloco(steps=8, outer_rate=0.5, outer_momentum=0.5)", 0.9, 1.0),
}
KNOWN_BY = ("model", "algorithm", "seed", "steps", "factor")
RESULTS = results.RESULTS / "algorithms.json"


def train(model: str, name: str, seed: int, steps: int, factor: float) -> Result:
    """Trains on each rank; returns the same result on all."""
    import torch

    import fusion_rt.torch as hvd
    from benchmarks.common import training

    text, momentum, _ = ALGORITHMS[name]
    lr = MODELS[model][1] * factor
    torch.manual_seed(seed)
    place = seed, hvd.rank(), hvd.size()
    task = training.digits_task(*place) if model == "digits" else training.char_gpt_task(*place)
    local = torch.optim.SGD(task.model.parameters(), lr=lr, momentum=momentum)
    optimizer = hvd.DistributedOptimizer(local, task.model.named_parameters(), algorithm=text)
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    scheduler = training.scheduler(optimizer, steps)
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(task.model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    seconds = time.perf_counter() - began
    hvd.consensus(optimizer, model=task.model)
    mine = torch.tensor([float(loss.detach()), *task.test()], dtype=torch.float64)
    train_loss, test_loss, accuracy = hvd.allreduce(mine).tolist()
    return {
        "model": model, "algorithm": name, "seed": seed, "steps": steps, "factor": factor, "momentum": momentum,
        "train_loss": train_loss, "test_loss": test_loss, "accuracy": accuracy, "seconds": seconds,
    }  # fmt: skip


def worker(out: Path, model: str, made: Iterable[tuple[str, float]], seed: int, steps: int) -> None:
    """Makes runs one after the other; rank 0 writes their results."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    for name, factor in made:
        result = train(model, name, seed, steps, factor)
        hvd.barrier()
        if hvd.rank() == 0:
            keep(out, result)
            print(f"{model} {name} x{factor:g} seed {seed}: {result['seconds']:.0f} s, {result['test_loss']:.4f}")
            sys.stdout.flush()
    hvd.shutdown()


def run(out: Path, model: str, made: Iterable[tuple[str, float]], seed: int, steps: int) -> None:
    """Starts one job with the runs that the file does not have yet.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    wanted = {
        f"{name}:{factor:g}": {"model": model, "algorithm": name, "factor": factor, "seed": seed, "steps": steps}
        for name, factor in made
    }
    missing = runs.missing(out, wanted)
    if not missing:
        return
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", str(RANKS)]
    command += [sys.executable, "-m", "benchmarks.algorithms", "--worker", ",".join(missing)]
    command += ["--out", str(out.absolute()), "--models", model, "--seeds", str(seed), "--steps", str(steps)]
    subprocess.run(command, check=True)


def keep(out: Path, result: Result) -> None:
    """Adds a run to a file."""
    numbers = {name: (result[name], "less", True) for name in ("train_loss", "test_loss")}
    results.keep(out, NAME, runs.record(KNOWN_BY, result, {**numbers, "accuracy": (result["accuracy"], "more", True)}))


Groups = dict[tuple[str, int], dict[tuple[str, float], list[Result]]]


def groups(found: Iterable[Result]) -> Groups:
    """Groups runs by model and number of steps, and by algorithm and rate, in the order of `ALGORITHMS`."""
    made: Groups = defaultdict(lambda: defaultdict(list))
    for result in found:
        made[result["model"], result["steps"]][result["algorithm"], result["factor"]].append(result)
    order = list(ALGORITHMS)
    return {
        key: dict(sorted(each.items(), key=lambda item: order.index(item[0][0]))) for key, each in sorted(made.items())
    }


def show(found: Iterable[Result], console: Console) -> None:
    """Prints a table for each model: means over seeds, and the loss relative to the all-reduce's."""
    for (model, steps), made in groups(found).items():
        columns = ["algorithm", "rate", "momentum", "seeds", "test loss", "/ allreduce", "spread", "right"]
        table = Table(columns, title=f"{model}, {RANKS} ranks, {steps} steps each")
        reference = mean(made.get(("allreduce", 1.0), []), "test_loss")
        for (name, factor), each in made.items():
            losses = [run["test_loss"] for run in each]
            table.add(
                name, f"{factor:g}", f"{each[0]['momentum']:g}", str(len(each)), f"{statistics.fmean(losses):.4f}",
                f"{statistics.fmean(losses) / reference:.3f}", f"{max(losses) - min(losses):.4f}",
                f"{mean(each, 'accuracy'):.1%}",
            )  # fmt: skip
        table.show(console)


def mean(found: list[Result], key: str) -> float:
    """Returns the mean of a number over runs; NaN if there are none."""
    return statistics.fmean(each[key] for each in found) if found else math.nan


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    shared.add_out(parser, RESULTS)
    parser.add_argument("--table", type=Path, metavar="FILE", help="only show the results in this file")
    parser.add_argument("--models", default=",".join(MODELS), help="of %(default)s")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="of %(default)s")
    parser.add_argument("--seeds", default="1,2,3", help="(%(default)s)")
    parser.add_argument("--steps", type=int, help="(digits 440, char-gpt 400)")
    parser.add_argument("--rates", help="multiples of the learning rate, instead of those of the algorithms")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = shared.chosen(parser, "model", arguments.models.split(","), MODELS)
    names = shared.chosen(parser, "algorithm", arguments.algorithms.split(","), ALGORITHMS)
    if arguments.worker:
        pairs = [each.rpartition(":") for each in arguments.worker.split(",")]
        made = [(name, float(factor)) for name, _, factor in pairs]
        worker(arguments.out, models[0], made, int(arguments.seeds), arguments.steps)
        return
    if arguments.table is None:
        rates = [float(rate) for rate in arguments.rates.split(",")] if arguments.rates else None
        for seed in shared.numbers(arguments.seeds):
            for model in models:
                made = [(name, rate) for name in names for rate in rates or [ALGORITHMS[name][2]]]
                run(arguments.out, model, made, seed, arguments.steps or MODELS[model][0])
    show(runs.load(arguments.table or arguments.out), Console(width=160))


if __name__ == "__main__":
    main()
