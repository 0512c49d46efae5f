"""Footprint of an idle daemon: CPU time, resident memory, and names in /dev/shm.

    python -m benchmarks.footprint
    python -m benchmarks.footprint --ranks 4 --seconds 30

The workers of a job on this host train for a few steps, with 100 MB of gradients, and reduce a few tensors besides;
then they are idle, and the daemon is watched from outside, through /proc. Its resident memory is split as the kernel
does: the arenas, which the workers have mapped, too, are shared; the rest is the daemon's own.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "footprint"
OURS, CPU, OWN = "fusion_rt", "CPU", "resident memory beyond the arenas"
ELEMENTS = 25_000_000  # float32
STEPS = 5
SETTLE_S = 1.0  # between the last operation and the watch


def worker(seconds: float) -> None:
    """Measures on each rank; rank 0 watches the daemon and prints the result."""
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
        before = launch.daemon()
        began = time.perf_counter()
        cpu = launch.cpu_seconds(before["pid"])
        time.sleep(seconds)
        share = (launch.cpu_seconds(before["pid"]) - cpu) / (time.perf_counter() - began)
        memory = resident(before["pid"])
        result = {"share": share, "arenas": before["workers"]["arenas"], "memory": memory, "shm": _shm()}
        launch.tell(result)
    else:
        time.sleep(SETTLE_S + seconds)
    hvd.barrier()
    hvd.shutdown()


def resident(pid: int) -> dict[str, int]:
    """Returns the resident memory of a process in bytes: anonymous (Anon), of files (File), shared (Shmem)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    found = dict(line.split(":") for line in lines if line.startswith("Rss"))
    return {name.removeprefix("Rss"): int(size.split()[0]) * 1024 for name, size in found.items()}


def _shm() -> int:
    """Counts the files in /dev/shm."""
    return len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0


def collect(ranks: int, seconds: float) -> Record:
    """Runs the job, and watches its daemon."""
    here, date = results.begin()
    before = _shm()
    command = ["-m", "benchmarks.footprint", "--worker", "--seconds", str(seconds)]
    found = launch.fusionrun(ranks, command)
    memory = found["memory"]
    measures = [
        Measure(CPU, "of a core", {OURS: [found["share"]]}),
        Measure(OWN, "B", {OURS: [memory["Anon"] + memory["File"]]}, portable=True),
    ]
    details = {"memory": memory, "arenas": found["arenas"], "shm": [before, found["shm"], _shm()], "seconds": seconds}
    return Record({"ranks": ranks}, measures, here, date, results.command_line(), details)


def show(record: Record) -> None:
    """Prints the results as a table."""
    memory = record.details["memory"]
    table = Table(["what", "how much"], title=f"an idle daemon, {record.setting['ranks']} ranks on this host")
    table.add("CPU", f"{record.measure(CPU).samples[OURS][0]:.3%} of a core")
    table.add(OWN, f"{record.measure(OWN).samples[OURS][0] / 1e6:.1f} MB")
    table.add("  anonymous", f"{memory['Anon'] / 1e6:.1f} MB")
    table.add("  of files (libraries)", f"{memory['File'] / 1e6:.1f} MB")
    table.add("resident memory in arenas", f"{memory['Shmem'] / 1e6:.1f} MB")
    table.add("size of the arenas", f"{record.details['arenas'] / 1e6:.1f} MB")
    table.add("files in /dev/shm before, during, after", ", ".join(map(str, record.details["shm"])))
    table.show()


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks, on one host (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which the daemon is watched (%(default)s)")
    shared.add_out(parser)
    shared.add_worker(parser)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.seconds)
        return
    record = collect(arguments.ranks, arguments.seconds)
    if arguments.out:
        results.keep(arguments.out, NAME, record)
    show(record)


if __name__ == "__main__":
    main()
