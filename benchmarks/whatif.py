"""Predictions of `fusion-trace whatif`, against jobs that were run: is the truth in their range, and how wide is it?

    python -m benchmarks.whatif
    python -m benchmarks.whatif --quick

Four netlab hosts (root needed) with one worker each train layers of 3.1 million parameters, dense and with topk 10 %,
at 1 Gbit/s, 200 and 100 Mbit/s. Layers *sleep* in their passes, as with an accelerator. From the recordings of three
of these jobs every other one is predicted. The first two steps, in which plans are made, do not count; the time of a
step is the mean over the others and over ranks. Jobs take turns for some rounds, so that what else the machine does
meets all of them, and the round of median length counts of each, as truth and as recording. Buckets leave in order
(FUSION_LINK_CREDIT=0), since the model knows no order of urgency.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.common import launch, machine

RESULTS = Path(__file__).parent / "results" / "whatif.json"
RATES = ("1gbit", "200mbit", "100mbit")
DENSITIES = (1.0, 0.1)
LAYERS, WIDTH, BATCH = 12, 512, 8
SKIPPED = 2  # steps
WIDEST = 0.25  # half of a range, as a part of the prediction


class Job(NamedTuple):
    """A job: the rate of its links, and the density of its gradients."""

    rate: str
    density: float

    def __str__(self) -> str:
        return f"{self.rate}/{self.density:g}"

    def rings(self, traces: Path, turn: int) -> Path:
        """Returns the directory of its rings in a round."""
        return traces / f"{self.rate}-{self.density:g}-{turn}"


RECORDED = (Job("1gbit", 1.0), Job("1gbit", 0.1), Job("200mbit", 1.0))


def worker(density: float, steps: int, compute: float) -> None:
    """Trains on each rank; rank 0 prints the mean seconds of a step."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    codec = "dense" if density == 1 else f"topk(density={density:g})"
    torch.manual_seed(1)
    model = make_model(compute)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), model.named_parameters(), codec
    )
    draw, ends = torch.Generator().manual_seed(hvd.rank()), []
    for _ in range(steps + SKIPPED):
        optimizer.zero_grad()
        model(torch.randn(BATCH, WIDTH, generator=draw)).square().mean().backward()  # no two ranks' are alike
        optimizer.step()
        ends.append(time.perf_counter())
    mean = torch.tensor((ends[-1] - ends[SKIPPED - 1]) / steps, dtype=torch.float64)
    mean = hvd.allreduce(mean, op=hvd.Average)
    if hvd.rank() == 0:
        launch.tell(float(mean))
    hvd.shutdown()


def make_model(compute: float) -> Any:
    """Makes layers that together sleep for `compute` seconds a step, a third of it forward, and compute little."""
    import torch

    share = compute / 3 / LAYERS

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Any) -> Any:
            time.sleep(share)
            return value.clone()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            time.sleep(2 * share)
            return gradient

    class Layer(torch.nn.Linear):
        def forward(self, value: Any) -> Any:
            return Pause.apply(super().forward(value)) * 1.7  # type: ignore[no-untyped-call]  # all layers' are alike

    return torch.nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))


def measure(hosts: int, jobs: Sequence[Job], steps: int, rounds: int, traces: Path) -> dict[str, list[float]]:
    """Runs every job in turn; returns seconds a step of each round. Their rings are left in `traces`, by round."""
    found: dict[str, list[float]] = {str(job): [] for job in jobs}
    for turn in range(rounds):
        for job in jobs:
            arguments = ["-m", "benchmarks.whatif", "--worker", str(job.density), "--steps", str(steps)]
            variables = {
                "FUSION_TRACE_DIR": str(job.rings(traces, turn)),
                "HOROVOD_FUSION_THRESHOLD": str(2 << 20),
                "FUSION_LINK_CREDIT": "0",
            }
            seconds = launch.on_hosts(hosts, job.rate, arguments, variables=variables)
            found[str(job)].append(seconds)
            print(f"round {turn}, {job}: {seconds:.4f} s a step", file=sys.stderr)
    return found


