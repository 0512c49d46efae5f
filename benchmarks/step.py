"""Cost of a training step beside the computation: 25.6 M parameters in 161 tensors, those of ResNet-50.

    python -m benchmarks.step
    python -m benchmarks.step --ranks 4 --steps 20
    python -m benchmarks.step --hosts 2 --out benchmarks/results/step.json
    python -m benchmarks.step --device cuda
    python -m benchmarks.step --overlap
    python -m benchmarks.step --overlap --hosts 4 --rate 1gbit --compute 1.5 --steps 3 --rounds 5

With `--overlap`, the exposed part of communication is measured when there is computation to hide it behind, with each
way of overlap; then `benchmarks/overlap.py` applies instead of the following.

There is no network behind the tensors: the backward pass produces gradients of the right shapes in the right order, the
last layer's first, and does nothing else, so that communication has nothing to hide behind. A step is then filling the
gradients, averaging them, and an update by SGD. The gradients' memory is used again in each step, so that the work of
the allocator (new pages, and their release) is not measured. Turns of fusion_rt alternate with turns of torch's
DistributedDataParallel on gloo, plain and with its hooks, and of Horovod where it can be imported, in the same
processes. A sample is the median of a turn's steps, on the slowest rank; those of the parts of a step are the largest
of any rank.

With `--device cuda` parameters and gradients are on GPUs, one for each rank, and DistributedDataParallel has NCCL. The
ranks of fusion_rt combine gradients by NCCL first, unless `FUSION_NODE_REDUCTION` says otherwise. Where there are more
ranks than GPUs, as on a machine with one, they share these. NCCL does not take such ranks: DistributedDataParallel has
gloo then, and the daemon combines. A step has ended when the GPU has done all that was queued. What are copies into the
arena otherwise is there what queueing copies takes.

*CPU* is the CPU time of all workers and daemons in a step. *GB reduced* are the gradients of all ranks together; *GB
sent* is the number of bytes on the links of all hosts, all headers included. *Python in a worker* is the time
inside the hooks on the gradients and in `step()` and `zero_grad()` of the distributed optimizer, less the script's own
optimizer, which they call, less the copies of gradients into the arena, and less the time for which the worker does not
run: it waits for a message, or has sent one, and the daemon that this wakes takes its core. What it computes while it
sends and receives stays in.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import overlap
from benchmarks.common import arguments as shared
from benchmarks.common import launch, peers, results, sampling, tables
from benchmarks.common.peers import DDP, FP16, HOROVOD, POWERSGD
from benchmarks.common.resnet import LR, silent_model
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table

NAME = "step"
OURS, ALONE = "fusion_rt", "no communication"
RUNTIMES = (OURS, ALONE, DDP, FP16, POWERSGD, HOROVOD)
STEP, CPU, SENT = "a step", "CPU", "sent by a host"
PARTS = {"python": "Python in a worker", "copy": "copies into the arena", "wait": "waiting for the daemon",
         "script": "the script's own optimizer"}  # fmt: skip
DAEMON = "CPU of the daemons"
PER_REDUCED, PER_SENT = f"{DAEMON} per GB reduced", f"{DAEMON} per GB sent"


class Turns:
    """The measurements of this rank, while one runtime after the other has its turn.

    Attributes:
        found: by name of the measure and runtime, one number a turn: of this rank (times, parts), or of this host.
    """

    def __init__(self, steps: int, idle: Callable[[], object]) -> None:
        """Args:
        steps: in a turn.
        idle: waits until the device has done all that was queued.
        """
        import fusion_rt.torch as hvd
        from benchmarks.common.stopwatch import measure_fusion

        self._steps, self._idle = steps, idle
        self._clock = measure_fusion()
        self._watched = launch.daemon()["pid"] if hvd.local_rank() == 0 else 0
        self.found: dict[str, dict[str, list[float]]] = {}

    def take(self, name: str, step: Callable[[], None]) -> float:
        """Takes a turn, and records its measures; returns the time of its last step (s)."""
        import torch.distributed as dist

        times, parts = [], []
        daemon, computed, link = self._daemon(), time.process_time(), launch.link_bytes()
        for _ in range(self._steps):
            dist.barrier()
            self._clock.take()
            began = time.perf_counter()
            step()
            self._idle()
            times.append(time.perf_counter() - began)
            parts.append(self._clock.take())
        dist.barrier()
        spent = self._daemon() - daemon
        own = time.process_time() - computed
        sent = launch.link_bytes() - link if self._watched else 0
        self._keep(CPU, name, (own + spent) / self._steps)
        self._keep(SENT, name, sent / self._steps)
        self._keep(DAEMON, name, spent / self._steps)
        for label, what in PARTS.items():
            self._keep(what, name, statistics.median(part.get(label, 0.0) for part in parts))
        self._keep(STEP, name, statistics.median(times))
        return times[-1]

    def forget(self) -> None:
        """Drops the measurements so far, which were for warming up."""
        self.found.clear()

    def _keep(self, what: str, name: str, sample: float) -> None:
        self.found.setdefault(what, {}).setdefault(name, []).append(sample)

    def _daemon(self) -> float:
        return launch.cpu_seconds(self._watched) if self._watched else 0.0


def worker(steps: int, rounds: int, names: list[str], on: str) -> None:
    """Measures on each rank, on the CPU or on a GPU (`on`); rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    device, idle, backend = torch.device(on), lambda: None, "gloo"
    if on == "cuda":
        there = torch.cuda.device_count()
        device, idle = torch.device(on, hvd.local_rank() % there), torch.cuda.synchronize
        torch.cuda.set_device(device)
        backend = "gloo" if hvd.local_size() > there else "cpu:gloo,cuda:nccl"
    launch.process_group(hvd, backend)
    turns = Turns(steps, idle)
    horovod: Any = peers.horovod() if HOROVOD in names else None
    runs: dict[str, Callable[[], float]] = {}
    optimizer: Any = None
    for name in (name for name in names if name != HOROVOD or horovod is not None):
        model = silent_model(device)
        parameters = list(model.named_parameters())
        local: Any = torch.optim.SGD(model.parameters(), LR)
        if name == OURS:
            local = optimizer = hvd.DistributedOptimizer(local, parameters)
        elif name == HOROVOD:
            local = horovod.DistributedOptimizer(local, named_parameters=parameters)
        elif name != ALONE:
            model = peers.ddp(name, model)
        runs[name] = _turn(turns, name, model, local)
    sampling.alternate(runs, 0)  # plans, caches, memory
    turns.forget()
    messages = launch.daemon()["workers"]["received"]
    sampling.alternate(runs, rounds, warm_up=0)
    messages = launch.daemon()["workers"]["received"] - messages
    found: dict[str, dict[str, list[float]]] = {}
    for what, by_name in turns.found.items():
        rows = torch.tensor(list(by_name.values()), dtype=torch.float64)
        together = what in (CPU, SENT, DAEMON)
        dist.all_reduce(rows, op=dist.ReduceOp.SUM if together else dist.ReduceOp.MAX)
        found[what] = {name: results.rounded(row) for name, row in zip(by_name, rows.tolist(), strict=True)}
    if hvd.rank() == 0:
        sizes = [parameter.numel() for parameter in optimizer.param_groups[0]["params"]]
        buckets = optimizer.statistics().buckets
        about = {"tensors": len(sizes), "parameters": sum(sizes), "buckets": buckets, "hosts": hvd.cross_size()}
        launch.tell({"found": found, "about": {**about, "messages": messages / (steps * rounds)}})
    dist.destroy_process_group()
    hvd.shutdown()


