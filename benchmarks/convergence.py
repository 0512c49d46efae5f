"""Convergence with each codec: loss against steps, and against the bytes that a node sends.

    python -m benchmarks.convergence --out results.json
    python -m benchmarks.convergence --out results.json --models char-gpt --codecs dense,topk-1%-momentum --steps 1600
    python -m benchmarks.convergence --table results.json

Two models of the examples learn on four ranks, each on a node of its own (daemons at 127.0.0.2 to .5, since codecs act
between nodes only): the digits' ConvNet and a GPT of 475 thousand parameters. Everything but the codec is the same: SGD
with a momentum of 0.9, or with none where the codec has it (momentum correction); one learning rate for each model,
chosen for dense gradients; batches and initial parameters by the seed. Tensors with at least 1024 elements are
compressed, not only those with 16384 as the codecs have it, because the models are small: that leaves 3 % at most.

Each run is written to the file as soon as it has ended, and is not repeated: a stopped benchmark goes on where it
was. Bytes are those of payloads that a node sends, on average over nodes: for codecs that count them, from
`hvd.compression_stats()`; for dense and fp16, those of a ring, 2 (N - 1) / N of the gradients.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import results, runs, tables
from benchmarks.common.runs import Result
from benchmarks.common.tables import Table

NAME = "convergence"
NODES = 4
MODELS = {"digits": (440, 0.12), "char-gpt": (800, 0.15)}  # steps and learning rate
EVALUATIONS = 10  # in a run
_TOPK, _TENTH, _GAUSSIAN, _RANDOM = (
    "topk(density=0.01, minimum=1024{})", "topk(density=0.001, minimum=1024{})",
    "gaussiank(density=0.01, minimum=1024{})", "randomk(density=0.01, minimum=1024{})",
)  # fmt: skip
_MOMENTUM, _LOSSY = ", momentum=0.9", ", feedback=False"
CODECS = {
    "dense": "dense",
    "topk-1%": _TOPK.format(""),
    "topk-1%-momentum": _TOPK.format(_MOMENTUM),
    "topk-1%-no-feedback": _TOPK.format(_LOSSY),
    "topk-.1%": _TENTH.format(""),
    "topk-.1%-momentum": _TENTH.format(_MOMENTUM),
    "gaussiank-1%": _GAUSSIAN.format(""),
    "randomk-1%": _RANDOM.format(""),
    "onebit": "onebit",
    "onebit-no-feedback": "onebit(feedback=False)",
    "onebit-momentum": "onebit(momentum=0.9)",
    "int8": "int8",
    "int4": "int4",
    "int2": "int2",
    "demo-1%": "demo(density=0.01, minimum=1024, decay=0.99)",
    "topk-1%-int2": "topk(density=0.01, minimum=1024, value='int2')",
    "powersgd-4": "powersgd(rank=4)",
    "fp16": "fp16",
    "topk-.1%-no-feedback": _TENTH.format(_LOSSY),
    "gaussiank-1%-no-feedback": _GAUSSIAN.format(_LOSSY),
    "randomk-1%-no-feedback": _RANDOM.format(_LOSSY),
    "int8-no-feedback": "int8(feedback=False)",
    "powersgd-4-no-feedback": "powersgd(rank=4, feedback=False)",
}
KNOWN_BY = ("model", "codec", "seed", "steps")
RESULTS = results.RESULTS / "convergence.json"
# A run has its settings (`model`, `codec`, `seed`, `steps`, `lr`, `parameters`), its results (`accuracy`, `asked`,
# `selected`, `seconds`), and `curve`, rows of step, bytes sent by a node, mean training loss since the last row, and
# test loss. It ends early when the loss is not finite.


def train(model: str, codec: str, seed: int, steps: int, number: int) -> Result:
    """Trains on each rank; returns the same result on all.

    `number`: number of distributed optimizers that this process has made before.
    """
    import torch

    import fusion_rt.torch as hvd
    from benchmarks.common import training

    lr, text = MODELS[model][1], CODECS[codec]
    torch.manual_seed(seed)
    place = seed, hvd.rank(), hvd.size()
    task = training.digits_task(*place) if model == "digits" else training.char_gpt_task(*place)
    names = list(task.model.named_parameters())
    optimizer = hvd.DistributedOptimizer(training.sgd(task.model, lr, text), names, compression=text)
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    scheduler = training.scheduler(optimizer, steps)
    parameters = sum(parameter.numel() for _, parameter in names)
    a_step = parameters * {"dense": 4, "fp16": 2}.get(codec, 0) * 2 * (hvd.size() - 1) / hvd.size()
    curve: list[list[float]] = []
    every, total, accuracy = max(1, steps // EVALUATIONS), torch.zeros(()), math.nan
    told: Mapping[str, float] = {"bytes_packed": 0, "asked": 0, "selected": 0}
    began = time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = task.loss(task.model)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        total += loss.detach()
        if step % every == 0 or step == steps:
            told = hvd.compression_stats().get(f"optimizer.{number + 1}", told)
            since = step - (curve[-1][0] if curve else 0)
            mine = [told["bytes_packed"] + step * a_step, total.item() / since, *task.test()]
            nbytes, train_loss, test_loss, accuracy = hvd.allreduce(torch.tensor(mine, dtype=torch.float64)).tolist()
            curve.append([step, nbytes, train_loss, test_loss])
            total.zero_()
            if not math.isfinite(train_loss):
                accuracy = math.nan
                break
    return {
        "model": model, "codec": codec, "seed": seed, "steps": steps, "lr": lr, "parameters": parameters,
        "accuracy": accuracy, "asked": told["asked"], "selected": told["selected"],
        "seconds": time.perf_counter() - began, "curve": curve,
    }  # fmt: skip


def worker(out: Path, model: str, codecs: Iterable[str], seed: int, steps: int) -> None:
    """Makes runs one after the other; rank 0 writes their results."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    for number, codec in enumerate(codecs):
        result = train(model, codec, seed, steps, number)
        if hvd.rank() == 0:
            keep(out, result)
            print(f"{model} {codec} seed {seed}: {result['seconds']:.0f} s, {result['curve'][-1]}", flush=True)
    hvd.shutdown()


