"""Cost of mirrors of parameter shards at each update (FUSION_MIRROR_SHARDS=update), beside those at commits alone.

    python -m benchmarks.shard_mirrors
    python -m benchmarks.shard_mirrors --algorithm asp --hosts 4 --parameters 4000000

Netlab hosts (root needed) with a worker each train parameters without a model: gradients are there at once, so that a
step is its exchange, and what mirrors cost is all of a step's cost. Jobs of both kinds take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results
from benchmarks.common.results import Measure, Record

if TYPE_CHECKING:
    from benchmarks.netlab import Netlab

WARM_UP, STEPS = 3, 12
NAME = "shard_mirrors"
COMMIT, UPDATE = WAYS = ("commit", "update")
_SETTING = ("algorithm", "optimizer", "hosts", "rate", "parameters")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for."""
    argv = sys.argv[1:] if argv is None else argv
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="hosts (2)")
    parser.add_argument("--rate", default="1gbit", help="of each link (1gbit)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="jobs of each kind (5)")
    parser.add_argument("--parameters", type=int, default=25_000_000, metavar="N", help="parameters (25,000,000)")
    parser.add_argument("--algorithm", default="bsp", help="bsp, asp or ssp(staleness=4) (bsp)")
    parser.add_argument("--optimizer", default="Adam", choices=["Adam", "SGD"], help="SGD: with momentum (Adam)")
    shared.add_out(parser)
    shared.add_worker(parser)
    options = parser.parse_args(argv)
    if options.worker:
        _work(options)
        return 0
    from benchmarks.netlab import Netlab

    here, date = results.begin()
    steps: dict[str, list[float]] = {way: [] for way in WAYS}
    own = ["-m", "benchmarks.shard_mirrors", "--worker", *argv]
    for turn in range(options.rounds):
        for way in WAYS if turn % 2 == 0 else WAYS[::-1]:
            with Netlab(hosts=options.hosts, rate=options.rate) as lab:
                variables = {"FUSION_MIRROR_SHARDS": way, "FUSION_KERNEL_THREADS": "1"}
                steps[way].append(_on_elastic(lab, own, variables))
        ratios = [new / old for old, new in zip(*steps.values(), strict=True)]
        told = ", ".join(f"{way} {steps[way][-1]:.3f} s" for way in WAYS)
        spread = f"median so far {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"round {turn + 1}: a step with mirrors by {told}; ratio {ratios[-1]:.2f}, {spread}", flush=True)
    if options.out:
        setting: results.Setting = {name: vars(options)[name] for name in _SETTING}
        measures = [Measure("a step", "s", {way: results.rounded(row) for way, row in steps.items()}, COMMIT)]
        results.keep(options.out, NAME, Record(setting, measures, here, date, results.command_line()))
    return 0


def _on_elastic(lab: Netlab, own: Sequence[str], variables: dict[str, str]) -> float:
    """Returns the median of a step in an elastic job (s)."""
    names = ",".join(f"{host.name}:1" for host in lab.hosts)
    size = str(len(lab.hosts))
    command = [sys.executable, "-m", "fusion_rt.runner", "-np", size, "--min-np", size, "-H", names]
    command += ["--rsh-agent", lab.agent, "--network-interface", "eth0", sys.executable, *own]
    environment = {**os.environ, "FUSION_ENCRYPTION": "control", "OMP_NUM_THREADS": "1", **variables}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (told,) = (line.split(launch.MARK, 1)[1] for line in run.stdout.splitlines() if launch.MARK in line)
    return float(told)


def _work(options: argparse.Namespace) -> None:
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    parameters = [torch.nn.Parameter(torch.zeros(options.parameters // 25)) for _ in range(25)]
    plain = (
        torch.optim.Adam(parameters, lr=1e-3)
        if options.optimizer == "Adam"
        else torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)
    )
    named = [(str(index), parameter) for index, parameter in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(plain, named, algorithm=options.algorithm)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3 * (1 + hvd.rank()))
    state = hvd.elastic.TorchState(None, optimizer, step=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        times = []
        for _ in range(WARM_UP + STEPS):
            hvd.barrier()
            began = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - began)
        if hvd.rank() == 0:
            launch.tell(statistics.median(times[WARM_UP:]))

    train(state)


if __name__ == "__main__":
    sys.exit(main())
