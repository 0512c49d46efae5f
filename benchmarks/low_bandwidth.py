"""Training over slow links: the loss by bytes and by seconds, with methods that send less, or less often.

    python -m benchmarks.low_bandwidth
    python -m benchmarks.low_bandwidth --quick
    python -m benchmarks.low_bandwidth --networks 10mbit --methods "dense;DiLoCo;streaming DiLoCo" --seeds 1
    python -m benchmarks.low_bandwidth --parts faults
    python -m benchmarks.low_bandwidth --table

Four netlab hosts (root needed) with one worker each learn a GPT of 475 thousand parameters, character by character, by
SGD with momentum, at the same learning rate everywhere. Methods whose codec is not in this version are left out.

*Training* runs once for each method and seed, without a limit on the links: the loss over held-out text of the ranks'
mean model every 64 steps, and the bytes that the hosts' links have counted in the steps between, headers included, as a
mean over the hosts: a root that sums for all sends more than the others. Dense arrays go by the ring, which sends the
fewest bytes; where no link is slow, recursive doubling would be chosen, whose bytes are a third more.
The limit changes no number that is computed, except for *decoupled* DiLoCo, whose learners do not wait: what they take
in is older then, by less than a round.

*A step* is measured on each network. A worker computes for 100 ms, of which it sleeps what forward and backward pass do
not take, so that two cores are enough for four; a turn is a whole number of rounds, until nothing is under way. The
*utilisation* is these 100 ms by the time of a step. *Seconds* are steps times the time of a step.

*Faults*: decoupled DiLoCo, homes on the first host, with one learner that is 5 times as slow, and with one that is
killed besides (after a third of the time). *Goodput* is the number of steps that the learners took while they lived, by
what they could have taken if a step were its computation.

*Overflows*: the loss at the end, with all-reduce and each codec, without a `GradScaler`, and with one whose scale of
65536 halves six times in a row in the middle, since six losses overflow. They are measured when they are asked for:

    python -m benchmarks.low_bandwidth --parts overflows --seeds 1 --steps 256 --out benchmarks/results/overflows.json
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, tables
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "low_bandwidth"

HOSTS = 4
LR = 0.1
SIZES = {"width": 96, "layers": 4, "batch": 4, "context": 32}
ROUND = 32  # local steps of a round
EVERY = 64  # steps between two tests of the loss
COMPUTE_S = 0.1
WARM_UP = 2  # steps
SLOWER = 5
SCALE, OVERFLOWS = 65536.0, 6
NETWORKS = ("100mbit", "10mbit")
PARTS = ("training", "times", "faults", "overflows")
USUAL = ";".join(PARTS[:3])
RESULTS = results.RESULTS / "low_bandwidth.json"
OUTER = f"steps={ROUND}, outer_rate=0.7, outer_momentum=0.6"
FEW_BITS = "minimum=0, value='int2', momentum=0.9"
STREAMS = "fragments=4, delay=8, mix=0.5"  # a fragment has until the next one is sent


@dataclass(frozen=True)
class Method:
    """A way to learn from all hosts' data.

    Attributes:
        algorithm, codec: their specs.
        turn: the least number of steps that can be timed.
    """

    algorithm: str = "allreduce"
    codec: str = "dense"
    turn: int = 1


DENSE, DECOUPLED = "dense", "decoupled DiLoCo"
METHODS = {
    DENSE: Method(),
    "fp16": Method(codec="fp16"),
    "topk 1%, momentum": Method(codec="topk(density=0.01, momentum=0.9)"),
    "topk 0.5%, 2 bits": Method(codec=f"topk(density=0.005, {FEW_BITS})"),
    "topk 0.1%, 2 bits": Method(codec=f"topk(density=0.001, {FEW_BITS})"),
    "PowerSGD": Method(codec="powersgd(rank=2)"),
    "int4": Method(codec="int4"),
    "DeMo": Method(codec="demo"),
    "local SGD": Method(f"local_sgd(steps={ROUND})", turn=ROUND),
    "DiLoCo": Method(f"diloco({OUTER})", turn=ROUND),
    "DiLoCo, int4": Method(f"diloco({OUTER})", "int4", ROUND),
    "streaming DiLoCo": Method(f"diloco({OUTER}, {STREAMS})", turn=ROUND),
    "streaming DiLoCo, int4": Method(f"diloco({OUTER}, {STREAMS})", "int4", ROUND),
    "streaming DiLoCo, int2": Method(f"diloco({OUTER}, {STREAMS})", "int2", ROUND),
    DECOUPLED: Method(f"decoupled(steps={ROUND}, fragments=4, mix=0.25, grace=0.1)", turn=ROUND),
    "NoLoCo": Method(f"noloco(steps={ROUND}, outer_rate=0.7, outer_momentum=0.5)", turn=ROUND),
    "SparseLoCo": Method(f"sparseloco(steps={ROUND})", turn=ROUND),
    "SparseLoCo, 8 steps": Method("sparseloco(steps=8)", turn=8),
    "SparseLoCo, 4 steps": Method("sparseloco(steps=4)", turn=4),
}
QUICK = {
    "seeds": 1, "steps": 2 * EVERY, "rounds": 1, "seconds": 10.0, "networks": "100mbit",
    "methods": f"{DENSE};streaming DiLoCo;{DECOUPLED}",
    "out": Path(tempfile.gettempdir()) / "low_bandwidth.quick.json",
}  # fmt: skip
FAULTS = {"one 5x slower": "", "one 5x slower, one killed": "killed"}
Measured = dict[str, Any]
"""`parameters`; `training`: by method and seed, `curve` of steps, bytes and loss; `times`: by network and method, the
turns' seconds a step; `faults`: by fault, `steps` and `could` of each learner, and `goodput`; `overflows`: by method
and seed, the number of steps, and the losses at the end, `plain` and `scaled`."""


def available() -> dict[str, Method]:
    """Returns the methods whose algorithm and codec are in this version."""
    from fusion_rt import algorithms, codecs

    found = {}
    for name, method in METHODS.items():
        try:
            spec, codec = algorithms.parse(method.algorithm), codecs.parse(method.codec)
            algorithms.check_use(spec, codec, "average", HOSTS)
        except ValueError:
            continue
        found[name] = method
    return found


def start(method: Method, seed: int, tests: int = 64) -> Any:
    """Returns one method's model and optimizer on this rank, as a `Contestant`."""
    import torch

    import fusion_rt.torch as hvd
    from benchmarks.common import training
    from benchmarks.common.contestant import Contestant

    torch.manual_seed(seed)
    task = training.char_gpt_task(seed, hvd.rank(), hvd.size(), **SIZES, tests=tests)
    optimizer: Any = hvd.DistributedOptimizer(
        training.sgd(task.model, LR, method.codec),
        task.model.named_parameters(),
        method.codec,
        algorithm=method.algorithm,
    )
    optimizer.samples = SIZES["batch"]
    return Contestant(task, optimizer)


