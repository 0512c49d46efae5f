"""`torch.distributed`'s operations by backend `fusion`, side by side with gloo.

    python -m benchmarks.backend --ranks 2,4
    python -m benchmarks.backend --hosts 2 --ranks 2,4
    python -m benchmarks.backend --operations all_reduce,send_recv --sizes 4,1048576

Each rank has both backends up in one process: the world is fusion_rt's, a second group of the same ranks is gloo's.
Turns of one alternate with turns of the other. All tensors are ordinary ones, as `torch.empty` makes them. The size is
that of the larger of input and output on a rank. A sample is the median time of an operation in a turn, on the slowest
rank; that of `send_recv` is half the time that a tensor takes from the first rank to the last, and back.

Workers have this command's environment: `FUSION_MEMORY=adopt` measures tensors that are moved into shared memory.

With `--hosts N` ranks run in network namespaces (root needed), joined by links of `--rate`, and share them evenly.
Steps of training are measured by `benchmarks.backend_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import allreduce
from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, sampling, tables
from benchmarks.common.backends import GLOO, OURS, both_backends, run
from benchmarks.common.results import Measure, Record, Setting
from benchmarks.common.tables import Table

NAME = "backend"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = (4, 1_024, 65_536, 1_048_576, 4_194_304, 25_600_000, 102_400_000, 268_435_456)


def call_of(operation: str, elements: int, group: Any) -> Callable[[], Any]:
    """Returns a function that does the operation once, on float32 tensors made here.

    Args:
        operation: of `OPERATIONS`.
        elements: of the larger tensor; each rank's share is at least one.
        group: all ranks.
    """
    import torch
    import torch.distributed as dist

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    share = max(1, elements // ranks)
    small, large, other = torch.ones(share), torch.ones(share * ranks), torch.ones(share * ranks)
    if operation == "all_reduce":
        large = torch.ones(elements)
        return lambda: dist.all_reduce(large, group=group)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(large, small, group=group)
    if operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(small, large, group=group)
    if operation == "all_to_all":
        return lambda: dist.all_to_all_single(other, large, group=group)
    tensor, last = torch.ones(elements), ranks - 1

    def back_and_forth() -> None:
        for source, target in ((0, last), (last, 0)):
            if rank == source:
                dist.send(tensor, target, group=group)
            elif rank == target:
                dist.recv(tensor, source, group=group)

    return back_and_forth


def worker(operations: list[str], sizes: list[int], rounds: int) -> None:
    """Measures on each rank; rank 0 prints the samples (s) by operation, size and backend."""
    import torch
    import torch.distributed as dist

    with both_backends() as groups:
        found: dict[str, dict[str, dict[str, list[float]]]] = {}
        for operation in operations:
            halved = 2 if operation == "send_recv" else 1
            for nbytes in sizes:
                calls = {name: call_of(operation, nbytes // 4, group) for name, group in groups.items()}
                turns = {name: allreduce.turn_of(call, allreduce.repeats(call)) for name, call in calls.items()}
                samples = sampling.alternate(turns, rounds, warm_up=0, first=dist.barrier)
                slowest = torch.tensor(list(samples.values()), dtype=torch.float64) / halved
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                rows = zip(samples, slowest.tolist(), strict=True)
                found.setdefault(operation, {})[str(nbytes)] = {name: results.rounded(row) for name, row in rows}
        if dist.get_rank() == 0:
            launch.tell(found)


def measure(setting: Setting, operations: list[str], sizes: list[int], rounds: int) -> list[Record]:
    """Runs the workers of one setting; returns a record for each operation."""
    here, date = results.begin()
    command = ["-m", "benchmarks.backend", "--worker", "--rounds", str(rounds)]
    command += ["--sizes", ",".join(map(str, sizes)), "--operations", ",".join(operations)]
    found = run(setting, command)
    return [
        Record(
            {"operation": operation, **setting},
            [Measure(name=size, unit="s", samples=samples, peer=GLOO) for size, samples in by_size.items()],
            here,
            date,
            results.command_line(),
        )
        for operation, by_size in found.items()
    ]


def show(record: Record) -> None:
    """Prints a table of an operation: milliseconds, and how many times faster than gloo."""
    columns = ["size", f"{OURS} ms", f"{GLOO} ms", f"{GLOO} / {OURS}"]
    table = Table(columns, title=f"{record.setting['operation']}, {allreduce.title(record.setting)}")
    for each in record.measures:
        times = [tables.ms(sampling.median(each.samples[name])) for name in (OURS, GLOO)]
        table.add(tables.nbytes(int(each.name)), *times, tables.ratio(ratio_of(each)))
    table.show()


def ratio_of(measured: Measure) -> sampling.Estimate:
    """Returns how many times as long gloo takes."""
    return sampling.ratio(measured.samples[GLOO], measured.samples[OURS])


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--ranks", help="numbers of ranks, such as 2,4 (2 on one host, else one on each)")
    parser.add_argument("--hosts", default="1", help="numbers of netlab hosts, such as 1,2 (%(default)s)")
    parser.add_argument("--rate", help="rate of each host's link, such as 100mbit")
    parser.add_argument("--operations", default=",".join(OPERATIONS), help="of %(default)s")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each backend (%(default)s)")
    shared.add_out(parser)
    shared.add_worker(parser)
    arguments = parser.parse_args()
    sizes = shared.numbers(arguments.sizes)
    operations = shared.chosen(parser, "operation", arguments.operations.split(","), dict.fromkeys(OPERATIONS))
    if arguments.worker:
        worker(operations, sizes, arguments.rounds)
        return
    chosen = allreduce.settings(arguments.ranks, arguments.hosts, arguments.rate, "control")
    if not chosen:
        parser.error(f"{arguments.ranks} ranks cannot be shared evenly by {arguments.hosts} hosts")
    for setting in chosen:
        found = measure(setting, operations, allreduce.fitting(sizes, int(setting["ranks"])), arguments.rounds)
        if arguments.out:
            results.keep(arguments.out, NAME, *found)
        for record in found:
            show(record)


if __name__ == "__main__":
    main()
