"""Training algorithms on fast and slow networks: one central parameter server, shards, all-reduce, gossip, local steps.

    python -m benchmarks.networks
    python -m benchmarks.networks --quick
    python -m benchmarks.networks --networks 100mbit --methods "central PS;D-PSGD ring"
    python -m benchmarks.networks --table

Four netlab hosts (root needed) with one worker each learn a GPT of 1.1 million parameters, character by character, with
SGD with momentum, the same learning rate everywhere. The central server keeps all homes on the first host, which runs a
worker, too; shards are on all hosts. Each is measured dense, and with topk 1 % where there is such a thing: gossip with
topk is CHOCO-SGD; a mean of parameters (local SGD) and AD-PSGD have nothing of the kind.

*A step* takes as long as on the slowest rank, in the mean over a turn of a few steps, at whose end no worker waits for
anything; methods take turns, each when the links are quiet again, and printed are medians over turns, and the range.
*None* does everything but communicate. *Sent* is the number of bytes that the first host's link has counted in a step,
all headers included; of the central server these are its answers.

*Steps to the loss* are counted without a limit on the links until the loss of the ranks' mean model over held-out text
is no larger, tested every 8 steps; the limit changes no number that is computed, as in all of them a step waits for its
inputs. *Seconds to the loss* are these steps times the time of a step. Central server, shards and all-reduce compute
the same without compression, and are trained once. AD-PSGD is different: the slower the network, the fewer averages for
a step. It is trained on each network itself, each rank for as long as it takes, and its time is that of the ranks'
mean, computed from copies that are written to files every second.

With P bytes of parameters and n hosts, the busiest link has to carry, in each direction and in each step: (n - 1) P to
and from a central server, 2 (n - 1) / n P for shards and for a ring, 2 P for D-PSGD on a ring, and P for SGP with one
peer. So gossip without compression cannot be much faster than a ring where only bytes count, but faster than a central
server.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, tables
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "networks"

HOSTS = 4
SIZES = {"width": 208, "layers": 2, "batch": 4, "context": 32}
LR = 0.05
EVERY = 8  # steps between two tests of the loss
PERIOD = 16  # of local SGD
QUIET_BYTES = 50_000  # in .2 s
RESULTS = results.RESULTS / "networks.json"
TOPK = "topk(density=0.01)"


@dataclass(frozen=True)
class Method:
    """A way to learn from all hosts' data.

    Attributes:
        algorithm, codec: their specs; no algorithm: each rank for itself.
        central: all homes are on the first host.
        like: the method that computes the same.
        turn: the least number of steps that can be timed.
        free: ranks wait for nobody, so that steps alone say nothing.
    """

    algorithm: str
    codec: str = "dense"
    central: bool = False
    like: str = ""
    turn: int = 1
    free: bool = False


NONE, CENTRAL, RING, ADPSGD = "none", "central PS", "ring all-reduce", "AD-PSGD ring"
METHODS = {
    NONE: Method(""),
    CENTRAL: Method("bsp", central=True, like=RING),
    "central PS, topk 1%": Method("bsp", TOPK, central=True),
    "shards": Method("bsp", like=RING),
    "shards, topk 1%": Method("bsp", TOPK),
    RING: Method("allreduce"),
    "all-reduce, topk 1%": Method("allreduce", TOPK),
    "D-PSGD ring": Method("dpsgd(topology='ring')"),
    "CHOCO-SGD ring, topk 1%": Method("choco(topology='ring')", TOPK),
    ADPSGD: Method("adpsgd(topology='ring')", turn=8, free=True),
    "SGP one-peer": Method("sgp(topology='one-peer-exponential')"),
    "local SGD": Method(f"local_sgd(steps={PERIOD})", turn=PERIOD),
}
DECENTRALISED = ("D-PSGD ring", "CHOCO-SGD ring, topk 1%", ADPSGD, "SGP one-peer")
Network = tuple[str | None, dict[int, str | None]]
"""The rate of all links, and those of single hosts."""
NETWORKS: dict[str, Network] = {
    "unshaped": (None, {}),
    "1gbit": ("1gbit", {}),
    "100mbit": ("100mbit", {}),
    "1gbit, one link 100mbit": ("1gbit", {HOSTS - 1: "100mbit"}),
}
Measured = dict[str, Any]
"""`parameters`, `loss`; `counts`: by method the steps to the loss, or None; `curves`: by method, the loss every 8
steps; `times`: by network and method, the turns' seconds a step; `sent`: the same for bytes a step; `free`: by network
and method, seconds to the loss, or None, `steps` of the ranks and `curve` of time and loss."""


def start(name: str, tests: int = 64) -> Any:
    """Returns one method's model and optimizer on this rank, as a `Contestant`."""
    import torch

    import fusion_rt.torch as hvd
    from benchmarks.common import training
    from benchmarks.common.contestant import Contestant

    method = METHODS[name]
    torch.manual_seed(1)
    task = training.char_gpt_task(1, hvd.rank(), hvd.size(), **SIZES, tests=tests)
    optimizer: Any = training.sgd(task.model, LR)
    if method.algorithm:
        optimizer = hvd.DistributedOptimizer(
            optimizer, task.model.named_parameters(), method.codec, algorithm=method.algorithm
        )
    return Contestant(task, optimizer)


