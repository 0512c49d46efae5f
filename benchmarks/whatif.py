"""Predictions of `fusion-trace whatif`, against jobs that were run: within 10 %, or refused with the reason.

    python -m benchmarks.whatif
    python -m benchmarks.whatif --quick

Four netlab hosts (root needed) with one worker each train layers of 3.1 million parameters, dense and with topk 10 %,
at 1 Gbit/s, 200 and 100 Mbit/s. Layers *sleep* in their passes, as with an accelerator. From the recordings of three
of these jobs every other one is predicted, and the error of the prediction is printed. The first two
steps, in which plans are made, do not count; the time of a step is the mean over the others and over ranks. Buckets
leave in order (FUSION_LINK_CREDIT=0), since the simulation knows no order of urgency.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.common import launch, machine

RESULTS = Path(__file__).parent / "results" / "whatif.json"
RATES = ("1gbit", "200mbit", "100mbit")
DENSITIES = (1.0, 0.1)
RECORDED = (("1gbit", 1.0), ("1gbit", 0.1), ("200mbit", 1.0))
LAYERS, WIDTH, BATCH = 12, 512, 8
SKIPPED = 2  # steps
GOAL = 0.10


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


def measure(hosts: int, rates: Sequence[str], densities: Sequence[float], steps: int, traces: Path) -> dict[str, Any]:
    """Runs every job; returns seconds a step by rate and density. Their rings are left in `traces`."""
    found: dict[str, Any] = {}
    for rate in rates:
        for density in densities:
            keep = traces / f"{rate}-{density:g}"
            arguments = ["-m", "benchmarks.whatif", "--worker", str(density), "--steps", str(steps)]
            variables = {"FUSION_TRACE_DIR": str(keep), "HOROVOD_FUSION_THRESHOLD": str(2 << 20)}
            variables["FUSION_LINK_CREDIT"] = "0"  # the simulation has no order of urgency
            found[f"{rate}/{density:g}"] = launch.on_hosts(hosts, rate, arguments, variables=variables)
            print(f"{rate}, density {density:g}: {found[f'{rate}/{density:g}']:.4f} s a step", file=sys.stderr)
    return found


def predict(traces: Path, rates: Sequence[str], densities: Sequence[float], steps: int) -> dict[str, Any]:
    """Returns for each recording its step, and its predictions of every other job."""
    from benchmarks.netlab.iproute import bits_per_second
    from fusion_trace.read.choice import StepRange
    from fusion_trace.read.job import load
    from fusion_trace.simulate.calibration import answer
    from fusion_trace.simulate.changes import Change
    from fusion_trace.simulate.recorded import understand

    found: dict[str, Any] = {}
    for its_rate, its_density in RECORDED:
        source = f"{its_rate}/{its_density:g}"
        recorded = understand(load([str(traces / source.replace("/", "-"))], str(traces)), StepRange(SKIPPED, None))
        as_it_was = answer(recorded, Change())
        row: dict[str, Any] = {
            "recorded": as_it_was.recorded.step.value,
            "replayed": as_it_was.replayed.step.value,
            "error": as_it_was.error,
            "codec": recorded.codec,
            "links": [[link.bandwidth, link.latency] for link in recorded.links],
            "predicted": {},
            "refused": {},
        }
        for rate in rates:
            for density in densities:
                change = Change(
                    bandwidth=None if rate == its_rate else float(bits_per_second(rate)),
                    density=None if density == its_density else density,
                )
                if change == Change():
                    continue
                told = answer(recorded, change)
                if told.changed is None:
                    row["refused"][f"{rate}/{density:g}"] = told.refused
                else:
                    step = told.changed.step
                    row["predicted"][f"{rate}/{density:g}"] = [step.value, step.low, step.high]
        found[source] = row
    return found


def errors(document: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Returns the relative error of the prediction (above 0: too long), by recording and job; not of refused ones."""
    measured = document["measured"]
    return {
        (source, job): predicted / measured[job] - 1
        for source, row in document["from"].items()
        for job, (predicted, *_) in row["predicted"].items()
    }


def show(document: dict[str, Any], console: Console) -> None:
    """Prints a table for each recording."""
    off = errors(document)
    for source, row in document["from"].items():
        rate = statistics.median(bandwidth for bandwidth, _ in row["links"]) * 8e-6
        table = Table(title=f"recorded {source}: {row['recorded']:.4f} s a step, replayed "
                      f"{row['error']:+.1%}; links of {rate:,.0f} Mbit/s found")  # fmt: skip
        for column in ("job", "predicted, s a step", "measured", "error", f"at most {GOAL:.0%}"):
            table.add_column(column, justify="left" if column == "job" else "right")
        for job, measured in document["measured"].items():
            if job == source:
                continue
            if job in row["refused"]:
                table.add_row(job, "refused", f"{measured:.4f}", "", "")
                continue
            predicted, low, high = row["predicted"][job]
            error = off[source, job]
            within = ("yes" if abs(error) <= GOAL else "no") + (
                "" if low <= measured <= high else ", not in its interval"
            )
            table.add_row(job, f"{predicted:.4f} ({low:.4f} to {high:.4f})", f"{measured:.4f}", f"{error:+.1%}", within)
        console.print(table)
        for why in dict.fromkeys(row["refused"].values()):
            console.print(f"refused: {why}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whatif", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hosts", type=int, default=4, help="%(default)s")
    parser.add_argument("--steps", type=int, default=10, help="of each job (%(default)s)")
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
            hosts, steps, rates = 2, 5, RATES[:2]
        with tempfile.TemporaryDirectory() as folder:
            traces = (arguments.traces or Path(folder)).resolve()
            measured = measure(hosts, rates, DENSITIES, steps, traces)
            predicted = predict(traces, rates, DENSITIES, steps)
        document = {"machine": msgspec.to_builtins(machine.describe()), "hosts": hosts, "steps": steps,
                    "parameters": LAYERS * (WIDTH + 1) * WIDTH, "measured": measured, "from": predicted}  # fmt: skip
        os.makedirs(arguments.out.parent, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    show(json.loads(arguments.out.read_text(encoding="utf-8")), Console())


if __name__ == "__main__":
    main()
