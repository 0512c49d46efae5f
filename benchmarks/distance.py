"""All-reduce over a distance: fusion_rt as it comes, beside torch.distributed gloo, and PCCL where it can be imported.

    python -m benchmarks.distance
    python -m benchmarks.distance --trips 40 --losses 0.01% --controls cubic,bbr --out benchmarks/results/distance.json
    python -m benchmarks.distance --parts order

Hosts are network namespaces (root needed) joined by a relay in user space (`benchmarks.netlab`), which adds half of the
round trip in each direction and loses packets at random; `cubic` and `bbr` are the congestion controls of all
connections. Every rank is one process that has all runtimes up at the same time, and they take turns. A sample is one
operation, on the slowest rank. Nothing is set by hand, and nobody encrypts payloads, since gloo cannot.

*Order* is four hosts of which the first two are joined by a slow path: a ring in the order in which hosts were named
crosses it, which is the worst order there is; the measured one does not. Both are jobs of their own, which alternate.

*Late* is by how many ms the relay itself was late (99 %). Where that is not small beside the round trip, the machine
was too busy for the result to be believed.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, sampling, tables
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "distance"
OURS, GLOO, PCCL = "fusion_rt", "gloo", "pccl"
MEASURED, WORST = "measured order", "worst order"
SIZES = (25_600_000, 102_400_000)
RATE = "1gbit"
SLOW_PAIR = "delay:40ms,rate:100mbit"
_PCCL_PORT = 48500
_PCCL_POOL = 16  # connections a peer, as its authors measure


def worker(sizes: list[int], rounds: int, names: list[str]) -> None:
    """Measures on each rank; rank 0 prints the samples (s) by size and runtime."""
    import torch
    import torch.distributed as dist

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    launch.process_group(hvd)
    found: dict[str, dict[str, list[float]]] = {}
    with_pccl = open_pccl(hvd) if PCCL in names else None
    for nbytes in sizes:
        arena = hvd.empty(nbytes // 4, dtype=torch.float32)
        plain = torch.ones(nbytes // 4, dtype=torch.float32)
        arena.fill_(1.0)
        calls: dict[str, Callable[[], Any]] = {
            OURS: lambda t=arena: hvd.allreduce_(t, op=hvd.Average, name="t"),  # type: ignore[misc]
            GLOO: lambda t=plain: dist.all_reduce(t, op=dist.ReduceOp.SUM),  # type: ignore[misc]
        }
        if with_pccl is not None:
            calls[PCCL] = lambda t=plain: with_pccl.reduce(t)  # type: ignore[misc]
        turns = {name: _turn(call) for name, call in calls.items() if name in names}
        samples = sampling.alternate(turns, rounds, warm_up=1, first=dist.barrier)
        assert float(arena[-1]) == 1.0
        slowest = torch.tensor(list(samples.values()), dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found[str(nbytes)] = {name: results.rounded(row) for name, row in zip(samples, slowest.tolist(), strict=True)}
    peers = launch.daemon()["mesh"]["peers"] if hvd.rank() == 0 else []
    if hvd.rank() == 0:
        chosen = [{name: peer[name] for name in ("connections", "link_credit")} for peer in peers]
        launch.tell({"samples": found, "chosen": chosen})
    if with_pccl is not None:
        with_pccl.close()
    dist.destroy_process_group()
    hvd.shutdown()


def _turn(call: Callable[[], Any]) -> Callable[[], float]:
    def turn() -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return turn


class Pccl:
    """PCCL's all-reduce of a tensor with a pool of connections, as its authors measure. `open_pccl` makes one."""

    def __init__(self, module: Any, hvd: Any) -> None:
        self._sum = module.ReduceOp.SUM
        self._barrier = hvd.barrier
        self._master = module.MasterNode(listen_address=f"0.0.0.0:{_PCCL_PORT}") if hvd.rank() == 0 else None
        if self._master is not None:
            self._master.run()
        self._barrier()
        self._communicator = module.Communicator(f"{os.environ[launch.MEETING]}:{_PCCL_PORT}", 0, _PCCL_POOL)
        self._communicator.connect(n_attempts=15)
        while self._communicator.get_attribute(module.Attribute.GLOBAL_WORLD_SIZE) < hvd.size():
            self._communicator.update_topology()

    def reduce(self, tensor: Any) -> None:
        """Adds up a tensor over all ranks, in place. Raises RuntimeError where that fails."""
        done, status, _ = self._communicator.all_reduce_async(tensor, tensor, op=self._sum).wait()
        if not done:
            raise RuntimeError(f"PCCL's all-reduce has failed with status {status}")

    def close(self) -> None:
        """Ends it on all ranks; the master last, whose end waits for an interruption."""
        self._communicator = None
        self._barrier()
        if self._master is not None:
            self._master.interrupt()
            self._master = None


def open_pccl(hvd: Any) -> Pccl | None:
    """Connects the ranks by PCCL; None where it is not installed."""
    try:
        module: Any = importlib.import_module("pccl")
    except ImportError:
        return None
    return Pccl(module, hvd)