def run(out: Path, model: str, codecs: Iterable[str], seed: int, steps: int) -> None:
    """Starts one job with the runs that the file does not have yet.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    wanted = {codec: {"model": model, "codec": codec, "seed": seed, "steps": steps} for codec in codecs}
    missing = runs.missing(out, wanted)
    if not missing:
        return
    hosts = ",".join(f"127.0.0.{2 + node}:1" for node in range(NODES))
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", str(NODES), "-H", hosts]
    command += [sys.executable, "-m", "benchmarks.convergence", "--worker", "--out", str(out.absolute())]
    command += ["--models", model, "--codecs", ",".join(missing), "--seeds", str(seed), "--steps", str(steps)]
    subprocess.run(command, check=True)


def keep(out: Path, result: Result) -> None:
    """Adds a run to a file."""
    last = result["curve"][-1]
    numbers = {
        "test loss": (last[3], "less", True),
        "bytes sent by a node": (last[1], "less", True),
        "accuracy": (result["accuracy"], "more", True),
    }
    results.keep(out, NAME, runs.record(KNOWN_BY, result, numbers))


# --- tables -----------------------------------------------------------------------------------------------------------


class Runs:
    """The runs of one model with one number of steps: means over seeds.

    Attributes:
        codecs: by name, the runs with different seeds, in the order of `CODECS`.
    """

    def __init__(self, made: Iterable[Result]) -> None:
        found: dict[str, list[Result]] = defaultdict(list)
        for result in made:
            found[result["codec"]].append(result)
        self.codecs = {codec: found[codec] for codec in CODECS if codec in found}

    def loss(self, codec: str, share: float = 1.0) -> float:
        """Returns the test loss after this share of the steps."""
        return statistics.fmean(_at(each, share)[3] for each in self.codecs[codec])

    def train_loss(self, codec: str) -> float:
        """Returns the mean loss of the batches since the last row but one."""
        return statistics.fmean(_at(each, 1.0)[2] for each in self.codecs[codec])

    def accuracy(self, codec: str) -> float:
        return statistics.fmean(each["accuracy"] for each in self.codecs[codec])

    def nbytes(self, codec: str) -> float:
        """Returns the bytes that a node has sent at the end."""
        return statistics.fmean(each["curve"][-1][1] for each in self.codecs[codec])

    def selected(self, codec: str) -> float:
        """Returns the ratio of selected elements to those asked for; NaN for codecs that do not select."""
        asked = sum(each["asked"] for each in self.codecs[codec])
        return sum(each["selected"] for each in self.codecs[codec]) / asked if asked else math.nan

    def until(self, codec: str, loss: float) -> tuple[float, float] | None:
        """Returns the steps and bytes until the test loss was at most `loss`; None unless it was with every seed."""
        rows = [next((row for row in each["curve"] if row[3] <= loss), None) for each in self.codecs[codec]]
        reached = [row for row in rows if row is not None]
        if len(reached) < len(rows):
            return None
        return statistics.fmean(row[0] for row in reached), statistics.fmean(row[1] for row in reached)


def _at(result: Result, share: float) -> list[float]:
    """Returns the row of the curve after this share of the steps; a row of NaN where the run had ended."""
    rows: Iterable[list[float]] = (row for row in result["curve"] if row[0] >= share * result["steps"])
    return next(iter(rows), [math.nan] * 4)


def groups(found: Iterable[Result]) -> dict[tuple[str, int], Runs]:
    """Groups runs by model and number of steps."""
    made: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in found:
        made[result["model"], result["steps"]].append(result)
    return {key: Runs(each) for key, each in sorted(made.items())}


def show(found: Iterable[Result], console: Console) -> None:
    """Prints a table for each model and number of steps, and one of the goals."""
    made = groups(found)
    for (model, steps), each in made.items():
        _table(model, steps, each).show(console)
    tables.goals(goals(made)).show(console)


def _table(model: str, steps: int, runs: Runs) -> Table:
    """Makes a table of means over seeds: test loss after parts of the run, training loss in its last part, test
    accuracy, bytes sent by a node, and the share of elements selected."""
    first = next(iter(runs.codecs.values()))[0]
    target = runs.loss("dense", 0.5) if "dense" in runs.codecs else math.nan
    what = f"{model}, {first['parameters']:,} parameters"
    titles = ["codec", "seeds", "test loss, 1/4", "1/2", "all steps", "/ dense", "training", "right"]
    titles += ["MB sent", "of dense", "selected", f"steps to {target:.3f}", "MB to it"]
    table = Table(titles, title=f"{what}, {NODES} nodes, {steps} steps, learning rate {first['lr']}")
    for codec, each in runs.codecs.items():
        relative = runs.loss(codec) / runs.loss("dense") if "dense" in runs.codecs else math.nan
        share = runs.nbytes(codec) / runs.nbytes("dense") if "dense" in runs.codecs else math.nan
        until = runs.until(codec, target)
        test_losses = [f"{runs.loss(codec, part):.3f}" for part in (0.25, 0.5, 1.0)]
        table.add(
            codec, str(len(each)), *test_losses, f"{relative:.3f}", f"{runs.train_loss(codec):.4g}",
            f"{runs.accuracy(codec):.1%}", f"{runs.nbytes(codec) / 1e6:.2f}", f"{share:.2%}",
            "" if math.isnan(runs.selected(codec)) else f"{runs.selected(codec):.3f}",
            *(("never", "") if until is None else (f"{until[0]:.0f}", f"{until[1] / 1e6:.2f}")),
        )  # fmt: skip
    return table


def goals(made: Mapping[tuple[str, int], Runs]) -> list[tuple[str, str, bool]]:
    """Lists goals: goal, what was measured, and whether it holds; of those for which there are runs."""
    found: list[tuple[str, str, bool]] = []
    ratios: list[tuple[int, float]] = []
    shares: dict[bool, list[float]] = {True: [], False: []}
    for (model, steps), each in made.items():
        what = f"{model}, {steps} steps"
        if {"dense", "topk-1%"} <= each.codecs.keys() and model == "digits":
            lost = 100 * (each.accuracy("dense") - each.accuracy("topk-1%"))
            found.append((f"{what}: topk-1% at most .5 points of accuracy below dense", f"{lost:.2f}", lost <= 0.5))
        if {"dense", "topk-1%-momentum"} <= each.codecs.keys() and model == "char-gpt":
            ratio = each.loss("topk-1%-momentum") / each.loss("dense")
            ratios.append((steps, ratio))
            if steps == MODELS[model][0]:
                goal = f"{what}: test loss of topk-1%-momentum at most 1.07 of dense"
                found.append((goal, f"{ratio:.3f}", ratio <= 1.07))
        for codec in each.codecs:
            without = f"{codec}-no-feedback"
            if without in each.codecs:
                ours, other = each.train_loss(codec), each.train_loss(without)
                goal = f"{what}: training loss of {codec} lower with feedback than without"
                found.append((goal, f"{ours:.4g} against {other:.4g}", ours < other or math.isnan(other)))
            if not math.isnan(each.selected(codec)):
                shares[codec.startswith("gaussiank")].append(each.selected(codec))
    if shares[False]:
        goal = "exact codecs select as many elements as they are asked for"
        found.append((goal, _between(shares[False]), set(shares[False]) == {1.0}))
    if shares[True]:
        goal = "approximate ones select 10 % more or less at most"
        found.append((goal, _between(shares[True]), all(abs(share - 1) <= 0.1 for share in shares[True])))
    if len(ratios) > 1:
        goal = "char-gpt: test loss of topk-1%-momentum comes closer to dense in longer runs, or is below"
        measured = ", ".join(f"{steps} steps: {ratio:.3f}" for steps, ratio in ratios)
        found.append((goal, measured, ratios[-1][1] < max(ratios[0][1], 1.0)))
    return found


def _between(shares: list[float]) -> str:
    return f"{min(shares):.4f} to {max(shares):.4f} of them"


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    shared.add_out(parser, RESULTS)
    parser.add_argument("--table", type=Path, metavar="FILE", help="only show the results in this file")
    parser.add_argument("--models", default=",".join(MODELS), help="of %(default)s")
    parser.add_argument("--codecs", default=",".join(CODECS), help="of %(default)s")
    parser.add_argument("--seeds", default="1,2,3", help="(%(default)s)")
    parser.add_argument("--steps", type=int, help="(digits 440, char-gpt 800)")
    shared.add_worker(parser)
    arguments = parser.parse_args()
    models = shared.chosen(parser, "model", arguments.models.split(","), MODELS)
    codecs = shared.chosen(parser, "codec", arguments.codecs.split(","), CODECS)
    if arguments.table is not None:
        show(runs.load(arguments.table), Console(width=180))
        return
    action = worker if arguments.worker else run
    for seed in shared.numbers(arguments.seeds):
        for model in models:
            action(arguments.out, model, codecs, seed, arguments.steps or MODELS[model][0])
    if not arguments.worker:
        show(runs.load(arguments.out), Console(width=180))


if __name__ == "__main__":
    main()
