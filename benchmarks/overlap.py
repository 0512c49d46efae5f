"""Exposed communication of a step that has computation to hide it behind: `benchmarks.step --overlap`.

The model has the parameters of ResNet-50 in 54 layers. Each of them *sleeps* in its forward and in its backward pass,
twice as long in the latter, as a worker does whose accelerator computes: the processor is free for communication
meanwhile, and only communication competes for it, not a computation that would be elsewhere.

*Exposed* is the time by which a step is longer than without communication: waiting, copies into the arena, Python. The
time of a step is that from the end of one to the end of the next, in the mean over a turn on the slowest rank, whose
first step does not count; updates that wait at the end of a turn are applied before the next runtime has its turn.
Printed are medians over turns.

With `--priority`, overlap with the next forward pass is compared with itself without priorities (`FUSION_PRIORITY=0`),
in which case buckets are sent in the order in which they were filled. *To the first layer* is the time from the end of
a backward pass to the moment when the first layer of the next forward pass may begin.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import launch, results
from benchmarks.common.resnet import LR, shapes
from benchmarks.common.results import Measure, Record

ALONE, DDP = "no communication", "DDP, gloo"
OVERLAPS = ("none", "forward", "stale")
RUNTIMES = (ALONE, *OVERLAPS, DDP)
PLAIN = ", no priorities"
COMPARED = (ALONE, "none", "forward", "forward" + PLAIN)
STEP, FIRST = "a step", "to the first layer"
SETTING = ("hosts", "rate", "ranks", "compute", "priority")  # identify a result; some may be missing
RESULTS = results.RESULTS / "overlap.json"
PRIORITY = "priority"  # the suite of what `--priority` measures; its results are in a file of that name
Measured = dict[str, Any]
"""`hosts`, `rate`, `ranks`, `compute` (s a step), `steps`, `parameters`, `buckets`; `seconds`: by runtime, those of a
step in each turn; `first`: those to the first layer; `waited`: by overlap, the median seconds for which a step
waited."""


def worker(steps: int, rounds: int, compute: float, priority: bool = False) -> None:
    """Measures on each rank; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    launch.process_group(hvd)
    runs: dict[str, tuple[Any, Any]] = {}
    for name in COMPARED if priority else RUNTIMES:
        model = make_model(compute)
        way = name.removesuffix(PLAIN)
        os.environ["FUSION_PRIORITY"] = str(int(way == name))
        optimizer: Any = torch.optim.SGD(model.parameters(), LR)
        if way in OVERLAPS:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), overlap=way)
        elif name == DDP:
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        runs[name] = model, optimizer
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    waited: dict[str, list[float]] = {name: [] for name in runs if name.removesuffix(PLAIN) in OVERLAPS}
    first: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):  # the first one is for warming up
        for name, (model, optimizer) in runs.items():
            dist.barrier()
            took, kept_waiting, to_first = _turn(model, optimizer, steps if number else 2)
            hvd.synchronize_parameters()
            if number:
                seconds[name].append(took)
                first[name].append(to_first)
                if name in waited:
                    waited[name].append(kept_waiting)
    slowest = torch.tensor([found[name] for found in (seconds, first) for name in runs], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if hvd.rank() == 0:
        rows = [[round(x, 5) for x in row] for row in slowest.tolist()]
        result: Measured = {
            "ranks": hvd.size(),
            "compute": compute,
            "steps": steps,
            "parameters": sum(parameter.numel() for parameter in runs[ALONE][0].parameters()),
            "buckets": runs["none"][1].statistics().buckets,
            "seconds": dict(zip(runs, rows, strict=False)),
            "first": dict(zip(runs, rows[len(runs) :], strict=True)),
            "waited": {name: round(statistics.median(row), 5) for name, row in waited.items()},
        }
        launch.tell(result)
    dist.destroy_process_group()
    hvd.shutdown()


def _turn(model: Any, optimizer: Any, steps: int) -> tuple[float, float, float]:
    """Takes a turn; returns the seconds of a step, those for which it waited, and the median of those to the first
    layer."""
    began = waited = 0.0
    begun: list[float] = []
    ended: list[float] = []
    layer = getattr(model, "module", model).layers[0]
    handle = layer.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter()))
    for number in range(steps + 1):
        optimizer.zero_grad()
        model().backward()
        ended.append(time.perf_counter())
        optimizer.step()
        if number == 0:
            began = time.perf_counter()
            waited = _waited(optimizer)
    took = (time.perf_counter() - began) / steps
    handle.remove()
    to_first = [after - before for after, before in zip(begun[1:], ended, strict=False)]
    return took, (_waited(optimizer) - waited) / steps, statistics.median(to_first)


