"""What a daemon takes while nothing is to do: CPU time, resident memory, and names in /dev/shm.

    python -m benchmarks.footprint
    python -m benchmarks.footprint --ranks 4 --seconds 30

The workers of a job on this host train for a few steps, with 100 MB of gradients, and reduce a few tensors besides;
then they sit still, and the daemon is watched from outside, through /proc. Its resident memory is split as the kernel
does: what lies in the arenas, which the workers have mapped, too, is shared; the rest is the daemon's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launch import MARK, fusionrun

ELEMENTS = 25_000_000  # float32
STEPS = 5
SETTLE_S = 1.0  # between the last operation and the watch


def worker(seconds: float) -> None:
    """What each rank runs; rank 0 watches the daemon and prints the result."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    layers = [torch.nn.Parameter(torch.zeros(ELEMENTS // 10)) for _ in range(10)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers, 1e-3))
    for _ in range(STEPS):
        optimizer.zero_grad()
        torch.stack([layer.sum() for layer in layers]).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        hvd.allreduce(torch.ones(1000), name="metric")
        hvd.allgather(torch.ones(1000), name="outputs")
    hvd.barrier()
    if hvd.rank() == 0:
        time.sleep(SETTLE_S)
        before = _daemon()
        began = time.perf_counter()
        cpu = cpu_seconds(before["pid"])
        time.sleep(seconds)
        share = (cpu_seconds(before["pid"]) - cpu) / (time.perf_counter() - began)
        memory = resident(before["pid"])
        result = {"share": share, "arenas": before["workers"]["arenas"], "memory": memory, "shm": _shm()}
        print(MARK + json.dumps(result), flush=True)
    else:
        time.sleep(SETTLE_S + seconds)
    hvd.barrier()
    hvd.shutdown()


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far. From the scheduler's statistics, which count nanoseconds: the usual
    counters advance in ticks of 10 ms, and an idle daemon needs less than that in a second."""
    found = (path.read_text().split()[0] for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(map(int, found)) / 1e9


def resident(pid: int) -> dict[str, int]:
    """Bytes of resident memory of a process: anonymous (Anon), of files (File), shared (Shmem)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":") for line in lines if line.startswith("Rss"))
    return {name.removeprefix("Rss"): int(size.split()[0]) * 1024 for name, size in found.items()}


def _daemon() -> Any:
    """What the daemon of this job says about itself."""
    command = [sys.executable, "-m", "fusiond", "status", "--json", "--job", os.environ["FUSION_JOB_ID"]]
    (found,) = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def _shm() -> int:
    """Number of files in /dev/shm."""
    return len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0


def show(result: dict[str, Any], ranks: int, before: int, after: int) -> None:
    """A table."""
    memory = result["memory"]
    table = Table(title=f"an idle daemon, {ranks} ranks on this host")
    table.add_column("what")
    table.add_column("how much", justify="right")
    table.add_row("CPU", f"{result['share']:.3%} of a core")
    table.add_row("resident memory beyond the arenas", f"{(memory['Anon'] + memory['File']) / 1e6:.1f} MB")
    table.add_row("  anonymous", f"{memory['Anon'] / 1e6:.1f} MB")
    table.add_row("  of files (libraries)", f"{memory['File'] / 1e6:.1f} MB")
    table.add_row("resident memory in arenas", f"{memory['Shmem'] / 1e6:.1f} MB")
    table.add_row("size of the arenas", f"{result['arenas'] / 1e6:.1f} MB")
    table.add_row("files in /dev/shm before, during, after", f"{before}, {result['shm']}, {after}")
    Console(width=100).print(table)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.footprint", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, default=2, help="ranks, on one host (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the daemon is watched (%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.seconds)
        return
    before = _shm()
    result = fusionrun(arguments.ranks, ["-m", "benchmarks.footprint", "--worker", "--seconds", str(arguments.seconds)])
    show(result, arguments.ranks, before, _shm())


if __name__ == "__main__":
    main()
