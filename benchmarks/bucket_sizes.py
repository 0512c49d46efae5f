"""Time of a step by the size of buckets and the rate of links, beside DistributedDataParallel with such buckets.

    python -m benchmarks.bucket_sizes
    python -m benchmarks.bucket_sizes --quick
    python -m benchmarks.bucket_sizes --rates 200mbit --sizes 1,16
    python -m benchmarks.bucket_sizes --table

Four netlab hosts (root needed) with one worker each train a GPT of 10.7 million parameters. Each rate and size is a job
of its own, in which fusion_rt, DDP and *none*, which does everything but communicate, take turns of a few steps; a
sample is the median step of a turn on the slowest rank. With `--passes` all sizes of a rate are measured again,
so that a slow phase of the machine does not fall on one size.

The size of buckets should not matter: a step may take 1.05 times as long as with the best size, plus the CPU time of
the further messages on all hosts, which here are one machine: `MESSAGE` for each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, sampling, tables
from benchmarks.common.peers import DDP
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "bucket_sizes"
RESULTS = results.RESULTS / "bucket_sizes.json"
ALONE, OURS = "none", "fusion_rt"
STEP = "a step"
RATES = ("50mbit", "100mbit", "200mbit", "500mbit", "1gbit")
SIZES = ("0.25", "0.5", "1", "2", "4", "8", "16", "32", "64")  # MiB
MESSAGE = 0.3e-3  # CPU seconds for a message between daemons, sent and received; estimated, not measured
SLACK = 1.05
MIB = 1024 * 1024
WARM_UP = 2  # steps that do not count: plans and memory


def time_steps(width: int, layers: int, size: float, steps: int, rounds: int) -> dict[str, Any]:
    """Returns the number of parameters and of our buckets, and by contender the time of a step (s) in each turn."""
    import time

    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd
    from benchmarks.common import training

    models: dict[str, tuple[Any, Any, Any]] = {}
    for name in (ALONE, OURS, DDP):
        torch.manual_seed(1)
        task = training.char_gpt_task(1, hvd.rank(), hvd.size(), width=width, layers=layers, batch=2, context=64)
        model: Any = task.model
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.01)
        if name == OURS:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        elif name == DDP:
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=size, gradient_as_bucket_view=True)
        models[name] = task, model, optimizer

    def turn(name: str, count: int) -> float:
        task, model, optimizer = models[name]
        seconds = []
        for _ in range(count):
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            task.loss(model).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - began)
        dist.barrier()
        return sampling.median(seconds)

    for name in models:
        turn(name, WARM_UP)
    turns = {name: partial(turn, name, steps) for name in models}
    samples = sampling.alternate(turns, rounds, warm_up=0, first=dist.barrier)
    slowest = torch.tensor([samples[name] for name in models], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return {
        "parameters": sum(parameter.numel() for parameter in models[OURS][1].parameters()),
        "buckets": models[OURS][2].statistics().buckets,
        "seconds": {name: results.rounded(row) for name, row in zip(models, slowest.tolist(), strict=True)},
    }


def worker(width: int, layers: int, size: float, steps: int, rounds: int) -> None:
    """Measures on each rank; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    launch.process_group(hvd)
    result = time_steps(width, layers, size, steps, rounds)
    if hvd.rank() == 0:
        launch.tell(result)
    dist.destroy_process_group()
    hvd.shutdown()


def measure(
    hosts: int, rate: str, sizes: Sequence[str], passes: int, passed: Sequence[str], out: Path | None
) -> list[Record]:
    """Measures each size on links of one rate, once in each pass; each record is written as soon as it is there."""
    from benchmarks.netlab import Netlab

    found: dict[str, Record] = {}
    with Netlab(hosts=hosts, rate=rate) as lab:
        for size in [*sizes] * passes:
            begun = results.begin()
            command = ["-m", "benchmarks.bucket_sizes", "--worker", "--sizes", size, *passed]
            variables = {"HOROVOD_FUSION_THRESHOLD": str(int(float(size) * MIB))}
            measured = launch.on_lab(lab, command, variables=variables)
            setting: results.Setting = {"hosts": hosts, "rate": rate, "MiB": float(size)}
            seconds = measured.pop("seconds")
            if size in found:
                before = found[size].measure(STEP).samples
                seconds = {name: before[name] + row for name, row in seconds.items()}
            measures = [Measure(STEP, "s", seconds, DDP)]
            found[size] = Record(setting, measures, *begun, results.command_line(), measured)
            if out:
                results.keep(out, NAME, found[size])
            print(f"{results.label(setting)}: {_median(found[size], OURS):.3f} s a step", file=sys.stderr, flush=True)
    return list(found.values())


