"""What training algorithms do to the loss, everything else being equal: samples, batches, initial parameters.

    python -m benchmarks.algorithms --out benchmarks/results/algorithms.jsonl
    python -m benchmarks.algorithms --out results.jsonl --models digits --algorithms bsp,asp --seeds 1 --rates 0.5,1
    python -m benchmarks.algorithms --table benchmarks/results/algorithms.jsonl

The digits' ConvNet and a GPT of 475 thousand parameters learn on four ranks of one host, by SGD. Each rank takes as
many steps with every algorithm. Synchronous algorithms, and those in which ranks have models of their own, have a
momentum of 0.9 and the model's learning rate; asynchronous ones that post gradients have no momentum, and the rate that
stands beside them in `ALGORITHMS`, as a multiple of the synchronous one, chosen by `--rates` on one seed. The test loss
is that of the common model: after `hvd.consensus()`.

Each run appends a line of JSON to the file, and a run that is in it is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RANKS = 4
MODELS = {"digits": (440, 0.12), "char-gpt": (400, 0.15)}  # steps and learning rate
# Its text, its momentum, and the multiple of the learning rate.
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
    "diloco-8": ("diloco(steps=8, outer_rate=0.5, outer_momentum=0.5)", 0.9, 1.0),
}
Result = dict[str, Any]


def train(model: str, name: str, seed: int, steps: int, factor: float) -> Result:
    """What each rank runs; the same result on all."""
    import torch

    import fusion_rt.torch as hvd
    from benchmarks import training

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


def worker(out: Path, model: str, runs: Iterable[tuple[str, float]], seed: int, steps: int) -> None:
    """Makes runs one after the other; rank 0 writes them down."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    for name, factor in runs:
        result = train(model, name, seed, steps, factor)
        hvd.barrier()
        if hvd.rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{model} {name} x{factor:g} seed {seed}: {result['seconds']:.0f} s, {result['test_loss']:.4f}")
            sys.stdout.flush()
    hvd.shutdown()


def run(out: Path, model: str, runs: Iterable[tuple[str, float]], seed: int, steps: int) -> None:
    """One job with the runs that the file does not have yet.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    done = {(r["model"], r["algorithm"], r["factor"], r["seed"], r["steps"]) for r in load(out)}
    missing = [f"{name}:{factor:g}" for name, factor in runs if (model, name, factor, seed, steps) not in done]
    if not missing:
        return
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", str(RANKS)]
    command += [sys.executable, "-m", "benchmarks.algorithms", "--worker", ",".join(missing)]
    command += ["--out", str(out.absolute()), "--models", model, "--seeds", str(seed), "--steps", str(steps)]
    subprocess.run(command, check=True)


def load(path: Path) -> list[Result]:
    """The runs in a file; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(results: Iterable[Result], console: Console) -> None:
    """A table for each model: means over seeds, and the loss relative to the all-reduce's."""
    groups: dict[tuple[str, int], dict[tuple[str, float], list[Result]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        groups[result["model"], result["steps"]][result["algorithm"], result["factor"]].append(result)
    for (model, steps), runs in sorted(groups.items()):
        table = Table(title=f"{model}, {RANKS} ranks, {steps} steps each")
        for title in ("algorithm", "rate", "momentum", "seeds", "test loss", "/ allreduce", "spread", "right"):
            table.add_column(title, justify="left" if title == "algorithm" else "right")
        reference = _mean(runs.get(("allreduce", 1.0), []), "test_loss")
        for (name, factor), found in sorted(runs.items(), key=lambda item: list(ALGORITHMS).index(item[0][0])):
            losses = [each["test_loss"] for each in found]
            table.add_row(
                name, f"{factor:g}", f"{found[0]['momentum']:g}", str(len(found)), f"{statistics.fmean(losses):.4f}",
                f"{statistics.fmean(losses) / reference:.3f}", f"{max(losses) - min(losses):.4f}",
                f"{_mean(found, 'accuracy'):.1%}",
            )  # fmt: skip
        console.print(table)


def _mean(results: list[Result], key: str) -> float:
    return statistics.fmean(each[key] for each in results) if results else math.nan


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, metavar="FILE", help="train, and append results to this file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="show what is in this file")
    parser.add_argument("--models", default=",".join(MODELS), help="of %(default)s")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="of %(default)s")
    parser.add_argument("--seeds", default="1,2,3", help="(%(default)s)")
    parser.add_argument("--steps", type=int, help="(digits 440, char-gpt 400)")
    parser.add_argument("--rates", help="multiples of the learning rate, instead of those of the algorithms")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models, names = arguments.models.split(","), arguments.algorithms.split(",")
    for kind, asked, known in (("model", models, MODELS), ("algorithm", names, ALGORITHMS)):
        unknown = [name for name in asked if name not in known]
        if unknown:
            parser.error(f"there is no {kind} {unknown[0]!r}; there are {', '.join(known)}")
    if arguments.out is None and arguments.table is None:
        parser.error("say --out FILE to train, or --table FILE to see what has come of it")
    if arguments.worker:
        pairs = [each.rpartition(":") for each in arguments.worker.split(",")]
        runs = [(name, float(factor)) for name, _, factor in pairs]
        worker(arguments.out, models[0], runs, int(arguments.seeds), arguments.steps)
        return
    if arguments.out is not None:
        rates = [float(rate) for rate in arguments.rates.split(",")] if arguments.rates else None
        for seed in map(int, arguments.seeds.split(",")):
            for model in models:
                runs = [(name, rate) for name in names for rate in rates or [ALGORITHMS[name][2]]]
                run(arguments.out, model, runs, seed, arguments.steps or MODELS[model][0])
    show(load(arguments.table or arguments.out), Console())


if __name__ == "__main__":
    main()
