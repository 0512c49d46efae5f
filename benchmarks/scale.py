"""Predicted steps of 2 to 4,096 nodes, for every algorithm and codec, and the validation of predictions.

    python -m benchmarks.scale
    python -m benchmarks.scale --quick
    python -m benchmarks.scale --validate

What messages, kernels and codecs cost is measured on this machine, on loopback, in a few seconds; the rest is simulated
(docs/simulation.md): up to 16 nodes (with homes, 32) message by message, by the daemon's own exchanges and algorithms;
beyond, one node stands for all, or, with homes, the busiest part says by how much a step is longer. *A step* computes
for `--compute` seconds, two thirds of it backward, in which buckets become ready one after the other; *sent* is what a
node sends in one. Nodes' times to compute differ by `--jitter` (relative deviation).

`--validate` (root needed) measures all-reduces of 2 and 4 netlab hosts at 1 Gbit/s, 200 and 100 Mbit/s, and compares.
All hosts are on one machine then, whose cores they share, in the simulation too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.common import launch, machine

RESULTS = Path(__file__).parent / "results" / "scale.json"
NODES = tuple(2**k for k in range(1, 13))
CODECS = (
    "dense", "fp16", "topk(density=0.1)", "topk(density=0.01)", "topk(density=0.001)", "randomk(density=0.01)", "int8",
    "onebit", "powersgd(rank=4)",
)  # fmt: skip
ALGORITHMS = (
    "allreduce", "local_sgd(steps=16)", "diloco(steps=500)", "bsp", "ssp(staleness=4)", "asp",
    "softsync(contributions=2)", "dc_asgd", "hogwild", "partial(backup=1)", "collaborative(samples=256)",
    "easgd(steps=10)", "ea_wild(steps=10)", "dpsgd(topology='ring')", "dpsgd(topology='exponential')",
    "adpsgd(topology='ring')", "sgp(topology='one-peer-exponential')", "choco(topology='ring')",
)  # fmt: skip
RATES = ("1gbit", "200mbit", "100mbit")
SIZES = (65_536, 1_048_576, 12_800_000)  # bytes, of what is validated


def calibrate(codecs: Sequence[str]) -> Any:
    """Measures the costs of the simulation on this machine; that of a worker's operation by a job."""
    from benchmarks.prediction.costs import costs

    return costs(codecs, launch.fusionrun(1, ["-m", "benchmarks.scale", "--worker", "4"])["4"])


def worker(sizes: Sequence[int]) -> None:
    """Measures on each rank; rank 0 prints the median seconds of an all-reduce on the slowest rank, by size."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    found = {}
    for nbytes in sizes:
        tensor = hvd.empty(nbytes // 4, dtype=torch.float32)
        tensor.fill_(1.0)
        times = []
        for number in range(40 if nbytes < 1e6 else 8):
            hvd.barrier()
            began = time.perf_counter()
            hvd.allreduce_(tensor, op=hvd.Average, name="x")
            if number >= 2:
                times.append(time.perf_counter() - began)
        found[str(nbytes)] = hvd.allreduce(torch.tensor(statistics.median(times)), op=hvd.Max).item()
    if hvd.rank() == 0:
        launch.tell(found)
    hvd.shutdown()


# --- predictions ------------------------------------------------------------------------------------------------------


def predict(costs: Any, nodes: Sequence[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicts a row for each algorithm, codec and number of nodes."""
    from benchmarks.netlab.iproute import bits_per_second
    from benchmarks.prediction.predictor import Case, Predictor
    from fusion_rt.algorithms import Place, parse
    from fusion_trace.simulate.model import ethernet

    link = ethernet(bits_per_second(arguments.rate), arguments.latency)
    predictor = Predictor(link, costs)
    rows = []
    for algorithm in arguments.algorithms.split(";"):
        spec = parse(algorithm)
        for codec in _codecs_for(
            spec.place is Place.NOWHERE and spec.period == 1, spec.name, arguments.codecs.split(";")
        ):
            for count in nodes:
                case = Case(algorithm, codec, count, arguments.compute, arguments.jitter, arguments.parameters)
                found = predictor(case)
                if found is not None:
                    rows.append({"algorithm": algorithm, "codec": codec, "nodes": count, **found})
    return rows


def _codecs_for(gradients_of_all: bool, name: str, codecs: Sequence[str]) -> list[str]:
    """Chooses the codecs for an algorithm: dense and fp16 for parameters, topk for CHOCO, three examples for shards."""
    if gradients_of_all:
        return list(codecs)
    if name == "choco":
        return [codec for codec in codecs if codec.startswith("topk")]
    if name in ("local_sgd", "diloco", "easgd", "ea_wild", "dpsgd", "adpsgd", "sgp"):
        return [codec for codec in codecs if codec in ("dense", "fp16")]
    return [codec for codec in codecs if codec in ("dense", "int8", "topk(density=0.01)")]


# --- validation -------------------------------------------------------------------------------------------------------