def two_hosts(trip: float, loss: str, control: str, sizes: list[int], rounds: int, runtimes: str) -> Record:
    """Measures two hosts at `RATE`; `trip`: ms of a round trip."""
    from benchmarks.netlab import Netlab, Path
    from benchmarks.netlab.paths import share

    here, date = results.begin()
    lab = Netlab(2, RATE, path=Path(delay=trip / 2e3, loss=share(loss)), congestion=control)
    command = ["-m", f"benchmarks.{NAME}", "--worker", "--rounds", str(rounds), "--sizes", ",".join(map(str, sizes))]
    command += ["--runtimes", runtimes]
    with lab:
        found = launch.on_lab(lab, command)
    measures = [Measure(tables.nbytes(int(size)), "s", rows, GLOO) for size, rows in found["samples"].items()]
    setting: results.Setting = {"hosts": 2, "rate": RATE, "rtt_ms": trip, "loss": loss, "congestion": control}
    details = {"relay": lab.relayed, "chosen": found["chosen"]}
    return Record(setting, measures, here, date, results.command_line(), details)


def slow_pair(sizes: list[int], rounds: int) -> Record:
    """Measures four hosts of which one pair is slow, in the measured order of the ring and in the worst one."""
    from benchmarks.netlab import Netlab, Path

    here, date = results.begin()
    samples: dict[str, dict[str, list[float]]] = {str(size): {WORST: [], MEASURED: []} for size in sizes}
    command = ["-m", f"benchmarks.{NAME}", "--worker", "--rounds", "1", "--runtimes", OURS]
    command += ["--sizes", ",".join(map(str, sizes))]
    relays = []
    for _ in range(rounds):
        for name, order in ((MEASURED, "measured"), (WORST, "given")):
            lab = Netlab(4, RATE, path=Path(delay=0.005), paths={(0, 1): SLOW_PAIR}, congestion="cubic")
            with lab:
                found = launch.on_lab(lab, command, variables={"FUSION_RING_ORDER": order})
            relays.append(lab.relayed)
            for size, rows in found["samples"].items():
                samples[size][name] += rows[OURS]
    measures = [Measure(tables.nbytes(int(size)), "s", rows, WORST) for size, rows in samples.items()]
    setting: results.Setting = {"hosts": 4, "rate": RATE, "rtt_ms": 10.0, "slow_pair": SLOW_PAIR, "congestion": "cubic"}
    worst = max(relays, key=lambda relay: relay["late_ms_99"])
    return Record(setting, measures, here, date, results.command_line(), {"relay": worst})


def show(record: Record) -> None:
    """Prints a table: milliseconds, and how many times faster than the peer."""
    names = list(record.measures[0].samples)
    peer = record.measures[0].peer
    ours = [name for name in names if name != peer]
    what = ", ".join(f"{name} {value}" for name, value in record.setting.items())
    late = record.details["relay"].get("late_ms_99", float("nan"))
    table = Table(["size", *(f"{name} ms" for name in names), *(f"{peer} / {name}" for name in ours)], title=what)
    for each in record.measures:
        row = [tables.ms(sampling.median(each.samples[name])) for name in names]
        row += [tables.ratio(sampling.ratio(each.samples[peer], each.samples[name])) for name in ours]
        table.add(each.name, *row)
    table.show()
    print(f"late: {late} ms; chosen: {record.details.get('chosen', '')}", file=sys.stderr)


def main() -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--parts", default="hosts,order", help="(%(default)s)")
    parser.add_argument("--trips", default="20,40,80", help="round trips, ms (%(default)s)")
    parser.add_argument("--losses", default="0,0.01%,0.1%", help="shares of packets (0, 0.01 and 0.1 %%)")
    parser.add_argument("--controls", default="cubic,bbr", help="congestion controls (%(default)s)")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each runtime (%(default)s)")
    parser.add_argument("--runtimes", default=f"{OURS},{GLOO},{PCCL}", help="those that take turns (%(default)s)")
    shared.add_out(parser)
    shared.add_worker(parser)
    arguments = parser.parse_args()
    sizes = shared.numbers(arguments.sizes)
    if arguments.worker:
        worker(sizes, arguments.rounds, arguments.runtimes.split(","))
        return
    parts = shared.chosen(parser, "part", arguments.parts.split(","), {"hosts": 0, "order": 0})
    for part in parts:
        for record in _records(part, arguments, sizes):
            if arguments.out:
                results.keep(arguments.out, NAME, record)
            show(record)


def _records(part: str, arguments: Any, sizes: list[int]) -> Any:
    if part == "order":
        yield slow_pair(sizes, arguments.rounds)
        return
    for trip in arguments.trips.split(","):
        for loss in arguments.losses.split(","):
            for control in arguments.controls.split(","):
                yield two_hosts(float(trip), loss, control, sizes, arguments.rounds, arguments.runtimes)


if __name__ == "__main__":
    main()