def _waited(optimizer: Any) -> float:
    return float(optimizer.statistics().waited_seconds) if hasattr(optimizer, "statistics") else 0.0


def make_model(compute: float) -> Any:
    """Makes layers with the parameters of ResNet-50, which sleep for `compute` seconds a step."""
    from benchmarks.common.sleeping import SleepingModel

    found = shapes()
    parts = [found[start : start + 3] for start in range(0, len(found) - 2, 3)] + [found[-2:]]
    return SleepingModel(parts, compute, lambda memory: memory.fill_(1e-3))


def measure(hosts: int, rate: str, ranks: int, arguments: Sequence[str]) -> Measured:
    """Runs the workers: on this host if `hosts` is 1, else one each on netlab hosts with links of this rate.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    command = ["-m", "benchmarks.step", "--overlap", "--worker", *arguments]
    if hosts == 1:
        return {"hosts": 1, "rate": "", **launch.fusionrun(ranks, command)}
    found: Measured = launch.on_hosts(hosts, rate or None, command)
    return {"hosts": hosts, "rate": rate, **found}


def keep(path: Path, measured: Measured) -> list[Measured]:
    """Writes results to a file, in place of those of the same setting. Returns all results in the file."""
    found = results.keep(path, PRIORITY if "forward" + PLAIN in measured["seconds"] else "overlap", record(measured))
    return [of(each) for each in found.records]


def record(measured: Measured) -> Record:
    """Makes the record of the results."""
    setting = {name: measured[name] for name in SETTING if name in measured}
    samples = [Measure(STEP, "s", measured["seconds"], DDP if DDP in measured["seconds"] else "")]
    if "first" in measured:
        samples.append(Measure(FIRST, "s", measured["first"]))
    details = {name: value for name, value in measured.items() if name not in (*SETTING, "seconds", "first")}
    return Record(setting, samples, *results.begin(), results.command_line(), details)


def of(record: Record) -> Measured:
    """Converts a record back to a measurement; the inverse of `record`."""
    return {**record.setting, **record.details, "seconds": record.measure(STEP).samples}


def exposed(measured: Measured) -> dict[str, float]:
    """Returns the exposed seconds of a step, by runtime: the median over turns, each compared with the turn without
    communication beside it."""
    alone = measured["seconds"][ALONE]
    return {
        name: statistics.median(a - b for a, b in zip(row, alone, strict=True))
        for name, row in measured["seconds"].items()
    }


def show(measured: Measured) -> None:
    """Prints a table of the runtimes."""
    where = f"{measured['ranks']} ranks on one host" if measured["hosts"] == 1 else (
        f"{measured['hosts']} hosts with one rank each, links of {measured['rate'] or 'any rate'}")  # fmt: skip
    title = f"{measured['parameters'] / 1e6:.1f} M parameters, {where}, {measured['compute'] * 1e3:.0f} ms of compute"
    if "forward" + PLAIN in measured["seconds"]:
        _show_priorities(title, measured)
        return
    table = Table(title=title)
    for column in ("runtime", "ms a step", "exposed, ms", "kept waiting, ms", "DDP / this"):
        table.add_column(column, justify="left" if column == "runtime" else "right")
    beyond = exposed(measured)
    theirs = statistics.median(measured["seconds"][DDP])
    for name, row in measured["seconds"].items():
        step = statistics.median(row)
        label = f"fusion_rt, overlap {name}" if name in OVERLAPS else name
        waited = f"{measured['waited'][name] * 1e3:.1f}" if name in OVERLAPS else ""
        table.add_row(label, f"{step * 1e3:.1f}", f"{beyond[name] * 1e3:.1f}", waited, f"{theirs / step:.2f}")
    Console(width=110).print(table)


def _show_priorities(title: str, measured: Measured) -> None:
    table = Table(title=title)
    for column in ("runtime", "ms a step", "exposed, ms", "to the first layer, ms", "step / without priorities"):
        table.add_column(column, justify="left" if column == "runtime" else "right")
    beyond = exposed(measured)
    for name, row in measured["seconds"].items():
        without = measured["seconds"].get(name + PLAIN)
        ratio = statistics.median(a / b for a, b in zip(row, without, strict=True)) if without else None
        table.add_row(
            name,
            f"{statistics.median(row) * 1e3:.0f}",
            f"{beyond[name] * 1e3:.0f}",
            f"{statistics.median(measured['first'][name]) * 1e3:.0f}",
            f"{ratio:.2f}" if ratio else "",
        )
    Console(width=110).print(table)
