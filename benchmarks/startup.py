"""Time of a hello-world: `fusionrun -np 2`, `torchrun --nproc-per-node 2` and, where it is installed,
`horovodrun -np 2`, alternating, on warm caches.

    python -m benchmarks.startup
    python -m benchmarks.startup --rounds 10 --verbose

Each worker joins its job, all-reduces one number, prints it and leaves. The time is that of the command from its start
to its end. With --verbose, the time at which the last worker reached each phase is shown, too, in seconds since the
command started. Under horovodrun the workers use `horovod.torch`, or `fusion_rt.torch` where horovod was built without
PyTorch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import time
from functools import partial
from typing import Any

from benchmarks.common import arguments as shared
from benchmarks.common import peers, results, sampling, tables
from benchmarks.common.launch import environment
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "startup"
OURS, TORCHRUN, HOROVODRUN = "fusionrun", "torchrun", "horovodrun"

_BEGAN = "BENCHMARK_BEGAN"  # environment variable: when the command was started, in seconds of the machine's clock
_PHASES = (
    "the worker runs",
    "torch is imported",
    "the job is joined",
    "the number is reduced",
    "the command has ended",
)
# Horovod's launcher needs nothing of Gloo itself, but refuses to start when horovod was built without any framework.
_HOROVODRUN = (
    "import horovod.runner.launch as launch; launch.gloo_built = lambda verbose=False: True; launch.run_commandline()"
)


def worker(runtime: str) -> None:
    """Runs the hello-world on each rank, and prints when it reached each phase."""
    phases = [time.time()]
    import torch

    if runtime != "torchrun":
        hvd = _horovod() if runtime == "horovodrun" else importlib.import_module("fusion_rt.torch")
        phases.append(time.time())
        hvd.init()
        phases.append(time.time())
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
        phases.append(time.time())
        hvd.shutdown()
    else:
        import torch.distributed as dist

        phases.append(time.time())
        dist.init_process_group("gloo")
        phases.append(time.time())
        total = torch.ones(1)
        dist.all_reduce(total)
        phases.append(time.time())
        dist.destroy_process_group()
    began = float(os.environ[_BEGAN])
    line = " ".join(["hello", str(int(total.item())), *(f"{phase - began:.3f}" for phase in phases)]) + "\n"
    os.write(1, line.encode())  # in one piece: torchrun lets its workers write into each other's lines


def _horovod() -> Any:
    hvd = importlib.import_module("horovod.torch")
    # Built without PyTorch, it is a module with nothing in it.
    return hvd if hasattr(hvd, "init") else importlib.import_module("fusion_rt.torch")


def measure(runtime: str, ranks: int) -> list[float]:
    """Runs the hello-world once; returns the seconds after which the last worker had reached each phase.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
        RuntimeError: it printed something else.
    """
    launcher = {
        "fusionrun": ["-m", "fusion_rt.runner", "-np", str(ranks), sys.executable],
        "torchrun": ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"],
        "horovodrun": ["-c", _HOROVODRUN, "--gloo", "-np", str(ranks), sys.executable],
    }[runtime]
    command = [sys.executable, *launcher, "-m", "benchmarks.startup", "--worker", runtime]
    began = time.time()
    run = subprocess.run(
        command, env={**environment(), _BEGAN: str(began)}, stdout=subprocess.PIPE, text=True, check=True
    )
    ended = time.time() - began
    found = re.findall(rf"hello {ranks} ([\d. ]+)", run.stdout)
    if len(found) != ranks:
        raise RuntimeError(f"{ranks} workers of {runtime} should have said hello, but they printed: {run.stdout!r}")
    return [max(phase) for phase in zip(*(map(float, line.split()) for line in found), strict=True)] + [ended]


def collect(ranks: int, rounds: int) -> Record:
    """Measures the launchers in turns."""
    here, date = results.begin()
    names = [OURS, TORCHRUN, *([HOROVODRUN] if peers.horovod_there() else [])]
    phases: dict[str, list[list[float]]] = {name: [] for name in names}

    def turn(name: str) -> float:
        phases[name].append(measure(name, ranks))
        return phases[name][-1][-1]

    sampling.alternate({name: partial(turn, name) for name in names}, rounds)
    made = []
    for index, phase in enumerate(_PHASES):
        samples = {name: results.rounded(each[index] for each in found[-rounds:]) for name, found in phases.items()}
        made.append(Measure(phase, "s", samples, TORCHRUN))
    return Record({"ranks": ranks}, made, here, date, results.command_line())


def show(record: Record, verbose: bool) -> None:
    """Prints a table of medians, and of the others' ratios to torchrun."""
    names = list(record.measures[0].samples)
    ours = [name for name in names if name != TORCHRUN]
    title = f"hello-world on {record.setting['ranks']} ranks, seconds"
    table = Table(["until", *names, *(f"torchrun / {name}" for name in ours)], title=title)
    for each in record.measures if verbose else record.measures[-1:]:
        row = [f"{sampling.median(each.samples[name]):.2f}" for name in names]
        row += [tables.ratio(sampling.ratio(each.samples[TORCHRUN], each.samples[name])) for name in ours]
        table.add(each.name, *row)
    table.show()


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks, on one host (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each, after one for warming up (%(default)s)")
    parser.add_argument("--verbose", action="store_true", help="also when the phases of the start were reached")
    shared.add_out(parser)
    parser.add_argument("--worker", metavar="RUNTIME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker)
        return
    record = collect(arguments.ranks, arguments.rounds)
    if arguments.out:
        results.keep(arguments.out, NAME, record)
    show(record, arguments.verbose)


if __name__ == "__main__":
    main()