def train(names: Sequence[str], seed: int, steps: int) -> Measured:
    """Trains by each method; returns by method the curve of steps, bytes sent by a host (the mean), and loss."""
    import torch

    import fusion_rt.torch as hvd

    found: Measured = {}
    for name in names:
        run, sent = start(METHODS[name], seed), 0
        curve = [[0, 0, round(run.loss(), 4)]]
        while curve[-1][0] < steps:
            hvd.barrier()
            before = launch.link_bytes()
            for _ in range(EVERY):
                run.step()
            counted = torch.tensor(launch.link_bytes() - before, dtype=torch.float64)
            sent += round(hvd.allreduce(counted, op=hvd.Average).item())
            curve.append([curve[-1][0] + EVERY, sent, round(run.loss(), 4)])
        found[name] = curve
        if hvd.rank() == 0:
            print(f"{name}, seed {seed}: loss {curve[-1][2]}, {sent / 1e6:.2f} MB", file=sys.stderr, flush=True)
    return {"training": found}


def time_steps(names: Sequence[str], rounds: int, steps: int) -> Measured:
    """Measures for each method the time of a step (s) on the slowest rank, in each turn of so many steps, or more."""
    import torch

    import fusion_rt.torch as hvd

    times: dict[str, list[float]] = {}
    parameters = 0
    for name in names:
        run = start(METHODS[name], 1, tests=1)
        parameters = sum(parameter.numel() for parameter in run.task.model.parameters())
        turn = METHODS[name].turn
        for _ in range(WARM_UP if turn == 1 else turn):
            run.step()
        times[name] = []
        for _ in range(rounds):
            run.drain()
            hvd.barrier()
            count = max(steps, turn)
            began = time.perf_counter()
            for _ in range(count):
                run.step(at_least=COMPUTE_S)
            took = torch.tensor((time.perf_counter() - began) / count, dtype=torch.float64)
            times[name].append(round(hvd.allreduce(took, op=hvd.Max).item(), 5))
        run.drain()
        hvd.barrier()
        if hvd.rank() == 0:
            print(f"{name}: {statistics.median(times[name]):.3f} s a step", file=sys.stderr, flush=True)
    return {"parameters": parameters, "times": times}