def time_steps(names: Sequence[str], steps: int, rounds: int) -> Measured:
    """Measures for each method the time of a step (s) in each turn, and the bytes that rank 0's host sends in one."""
    import torch

    import fusion_rt.torch as hvd
    from benchmarks.common.launch import link_bytes

    runs = {name: start(name, tests=1) for name in names}
    times: dict[str, list[float]] = {name: [] for name in runs}
    sent = dict.fromkeys(runs, 0.0)
    for number in range(rounds + 1):
        for name, run in runs.items():
            count = max(steps if number else 2, METHODS[name].turn)
            hvd.barrier()
            before, began = link_bytes(), time.perf_counter()
            for _ in range(count):
                run.step()
            run.drain()
            took = torch.tensor((time.perf_counter() - began) / count, dtype=torch.float64)
            _settle()
            hvd.barrier()
            if number:
                sent[name] += (link_bytes() - before) / count / rounds
                times[name].append(round(hvd.allreduce(took, op=hvd.Max).item(), 5))
    parameters = sum(parameter.numel() for parameter in runs[names[0]].task.model.parameters())
    return {"parameters": parameters, "times": times, "sent": {name: round(nbytes) for name, nbytes in sent.items()}}


def _settle() -> None:
    """Waits until this host's link is quiet: homes of AD-PSGD still average when no worker waits for them."""
    from benchmarks.common.launch import link_bytes

    before = -QUIET_BYTES
    while (now := link_bytes()) >= before + QUIET_BYTES:
        before = now
        time.sleep(0.2)


def count_steps(names: Sequence[str], loss: float, most: int) -> Measured:
    """Counts for each method the steps until the loss is at most `loss`; None if that takes more than `most`."""
    counts: dict[str, int | None] = {}
    curves: dict[str, list[float]] = {}
    for name in names:
        run = start(name)
        curve = curves.setdefault(name, [])
        while (not curve or curve[-1] > loss) and len(curve) * EVERY < most:
            for _ in range(EVERY):
                run.step()
            curve.append(round(run.loss(), 4))
        counts[name] = len(curve) * EVERY if curve[-1] <= loss else None
    return {"counts": counts, "curves": curves}


def train_freely(names: Sequence[str], loss: float, seconds: float, folder: Path) -> Measured:
    """Measures for each method the seconds until the loss of the ranks' mean is at most `loss`; None if it takes more
    than `seconds`. `folder`: for copies of parameters; all hosts share it."""
    import torch

    import fusion_rt.torch as hvd

    found: Measured = {}
    for number, name in enumerate(names):
        run = start(name)
        parameters = list(run.task.model.parameters())
        run.step()
        hvd.barrier()
        began, steps, copies, elapsed = time.perf_counter(), 0, 0, 0.0
        while elapsed < seconds:
            run.step()
            steps += 1
            elapsed = time.perf_counter() - began
            if elapsed >= copies + 1 and copies + 1 < seconds:
                copies += 1
                torch.save(torch.nn.utils.parameters_to_vector(parameters), folder / f"{number}-{copies}-{hvd.rank()}")
        hvd.join()
        run.drain()
        hvd.barrier()
        curve: list[list[float]] = []
        for copy in range(1, int(hvd.allreduce(torch.tensor(copies), op=hvd.Min)) + 1):
            ranks = [torch.load(folder / f"{number}-{copy}-{rank}") for rank in range(hvd.size())]
            torch.nn.utils.vector_to_parameters(torch.stack(ranks).mean(dim=0), parameters)
            mean = hvd.allreduce(torch.tensor(run.task.test()[0], dtype=torch.float64)).item()
            curve.append([copy, round(mean, 4)])
            if mean <= loss:
                break
        counted = hvd.allgather(torch.tensor([steps])).tolist()
        reached = curve[-1][0] if curve and curve[-1][1] <= loss else None
        found[name] = {"seconds": reached, "steps": counted, "trained": seconds, "curve": curve}
    return {"free": found}