def _turn(turns: Turns, name: str, model: Any, optimizer: Any) -> Callable[[], float]:
    def step() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return lambda: turns.take(name, step)


def measures(found: dict[str, dict[str, list[float]]], gradients: int, ranks: int, hosts: int) -> list[Measure]:
    """Makes the measures of a setting.

    Args:
        found: the workers' results, by measure and runtime, one number a turn.
        gradients: bytes of one rank's gradients.
        ranks, hosts: their numbers.
    """
    peer = DDP if DDP in found[STEP] else ""
    made = [Measure(STEP, "s", found[STEP], peer), Measure(CPU, "s", found[CPU], peer)]
    if hosts > 1:
        sent = {name: results.rounded(each / hosts for each in row) for name, row in found[SENT].items()}
        made.append(Measure(SENT, "B", sent, peer, portable=True))
    for what in (*PARTS.values(), DAEMON):
        made.append(Measure(what, "s", {OURS: found[what][OURS]}))
    cpu = found[DAEMON][OURS]
    reduced = [seconds / (gradients * ranks / 1e9) for seconds in cpu]
    made.append(Measure(PER_REDUCED, "s/GB", {OURS: results.rounded(reduced)}))
    if hosts > 1:
        per_sent = [seconds / (nbytes / 1e9) for seconds, nbytes in zip(cpu, found[SENT][OURS], strict=True)]
        made.append(Measure(PER_SENT, "s/GB", {OURS: results.rounded(per_sent)}))
    return made


