"""Training over a slow network: a GPT of 10.8 million parameters, on 4 hosts that are joined by links of 100 Mbit/s.

    python -m benchmarks.slow_network
    python -m benchmarks.slow_network --parts times --rounds 7 --out measured.json
    python -m benchmarks.slow_network --parts training --loss 2.4 --out measured.json

Each rank runs in a network namespace of its own (root needed). *A step* takes as long as on the slowest rank; all
runtimes are up in the same processes, and take turns of a few steps each, so that whatever else the machine does meets
all of them; printed are medians. *None* does everything but communicate. *Sent* is what rank 0's link has counted, all
headers included. Nothing encrypts tensors, since gloo cannot.

*Steps to the loss* are those of a training run, the same for all but the gradients' way, until the mean loss over text
that was held out is no larger, looked at every 10 steps. They are counted without a limit on the links, which changes
no number that is computed, and multiplied by the time of a step with the limit. What fusion_rt computes without
compression is what DistributedDataParallel does, and it is not trained again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launch import MARK

TOPK = "topk(density=0.01, momentum=0.9)"
CODECS = {"fusion_rt dense": "dense", "fusion_rt fp16": "fp16", "fusion_rt topk 1%": TOPK}
OURS, ALONE, DDP, FP16, POWERSGD = "fusion_rt topk 1%", "none", "DDP", "DDP, fp16 hook", "DDP, PowerSGD hook"
RUNTIMES = (ALONE, *CODECS, DDP, FP16, POWERSGD)
SAME = {"fusion_rt dense": DDP}  # computes the same
LR = 0.05
SCHEDULE = 500  # steps that the learning rate is made for
WARM_UP = 4  # steps that do not count: plans, memory, and two that PowerSGD makes without compression
EVERY = 10  # steps between two looks at the test loss
Sizes = dict[str, int]
"""Arguments of `training.char_gpt_task`."""


class Contestant:
    """One runtime's model and optimizer on this rank."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        import fusion_rt.torch as hvd
        from benchmarks import training

        torch.manual_seed(1)
        self.task = training.char_gpt_task(1, hvd.rank(), hvd.size(), **sizes)
        codec = CODECS.get(name, "dense")
        self.model: Any = self.task.model
        self.optimizer: Any = training.sgd(self.model, LR, codec)
        if name in CODECS:
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, self.model.named_parameters(), compression=codec)
        elif name != ALONE:
            cap = 1000 if name == POWERSGD else None  # over gloo its hook works with one bucket only
            self.model = torch.nn.parallel.DistributedDataParallel(
                self.model, bucket_cap_mb=cap, gradient_as_bucket_view=True
            )
        if name == FP16:
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if name == POWERSGD:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        self._scheduler = training.scheduler(self.optimizer, SCHEDULE)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.task.loss(self.model).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._scheduler.step()


def time_steps(sizes: Sizes, names: Sequence[str], steps: int, rounds: int) -> dict[str, Any]:
    """For each runtime, the median time of a step (s), and the bytes that rank 0's host sent in one."""
    import torch
    import torch.distributed as dist

    runs = {name: Contestant(name, sizes) for name in names}
    times: dict[str, list[float]] = {name: [] for name in runs}
    sent = dict.fromkeys(runs, 0)
    for number in range(rounds + 1):
        for name, run in runs.items():
            dist.barrier()
            before = link_bytes()
            for _ in range(steps if number else WARM_UP):
                dist.barrier()
                began = time.perf_counter()
                run.step()
                if number:
                    times[name].append(time.perf_counter() - began)
            dist.barrier()
            sent[name] += link_bytes() - before if number else 0
    slowest = torch.tensor([times[name] for name in runs])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    medians = slowest.median(dim=1).values.tolist()
    parameters = sum(parameter.numel() for parameter in runs[names[0]].model.parameters())
    return {
        "parameters": parameters,
        "seconds": dict(zip(runs, medians, strict=True)),
        "sent": {name: nbytes / (steps * rounds) for name, nbytes in sent.items()},
    }


def count_steps(sizes: Sizes, names: Sequence[str], loss: float, most: int) -> dict[str, Any]:
    """For each runtime, the steps until the test loss is at most `loss`; None if that takes more than `most`."""
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


