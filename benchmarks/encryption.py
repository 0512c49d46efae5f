"""Cost of encryption: all-reduce between two hosts with `--encryption all` beside `control`.

    python -m benchmarks.encryption
    python -m benchmarks.encryption --rates 1gbit --rounds 9
    python -m benchmarks.encryption --table

Two netlab hosts (root needed), one rank each; the ranks speak to their daemons directly, without torch. For each rate
of the links, jobs of all variants take turns, so that other load of the machine affects all of them: `all` and
`control`, with some numbers of payload connections and of ZeroMQ's I/O threads, which encrypt. A turn's sample is the
median time of an all-reduce on the slower rank. Printed are medians over turns and their range, the same in bytes of
the bucket a second, and the median of the ratio of `control` to `all`, turn by turn.

Both hosts share this machine's cores, and numbers of a busy machine mean little: the load before each part is recorded
with them. On links that are faster than one core can encrypt, encryption therefore costs more here than on separate
hosts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from benchmarks.common import arguments as shared
from benchmarks.common import launch, results, tables
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table

NAME = "encryption"

HOSTS = 2
BYTES = 25_600_000
RESULTS = results.RESULTS / "encryption.json"
UNSHAPED = "unshaped"
RATES = (UNSHAPED, "1gbit")
SECONDS = {UNSHAPED: 1.0, "1gbit": 2.0}  # of one turn, about
MODES = ("all", "control")
CONTROL = "control"
Measured = dict[str, Any]
"""`bytes`; `cores` of the machine; `load`: by rate, how many processes wanted to run before that; `times`: by rate and
variant, the turns' seconds of an all-reduce."""


class Variant(NamedTuple):
    """The settings of a job that are varied."""

    encryption: str
    connections: int
    io_threads: int

    def __str__(self) -> str:
        return f"{self.encryption}, {self.connections}, {self.io_threads}"

    def environment(self) -> dict[str, str]:
        return {
            "FUSION_ENCRYPTION": self.encryption,
            "FUSION_CONNECTIONS": str(self.connections),
            "FUSION_IO_THREADS": str(self.io_threads),
        }


WAYS = ((1, 1), (4, 1), (4, 2))  # connections and I/O threads


def worker(nbytes: int, seconds: float) -> None:
    """Measures on each rank; rank 0 prints the median of the slower rank's times."""
    import numpy as np

    from fusion_rt import wire
    from fusion_rt.client import Client
    from fusion_rt.launchers.environment import detect

    where = detect()
    client = Client(where.socket, where.job, where.rank, 60.0)
    elements = nbytes // 4
    region = client.allocate(nbytes)
    values = np.frombuffer(region.view, np.float32)[:elements]
    values[:] = 1.0
    signature = wire.Signature("allreduce", "float32", (elements,), "average")
    most = wire.Signature("allreduce", "float64", (2,), "max")

    def reduce() -> float:
        began = time.perf_counter()
        client.wait(client.submit("x", signature, place=(region.segment, region.offset)))
        return time.perf_counter() - began

    def slower(*numbers: float) -> list[float]:
        data = np.array(numbers, np.float64).tobytes()
        found = client.wait(client.submit("slower", most, inline=data)).inline
        return [float(number) for number in np.frombuffer(found or b"", np.float64)]

    for _ in range(3):
        reduce()
    count = int(max(4, min(200, seconds / slower(reduce(), 0.0)[0])))
    median = slower(statistics.median(reduce() for _ in range(count)), 0.0)[0]
    assert (values == 1.0).all()
    if where.rank == 0:
        launch.tell(median)
    client.leave()


def turn(lab: Any, variant: Variant, seconds: float) -> float:
    """Runs one job on the lab's hosts; returns the seconds of an all-reduce."""
    command = ["-m", "benchmarks.encryption", "--worker", "--seconds", str(seconds)]
    return float(launch.on_lab(lab, command, variables=variant.environment()))


def measure(rates: Sequence[str], rounds: int) -> Measured:
    """Measures turns of all variants on links of each rate."""
    from benchmarks.netlab import Netlab

    variants = [Variant(mode, *way) for way in WAYS for mode in MODES]
    measured: Measured = {"bytes": BYTES, "cores": os.cpu_count(), "load": {}, "times": {}}
    for rate in rates:
        measured["load"][rate] = round(os.getloadavg()[0], 1)
        times: dict[str, list[float]] = {str(variant): [] for variant in variants}
        with Netlab(HOSTS, None if rate == UNSHAPED else rate) as lab:
            for number in range(rounds):
                for variant in variants[::-1] if number % 2 else variants:
                    times[str(variant)].append(round(turn(lab, variant, SECONDS.get(rate, 2.0)), 6))
                print(f"{rate}: round {number + 1} of {rounds}", file=sys.stderr)
        measured["times"][rate] = times
    return measured