def middle(times: Sequence[float]) -> int:
    """Returns the round of median length."""
    return sorted(range(len(times)), key=times.__getitem__)[len(times) // 2]


def predict(traces: Path, jobs: Sequence[Job], measured: dict[str, list[float]]) -> dict[str, Any]:
    """Returns for each recording its step, and its predictions of every other job."""
    from benchmarks.netlab.iproute import bits_per_second
    from fusion_trace.analyse.recorded_steps import understand
    from fusion_trace.analyse.whatif import Change, Model
    from fusion_trace.read.choice import StepRange
    from fusion_trace.read.job import load

    found: dict[str, Any] = {}
    for source in RECORDED:
        rings = source.rings(traces, middle(measured[str(source)]))
        model = Model(understand(load([str(rings)], str(traces)), StepRange(SKIPPED, None)))
        row: dict[str, Any] = {"error": model.error, "predicted": {}}
        for job in jobs:
            change = Change(
                rate=None if job.rate == source.rate else float(bits_per_second(job.rate)),
                density=None if job.density == source.density else job.density,
            )
            if change != Change():
                told = model.answer(change)
                step = told.changed.step
                doubts = {doubt.reason: doubt.seconds for doubt in told.doubts}
                row["predicted"][str(job)] = {**asdict(step), "doubts": doubts}
        found[str(source)] = row
    return found


def judge(document: dict[str, Any]) -> list[tuple[str, str, float, float, bool]]:
    """Returns of each prediction: recording, job, its error (above 0: too long), half of its range as a part of it, and
    whether the truth is in it."""
    found = []
    for source, row in document["from"].items():
        for job, told in row["predicted"].items():
            times = document["measured"][job]
            truth = times[middle(times)]
            width = (told["high"] - told["low"]) / 2 / told["value"]
            found.append((source, job, told["value"] / truth - 1, width, told["low"] <= truth <= told["high"]))
    return found


def show(document: dict[str, Any], console: Console) -> None:
    """Prints a table of all predictions, and how many of them hold."""
    table = Table(title="seconds a step")
    for column in ("recorded", "job", "predicted", "measured", "of rounds", "error", "range", "truth in it"):
        table.add_column(column, justify="left" if column in ("recorded", "job") else "right")
    found = judge(document)
    for source, job, error, width, inside in found:
        told, times = document["from"][source]["predicted"][job], document["measured"][job]
        rounds = f"{min(times):.3f} to {max(times):.3f}"
        value = f"{told['value']:.3f} ({told['low']:.3f} to {told['high']:.3f})"
        truth = f"{times[middle(times)]:.3f}"
        table.add_row(source, job, value, truth, rounds, f"{error:+.1%}", f"{width:.0%}", "yes" if inside else "no")
    console.print(table)
    wide = sum(width > WIDEST for *_, width, _ in found)
    console.print(
        f"In their range: {sum(each[-1] for each in found)} of {len(found)}; wider than {WIDEST:.0%}: {wide}."
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whatif", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", type=int, default=4, help="%(default)s")
    parser.add_argument("--steps", type=int, default=20, help="of each job in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of all jobs (%(default)s)")
    parser.add_argument("--compute", type=float, default=0.06, help="seconds a step (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="two hosts, five steps, 1 Gbit/s and 200 Mbit/s")
    parser.add_argument("--table", action="store_true", help="only show the results that there are")
    parser.add_argument("--traces", type=Path, help="where recordings stay; by default they are removed")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="of results (%(default)s)")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker is not None:
        worker(arguments.worker, arguments.steps, arguments.compute)
        return
    if not arguments.table:
        hosts, steps = arguments.hosts, arguments.steps
        rates: Sequence[str] = RATES
        if arguments.quick:
            hosts, steps, rates, arguments.rounds = 2, 5, RATES[:2], 1
        jobs = [Job(rate, density) for rate in rates for density in DENSITIES]
        with tempfile.TemporaryDirectory() as folder:
            traces = (arguments.traces or Path(folder)).resolve()
            measured = measure(hosts, jobs, steps, arguments.rounds, traces)
            predicted = predict(traces, jobs, measured)
        document = {"machine": msgspec.to_builtins(machine.describe()), "hosts": hosts, "steps": steps,
                    "parameters": LAYERS * (WIDTH + 1) * WIDTH, "measured": measured, "from": predicted}  # fmt: skip
        os.makedirs(arguments.out.parent, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    show(json.loads(arguments.out.read_text(encoding="utf-8")), Console())


if __name__ == "__main__":
    main()