def link_bytes() -> int:
    """Bytes that this host has sent on all links to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(words[9]) for words in fields if words[0] != "lo")


def worker(measure: Callable[[], dict[str, Any]]) -> None:
    """What each rank runs; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
    result = measure()
    if hvd.rank() == 0:
        print(MARK + json.dumps(result), flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


def on_hosts(hosts: int, rate: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs this module's workers on netlab hosts with links of this rate; returns what rank 0 has printed.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    from benchmarks.netlab import Netlab

    with Netlab(hosts=hosts, rate=rate) as lab:
        command = [sys.executable, "-m", "fusion_rt.runner", "-H", ",".join(f"{host.name}:1" for host in lab.hosts)]
        command += ["--rsh-agent", lab.agent, sys.executable, "-m", "benchmarks.slow_network", "--worker", *arguments]
        environment = dict(os.environ, FUSION_ENCRYPTION="control", OMP_NUM_THREADS="1")
        environment.update(MASTER_ADDR=lab.hosts[0].address, MASTER_PORT="29512")
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in run.stdout.splitlines() if MARK in line)
    found: dict[str, Any] = json.loads(line.split(MARK, 1)[1])
    return found


def show(measured: dict[str, Any], console: Console) -> None:
    """A table of the runtimes, and one of the goals."""
    times, training = measured.get("times", {}), measured.get("training", {})
    seconds, sent = times.get("seconds", {}), times.get("sent", {})
    title = f"{times.get('parameters', 0) / 1e6:.1f} M parameters, {measured['hosts']} hosts at {measured['rate']}"
    table = Table(title=title)
    columns = ["runtime", "s a step", "/ none", "DDP / this", "MB sent a step"]
    columns += [f"steps to loss {training.get('loss', '')}", "s to that loss"]
    for column in columns:
        table.add_column(column, justify="left" if column == "runtime" else "right")
    until = times_to_loss(measured)
    for name in RUNTIMES:
        row = [name, "", "", "", "", "", ""]
        if name in seconds:
            row[1] = f"{seconds[name]:.3f}"
            row[2] = f"{seconds[name] / seconds[ALONE]:.2f}" if ALONE in seconds else ""
            row[3] = f"{seconds[DDP] / seconds[name]:.2f}" if DDP in seconds else ""
            row[4] = f"{sent[name] / 1e6:.2f}"
        if SAME.get(name, name) in training.get("steps", {}):
            row[5] = str(training["steps"][SAME.get(name, name)] or "never")
        if name in until:
            row[6] = f"{until[name]:.0f}"
        table.add_row(*row)
    console.print(table)
    table = Table(title="goals")
    for column in ("goal", "measured", "holds"):
        table.add_column(column)
    for goal, found, holds in goals(measured):
        table.add_row(goal, found, "yes" if holds else "no")
    console.print(table)


def times_to_loss(measured: dict[str, Any]) -> dict[str, float]:
    """Seconds to the loss, for runtimes that reached it and whose steps were timed."""
    seconds = measured.get("times", {}).get("seconds", {})
    steps = measured.get("training", {}).get("steps", {})
    return {name: seconds[name] * steps[SAME.get(name, name)] for name in seconds if steps.get(SAME.get(name, name))}


def goals(measured: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Goal, what was measured, and whether it holds; of those that were measured."""
    found = []
    seconds, until = measured.get("times", {}).get("seconds", {}), times_to_loss(measured)
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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slow_network", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", type=int, default=4, help="netlab hosts, one rank on each (%(default)s)")
    parser.add_argument("--rate", default="100mbit", help="of each host's link (%(default)s)")
    parser.add_argument("--parts", default="times,training", help="what to measure, of %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep what was measured, beside what is there already")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each runtime (%(default)s)")
    parser.add_argument("--loss", type=float, default=2.6, help="to reach (%(default)s)")
    parser.add_argument("--most", type=int, default=600, help="steps after which a run is given up (%(default)s)")
    parser.add_argument("--runtimes", default=";".join(RUNTIMES), help="of %(default)s")
    for name, size in (("width", 384), ("layers", 6), ("batch", 2), ("context", 64)):
        parser.add_argument(f"--{name}", type=int, default=size, help="of the model (%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("width", "layers", "batch", "context")}
    names = arguments.runtimes.split(";")
    if unknown := sorted(set(names) - set(RUNTIMES)):
        parser.error(f"there is no runtime {unknown[0]!r}; there are {'; '.join(RUNTIMES)}")
    if arguments.worker and arguments.parts == "times":
        worker(lambda: time_steps(sizes, names, arguments.steps, arguments.rounds))
    elif arguments.worker:
        worker(lambda: count_steps(sizes, names, arguments.loss, arguments.most))
    else:
        measured = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
        measured.update(hosts=arguments.hosts, rate=arguments.rate)
        for part in arguments.parts.split(","):
            passed = ["--parts", part, "--runtimes", arguments.runtimes]
            for name in ("steps", "rounds", "loss", "most", *sizes):
                passed += [f"--{name}", str(getattr(arguments, name))]
            measured[part] = on_hosts(arguments.hosts, arguments.rate if part == "times" else None, passed)
            if arguments.out:
                arguments.out.write_text(json.dumps(measured))
        show(measured, Console(width=140))


if __name__ == "__main__":
    main()