def measure(hosts: int, rate: str, ranks: int, turns: list[str], gpu: str = "", gpus: int = 0) -> Record:
    """Runs the workers: on this host if `hosts` is 1, else `ranks` of them on netlab hosts with links of this rate; on
    so many GPUs if `gpu` names them."""
    here, date = results.begin()
    command = ["-m", "benchmarks.step", "--worker", *turns]
    setting: Setting = {"hosts": hosts, "ranks": ranks}
    variables: dict[str, str] = {}
    if gpu:
        variables = {"FUSION_NODE_REDUCTION": os.environ.get("FUSION_NODE_REDUCTION", "auto")}
        setting |= {"device": gpu, "node_reduction": variables["FUSION_NODE_REDUCTION"]}
        if ranks > gpus:
            setting["shared_gpus"] = gpus
    if hosts > 1:
        setting["rate"] = rate or "unshaped"
        told = launch.on_hosts(hosts, rate or None, command, per_host=ranks // hosts)
    else:
        told = launch.fusionrun(ranks, command, variables)
    about = told["about"]
    made = measures(told["found"], 4 * about["parameters"], ranks, hosts)
    return Record(setting, made, here, date, results.command_line(), about)


def title(record: Record) -> str:
    """Describes a setting in words."""
    setting, about = record.setting, record.details
    where = "one host" if setting["hosts"] == 1 else f"{setting['hosts']} hosts, {setting['rate']}"
    if "shared_gpus" in setting:
        where += f", which share {setting['shared_gpus']} {setting['device']}, with DDP on gloo"
    elif "device" in setting:
        where += f", a rank for each {setting['device']}"
    model = f"{about['parameters'] / 1e6:.1f} M parameters in {about['tensors']} tensors"
    return f"{model}, {setting['ranks']} ranks on {where}"


def show(record: Record) -> None:
    """Prints two tables: the steps, and the parts of fusion_rt's."""
    steps, cpu = record.measure(STEP), record.measure(CPU)
    table = Table(["runtime", "ms a step", "DDP / this", "CPU, ms", "DDP / this "], title=title(record))
    for name in steps.samples:
        row = [name]
        for each in (steps, cpu):
            row.append(tables.ms(sampling.median(each.samples[name])))
            row.append(tables.ratio(sampling.ratio(each.samples[DDP], each.samples[name])) if each.peer else "")
        table.add(*row)
    table.show()
    about, ranks = record.details, int(record.setting["ranks"])
    table = Table(["what", "how much"], title="fusion_rt, each step")
    table.add("buckets", str(about["buckets"]))
    if about["buckets"]:  # a single rank has none
        on_a_host = ranks // int(record.setting["hosts"])
        table.add("messages per bucket and rank", f"{about['messages'] / (about['buckets'] * on_a_host):.3f}")
    for each in record.measures:
        if each.name not in (STEP, CPU):
            table.add(each.name, told(each))
    table.show()


def told(measure: Measure) -> str:
    """Formats the median of fusion_rt, with its unit."""
    value = sampling.median(measure.samples[OURS])
    if measure.unit == "s":
        return f"{tables.ms(value)} ms"
    return f"{value / 1e6:.1f} MB" if measure.unit == "B" else f"{tables.number(value)} {measure.unit}"


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--ranks", type=int, help="in all (2 on one host, or as many as it has GPUs, else one on each)")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each runtime (%(default)s)")
    parser.add_argument("--runtimes", default=";".join(RUNTIMES), help="of %(default)s; the first is always there")
    parser.add_argument(
        "--overlap", action="store_true", help="measure exposed communication, with each way of overlap"
    )
    parser.add_argument(
        "--compute", type=float, default=0.3, metavar="S", help="of a step, to hide behind (%(default)s)"
    )
    parser.add_argument("--priority", action="store_true", help="with --overlap: compare with no priorities of buckets")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are (%(default)s)")
    parser.add_argument("--hosts", type=int, default=1, help="netlab hosts (root needed)")
    parser.add_argument("--rate", default="", help="of their links, such as 1gbit")
    parser.add_argument("--out", type=Path, metavar="FILE", help="of results, which are added to it")
    shared.add_worker(parser)
    arguments = parser.parse_args()
    ranks, gpu, there = arguments.ranks or (2 if arguments.hosts == 1 else arguments.hosts), "", 0
    if arguments.device == "cuda" and not arguments.worker:
        if arguments.overlap or arguments.hosts > 1:
            parser.error("--device cuda measures on this host, and without --overlap")
        gpu, there = gpus()
        ranks = arguments.ranks or max(2, there)
    turns = ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds), "--device", arguments.device]
    if arguments.overlap:
        _overlap(arguments, ranks, turns)
        return
    names = shared.chosen(parser, "runtime", arguments.runtimes.split(";"), dict.fromkeys(RUNTIMES), "; ")
    if arguments.worker:
        names = [OURS, *(name for name in names if name != OURS)]
        worker(arguments.steps, arguments.rounds, names, arguments.device)
        return
    if gpu:
        names = [name for name in names if name != HOROVOD]  # which is given gloo here
    record = measure(arguments.hosts, arguments.rate, ranks, [*turns, "--runtimes", ";".join(names)], gpu, there)
    if arguments.out:
        results.keep(arguments.out, NAME, record)
    show(record)


def gpus() -> tuple[str, int]:
    """Returns the name of this machine's GPUs, and how many there are. Raises `SystemExit` where there are none."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU on this machine, so nothing was measured.")
    return torch.cuda.get_device_name(), torch.cuda.device_count()


def _overlap(arguments: argparse.Namespace, ranks: int, turns: list[str]) -> None:
    if arguments.worker:
        overlap.worker(arguments.steps, arguments.rounds, arguments.compute, arguments.priority)
        return
    turns += ["--compute", str(arguments.compute), *(["--priority"] if arguments.priority else [])]
    measured = overlap.measure(arguments.hosts, arguments.rate, ranks, turns)
    if arguments.out:
        overlap.keep(arguments.out, measured)
    overlap.show(measured)


if __name__ == "__main__":
    main()
