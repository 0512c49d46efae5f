"""Settings found by `--autotune` and `--auto`, beside the default and the best of a sweep of fixed settings.

    python -m benchmarks.autotune
    python -m benchmarks.autotune --networks 100mbit --samples 30
    python -m benchmarks.autotune --quick

Four netlab hosts (root needed) with one worker each. The model has layers that *sleep* in their forward and backward
passes, as a worker does whose accelerator computes, so that no contender's computation disturbs another's
communication. First `--autotune` searches, and each `--auto` decides; then all take turns in one job: the default, the
settings that were found, and every fixed setting of the sweep. A sample is the mean time of a step over a turn on the
slowest rank.

*Behind the best* compares with the best fixed setting of the sweep with the same mathematics. The best of many noisy
medians is also the luckiest one: so for each turn the best is chosen by all other turns, and compared in this one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import netlab
from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, sampling
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table, goals, number

NAME = "autotune"
RESULTS = results.RESULTS / "autotune.json"
HOSTS = 4
LAYERS, ELEMENTS = 16, 90_000  # of each layer: a matrix, and a bias of a hundredth
MIB, KIB = 1 << 20, 1 << 10
NETWORKS: dict[str, dict[str, Any]] = {
    "unshaped": {},
    "1gbit": {"rate": "1gbit"},
    "200mbit": {"rate": "200mbit"},
    "100mbit": {"rate": "100mbit"},
    "10mbit": {"rate": "10mbit"},
    "far": {"path": netlab.Path(delay=20e-3, loss=1e-4, rate=200_000_000), "congestion": "cubic"},
    "slow-host": {"rate": "1gbit", "rates": {HOSTS - 1: "100mbit"}},
}
"""Arguments of each lab. In the far one a round trip takes 40 ms, and .01 % of packets are lost."""
DEFAULT, TUNED = "default", "--autotune"
AUTOS = {"lossless": "--auto=lossless", "lossy": "--auto=lossy", "async": "--auto=async"}
SWEEP: dict[str, dict[str, Any]] = {
    "buckets .25 MiB": {"threshold": MIB // 4},
    "buckets 1 MiB": {"threshold": MIB},
    "buckets 2 MiB": {"threshold": 2 * MIB},
    "buckets 64 MiB": {"threshold": 64 * MIB},
    "chunks 64 KiB": {"chunk_bytes": 64 * KIB},
    "chunks 256 KiB": {"chunk_bytes": 256 * KIB},
    "chunks 2 MiB": {"chunk_bytes": 2 * MIB},
    "buckets 1 MiB, doubling": {"threshold": MIB, "exchange": "doubling"},
    "ring": {"exchange": "ring"},
    "window 4 MiB": {"window_bytes": 4 * MIB},
    "1 thread": {"threads": 1},
}
LOSSY: dict[str, dict[str, Any]] = {
    "fp16": {"codec": "fp16"},
    "int8": {"codec": "int8"},
    "topk 1 %": {"codec": "topk(density=0.01)"},
    "topk 1 %, buckets 1 MiB": {"codec": "topk(density=0.01)", "threshold": MIB},
    "topk 1 %, 2 bits": {"codec": "topk(density=0.01, value='int2', minimum=1024)"},
}
LATE: dict[str, dict[str, Any]] = {"stale": {"late": True}}
CLASSES = {
    TUNED: (DEFAULT, *SWEEP),
    AUTOS["lossless"]: (DEFAULT, *SWEEP),
    AUTOS["lossy"]: (DEFAULT, *SWEEP, *LOSSY),
    AUTOS["async"]: (DEFAULT, *SWEEP, *LATE),
}
"""By search, the fixed settings that its result is compared with: those with the same mathematics. (`async` may choose
a codec or local steps besides.)"""
LOCAL_STEPS = 1200  # that trying algorithms with local steps takes at most
BEHIND = 1.02


def make_model(compute: float) -> Any:
    """Makes a model whose steps sleep for `compute` seconds and take hardly any CPU time."""
    from benchmarks.common.sleeping import SleepingModel

    layers = [((ELEMENTS,), (ELEMENTS // 100,))] * LAYERS
    return SleepingModel(layers, compute, lambda memory: memory.normal_())


class Contender:
    """A model, and its optimizer, made with these environment variables."""

    def __init__(self, compute: float, variables: dict[str, str], overlap: str | None = None) -> None:
        import torch

        import fusion_rt.torch as hvd

        self.model = make_model(compute)
        os.environ.update(variables)
        try:
            self.optimizer: Any = hvd.DistributedOptimizer(
                torch.optim.SGD(self.model.parameters(), 1e-3), self.model.named_parameters(), overlap=overlap
            )
        finally:
            for name in variables:
                del os.environ[name]

    @property
    def tuning(self) -> Any:
        """Settings of the active plan; None if it is not tuned."""
        plan = self.optimizer._sync.plan.agreed
        return None if plan is None else plan.tuning

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model().backward()
            self.optimizer.step()
        if hasattr(self.optimizer, "synchronize_parameters"):
            self.optimizer.synchronize_parameters()

    def settle(self, most: int) -> int:
        """Trains until the search has ended. Returns the number of steps.

        Raises:
            RuntimeError: it has not ended after `most` steps.
        """
        steps = 0
        while steps < most:
            self.train(1)
            steps += 1
            if self.tuning is not None and self.tuning.steps == 0:
                return steps
        raise RuntimeError(f"the search has not ended after {most} steps")

    def turn(self, steps: int) -> float:
        """Takes a turn; returns the mean seconds of a step on the slowest rank."""
        import torch

        import fusion_rt.torch as hvd

        period = self.optimizer._sync.options.algorithm.period
        steps = -(-steps // period) * period
        hvd.barrier()
        began = time.perf_counter()
        self.train(steps)
        took = torch.tensor((time.perf_counter() - began) / steps, dtype=torch.float64)
        return float(hvd.allreduce(took, op=hvd.Max))


def fixed(compute: float, setting: dict[str, Any]) -> Contender:
    """One whose plans have this setting from the first to the last."""
    from fusion_rt.choice.candidates import Setting
    from fusion_rt.torch.autotune.director import Circumstances, Director, Sample, Trial
    from fusion_rt.torch.autotune.replanning import Replanning

    class Only:
        def __init__(self, where: Circumstances) -> None:
            self._setting = Setting(**{"threshold": where.threshold, **setting})

        def first(self) -> Trial:
            return Trial(self._setting, "", is_last=True)

        def measured(self, sample: Sample) -> Trial:
            raise AssertionError("a setting that stays is not judged")

    made = Contender(compute, {}, "stale" if setting.get("late") else None)
    made.optimizer._sync.replanning = Replanning(lambda where: Director(Only(where), 1))
    return made


def worker(arguments: argparse.Namespace) -> None:
    """Measures on each rank; rank 0 prints the result."""
    import torch

    import fusion_rt.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    compute, steps = arguments.compute, str(arguments.sample_steps)
    found: dict[str, Any] = {"steps": {}, "chosen": {}}
    contenders = {DEFAULT: Contender(compute, {})}
    with tempfile.TemporaryDirectory() as folder:
        tuned = Contender(
            compute,
            {
                "HOROVOD_AUTOTUNE": "1",
                "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": steps,
                "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": str(arguments.samples),
                "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
                "HOROVOD_AUTOTUNE_LOG": str(Path(folder) / "log.csv"),
                "FUSION_AUTOTUNE_DIRECTORY": folder,
            },
        )
        searches: dict[str, Contender] = {TUNED: tuned}
        for level, name in AUTOS.items():
            variables = {"FUSION_AUTO": level, "FUSION_AUTO_EVERY": "0", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": steps}
            searches[name] = Contender(compute, variables)
        for name, search in searches.items():
            found["steps"][name] = search.settle((arguments.samples + 10) * (arguments.sample_steps + 2) + LOCAL_STEPS)
            found["chosen"][name] = search.tuning.why
            contenders[name] = search
        found["log"] = next((path.read_text(encoding="utf-8") for path in Path(folder).glob("log*")), "")
    for name, setting in {**SWEEP, **LOSSY, **LATE}.items():
        contenders[name] = fixed(compute, setting)
    turns: dict[str, Callable[[], float]] = {
        name: lambda contender=one: contender.turn(arguments.steps)  # type: ignore[misc]
        for name, one in contenders.items()
    }
    for one in contenders.values():
        one.train(2)
    samples = sampling.alternate(turns, arguments.rounds, warm_up=1)
    parameters = sum(parameter.numel() for parameter in contenders[DEFAULT].model.parameters())
    if hvd.rank() == 0:
        launch.tell({**found, "samples": samples, "parameters": parameters})
    hvd.shutdown()


def measure(network: str, arguments: argparse.Namespace) -> Record:
    """Measures on one network."""
    here, date = results.begin()
    passed = ["-m", "benchmarks.autotune", "--worker"]
    for name in ("steps", "rounds", "samples", "sample-steps", "compute"):
        passed += [f"--{name}", str(getattr(arguments, name.replace("-", "_")))]
    with netlab.Netlab(arguments.hosts, **NETWORKS[network]) as lab:
        found = launch.on_lab(lab, passed)
    setting: results.Setting = {"network": network, "hosts": arguments.hosts, "compute": arguments.compute}
    samples = {name: results.rounded(turns) for name, turns in found["samples"].items()}
    details = {name: found[name] for name in ("steps", "chosen", "log", "parameters")}
    details["samples_of_autotune"] = arguments.samples
    return Record(setting, [Measure("a step", "s", samples, DEFAULT)], here, date, results.command_line(), details)


def show(records: Sequence[Record]) -> None:
    """Prints a table for each network, and the goals."""
    for record in records:
        samples = record.measure("a step").samples
        setting, millions = record.setting, record.details["parameters"] / 1e6
        title = f"{millions:.1f} M parameters, {setting['hosts']} hosts, {setting['network']}"
        table = Table(["setting", "ms a step", "quartiles", "default / this", "steps to find it"], title=title)
        for name, turns in samples.items():
            middle = sampling.quartiles(turns)
            table.add(
                name,
                f"{middle.value * 1e3:.1f}",
                f"{middle.low * 1e3:.1f}-{middle.high * 1e3:.1f}",
                number(sampling.median(samples[DEFAULT]) / middle.value),
                str(record.details["steps"].get(name, "")),
            )
        table.show()
    goals(found for record in records for found in reached(record)).show()


def table(records: Sequence[Record]) -> Table:
    """Makes a table: milliseconds a step on each network, and their ratio to the best fixed setting of the same
    mathematics."""
    found = Table(["ms a step", "default", *(f"`{name}`" for name in CLASSES), "best of the sweep", "... with a codec"])
    for record in records:
        samples = record.measure("a step").samples
        middles = {name: sampling.median(turns) for name, turns in samples.items()}
        row = [f"{middles[DEFAULT] * 1e3:.0f}"]
        for name, others in CLASSES.items():
            compared = behind(samples, name, others)
            interval = f"{compared.value:.2f}; {compared.low:.2f}–{compared.high:.2f}"
            row.append(f"{middles[name] * 1e3:.0f} ({interval})")
        for names in (CLASSES[TUNED], LOSSY):
            best = min((name for name in names if name in middles), key=middles.__getitem__)
            row.append(f"{middles[best] * 1e3:.0f} ({best})")
        found.add(str(record.setting["network"]), *row)
    return found


def reached(record: Record) -> list[tuple[str, str, bool]]:
    """Lists goals: goal, what was measured, and whether it holds."""
    samples, network = record.measure("a step").samples, record.setting["network"]
    found = []
    for name, others in CLASSES.items():
        default = sampling.ratio(samples[DEFAULT], samples[name])
        if name == TUNED:
            goal = f"{network}: {name} no slower than the default"
            found.append((goal, f"{number(default.value)} ({number(default.low)}-{number(default.high)})",
                          default.high >= 1))  # fmt: skip
        compared = behind(samples, name, others)
        best = min((other for other in others if other in samples), key=lambda other: sampling.median(samples[other]))
        goal = f"{network}: {name} at most 2 % behind the best fixed setting"
        measured = f"{number(compared.value)} ({number(compared.low)}-{number(compared.high)}) of {best}"
        found.append((goal, measured, compared.value <= BEHIND))
    return found


def behind(samples: Mapping[str, Sequence[float]], name: str, others: Sequence[str]) -> sampling.Estimate:
    """Returns the ratio of the time with the setting that was found to that with the best of the others.

    In each turn, the best is the one that is best in all other turns, so that luck in a turn does not count in it.
    """
    best = []
    for turn in range(len(samples[name])):
        rest = {
            other: sampling.median([*samples[other][:turn], *samples[other][turn + 1 :]] or samples[other])
            for other in others
            if other in samples
        }
        best.append(samples[min(rest, key=rest.__getitem__)][turn])
    return sampling.ratio(samples[name], best)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    commands = shared.parser(NAME, __doc__)
    commands.add_argument("--networks", default=",".join(NETWORKS), help="of %(default)s")
    commands.add_argument("--hosts", type=int, default=HOSTS, help="(%(default)s)")
    commands.add_argument("--steps", type=int, default=3, help="in a turn (%(default)s)")
    commands.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    commands.add_argument("--samples", type=int, default=30, help="of --autotune (%(default)s)")
    commands.add_argument("--sample-steps", type=int, default=5, help="in each (%(default)s)")
    commands.add_argument("--compute", type=float, default=0.06, help="seconds a step (%(default)s)")
    commands.add_argument("--quick", action="store_true", help="one short turn of each, and few samples")
    shared.add_out(commands, RESULTS)
    shared.add_table(commands)
    shared.add_worker(commands)
    arguments = commands.parse_args(argv)
    if arguments.worker:
        worker(arguments)
        return
    if arguments.quick:
        if arguments.networks == commands.get_default("networks"):
            arguments.networks = "1gbit"
        arguments.steps, arguments.rounds = 1, 1
        arguments.samples, arguments.sample_steps = 3, 1
    names = shared.chosen(commands, "network", arguments.networks.split(","), NETWORKS)
    if arguments.table:
        show(results.load(arguments.out, NAME).records)
        return
    made = []
    for name in names:
        began = time.perf_counter()
        made.append(measure(name, arguments))
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        if arguments.out:
            results.keep(arguments.out, NAME, made[-1])
    show(made)


if __name__ == "__main__":
    main()
