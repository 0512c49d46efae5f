"""Training over a slow network: a GPT of 10.8 million parameters, on 4 hosts that are joined by links of 100 Mbit/s.

    python -m benchmarks.slow_network
    python -m benchmarks.slow_network --parts times --rounds 7 --out benchmarks/results/slow_network.json
    python -m benchmarks.slow_network --parts training --loss 2.4 --out benchmarks/results/slow_network.json

Each rank runs in a network namespace of its own (root needed). *A step* takes as long as on the slowest rank; all
runtimes are up in the same processes, and take turns of a few steps each, so that other load of the machine affects all
of them; printed are medians. *None* does everything but communicate. *Sent* is the number of bytes that rank 0's link
has counted, all headers included. Nothing encrypts tensors, since gloo cannot.

*Steps to the loss* are those of a training run, in which only the communication of gradients differs, until the mean
loss over held-out text is no larger, tested every 10 steps. They are counted without a limit on the links, which
changes no number that is computed, and multiplied by the time of a step with the limit. fusion_rt without compression
and Horovod, which takes part where it can be imported, compute the same as DistributedDataParallel, and are not trained
again.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import launch, peers, results, sampling, tables
from benchmarks.common.peers import DDP, FP16, HOROVOD, POWERSGD
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table

NAME = "slow_network"

TOPK = "topk(density=0.01, momentum=0.9)"
CODECS = {
    "fusion_rt dense": "dense",
    "fusion_rt fp16": "fp16",
    "fusion_rt int8": "int8",
    "fusion_rt topk 1%": TOPK,
}
OURS, ALONE = "fusion_rt topk 1%", "none"
STEP, SENT = "a step", "sent by the first host"
RUNTIMES = (ALONE, *CODECS, DDP, FP16, POWERSGD, HOROVOD)
SAME = {"fusion_rt dense": DDP, HOROVOD: DDP}  # computes the same
LR = 0.05
SCHEDULE = 500  # steps of the learning rate's schedule
WARM_UP = 4  # steps that do not count: plans, memory, and two that PowerSGD makes without compression
EVERY = 10  # steps between two tests of the loss
Sizes = dict[str, int]
"""Arguments of `training.char_gpt_task`."""
Measured = dict[str, Any]
"""`hosts`, `rate`; `times`: `parameters`, and by runtime `seconds` of a step and bytes `sent` in each turn; `training`:
the `loss` to reach, by runtime `steps` to it, or None, and `curves`."""


class Contestant:
    """One runtime's model and optimizer on this rank; `horovod`: its module, for that runtime."""

    def __init__(self, name: str, sizes: Sizes, horovod: Any = None) -> None:
        import torch

        import fusion_rt.torch as hvd
        from benchmarks.common import training

        torch.manual_seed(1)
        self.task = training.char_gpt_task(1, hvd.rank(), hvd.size(), **sizes)
        codec = CODECS.get(name, "dense")
        self.model: Any = self.task.model
        self.optimizer: Any = training.sgd(self.model, LR, codec)
        if name in CODECS:
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, self.model.named_parameters(), compression=codec)
        elif name == HOROVOD:
            self.optimizer = horovod.DistributedOptimizer(self.optimizer, self.model.named_parameters())
        elif name != ALONE:
            self.model = peers.ddp(name, self.model)
        self._scheduler = training.scheduler(self.optimizer, SCHEDULE)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.task.loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._scheduler.step()