def worker(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Measures on each rank; rank 0 prints the result."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    if arguments.worker == "times":
        result = time_steps(names, arguments.steps, arguments.rounds)
    elif arguments.worker == "counts":
        result = count_steps(names, arguments.loss, arguments.most)
    else:
        result = train_freely(names, arguments.loss, arguments.seconds, arguments.folder)
    if hvd.rank() == 0:
        launch.tell(result)
    hvd.shutdown()


def on_hosts(network: Network, central: bool, arguments: Sequence[str]) -> Measured:
    """Runs this module's workers on netlab hosts; returns the result of rank 0.

    Raises:
        subprocess.CalledProcessError: the job failed; why is on standard error.
    """
    from benchmarks.netlab import Netlab

    rate, rates = network
    with Netlab(hosts=HOSTS, rate=rate, rates=rates) as lab:
        variables = {"FUSION_SHARD_HOSTS": lab.hosts[0].name} if central else {}
        found: Measured = launch.on_lab(lab, ["-m", "benchmarks.networks", *arguments], variables=variables)
    return found


def measure(arguments: argparse.Namespace, names: Sequence[str], networks: Sequence[str]) -> None:
    """Runs all measurements, and writes the file after each job."""
    began = time.perf_counter()
    measured = load(arguments.out)
    if measured.get("loss") != arguments.loss:
        for part in ("counts", "curves", "free"):
            measured.pop(part, None)
    measured["loss"] = arguments.loss

    def job(part: str, network: str, chosen: list[str], extra: Sequence[str] = ()) -> Measured:
        """Runs one job for the methods with all homes on one host, and one for the others."""
        together: Measured = {}
        for central in (True, False):
            these = [name for name in chosen if METHODS[name].central == central]
            if not these:
                continue
            passed = ["--worker", part, "--methods", ";".join(these), *extra]
            for name in ("steps", "rounds", "loss", "most", "seconds"):
                passed += [f"--{name}", str(getattr(arguments, name))]
            try:
                found = on_hosts(NETWORKS[network], central, passed)
            except subprocess.CalledProcessError as error:
                print(f"{part} on {network} failed with status {error.returncode}: {these}", file=sys.stderr)
                continue
            for key, value in found.items():
                if isinstance(value, dict):
                    together.setdefault(key, {}).update(value)
                else:
                    together[key] = value
            print(f"{time.perf_counter() - began:4.0f} s: {part} on {network}, {'; '.join(these)}", file=sys.stderr)
        return together

    for network in networks:
        found = job("times", network, list(names))
        measured["parameters"] = found.get("parameters", measured.get("parameters"))
        for part in ("times", "sent"):
            measured.setdefault(part, {}).setdefault(network, {}).update(found.get(part, {}))
        free = [name for name in names if METHODS[name].free]
        if free and not arguments.only_times:
            with tempfile.TemporaryDirectory() as folder:
                found = job("free", network, free, ["--folder", folder])
            measured.setdefault("free", {}).setdefault(network, {}).update(found.get("free", {}))
        keep(arguments.out, measured)
    wanted = {METHODS[name].like or name for name in names if METHODS[name].algorithm and not METHODS[name].free}
    if not arguments.only_times:
        found = job("counts", "unshaped", [name for name in METHODS if name in wanted])
        for part in ("counts", "curves"):
            measured.setdefault(part, {}).update(found.get(part, {}))
        keep(arguments.out, measured)


def load(path: Path) -> Measured:
    """Reads earlier results; empty if there is no such file."""
    return dict(results.load(path, NAME).records[0].details) if path.exists() else {}


def keep(out: Path, measured: Measured) -> None:
    """Writes the results to a file."""
    samples = [
        Measure(network, "s", times, NONE if NONE in times and len({len(row) for row in times.values()}) == 1 else "")
        for network, times in measured.get("times", {}).items()
    ]
    results.keep(out, NAME, Record({"hosts": HOSTS}, samples, *results.begin(), results.command_line(), measured))


# --- tables -----------------------------------------------------------------------------------------------------------


def steps_to_loss(measured: Measured, name: str) -> int | None:
    """Returns a method's steps to the loss; None where it was not reached or not trained."""
    count: int | None = measured.get("counts", {}).get(METHODS[name].like or name)
    return count


def seconds_to_loss(measured: Measured, network: str, name: str) -> float:
    """Returns a method's seconds to the loss on a network; NaN where it was not reached, or not measured."""
    if METHODS[name].free:
        reached = measured.get("free", {}).get(network, {}).get(name, {}).get("seconds")
        return math.nan if reached is None else float(reached)
    count, turns = steps_to_loss(measured, name), measured["times"].get(network, {}).get(name)
    return count * statistics.median(turns) if count and turns else math.nan


def show(measured: Measured, console: Console) -> None:
    """Prints a table of the methods for each network, and one of the goals."""
    for network in (name for name in NETWORKS if name in measured.get("times", {})):
        times, sent = measured["times"][network], measured["sent"][network]
        middles = {name: statistics.median(turns) for name, turns in times.items()}
        until = {name: seconds_to_loss(measured, network, name) for name in METHODS}
        titles = ["method", "s a step (range)", "/ none", "central PS / this", "ring / this", "MB sent a step"]
        titles += [f"steps to loss {measured['loss']}", "s to it", "central PS / this", "ring / this"]
        table = Table(titles, title=f"{measured['parameters'] / 1e6:.1f} M parameters, {HOSTS} hosts, {network}")
        for name in METHODS:
            if name not in times:
                continue
            step, spread = middles[name], f"{min(times[name]):.3f}-{max(times[name]):.3f}"
            row = [name, f"{step:.3f} ({spread})", _ratio(step, middles.get(NONE))]
            row += [_ratio(middles.get(other), step) for other in (CENTRAL, RING)]
            row.append(f"{sent[name] / 1e6:.2f}")
            row.append("" if METHODS[name].free else str(steps_to_loss(measured, name) or ""))
            row.append("" if math.isnan(until[name]) else f"{until[name]:.0f}")
            row += [_ratio(until[other], until[name]) for other in (CENTRAL, RING)]
            table.add(*row)
        table.show(console)
    tables.goals(goals(measured)).show(console)


def _ratio(one: float | None, other: float | None) -> str:
    if one is None or other is None or math.isnan(one / other):
        return ""
    return f"{one / other:.2f}"


def goals(measured: Measured) -> list[tuple[str, str, bool]]:
    """Lists goals: goal, what was measured, and whether it holds; of those that were measured."""
    found = []
    for network in (name for name in ("100mbit", "1gbit, one link 100mbit") if name in measured.get("times", {})):
        central = seconds_to_loss(measured, network, CENTRAL)
        for name in DECENTRALISED:
            faster = central / seconds_to_loss(measured, network, name)
            if not math.isnan(faster):
                goal = f"{network}: {name} at the loss at least 4 times as soon as the central server"
                ring = seconds_to_loss(measured, network, RING) / seconds_to_loss(measured, network, name)
                found.append((goal, f"{faster:.2f} (ring / this: {ring:.2f})", faster >= 4))
    return found


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--networks", default=";".join(NETWORKS), help="of %(default)s")
    parser.add_argument("--methods", default=";".join(METHODS), help="of %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="in a turn (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method (%(default)s)")
    parser.add_argument("--loss", type=float, default=2.75, help="to reach (%(default)s)")
    parser.add_argument("--most", type=int, default=400, help="steps after which a run is abandoned (%(default)s)")
    parser.add_argument("--seconds", type=float, default=45.0, help="of training of AD-PSGD (%(default)s)")
    parser.add_argument("--only-times", action="store_true", help="train nothing")
    parser.add_argument("--quick", action="store_true", help="one short turn each, unshaped and 100mbit, no training")
    shared.add_out(parser, RESULTS)
    shared.add_table(parser)
    parser.add_argument("--worker", choices=("times", "counts", "free"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Parses the command line, with its methods and networks; exits with status 2 if one is not known."""
    commands = parser()
    arguments = commands.parse_args(argv)
    if arguments.quick:
        arguments.networks, arguments.steps, arguments.rounds, arguments.only_times = "unshaped;100mbit", 2, 1, True
    chosen: list[list[str]] = []
    known: Mapping[str, Mapping[str, object]] = {"method": METHODS, "network": NETWORKS}
    for kind, names in known.items():
        asked = getattr(arguments, f"{kind}s").split(";")
        chosen.append(shared.chosen(commands, kind, asked, names, "; "))
    return arguments, chosen[0], chosen[1]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    arguments, names, networks = parse(argv)
    if arguments.worker:
        worker(arguments, names)
        return
    if not arguments.table:
        measure(arguments, names, networks)
    show(load(arguments.out), Console(width=180))


if __name__ == "__main__":
    main()
