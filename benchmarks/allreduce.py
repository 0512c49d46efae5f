"""All-reduce, side by side: fusion_rt, torch.distributed gloo, and Horovod where it can be imported.

    python -m benchmarks.allreduce --ranks 2,4
    python -m benchmarks.allreduce --hosts 2
    python -m benchmarks.allreduce --hosts 4 --rate 1gbit

Every rank is one process that has all runtimes up at the same time; rounds of one alternate with rounds of the others,
so that whatever else the machine does meets all of them. Printed are medians over all operations of the slowest rank,
and ratios. Two columns are fusion_rt's: *arena* reduces a tensor that lies in the arena, as a gradient does in training
(and as `fusion_rt.torch.empty` gives it); *copy* reduces an ordinary tensor, which is copied into the arena and back.

With `--hosts N` each rank runs in a network namespace of its own (root needed), joined by links of `--rate`; *limit* is
then the time that the ring's bytes need on that link, in full Ethernet frames with their TCP, IP and Ethernet headers.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

SIZES = (4, 65_536, 1_048_576, 25_600_000, 102_400_000)  # bytes
_MARK = "RESULT "
_FRAMED = 1514 / 1448  # bytes on the wire for each byte of payload, at an MTU of 1500 and with TCP timestamps
_BUDGET = 1.5  # seconds of one round of one runtime, at most; small sizes do more operations in less


def worker(sizes: list[int], rounds: int) -> None:
    """What each rank runs; rank 0 prints the result."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
    horovod = _horovod()
    result: dict[str, dict[str, float]] = {}
    for nbytes in sizes:
        arena = hvd.empty(nbytes // 4, dtype=torch.float32)
        plain = torch.empty(nbytes // 4, dtype=torch.float32)
        arena.fill_(1.0)
        plain.fill_(1.0)
        calls: dict[str, Callable[[], Any]] = {
            "arena": lambda t=arena: hvd.allreduce_(t, op=hvd.Average, name="arena"),  # type: ignore[misc]
            "copy": lambda t=plain: hvd.allreduce_(t, op=hvd.Average, name="copy"),  # type: ignore[misc]
            "gloo": lambda t=plain: dist.all_reduce(t),  # type: ignore[misc]
        }
        if horovod is not None:
            calls["horovod"] = lambda t=plain: horovod.allreduce_(t, op=horovod.Average, name="x")  # type: ignore[misc]
        times: dict[str, list[float]] = {name: [] for name in calls}
        counts = {name: _repeats(call, dist, torch) for name, call in calls.items()}
        for _ in range(rounds):
            for name, call in calls.items():
                dist.barrier()
                for _ in range(counts[name]):
                    begin = time.perf_counter()
                    call()
                    times[name].append(time.perf_counter() - begin)
        slowest = torch.tensor([statistics.median(times[name]) for name in calls])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        result[str(nbytes)] = dict(zip(calls, slowest.tolist(), strict=True))
        plain.fill_(1.0)
    if hvd.rank() == 0:
        print(_MARK + json.dumps(result), flush=True)
    dist.destroy_process_group()
    hvd.shutdown()


def _repeats(call: Callable[[], Any], dist: Any, torch: Any) -> int:
    """Warms up, and says how many operations fit into a round's budget, the same on all ranks."""
    for _ in range(2):
        call()
    begin = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - begin])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return int(max(2, min(200, _BUDGET / float(seconds))))


def _horovod() -> Any:
    try:
        import horovod.torch as horovod
    except Exception:  # whatever an import of a package built for another torch raises
        return None
    if not horovod.is_initialized():
        horovod.init()
    return horovod


def measure(ranks: int, hosts: int, rate: str | None, sizes: list[int], rounds: int, encryption: str) -> dict[str, Any]:
    """Runs the workers of one configuration; returns seconds by size and runtime."""
    from benchmarks.netlab import Netlab

    command = [sys.executable, "-m", "benchmarks.allreduce", "--worker", "--rounds", str(rounds)]
    command += ["--sizes", ",".join(map(str, sizes))]
    environment = dict(os.environ, FUSION_ENCRYPTION=encryption, OMP_NUM_THREADS="1")
    with Netlab(hosts=hosts, rate=rate) if hosts > 1 else nullcontext() as lab:
        launch = [sys.executable, "-m", "fusion_rt.runner", "-np", str(ranks)]
        if lab is None:
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        else:
            per_host = ranks // hosts
            launch += ["-H", ",".join(f"{host.name}:{per_host}" for host in lab.hosts), "--rsh-agent", lab.agent]
            environment.update(MASTER_ADDR=lab.hosts[0].address, MASTER_PORT="29511")
        run = subprocess.run(launch + command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in run.stdout.splitlines() if _MARK in line)
    found: dict[str, Any] = json.loads(line.split(_MARK, 1)[1])
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def show(title: str, result: dict[str, Any], limit: Callable[[int], float] | None) -> None:
    """One table: milliseconds, and how many times faster than gloo."""
    names = list(next(iter(result.values())))
    table = Table(title=title)
    table.add_column("bytes", justify="right")
    for name in names:
        table.add_column(f"{name} ms", justify="right")
    for name in names:
        if name != "gloo":
            table.add_column(f"gloo / {name}", justify="right")
    if limit is not None:
        table.add_column("limit ms", justify="right")
        table.add_column("arena / limit", justify="right")
    for nbytes, times in result.items():
        row = [f"{int(nbytes):,}"] + [f"{times[name] * 1e3:.3f}" for name in names]
        row += [f"{times['gloo'] / times[name]:.2f}" for name in names if name != "gloo"]
        if limit is not None:
            seconds = limit(int(nbytes))
            row += [f"{seconds * 1e3:.3f}", f"{times['arena'] / seconds:.3f}"]
        table.add_row(*row)
    Console(width=140).print(table)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.allreduce", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", default="2", help="numbers of ranks on one host, such as 2,4")
    parser.add_argument("--hosts", type=int, default=1, help="netlab hosts, one rank on each")
    parser.add_argument("--rate", help="rate of each host's link, such as 1gbit")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each runtime")
    parser.add_argument(
        "--encryption", default="control", choices=["all", "control"],
        help="between hosts; gloo encrypts nothing, so control is the comparison of like with like",
    )  # fmt: skip
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    if arguments.worker:
        worker(sizes, arguments.rounds)
        return
    if arguments.hosts > 1:
        hosts = arguments.hosts
        result = measure(hosts, hosts, arguments.rate, sizes, arguments.rounds, arguments.encryption)
        limit = None
        if arguments.rate is not None:
            from benchmarks.netlab.iproute import bits_per_second

            bytes_per_second = bits_per_second(arguments.rate) / 8
            limit = lambda nbytes: 2 * nbytes * (hosts - 1) / hosts * _FRAMED / bytes_per_second  # noqa: E731
        title = f"{hosts} hosts, {arguments.rate or 'unshaped'}, encryption {arguments.encryption}"
        show(title, result, limit)
        return
    for ranks in (int(ranks) for ranks in arguments.ranks.split(",")):
        show(f"{ranks} ranks on one host", measure(ranks, 1, None, sizes, arguments.rounds, "control"), None)


if __name__ == "__main__":
    main()
