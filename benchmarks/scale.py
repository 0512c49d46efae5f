"""Predicted steps of 2 to 4,096 nodes, for every algorithm and codec, and the validation of predictions.

    python -m benchmarks.scale
    python -m benchmarks.scale --quick
    python -m benchmarks.scale --validate
    python -m benchmarks.scale --control
    python -m benchmarks.scale --processes 64

Predictions are those of the model by which `--auto` and `fusion-trace whatif` predict (`fusion_rt.choice.step_model`).
The cost of a worker's operation and of the codecs is measured on this machine in a few seconds; a message costs a
daemon `MESSAGE`. *A step* computes for `--compute` seconds, two thirds of it backward, in which buckets become ready
one after the other; *sent* is what a node sends in one. Nodes' times to compute differ by `--jitter` (relative
deviation): where all are waited for, the slowest one counts.

`--validate` (root needed) measures all-reduces of 2 and 4 netlab hosts at 1 Gbit/s, 200 and 100 Mbit/s, and compares.
All hosts are on one machine then, whose processors they share.

`--control` measures the cost of control by the number of hosts instead (`benchmarks.control`), and `--processes` runs
jobs of many hosts as processes of this machine (`benchmarks.processes`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.common import launch, machine
from benchmarks.netlab.iproute import bits_per_second
from fusion_rt import algorithms, codecs
from fusion_rt.algorithms import Algorithm, Place, Signal
from fusion_rt.choice.codec_costs import Encoded, measured
from fusion_rt.choice.step_model import (
    Action,
    BucketCost,
    Compute,
    HandOver,
    Network,
    Parcel,
    Wait,
    around_steps,
    exchange_cost,
    in_turn,
    walk,
)
from fusion_rt.codecs.base import Layout, Span
from fusion_rt.core import mixing
from fusion_rt.core.cost import CostModel
from fusion_rt.core.dtypes import DTYPES

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
MESSAGE = 70e-6  # seconds of a daemon's event loop, for a message that it sends and one that it receives
STEPS, RANKS = 4, 16  # that are walked through; where ranks do not wait for each other, so many of them
TENSORS = 50
THRESHOLD = 64 << 20  # bytes of a bucket
CHUNK = 2 << 20  # bytes of a message
FRAMED = 1514 / 1448  # bytes on a link for each of payload


@dataclass(frozen=True)
class Case:
    """A step to be predicted.

    Attributes:
        algorithm, codec: their texts.
        compute: seconds a step; `jitter`: its relative deviation between ranks and steps.
        parameters: of the model, in `TENSORS` equal matrices.
    """

    algorithm: str
    codec: str
    nodes: int
    compute: float
    jitter: float = 0.02
    parameters: int = 25_600_000


def calibrate() -> float:
    """Measures the seconds of a worker's operation on this machine, by a job of one rank."""
    return float(launch.fusionrun(1, ["-m", "benchmarks.scale", "--worker", "4"])["4"])


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


