"""All-reduce, side by side: fusion_rt, torch.distributed gloo, and Horovod where it can be imported.

    python -m benchmarks.allreduce --ranks 2,4
    python -m benchmarks.allreduce --hosts 2
    python -m benchmarks.allreduce --hosts 4 --rate 1gbit
    python -m benchmarks.allreduce --hosts 1,2,4 --ranks 2,4 --out benchmarks/results/allreduce.json

Every rank is one process that has all runtimes up at the same time; turns of one alternate with turns of the others, so
that other load of the machine affects all of them. A sample is the median time of an operation in a turn, on the
slowest rank. Two contenders are fusion_rt's: *arena* reduces a tensor in the arena, as a gradient is in training (and
as `fusion_rt.torch.empty` makes it); *copy* reduces an ordinary tensor, which is copied into the arena and back.
Printed are medians, and the median of the turns' ratios with its interval.

With `--hosts N` ranks run in network namespaces (root needed), joined by links of `--rate`, and share them evenly;
without `--ranks` there is one on each. *Limit* is then the time that the ring's bytes need on that link, in full
Ethernet frames with their TCP, IP and Ethernet headers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import arguments as shared
from benchmarks.common import launch, peers, results, sampling, tables
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table

NAME = "allreduce"
GLOO, ARENA, COPY = "gloo", "arena", "copy"
SIZES = (
    4, 1_024, 16_384, 65_536, 262_144, 1_048_576, 8_388_608, 25_600_000, 102_400_000, 268_435_456, 1_073_741_824
)  # fmt: skip
_FRAMED = 1514 / 1448  # bytes on the wire for each byte of payload, at an MTU of 1500 and with TCP timestamps
_BUDGET = 0.5  # seconds of one turn, at most; small sizes do more operations in less
_MOST = 200  # operations in a turn
_WARM_UP, _WARM_UP_S = 40, 4.0  # operations at most, and seconds: ordinary tensors get huge pages in the first ones
_ROOM = 8  # bytes of memory that are needed for each that is reduced, on each rank: tensors, arena, what gloo sends


def worker(sizes: list[int], rounds: int, with_horovod: bool) -> None:
    """Measures on each rank; rank 0 prints the samples (s) by size and runtime."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    launch.process_group(hvd)
    horovod = peers.horovod() if with_horovod else None
    result: dict[str, dict[str, list[float]]] = {}
    for nbytes in sizes:
        arena = hvd.empty(nbytes // 4, dtype=torch.float32)
        plain = torch.empty(nbytes // 4, dtype=torch.float32)
        arena.fill_(1.0)
        plain.fill_(1.0)
        calls: dict[str, Callable[[], Any]] = {
            ARENA: lambda t=arena: hvd.allreduce_(t, op=hvd.Average, name="arena"),  # type: ignore[misc]
            COPY: lambda t=plain: hvd.allreduce_(t, op=hvd.Average, name="copy"),  # type: ignore[misc]
            GLOO: lambda t=plain: dist.all_reduce(t),  # type: ignore[misc]
        }
        if horovod is not None:
            calls[peers.HOROVOD] = lambda t=plain: horovod.allreduce_(t, op=horovod.Average, name="x")  # type: ignore[misc]
        turns = {name: turn_of(call, repeats(call)) for name, call in calls.items()}
        samples = sampling.alternate(turns, rounds, warm_up=0, first=dist.barrier)
        slowest = torch.tensor(list(samples.values()), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        result[str(nbytes)] = {name: results.rounded(row) for name, row in zip(samples, slowest.tolist(), strict=True)}
    if hvd.rank() == 0:
        launch.tell(result)
    dist.destroy_process_group()
    hvd.shutdown()


def turn_of(call: Callable[[], Any], count: int) -> Callable[[], float]:
    """Returns a turn of `count` operations, whose sample is their median (s)."""

    def turn() -> float:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    return turn


def repeats(call: Callable[[], Any]) -> int:
    """Warms up, and returns how many operations fit into a turn's budget, the same on all ranks."""
    import torch
    import torch.distributed as dist

    def slowest(count: int) -> float:
        """Returns the seconds of the last of so many operations, on the slowest rank."""
        for _ in range(count):
            begin = time.perf_counter()
            call()
        seconds = torch.tensor([time.perf_counter() - begin])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return float(seconds)

    once = slowest(3)
    more = int(min(_WARM_UP, _WARM_UP_S / once))
    if more:
        once = slowest(more)
    return int(max(1, min(_MOST, _BUDGET / once)))


def settings(ranks: str | None, hosts: str, rate: str | None, encryption: str) -> list[Setting]:
    """Returns a setting for each number of hosts and each number of ranks that can be on them."""
    found: list[Setting] = []
    for count in shared.numbers(hosts):
        for all_ranks in shared.numbers(ranks) if ranks else [2 if count == 1 else count]:
            if all_ranks % count == 0 and all_ranks > 1:
                network = {"rate": rate or "unshaped", "encryption": encryption} if count > 1 else {}
                found.append({"hosts": count, "ranks": all_ranks, **network})
    return found


def measure(setting: Setting, sizes: list[int], rounds: int, with_horovod: bool = True) -> Record:
    """Runs the workers of one setting."""
    hosts, ranks = int(setting["hosts"]), int(setting["ranks"])
    here, date = results.begin()
    command = ["-m", "benchmarks.allreduce", "--worker", "--rounds", str(rounds)]
    command += ["--sizes", ",".join(map(str, sizes)), *([] if with_horovod else ["--no-horovod"])]
    if hosts > 1:
        rate, variables = setting["rate"], {"FUSION_ENCRYPTION": str(setting["encryption"])}
        limit = None if rate == "unshaped" else str(rate)
        found = launch.on_hosts(hosts, limit, command, per_host=ranks // hosts, variables=variables)
    else:
        found = launch.fusionrun(ranks, command)
    measures = [Measure(name=size, unit="s", samples=samples, peer=GLOO) for size, samples in found.items()]
    return Record(setting, measures, here, date, results.command_line())


def limit(setting: Setting, nbytes: int) -> float | None:
    """Returns the seconds that a ring's bytes need on the links; None if these have no limit, or ranks share hosts."""
    from benchmarks.netlab.iproute import bits_per_second

    hosts, rate = int(setting["hosts"]), str(setting.get("rate", "unshaped"))
    if rate == "unshaped" or hosts != setting["ranks"]:
        return None
    return 2 * nbytes * (hosts - 1) / hosts * _FRAMED / (bits_per_second(rate) / 8)


def title(setting: Setting) -> str:
    """Describes a setting in words."""
    if setting["hosts"] == 1:
        return f"{setting['ranks']} ranks on one host"
    each = "" if setting["ranks"] == setting["hosts"] else f" with {setting['ranks']} ranks"
    encrypted = "" if setting["encryption"] == "control" else f", encryption {setting['encryption']}"
    return f"{setting['hosts']} hosts{each}, {setting['rate']}{encrypted}"


def show(record: Record) -> None:
    """Prints a table: milliseconds, and how many times faster than gloo."""
    names = list(record.measures[0].samples)
    limited = limit(record.setting, 1) is not None
    ours = [name for name in names if name != GLOO]
    columns = ["size", *(f"{name} ms" for name in names), *(f"gloo / {name}" for name in ours)]
    table = Table(columns + (["limit ms", "arena / limit"] if limited else []), title=title(record.setting))
    for each in record.measures:
        row = [tables.ms(sampling.median(each.samples[name])) for name in names]
        row += [tables.ratio(sampling.ratio(each.samples[GLOO], each.samples[name])) for name in ours]
        if seconds := limit(record.setting, int(each.name)):
            row += [tables.ms(seconds), tables.number(sampling.median(each.samples[ARENA]) / seconds)]
        table.add(tables.nbytes(int(each.name)), *row)
    table.show()


def fitting(sizes: list[int], ranks: int) -> list[int]:
    """Returns the sizes for which this machine has memory, and prints those that are left out."""
    import psutil

    room = psutil.virtual_memory().available / (_ROOM * ranks)
    for size in (size for size in sizes if size > room):
        print(f"{tables.nbytes(size)} are left out: {ranks} ranks need {_ROOM} times that each.", file=sys.stderr)
    return [size for size in sizes if size <= room]


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--ranks", help="numbers of ranks, such as 2,4 (2 on one host, else one on each)")
    parser.add_argument("--hosts", default="1", help="numbers of netlab hosts, such as 1,2,4 (%(default)s)")
    parser.add_argument("--rate", help="rate of each host's link, such as 1gbit")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each runtime (%(default)s)")
    parser.add_argument("--no-horovod", action="store_true", help="also where there is one")
    parser.add_argument(
        "--encryption", default="control", choices=["all", "control"],
        help="between hosts; gloo encrypts nothing, so control is the comparison of like with like",
    )  # fmt: skip
    shared.add_out(parser)
    shared.add_worker(parser)
    arguments: argparse.Namespace = parser.parse_args()
    sizes = shared.numbers(arguments.sizes)
    if arguments.worker:
        worker(sizes, arguments.rounds, not arguments.no_horovod)
        return
    chosen = settings(arguments.ranks, arguments.hosts, arguments.rate, arguments.encryption)
    if not chosen:
        parser.error(f"{arguments.ranks} ranks cannot be shared evenly by {arguments.hosts} hosts")
    for setting in chosen:
        possible = fitting(sizes, int(setting["ranks"]))
        record = measure(setting, possible, arguments.rounds, not arguments.no_horovod)
        if arguments.out:
            results.keep(arguments.out, NAME, record)
        show(record)


if __name__ == "__main__":
    main()
