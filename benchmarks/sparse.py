"""Bytes that a node sends in a step of top-k, by the number of nodes: through owners of ranges, and by gathering.

    python -m benchmarks.sparse
    python -m benchmarks.sparse --hosts 2,4 --density 0.001

Each rank runs in a network namespace of its own (root needed), as on a host of its own. There is one tensor of 4 M
elements; its gradients are random, in such a way that the nodes' selections have half of their elements in common, as
they do in training. Printed are bytes of payload a step on the node that sends the most, and what is left when they are
divided by k, in values: one is 4 bytes, so that a value of 2 bytes with its index is about one. *wire* is what the
host's link counts, with the headers of the daemon's messages, of ZeroMQ, TCP, IP and Ethernet, acknowledgements, and
what the daemons say beside.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.launch import MARK

ELEMENTS = 4_000_000
VALUE_BYTES = 4
ROUTES = ("owners", "gather")


def worker(density: float, steps: int, elements: int) -> None:
    """One rank."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    shared = torch.randn(elements)
    torch.manual_seed(1 + hvd.rank())
    parameter = torch.nn.Parameter(torch.zeros(elements))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.0), [("w", parameter)], compression=f"topk(density={density}, minimum=0)"
    )

    def step() -> None:
        gradient = shared + torch.randn(elements)
        optimizer.zero_grad()
        (parameter * gradient).sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def counters() -> tuple[int, int]:
        hvd.barrier()
        return int(hvd.compression_stats()["total"]["bytes_packed"]), _link_bytes()

    for _ in range(2):  # the first step makes the plan, and after the second the ranges are adapted
        step()
    payload, link = counters()
    for _ in range(steps):
        step()
    payload_after, link_after = counters()
    mine = torch.tensor([payload_after - payload, link_after - link], dtype=torch.float64) / steps
    most = hvd.allreduce(mine, op=hvd.Max)
    if hvd.rank() == 0:
        print(MARK + json.dumps(most.tolist()), flush=True)
    hvd.shutdown()


def _link_bytes() -> int:
    """Bytes that this host has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(words[9]) for words in fields if words[0] != "lo")


def measure(hosts: int, route: str, density: float, steps: int, elements: int = ELEMENTS) -> list[float]:
    """Bytes a step of payload and on the link, of the node that sends the most."""
    from benchmarks.netlab import Netlab

    command = [sys.executable, "-m", "benchmarks.sparse", "--worker", "--elements", str(elements)]
    command += ["--density", str(density), "--steps", str(steps)]
    environment = dict(os.environ, FUSION_SPARSE_ROUTE=route, OMP_NUM_THREADS="1")
    with Netlab(hosts=hosts) as lab:
        names = ",".join(f"{host.name}:1" for host in lab.hosts)
        launch = [sys.executable, "-m", "fusion_rt.runner", "-H", names, "--rsh-agent", lab.agent]
        run = subprocess.run(launch + command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in run.stdout.splitlines() if MARK in line)
    found: list[float] = json.loads(line.split(MARK, 1)[1])
    return found


def show(found: Mapping[tuple[int, str], Sequence[float]], density: float, elements: int = ELEMENTS) -> None:
    """A row for each number of hosts."""
    k = round(elements * density)
    table = Table(title=f"{elements:,} elements, k = {k:,}: bytes that a node sends in a step")
    table.add_column("hosts", justify="right")
    for route in ROUTES:
        for column in (f"{route}: payload", "values / k", "wire"):
            table.add_column(column, justify="right")
    for hosts in sorted({hosts for hosts, _ in found}):
        row: list[Any] = [hosts]
        for route in ROUTES:
            payload, link = found[hosts, route]
            row += [f"{payload:,.0f}", f"{payload / VALUE_BYTES / k:.2f}", f"{link:,.0f}"]
        table.add_row(*map(str, row))
    Console(width=140).print(table)


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", default="2,3,4,6,8", help="numbers of netlab hosts, one rank on each")
    parser.add_argument("--density", type=float, default=0.01, help="share of the elements that is selected")
    parser.add_argument("--steps", type=int, default=6, help="steps that are measured")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of the tensor")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.density, arguments.steps, arguments.elements)
        return
    hosts = [int(number) for number in arguments.hosts.split(",")]
    found = {
        (number, route): measure(number, route, arguments.density, arguments.steps, arguments.elements)
        for number in hosts
        for route in ROUTES
    }
    show(found, arguments.density, arguments.elements)


if __name__ == "__main__":
    main()