def time_steps(sizes: Sizes, names: Sequence[str], steps: int, rounds: int) -> dict[str, Any]:
    """Measures for each runtime the time of a step (s) in each turn, and the bytes that rank 0's host sends in one."""
    import torch
    import torch.distributed as dist

    horovod = peers.horovod() if HOROVOD in names else None
    names = [name for name in names if name != HOROVOD or horovod is not None]
    runs = {name: Contestant(name, sizes, horovod) for name in names}
    sent: dict[str, list[float]] = {name: [] for name in runs}

    def turn(name: str) -> float:
        times = []
        before = launch.link_bytes()
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            runs[name].step()
            times.append(time.perf_counter() - began)
        dist.barrier()
        sent[name].append((launch.link_bytes() - before) / steps)
        return statistics.median(times)

    for run in runs.values():
        for _ in range(WARM_UP):
            run.step()
    samples = sampling.alternate({name: partial(turn, name) for name in runs}, rounds, warm_up=0, first=dist.barrier)
    slowest = torch.tensor([samples[name] for name in runs], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    parameters = sum(parameter.numel() for parameter in runs[names[0]].model.parameters())
    rows = zip(runs, slowest.tolist(), strict=True)
    return {"parameters": parameters, "seconds": {name: results.rounded(row) for name, row in rows}, "sent": sent}


def count_steps(sizes: Sizes, names: Sequence[str], loss: float, most: int) -> dict[str, Any]:
    """Counts for each runtime the steps until the test loss is at most `loss`; None if that takes more than `most`."""
    import torch
    import torch.distributed as dist

    found: dict[str, int | None] = {}
    curves: dict[str, list[float]] = {}
    for name in (name for name in names if name != ALONE and name not in SAME):
        run = Contestant(name, sizes)
        curve = curves.setdefault(name, [])
        while (not curve or curve[-1] > loss) and len(curve) * EVERY < most:
            for _ in range(EVERY):
                run.step()
            mean = torch.tensor(run.task.test()[0])
            dist.all_reduce(mean)
            curve.append(mean.item() / dist.get_world_size())
            if dist.get_rank() == 0:
                print(f"{name}, step {len(curve) * EVERY}: test loss {curve[-1]:.3f}", file=sys.stderr, flush=True)
        found[name] = len(curve) * EVERY if curve[-1] <= loss else None
    return {"loss": loss, "steps": found, "curves": curves}


def worker(measure: Callable[[], dict[str, Any]]) -> None:
    """Measures on each rank; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    launch.process_group(hvd)
    result = measure()
    if hvd.rank() == 0:
        launch.tell(result)
    dist.destroy_process_group()
    hvd.shutdown()


def load(path: Path, hosts: int, rate: str) -> Measured:
    """Reads earlier results with this number of hosts and rate of links."""
    found = results.load(path, NAME).find(hosts=hosts, rate=rate) if path.exists() else []
    return of(found[0]) if found else {"hosts": hosts, "rate": rate}


def of(record: Record) -> Measured:
    """Converts a record to a measurement."""
    return {**record.setting, **record.details}


def keep(path: Path, measured: Measured) -> None:
    """Writes the results to a file."""
    times = measured.get("times", {})
    measures = []
    for what, unit, part in ((STEP, "s", "seconds"), (SENT, "B", "sent")):
        if part in times:
            peer = DDP if DDP in times[part] else ""
            measures.append(Measure(what, unit, times[part], peer, portable=unit == "B"))
    details = {name: value for name, value in measured.items() if name in ("times", "training")}
    setting: Setting = {"hosts": measured["hosts"], "rate": measured["rate"]}
    results.keep(path, NAME, Record(setting, measures, *results.begin(), results.command_line(), details))


def show(measured: Measured, console: Console) -> None:
    """Prints a table of the runtimes, and one of the goals."""
    training = measured.get("training", {})
    seconds, sent = steps_of(measured), measured.get("times", {}).get("sent", {})
    title = f"{measured.get('times', {}).get('parameters', 0) / 1e6:.1f} M parameters"
    columns = ["runtime", "s a step", "/ none", "DDP / this", "MB sent a step"]
    columns += [f"steps to loss {training.get('loss', '')}", "s to that loss"]
    table = Table(columns, title=f"{title}, {measured['hosts']} hosts at {measured['rate']}")
    until = times_to_loss(measured)
    for name in RUNTIMES:
        row = [name, "", "", "", "", "", ""]
        if name in seconds:
            row[1] = f"{seconds[name]:.3f}"
            row[2] = f"{seconds[name] / seconds[ALONE]:.2f}" if ALONE in seconds else ""
            row[3] = f"{seconds[DDP] / seconds[name]:.2f}" if DDP in seconds else ""
            row[4] = f"{sampling.median(sent[name]) / 1e6:.2f}"
        if SAME.get(name, name) in training.get("steps", {}):
            row[5] = str(training["steps"][SAME.get(name, name)] or "never")
        if name in until:
            row[6] = f"{until[name]:.0f}"
        table.add(*row)
    table.show(console)
    tables.goals(goals(measured)).show(console)


def steps_of(measured: Measured) -> dict[str, float]:
    """Returns the median time of a step (s), by runtime."""
    return {name: sampling.median(row) for name, row in measured.get("times", {}).get("seconds", {}).items()}


def times_to_loss(measured: Measured) -> dict[str, float]:
    """Returns the seconds to the loss, for runtimes that reached it and whose steps were timed."""
    seconds = steps_of(measured)
    steps = measured.get("training", {}).get("steps", {})
    return {name: seconds[name] * steps[SAME.get(name, name)] for name in seconds if steps.get(SAME.get(name, name))}


def goals(measured: Measured) -> list[tuple[str, str, bool]]:
    """Lists goals: goal, what was measured, and whether it holds; of those that were measured."""
    found = []
    seconds, until = steps_of(measured), times_to_loss(measured)
    if {OURS, DDP} <= seconds.keys():
        faster = seconds[DDP] / seconds[OURS]
        found.append((f"{OURS} at least 10 times as fast a step as DDP", f"{faster:.1f}", faster >= 10))
    if {OURS, ALONE} <= seconds.keys():
        slower = seconds[OURS] / seconds[ALONE]
        found.append((f"a step of {OURS} at most 1.3 times that of none", f"{slower:.2f}", slower <= 1.3))
    if until:
        best = min(until, key=lambda name: until[name])
        found.append((f"{OURS} at the loss first", f"{best} after {until[best]:.0f} s", best == OURS))
    return found


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--hosts", type=int, default=4, help="netlab hosts, one rank on each (%(default)s)")
    parser.add_argument("--rate", default="100mbit", help="of each host's link (%(default)s)")
    parser.add_argument("--parts", default="times,training", help="what to measure, of %(default)s")
    shared.add_out(parser)
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each runtime (%(default)s)")
    parser.add_argument("--loss", type=float, default=2.6, help="to reach (%(default)s)")
    parser.add_argument("--most", type=int, default=600, help="steps after which a run is abandoned (%(default)s)")
    parser.add_argument("--runtimes", default=";".join(RUNTIMES), help="of %(default)s")
    for name, size in (("width", 384), ("layers", 6), ("batch", 2), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=size, help="of the model (%(default)s)")
    shared.add_worker(parser)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("width", "layers", "batch", "context")}
    names = shared.chosen(parser, "runtime", arguments.runtimes.split(";"), dict.fromkeys(RUNTIMES), "; ")
    if arguments.worker and arguments.parts == "times":
        worker(lambda: time_steps(sizes, names, arguments.steps, arguments.rounds))
    elif arguments.worker:
        worker(lambda: count_steps(sizes, names, arguments.loss, arguments.most))
    else:
        where = arguments.hosts, arguments.rate
        measured = load(arguments.out, *where) if arguments.out else {"hosts": where[0], "rate": where[1]}
        for part in arguments.parts.split(","):
            passed = ["-m", "benchmarks.slow_network", "--worker", "--parts", part, "--runtimes", arguments.runtimes]
            for name in ("steps", "rounds", "loss", "most", *sizes):
                passed += [f"--{name}", str(getattr(arguments, name))]
            measured[part] = launch.on_hosts(arguments.hosts, arguments.rate if part == "times" else None, passed)
            if arguments.out:
                keep(arguments.out, measured)
        show(measured, Console(width=140))


if __name__ == "__main__":
    main()