def keep(path: Path, measured: Measured) -> None:
    """Writes the results to a file: a record for each rate."""
    here, date = results.begin()
    records = []
    for rate, times in measured["times"].items():
        measures = [
            Measure(way_name(*way), "s", {mode: times[str(Variant(mode, *way))] for mode in MODES}, CONTROL)
            for way in WAYS
        ]
        machine = msgspec.structs.replace(here, load=measured["load"][rate])
        details = {"bytes": measured["bytes"]}
        records.append(Record({"rate": rate}, measures, machine, date, results.command_line(), details))
    results.keep(path, NAME, *records)


def load(path: Path) -> Measured:
    """Reads the results in a file."""
    found = results.load(path, NAME).records
    times = {
        str(record.setting["rate"]): {
            str(Variant(mode, *way)): record.measure(way_name(*way)).samples[mode] for way in WAYS for mode in MODES
        }
        for record in found
    }
    machines = {str(record.setting["rate"]): record.machine for record in found}
    load = {rate: machine.load if machine else 0.0 for rate, machine in machines.items()}
    cores = max(machine.cores if machine else 0 for machine in machines.values())
    return {"bytes": found[0].details["bytes"], "cores": cores, "load": load, "times": times}


def way_name(connections: int, io_threads: int) -> str:
    """Names a number of connections and of I/O threads in words."""
    return f"connections {connections}, I/O threads {io_threads}"


def ratio(times: dict[str, list[float]], connections: int, io_threads: int) -> float:
    """Returns the ratio of `control`'s time to `all`'s: the median over rounds, in which both had their turns."""
    both = zip(*(times[str(Variant(mode, connections, io_threads))] for mode in MODES), strict=True)
    return float(statistics.median(control / encrypted for encrypted, control in both))


def show(measured: Measured, console: Console) -> None:
    """Prints a table of the variants for each rate, and one of the goals."""
    for rate, times in measured["times"].items():
        busy = f", load {measured['load'][rate]:g} before" if measured["load"][rate] > 1 else ""
        title = f"{measured['bytes'] / 1e6:g} MB, {HOSTS} hosts on {measured['cores']} cores, {rate}{busy}"
        columns = ["connections", "I/O threads", *(f"{mode} ms (range)" for mode in MODES)]
        table = Table([*columns, "all MB/s", "control MB/s", "all / control"], title=title, left=0)
        for way in WAYS:
            turns = [times[str(Variant(mode, *way))] for mode in MODES]
            row = [str(number) for number in way]
            row += [f"{statistics.median(t) * 1e3:.1f} ({min(t) * 1e3:.1f}-{max(t) * 1e3:.1f})" for t in turns]
            row += [f"{measured['bytes'] / statistics.median(t) / 1e6:.0f}" for t in turns]
            table.add(*row, f"{ratio(times, *way):.3f}")
        table.show(console)
    tables.goals(goals(measured)).show(console)


def goals(measured: Measured) -> list[tuple[str, str, bool]]:
    """Lists goals: goal, what was measured, and whether it holds; of the rates that were measured."""
    found = []
    for rate, times in measured["times"].items():
        ratios = {way: ratio(times, *way) for way in WAYS}
        told = ", ".join(f"{number:.3f} ({c} connections, {t} I/O threads)" for (c, t), number in ratios.items())
        if rate == UNSHAPED:
            several = max(number for (connections, _), number in ratios.items() if connections > 1)
            found.append(
                ("unshaped, several connections: all at least 0.5 times as fast as control", told, several >= 0.5)
            )
        else:
            goal = f"{rate}: all within 3 % of control"
            found.append((goal, told, all(abs(number - 1) <= 0.03 for number in ratios.values())))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--rates", default=",".join(RATES), help="of the links (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant (%(default)s)")
    shared.add_out(parser, RESULTS)
    shared.add_table(parser)
    shared.add_worker(parser)
    parser.add_argument("--seconds", type=float, default=1.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.worker:
        worker(BYTES, arguments.seconds)
        return
    if not arguments.table:
        keep(arguments.out, measure(arguments.rates.split(","), arguments.rounds))
    show(load(arguments.out), Console(width=140))


if __name__ == "__main__":
    main()