def overflow(names: Sequence[str], seed: int, steps: int) -> Measured:
    """Trains by each method without a scaler, and with one whose scale halves in the middle, again and again."""
    import torch

    import fusion_rt.torch as hvd

    found: Measured = {}
    for name in names:
        row: Measured = {"steps": steps}
        for how in ("plain", "scaled"):
            run = start(METHODS[name], seed)
            scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=steps) if how == "scaled" else None
            for step in range(steps):
                run.step(scaler=scaler, overflows=0 <= step - steps // 2 < OVERFLOWS)
            if scaler is not None and scaler.get_scale() != SCALE / 2**OVERFLOWS:
                raise RuntimeError(f"{name}: the scale is {scaler.get_scale():g} at the end")
            row[how] = round(run.loss(), 4)
            hvd.barrier()
        found[name] = row
        if hvd.rank() == 0:
            print(f"{name}, seed {seed}: {row}", file=sys.stderr, flush=True)
    return {"overflows": found}


def survive(fault: str, seconds: float, folder: Path) -> Measured:
    """Has learners of unequal speed train for so long (s); one is killed after a third of that, if that is the fault.
    `folder`: for the counts of steps, which outlive their learner; all hosts share it."""
    import fusion_rt.torch as hvd

    rank = hvd.rank()
    computation = COMPUTE_S * (SLOWER if rank == HOSTS - 2 else 1)
    run, victim = start(METHODS[DECOUPLED], 1, tests=1), rank == HOSTS - 1 and FAULTS[fault] == "killed"
    run.step()
    hvd.barrier()
    began, steps = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        if victim and elapsed > seconds / 3:
            (folder / str(rank)).write_text(f"{steps} {elapsed / computation}", encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(at_least=computation)
        steps += 1
    (folder / str(rank)).write_text(f"{steps} {elapsed / computation}", encoding="utf-8")
    run.drain()
    return {}


def goodput(folder: Path) -> Measured:
    """Returns the steps that learners took and could have taken, as they have written them down."""
    rows = [[float(word) for word in (folder / str(rank)).read_text(encoding="utf-8").split()] for rank in range(HOSTS)]
    steps, could = ([round(row[place], 1) for row in rows] for place in (0, 1))
    return {"steps": steps, "could": could, "goodput": round(sum(steps) / sum(could), 4)}


def worker(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Measures on each rank; rank 0 prints the result."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    if arguments.worker == "training":
        result = train(names, arguments.seed, arguments.steps)
    elif arguments.worker == "times":
        result = time_steps(names, arguments.rounds, arguments.turn)
    elif arguments.worker == "overflows":
        result = overflow(names, arguments.seed, arguments.steps)
    else:
        result = survive(arguments.fault, arguments.seconds, arguments.folder)
    if hvd.rank() == 0:
        launch.tell(result)
    hvd.shutdown()


def measure(arguments: argparse.Namespace, names: Sequence[str], networks: Sequence[str], parts: Sequence[str]) -> None:
    """Runs all measurements, each method in a job of its own, and writes the file after each job. What the file has
    already is not measured again."""
    from benchmarks.netlab import Netlab

    began, measured = time.perf_counter(), load(arguments.out)
    training, times, faults, overflows = (measured.setdefault(part, {}) for part in PARTS)

    def job(part: str, rate: str | None, extra: Sequence[str], variables: Mapping[str, str] | None = None) -> Measured:
        passed = ["-m", "benchmarks.low_bandwidth", "--worker", part, *extra]
        for option in ("steps", "rounds", "turn", "seconds"):
            passed += [f"--{option}", str(getattr(arguments, option))]
        with Netlab(hosts=HOSTS, rate=rate) as lab:
            if part == "faults":
                variables = {"FUSION_SHARD_HOSTS": lab.hosts[0].name, "FUSION_TOLERATE_LOSSES": "1"}
            try:
                found: Measured = launch.on_lab(lab, passed, variables=variables)
            except subprocess.CalledProcessError as error:
                print(f"{part} {extra} failed with status {error.returncode}", file=sys.stderr)
                return {}
        print(f"{time.perf_counter() - began:4.0f} s: {part} {rate or 'unshaped'} {' '.join(extra)}", file=sys.stderr)
        return found

    for seed in range(1, arguments.seeds + 1) if "training" in parts else ():
        for name in names:
            seeds = training.setdefault(name, {})
            if str(seed) not in seeds or seeds[str(seed)][-1][0] < arguments.steps:
                extra = ["--methods", name, "--seed", str(seed)]
                found = job("training", None, extra, {"FUSION_DENSE_ROUTE": "ring"})
                seeds.update({str(seed): curve for curve in found.get("training", {}).values()})
                keep(arguments.out, measured)
    for seed in range(1, arguments.seeds + 1) if "overflows" in parts else ():
        for name in names:
            if METHODS[name].algorithm != "allreduce":
                continue
            seeds = overflows.setdefault(name, {})
            if str(seed) not in seeds:
                found = job("overflows", None, ["--methods", name, "--seed", str(seed)])
                seeds.update({str(seed): row for row in found.get("overflows", {}).values()})
                keep(arguments.out, measured)
    for network in networks if "times" in parts else ():
        for name in names:
            if len(times.setdefault(network, {}).get(name, ())) < arguments.rounds:
                found = job("times", network, ["--methods", name])
                times[network].update(found.get("times", {}))
                measured["parameters"] = found.get("parameters", measured.get("parameters"))
                keep(arguments.out, measured)
    for fault in FAULTS if "faults" in parts else ():
        with tempfile.TemporaryDirectory() as folder:
            job("faults", networks[0], ["--fault", fault, "--folder", folder])
            if len(list(Path(folder).iterdir())) == HOSTS:
                faults[fault] = goodput(Path(folder))
                keep(arguments.out, measured)


def load(path: Path) -> Measured:
    """Reads earlier results; empty if there is no such file."""
    return dict(results.load(path, NAME).records[0].details) if path.exists() else {}


def keep(out: Path, measured: Measured) -> None:
    """Writes the results to a file."""
    samples = [
        Measure(network, "s", times, DENSE if len({len(row) for row in times.values()} | {0}) == 2 else "")
        for network, times in measured.get("times", {}).items()
        if times
    ]
    results.keep(out, NAME, Record({"hosts": HOSTS}, samples, *results.begin(), results.command_line(), measured))


# --- what is shown ----------------------------------------------------------------------------------------------------


def step_seconds(measured: Measured, network: str) -> dict[str, float]:
    """Returns the median time of a step (s), by method."""
    return {name: statistics.median(row) for name, row in measured.get("times", {}).get(network, {}).items()}


def curve_of(measured: Measured, name: str) -> list[tuple[float, float, float]]:
    """Returns steps, bytes and loss, the latter two as medians over seeds; empty if it was not trained."""
    runs = list(measured.get("training", {}).get(name, {}).values())
    return [
        (rows[0][0], statistics.median(row[1] for row in rows), statistics.median(row[2] for row in rows))
        for rows in zip(*runs, strict=False)
    ]


def ends(measured: Measured) -> dict[str, tuple[float, float]]:
    """Returns the loss in the end, and the bytes that were sent, by method; all after as many steps."""
    curves = {name: curve for name in METHODS if (curve := curve_of(measured, name))}
    last = min((curve[-1][0] for curve in curves.values()), default=0)
    return {name: next((row[2], row[1]) for row in curve if row[0] == last) for name, curve in curves.items()}


def show(measured: Measured, console: Console) -> None:
    """Prints a table of the methods, one of faults, and one of the goals."""
    networks = [network for network in NETWORKS if network in measured.get("times", {})]
    titles = ["method", "loss", "/ dense", "MB sent", "dense / this"]
    for network in networks:
        titles += [f"{network}: s a step", "utilisation"]
    table = Table(titles, title=f"{(measured.get('parameters') or 0) / 1e6:.2f} M parameters, {HOSTS} hosts")
    found = ends(measured)
    for name in METHODS:
        loss, sent = found.get(name, (math.nan, math.nan))
        base, most = found.get(DENSE, (math.nan, math.nan))
        row = [name, *map(_written, (loss, loss / base, sent / 1e6, most / sent if sent else math.nan))]
        for network in networks:
            step = step_seconds(measured, network).get(name, math.nan)
            row += [_written(step), _written(COMPUTE_S / step)]
        if any(row[1:]):
            table.add(*row)
    table.show(console)
    if measured.get("faults"):
        table = Table(["fault", "steps of the learners", "could have been", "goodput"])
        for fault, row in measured["faults"].items():
            table.add(fault, str(row["steps"]), str(row["could"]), f"{row['goodput']:.1%}")
        table.show(console)
    if measured.get("overflows"):
        overflow_table(measured).show(console)
    tables.goals(goals(measured)).show(console)


def overflowed(measured: Measured) -> dict[str, tuple[float, float]]:
    """Returns the losses without a scaler, and with one whose losses overflow, by method; medians over seeds."""
    found = {name: list(rows.values()) for name, rows in measured.get("overflows", {}).items() if rows}
    return {
        name: (statistics.median(row["plain"] for row in rows), statistics.median(row["scaled"] for row in rows))
        for name, rows in found.items()
    }


def overflow_table(measured: Measured) -> Table:
    """Makes the table of losses with a scaler and overflows, and without."""
    table = Table(["method", "loss without a scaler", f"with {OVERFLOWS} overflows", "/ without"])
    for name, (plain, scaled) in overflowed(measured).items():
        table.add(name, f"{plain:.3f}", f"{scaled:.3f}", f"{scaled / plain:.3f}")
    return table


def _written(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def goals(measured: Measured) -> list[tuple[str, str, bool]]:
    """Lists goals: goal, what was measured, and whether it holds; of those that were measured."""
    found = ends(measured)
    goal: list[tuple[str, str, bool]] = []
    if DENSE in found and len(found) > 1:
        loss, sent = found[DENSE]
        for times, within in ((100, 0.02), (400, 0.05)):
            these = {name: sent / bytes_ for name, (_, bytes_) in found.items() if bytes_ and sent >= times * bytes_}
            best = min(these, key=lambda name: found[name][0], default="")
            said = f"{best}: {found[best][0] / loss - 1:+.1%}, {these[best]:.0f} times fewer" if best else "none"
            holds = bool(best) and found[best][0] <= (1 + within) * loss
            goal.append((f"{times} times fewer bytes than dense, loss within {within:.0%}", said, holds))
    for network, least in (("100mbit", 0.95), ("10mbit", 0.9)):
        if steps := step_seconds(measured, network):
            best = min(steps, key=lambda name: steps[name])
            share = COMPUTE_S / steps[best]
            goal.append((f"{network}: utilisation at least {least:.0%}", f"{best}: {share:.1%}", share >= least))
    for fault, row in measured.get("faults", {}).items():
        goal.append((f"{DECOUPLED}, {fault}: goodput at least 90%", f"{row['goodput']:.1%}", row["goodput"] >= 0.9))
    for name, (plain, scaled) in overflowed(measured).items():
        goal.append(
            (f"{name}, {OVERFLOWS} overflows: loss within 2%", f"{scaled / plain - 1:+.1%}", scaled <= 1.02 * plain)
        )
    return goal


# --- the command line -------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--networks", default=";".join(NETWORKS), help="of %(default)s")
    parser.add_argument("--methods", default=";".join(METHODS), help="of %(default)s")
    parser.add_argument("--parts", default=USUAL, help=f"of {';'.join(PARTS)} (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of training (%(default)s)")
    parser.add_argument("--steps", type=int, default=1024, help="of training (%(default)s)")
    parser.add_argument("--turn", type=int, default=4, help="steps that are timed, or a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training with faults (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few short runs, of which nothing follows")
    shared.add_out(parser, RESULTS)
    shared.add_table(parser)
    for name, kind in (("worker", str), ("fault", str), ("folder", Path), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return parser


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str], list[str], list[str]]:
    """Parses the command line, with its methods, networks and parts; exits with status 2 if one is not known."""
    commands = parser()
    arguments = commands.parse_args(argv)
    if arguments.quick:
        for option, value in QUICK.items():
            if getattr(arguments, option) == commands.get_default(option):
                setattr(arguments, option, value)
    chosen: list[list[str]] = []
    known: Mapping[str, Iterable[str]] = {"methods": METHODS, "networks": NETWORKS, "parts": PARTS}
    for plural, names in known.items():
        asked = getattr(arguments, plural).split(";")
        chosen.append(shared.chosen(commands, plural[:-1], asked, dict.fromkeys(names), "; "))
    return arguments, chosen[0], chosen[1], chosen[2]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    arguments, names, networks, parts = parse(argv)
    if arguments.worker:
        worker(arguments, names)
        return
    if not arguments.table:
        here = available()
        if missing := [name for name in names if name not in here]:
            print(f"not in this version: {', '.join(missing)}", file=sys.stderr)
        measure(arguments, [name for name in names if name in here], networks, parts)
    show(load(arguments.out), Console(width=180))


if __name__ == "__main__":
    main()