def validate(costs: Any, hosts: Sequence[int], rates: Sequence[str]) -> list[dict[str, Any]]:
    """Measures and predicts all-reduces of netlab hosts."""
    rows = []
    for count in hosts:
        for rate in rates:
            command = ["-m", "benchmarks.scale", "--worker", ",".join(map(str, SIZES))]
            measured = launch.on_hosts(count, rate, command)
            for nbytes in SIZES:
                seconds = _all_reduce(costs, count, rate, nbytes)
                error = seconds / measured[str(nbytes)] - 1
                rows.append({"hosts": count, "rate": rate, "bytes": nbytes, "measured": measured[str(nbytes)],
                             "predicted": seconds, "error": error})  # fmt: skip
    return rows


def _all_reduce(costs: Any, hosts: int, rate: str, nbytes: int) -> float:
    from benchmarks.netlab.iproute import bits_per_second
    from fusion_trace.simulate.model import Bucket, equal, ethernet
    from fusion_trace.simulate.programs import Submit, Wait
    from fusion_trace.simulate.simulation import Job

    cluster = equal(
        hosts,
        ethernet(bits_per_second(rate), 30e-6),
        costs=costs,
        machines=(0,) * hosts,
        processors=(os.cpu_count() or 1,),
    )
    return Job(cluster, [[(Submit(0), Wait(0))] * 3] * hosts, [Bucket(nbytes)]).run().step_seconds()


# --- tables -----------------------------------------------------------------------------------------------------------


def show(document: dict[str, Any], console: Console) -> None:
    """Prints step times by algorithm, codec and number of nodes, and the errors of validated predictions."""
    rows = document["predicted"]
    nodes = sorted({row["nodes"] for row in rows})
    by = {(row["algorithm"], row["codec"], row["nodes"]): row for row in rows}
    for title, key, scale in (("ms a step", "seconds", 1e3), ("MB a node sends in a step", "sent", 1e-6)):
        size, compute = document["parameters"] / 1e6, document["compute"] * 1e3
        table = Table(title=f"{title}: {size:.3g} M parameters, {compute:.0f} ms of computing, {document['rate']}")
        for column in ("algorithm", "codec", *map(str, nodes)):
            table.add_column(column, justify="left" if column in ("algorithm", "codec") else "right")
        for algorithm, codec in dict.fromkeys((row["algorithm"], row["codec"]) for row in rows):
            cells = [by.get((algorithm, codec, count)) for count in nodes]
            table.add_row(algorithm, codec, *("" if c is None else f"{c[key] * scale:,.4g}" for c in cells))
        console.print(table)
    if document.get("validated"):
        table = Table(title="all-reduce, netlab hosts")
        for column in ("hosts", "rate", "bytes", "measured, ms", "predicted, ms", "error"):
            table.add_column(column, justify="right")
        for row in document["validated"]:
            table.add_row(str(row["hosts"]), row["rate"], f"{row['bytes']:,}", f"{row['measured'] * 1e3:.2f}",
                          f"{row['predicted'] * 1e3:.2f}", f"{row['error']:+.1%}")  # fmt: skip
        console.print(table)


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--algorithms", default=";".join(ALGORITHMS), help="of %(default)s")
    parser.add_argument("--codecs", default=";".join(CODECS), help="of %(default)s")
    parser.add_argument("--nodes", help="numbers of nodes, with commas; by default powers of two from 2 to 4096")
    parser.add_argument("--rate", default="10gbit", help="of links (%(default)s)")
    parser.add_argument("--latency", type=float, default=50e-6, help="of links, one way, s (%(default)s)")
    parser.add_argument("--parameters", type=int, default=25_600_000, help="%(default)s, as ResNet-50 has")
    parser.add_argument("--compute", type=float, default=0.2, help="seconds a step (%(default)s)")
    parser.add_argument("--jitter", type=float, default=0.02, help="of computing (%(default)s)")
    parser.add_argument("--validate", action="store_true", help="also measure netlab hosts")
    parser.add_argument("--quick", action="store_true", help="2, 16 and 256 nodes, few algorithms and codecs")
    parser.add_argument("--table", action="store_true", help="only show the results that there are")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="of results (%(default)s)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    if arguments.worker:
        worker([int(size) for size in arguments.worker.split(",")])
        return
    if not arguments.table:
        nodes = [int(count) for count in arguments.nodes.split(",")] if arguments.nodes else list(NODES)
        hosts: Sequence[int] = (2, 4)
        rates: Sequence[str] = RATES
        if arguments.quick:
            arguments.algorithms, arguments.codecs = "allreduce;bsp;dpsgd(topology='ring')", "dense;topk(density=0.01)"
            nodes, hosts, rates = [2, 16, 256], [2], RATES[:1]
        costs = calibrate(arguments.codecs.split(";"))
        document: dict[str, Any] = {
            "machine": msgspec.to_builtins(machine.describe()), "costs": msgspec.to_builtins(costs),
            "rate": arguments.rate, "latency": arguments.latency, "parameters": arguments.parameters,
            "compute": arguments.compute, "jitter": arguments.jitter, "predicted": predict(costs, nodes, arguments),
        }  # fmt: skip
        if arguments.validate:
            document["validated"] = validate(costs, hosts, rates)
        elif arguments.out.exists():
            document["validated"] = json.loads(arguments.out.read_text(encoding="utf-8")).get("validated")
        os.makedirs(arguments.out.parent, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    show(json.loads(arguments.out.read_text(encoding="utf-8")), Console(width=None))


if __name__ == "__main__":
    main()