def predict(local: float, nodes: Sequence[int], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicts a row for each algorithm, codec and number of nodes. `local`: seconds of a worker's operation."""
    link = CostModel(arguments.latency, 8 * FRAMED / bits_per_second(arguments.rate))
    rows = []
    for algorithm in arguments.algorithms.split(";"):
        spec = algorithms.parse(algorithm)
        gradients_of_all = spec.place is Place.NOWHERE and spec.period == 1
        for codec in _codecs_for(gradients_of_all, spec.name, arguments.codecs.split(";")):
            for count in nodes:
                case = Case(algorithm, codec, count, arguments.compute, arguments.jitter, arguments.parameters)
                found = predict_case(link, local, case)
                if found is not None:
                    rows.append({"algorithm": algorithm, "codec": codec, "nodes": count, **found})
    return rows


def predict_case(link: CostModel, local: float, case: Case) -> dict[str, float] | None:
    """Predicts a step.

    Returns:
        Its seconds, for how long it is kept waiting, and bytes that a node sends in it; None if so many nodes cannot do
        this.
    """
    spec = algorithms.parse(case.algorithm)
    try:
        spec.check(min(case.nodes, mixing.MAX_RANKS))
    except algorithms.AlgorithmError:
        return None
    every = spec if spec.period == 1 else replace(spec, steps=1)  # type: ignore[call-arg]  # an exchange in each step
    tensors = _tensors_of_buckets(case, spec)
    costs = [_cost(link, local, case, every, count, len(tensors)) for count in tensors]
    together = every.lockstep and every.waits_for_answers
    programs = [_program(every, tensors, _computing(case, rank)) for rank in range(1 if together else RANKS)]
    if together:
        slowest = [max(step) for step in zip(*(_computing(case, rank) for rank in range(case.nodes)), strict=True)]
        programs = [_program(every, tensors, slowest)]
    ends = walk(programs, costs, together).ends
    seconds = statistics.fmean((its[-1] - its[0]) / (STEPS - 1) for its in ends)  # in the first, nothing is under way
    waited = max(seconds - case.compute, 0.0) / spec.period
    sent = sum(cost.sent for cost in costs) / spec.period
    return {"seconds": case.compute + waited, "waited": waited, "sent": sent}


def _tensors_of_buckets(case: Case, spec: Algorithm) -> list[int]:
    """Returns how many tensors each bucket of a plan has: with shards, so few that each node has its share."""
    tensor = 4 * math.prod(_shape(case))
    threshold = min(THRESHOLD, -(-tensor * TENSORS // case.nodes)) if spec.at_shards else THRESHOLD
    together = max(1, threshold // tensor)
    return [min(together, TENSORS - first) for first in range(0, TENSORS, together)]


def _shape(case: Case) -> tuple[int, int]:
    elements = max(case.parameters // TENSORS, 1)
    rows = max(int(elements**0.5), 1)
    return rows, elements // rows


def _cost(link: CostModel, local: float, case: Case, spec: Algorithm, tensors: int, buckets: int) -> BucketCost:
    """Returns the cost of a bucket with so many tensors, one of so many buckets."""
    encoded = _encoded(case.codec, _shape(case))
    nbytes = 4 * math.prod(_shape(case)) * tensors
    parcel = Parcel(nbytes, tensors * encoded.nbytes, encoded.exchange)
    cost = exchange_cost(Network(case.nodes, 1, link, CHUNK), spec, parcel, buckets)
    rounds = cost.after / link.latency if link.latency else 0.0  # of messages, one after the other
    if not spec.at_homes and encoded.exchange == "owners":  # each hears of all others, twice
        rounds = 2 * (case.nodes - 1)
    if spec.at_shards:  # its home hears of each rank
        rounds = 2 * (case.nodes - 1) / min(case.nodes, buckets)
    return cost._replace(work=local + tensors * encoded.seconds + rounds * MESSAGE)


@cache
def _encoded(codec: str, shape: tuple[int, int]) -> Encoded:
    """Returns what a codec makes of a tensor."""
    count = math.prod(shape)
    return measured(codecs.parse(codec), Layout(DTYPES["float32"], count, (Span("tensor", 0, count, shape),)))


def _computing(case: Case, rank: int) -> list[float]:
    """Returns the seconds for which a rank computes in each step."""
    dice = random.Random(rank)
    return [case.compute * max(dice.gauss(1.0, case.jitter), 0.1) for _ in range(STEPS)]


def _program(spec: Algorithm, tensors: Sequence[int], steps: Sequence[float]) -> list[list[Action]]:
    """Returns the program of a rank that computes for so many seconds in each of its steps."""
    if spec.signal is not Signal.GRADIENT:
        return around_steps(steps, len(tensors), spec)
    found: list[list[Action]] = []
    for compute in steps:
        step: list[Action] = [Compute(compute / 3)]
        for index, count in enumerate(tensors):
            step += [Compute(compute * 2 / 3 * count / TENSORS), HandOver(index)]
        found.append([*step, *(Wait(index) for index in range(len(tensors)))])
    return found


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


def validate(local: float, hosts: Sequence[int], rates: Sequence[str]) -> list[dict[str, Any]]:
    """Measures and predicts all-reduces of netlab hosts. `local`: seconds of a worker's operation."""
    rows = []
    for count in hosts:
        for rate in rates:
            command = ["-m", "benchmarks.scale", "--worker", ",".join(map(str, SIZES))]
            measured = launch.on_hosts(count, rate, command)
            for nbytes in SIZES:
                seconds = all_reduce(local, count, rate, nbytes)
                error = seconds / measured[str(nbytes)] - 1
                rows.append({"hosts": count, "rate": rate, "bytes": nbytes, "measured": measured[str(nbytes)],
                             "predicted": seconds, "error": error})  # fmt: skip
    return rows


def all_reduce(local: float, hosts: int, rate: str, nbytes: int) -> float:
    """Predicts the seconds of an all-reduce of hosts on this machine."""
    network = Network(hosts, 1, CostModel(30e-6, 8 * FRAMED / bits_per_second(rate)), CHUNK)
    cost = exchange_cost(network, algorithms.parse("allreduce"), Parcel(nbytes, nbytes), 1)
    crowded = max(1.0, hosts / (os.cpu_count() or 1))
    return in_turn([0.0], [cost._replace(work=crowded * (local + cost.after / 30e-6 * MESSAGE))])


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
    parser.add_argument("--control", action="store_true", help="measure control, at --nodes hosts (8,64,256)")
    parser.add_argument("--processes", metavar="HOSTS", help="run jobs of so many hosts on this machine, with commas")
    parser.add_argument("--quick", action="store_true", help="2, 16 and 256 nodes, few algorithms and codecs")
    parser.add_argument("--table", action="store_true", help="only show the results that there are")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"of results ({RESULTS}, control.json, processes.json)"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parser().parse_args(argv)
    if arguments.worker:
        worker([int(size) for size in arguments.worker.split(",")])
        return
    if arguments.processes:
        from benchmarks import processes

        processes.main([int(count) for count in arguments.processes.split(",")], arguments.out, arguments.table)
        return
    if arguments.control:
        from benchmarks import control

        nodes = [int(count) for count in arguments.nodes.split(",")] if arguments.nodes else control.NODES
        control.main(nodes, arguments.out, arguments.table)
        return
    arguments.out = arguments.out or RESULTS
    if not arguments.table:
        nodes = [int(count) for count in arguments.nodes.split(",")] if arguments.nodes else list(NODES)
        hosts: Sequence[int] = (2, 4)
        rates: Sequence[str] = RATES
        if arguments.quick:
            arguments.algorithms, arguments.codecs = "allreduce;bsp;dpsgd(topology='ring')", "dense;topk(density=0.01)"
            nodes, hosts, rates = [2, 16, 256], [2], RATES[:1]
        local = calibrate()
        document: dict[str, Any] = {
            "machine": msgspec.to_builtins(machine.describe()), "operation": local,
            "rate": arguments.rate, "latency": arguments.latency, "parameters": arguments.parameters,
            "compute": arguments.compute, "jitter": arguments.jitter, "predicted": predict(local, nodes, arguments),
        }  # fmt: skip
        if arguments.validate:
            document["validated"] = validate(local, hosts, rates)
        elif arguments.out.exists():
            document["validated"] = json.loads(arguments.out.read_text(encoding="utf-8")).get("validated")
        os.makedirs(arguments.out.parent, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    show(json.loads(arguments.out.read_text(encoding="utf-8")), Console(width=None))


if __name__ == "__main__":
    main()