def _median(record: Record, name: str) -> float:
    return sampling.median(record.measure(STEP).samples[name])


def allowed(records: Sequence[Record]) -> dict[float, float]:
    """Returns the seconds that a step may take, by size, for records of one rate."""
    best = min(records, key=lambda record: _median(record, OURS))
    hosts = int(best.setting["hosts"])

    def messages(record: Record) -> float:
        return float(record.details["buckets"]) * 2 * (hosts - 1) * hosts

    return {
        float(record.setting["MiB"]): SLACK * _median(best, OURS)
        + MESSAGE * max(0.0, messages(record) - messages(best))
        for record in records
    }


def goals(records: Sequence[Record]) -> list[tuple[str, str, bool]]:
    """Lists goals: goal, what was measured, and whether it holds, for each rate."""
    found = []
    for rate in dict.fromkeys(record.setting["rate"] for record in records):
        of_rate = [record for record in records if record.setting["rate"] == rate]
        limits = allowed(of_rate)
        over = {record.setting["MiB"]: _median(record, OURS) / limits[float(record.setting["MiB"])]
                for record in of_rate}  # fmt: skip
        worst = max(over, key=lambda size: over[size])
        said = f"{worst:g} MiB: {over[worst]:.2f} of the limit"
        found.append((f"{rate}: no size slower than 1.05 x the best and its messages", said, over[worst] <= 1))
    return found


def show(records: Sequence[Record], console: Console) -> None:
    """Prints a table of the steps, and one of the goals."""
    table = Table(["rate", "MiB", "buckets", "ms a step", "allowed", "none", "DDP", "DDP / this"])
    for rate in dict.fromkeys(record.setting["rate"] for record in records):
        of_rate = [record for record in records if record.setting["rate"] == rate]
        limits = allowed(of_rate)
        for record in sorted(of_rate, key=lambda each: float(each.setting["MiB"])):
            size = float(record.setting["MiB"])
            ours, alone, theirs = (_median(record, name) for name in (OURS, ALONE, DDP))
            numbers = (f"{1e3 * seconds:.0f}" for seconds in (ours, limits[size], alone, theirs))
            table.add(str(rate), f"{size:g}", str(record.details["buckets"]), *numbers, f"{theirs / ours:.2f}")
    table.show(console)
    tables.goals(goals(records)).show(console)


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--hosts", type=int, default=4, help="netlab hosts, one rank on each (%(default)s)")
    parser.add_argument("--rates", default=",".join(RATES), help="of the hosts' links (%(default)s)")
    parser.add_argument("--sizes", default=",".join(SIZES), help="of buckets, in MiB (%(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="in a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (%(default)s)")
    parser.add_argument("--passes", type=int, default=1, help="over all sizes of a rate (%(default)s)")
    parser.add_argument("--width", type=int, default=384, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two sizes and one rate, a small model on two hosts")
    shared.add_out(parser)
    shared.add_table(parser)
    shared.add_worker(parser)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.hosts, arguments.rates, arguments.sizes = 2, "200mbit", "0.25,4"
        arguments.steps, arguments.rounds, arguments.width, arguments.layers = 1, 2, 64, 1
    sizes, model = arguments.sizes.split(","), (arguments.width, arguments.layers)
    if arguments.worker:
        worker(*model, float(sizes[0]), arguments.steps, arguments.rounds)
        return
    if arguments.table:
        records = results.load(arguments.out or RESULTS, NAME).records
    else:
        passed = []
        for name in ("steps", "rounds", "width", "layers"):
            passed += [f"--{name}", str(getattr(arguments, name))]
        records = []
        for rate in arguments.rates.split(","):
            records += measure(arguments.hosts, rate, sizes, arguments.passes, passed, arguments.out)
    show(records, Console(width=140))


if __name__ == "__main__":
    main()
