"""All-reduce by size on one host, and between hosts in the clear and encrypted, beside gloo; and the busiest thread.

    python -m benchmarks.cores
    python -m benchmarks.cores --sizes 4,25600000 --rounds 9
    python -m benchmarks.cores --table

On one host the ranks share a daemon; between hosts each has its own, on addresses of loopback, which has large packets
as a network card with segmentation offload has. A tensor lies in the arena, or is the script's own ("ordinary"). gloo
runs in the same processes, and all take turns. A sample is the time on the slowest rank.

For a size, the processor time of each thread of rank 0's host is read before and after some operations. The busiest
thread's is the floor of an operation, however many processors there are. So on a machine with few of them it tells what
many would give: the rate at which that thread would be full.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "cores"
RESULTS = results.RESULTS / "cores.json"
SIZES = (4, 65_536, 1 << 20, 25_600_000)  # bytes
ARENA, ORDINARY, GLOO = "arena", "ordinary", "gloo"
PLACES = ((1, 2, ""), (1, 4, ""), (2, 2, "control"), (2, 2, "all"))  # hosts, ranks, encryption
BUSIEST, ALL = "busiest thread", "all threads"
_BUSY_FROM = 1 << 20  # bytes of an operation from which the processor time of threads is read
_BYTES_A_TURN = 4_000_000
Threads: TypeAlias = dict[str, float]


def threads_of(pids: Sequence[int]) -> Threads:
    """Returns the processor seconds of each thread of some processes so far, by process and thread."""
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            found[f"{pid}/{path.parent.name}"] = int(path.read_text(encoding="utf-8").split()[0]) / 1e9
    return found


def spent(before: Threads, after: Threads, count: int) -> tuple[float, float]:
    """Returns the processor seconds an operation of the busiest thread, and of all together."""
    differences = [(seconds - before.get(thread, 0.0)) / count for thread, seconds in after.items()]
    return max(differences), sum(differences)


def worker(sizes: Sequence[int], rounds: int) -> None:
    """Measures on each rank; rank 0 prints its samples, by size and contender."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    launch.process_group(hvd)
    pid = int(Path(os.environ["FUSION_SOCKET"]).with_name("lock").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    for nbytes in sizes:
        shared_one, own = hvd.empty(nbytes // 4, dtype=torch.float32), torch.empty(nbytes // 4)
        ways: dict[str, Callable[[], object]] = {
            ARENA: lambda x=shared_one, n=nbytes: hvd.allreduce_(x, op=hvd.Sum, name=f"{n}"),  # type: ignore[misc]
            ORDINARY: lambda x=own, n=nbytes: hvd.allreduce_(x, op=hvd.Sum, name=f"own {n}"),  # type: ignore[misc]
            GLOO: lambda x=own: dist.all_reduce(x),  # type: ignore[misc]
        }
        inner = max(1, min(20, _BYTES_A_TURN // nbytes))
        times: dict[str, list[float]] = {name: [] for name in ways}
        busy: dict[str, tuple[float, float]] = {}
        for number in range(-2, rounds):  # the first ones warm up
            for name in (*ways,)[:: -1 if number % 2 else 1]:
                shared_one.zero_()
                own.zero_()
                hvd.barrier()
                before, began = threads_of([pid, os.getpid()]), time.perf_counter()
                for _ in range(inner):
                    ways[name]()
                seconds = torch.tensor([(time.perf_counter() - began) / inner])
                if nbytes >= _BUSY_FROM:
                    busy[f"{name} {number}"] = spent(before, threads_of([pid, os.getpid()]), inner)
                hvd.allreduce_(seconds, op=hvd.Max, name="seconds")
                if number >= 0:
                    times[name].append(float(seconds))
        counted = {name: [busy[f"{name} {n}"] for n in range(rounds) if f"{name} {n}" in busy] for name in ways}
        found[str(nbytes)] = {"seconds": times, "busy": counted}
    if hvd.rank() == 0:
        launch.tell(found)
    hvd.shutdown()


def turn(hosts: int, ranks: int, encryption: str, command: Sequence[str]) -> dict[str, Any]:
    """Runs a job; returns the samples of rank 0."""
    variables = {"GLOO_SOCKET_IFNAME": "lo", **({"FUSION_ENCRYPTION": encryption} if encryption else {})}
    if hosts == 1:
        return launch.fusionrun(ranks, command, variables)
    names = ",".join(f"127.0.0.{host + 1}:{ranks // hosts}" for host in range(hosts))
    return launch.on_loopback(ranks, names, command, variables)


def record_of(hosts: int, ranks: int, encryption: str, found: dict[str, Any]) -> Record:
    """Makes the record of a job's samples."""
    machine, date = results.begin()
    measures = []
    for size, samples in found.items():
        measures.append(Measure(f"{size} B", "s", samples["seconds"], GLOO))
        for index, what in enumerate((BUSIEST, ALL)):
            busy = {name: [pair[index] for pair in pairs] for name, pairs in samples["busy"].items() if pairs}
            if busy:
                measures.append(Measure(f"{size} B: {what}", "s", busy, GLOO))
    setting: results.Setting = {"hosts": hosts, "ranks": ranks, "encryption": encryption}
    return Record(setting, measures, machine, date, results.command_line(), {})


def table(records: Sequence[Record]) -> Table:
    """Makes the table of all places and sizes."""
    head = ["hosts, ranks", "bytes", "gloo ms", "arena ms", "ordinary ms", "gloo / arena", "gloo / ordinary"]
    made = Table([*head, "busiest thread full at GB/s", "CPU ms: ours, gloo's"], left=1)
    for record in records:
        setting = record.setting
        place = f"{setting['hosts']}, {setting['ranks']}" + (
            f", {setting['encryption']}" if setting["encryption"] else ""
        )
        measures = {measure.name: measure.samples for measure in record.measures}
        for name, samples in measures.items():
            if ":" in name:
                continue
            size = int(name.removesuffix(" B"))
            times = {way: statistics.median(samples[way]) for way in (GLOO, ARENA, ORDINARY)}
            ratios = [f"{times[GLOO] / times[way]:.2f}" for way in (ARENA, ORDINARY)]
            cells = ["", ""]
            if busiest := measures.get(f"{name}: {BUSIEST}"):
                everything = measures[f"{name}: {ALL}"]
                cpu = [1e3 * statistics.median(everything[way]) for way in (ARENA, GLOO)]
                cells = [f"{size / statistics.median(busiest[ARENA]) / 1e9:.2f}", f"{cpu[0]:.1f}, {cpu[1]:.1f}"]
            made.add(place, f"{size:,}", *(f"{1e3 * seconds:.3g}" for seconds in times.values()), *ratios, *cells)
    return made


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--sizes", type=shared.numbers, default=list(SIZES), help="bytes, with commas between")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender (%(default)s)")
    shared.add_out(parser, RESULTS)
    shared.add_table(parser)
    shared.add_worker(parser)
    parser.add_argument("--places", type=int, default=len(PLACES), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        worker(arguments.sizes, arguments.rounds)
        return
    if not arguments.table:
        sizes = ",".join(map(str, arguments.sizes))
        command = ["-m", "benchmarks.cores", "--worker", "--sizes", sizes, "--rounds", str(arguments.rounds)]
        made = [record_of(*place, turn(*place, command)) for place in PLACES[: arguments.places]]
        results.keep(arguments.out, NAME, *made)
    table(results.load(arguments.out, NAME).records).show(Console(width=160))


if __name__ == "__main__":
    main()
