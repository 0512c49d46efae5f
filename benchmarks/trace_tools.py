"""Time and memory of every tool of fusion-trace, on rings of a large job that never ran.

    python -m benchmarks.trace_tools
    python -m benchmarks.trace_tools --steps 500 --tools summary,report
    python -m benchmarks.trace_tools --steps 500 --times 100 --ranks 64 --hosts 8

The job is made by `tests.diagnosis.generator`: hosts around a ring, as many ranks on each, and one rank that is slow in
every step, and in one of a hundred much slower. `--times` repeats the steps with later times and numbers. Each tool is
a process of its own, as a person starts it; its memory is the largest resident set that the kernel has seen of it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.common import arguments as shared
from benchmarks.common import results
from benchmarks.common.results import Measure, Record
from benchmarks.common.tables import Table
from tests.diagnosis.generator import MS, Fault, Shape, write

NAME = "trace_tools"
RESULTS = results.RESULTS / "trace_tools.json"
GOAL_SECONDS, GOAL_NBYTES = 5.0, 300e6
MOST_STEPS, GOAL_OF_LARGER = 5000, 60.0
MOST_COMPARED = 64_000  # steps of all ranks on either side of `diff`
TOOLS: Mapping[str, tuple[str, ...]] = {
    "summary": ("summary", "{rings}"),
    "overlap": ("overlap", "{rings}"),
    "stragglers": ("stragglers", "{rings}"),
    "buckets": ("buckets", "{rings}"),
    "tensor": ("tensor", "bucket 0", "{rings}"),
    "critical-path": ("critical-path", "{rings}"),
    "diff": ("diff", "{rings}", "{rings}", "--steps", "{low}:{half}", "--after-steps", "{half}:{high}"),
    "whatif": ("whatif", "{rings}", "--rate", "1gbit"),
    "report": ("report", "{rings}", "-o", "{out}/report.html"),
    "merge": ("merge", "{rings}", "-o", "{out}/merged.json.gz"),
    "convert (CSV)": ("convert", "{rings}", "-o", "{out}/records.csv"),
    "hang": ("hang", "--trace", "{rings}"),
}


def job(directory: Path, steps: int, ranks: int, hosts: int, times: int) -> int:
    """Writes the rings of the job; returns the number of records."""
    when = np.where(np.random.default_rng(1).random(steps) < 0.01, 7.0, 1.0)
    shape = Shape(nodes=hosts, ranks_per_node=ranks // hosts, steps=steps, buckets=2, seed=1)
    fault = Fault("forward", tuple(when.tolist()), frozenset({min(2, ranks - 1)}), more=5 * MS)
    return write(shape, directory, fault, times)


def measure(directory: Path, tool: str, steps: int, ranks: int) -> tuple[float, float, float]:
    """Runs a tool. Returns its seconds, those of processors, and bytes. Raises `subprocess.CalledProcessError`."""
    half = steps // 2
    compared = min(half, MOST_COMPARED // ranks)
    steps_of_diff = {"low": half - compared, "half": half, "high": half + compared}
    names: dict[str, object] = {"rings": directory / "rings", "out": directory, **steps_of_diff}
    command = [sys.executable, "-m", "fusion_trace", *(word.format(**names) for word in TOOLS[tool])]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0


def run(steps: int, ranks: int, hosts: int, times: int, rounds: int, tools: Sequence[str]) -> Record:
    """Measures tools, `rounds` times each, in turn."""
    machine, date = results.begin()
    with tempfile.TemporaryDirectory(prefix=NAME) as name:
        directory = Path(name)
        (directory / "rings").mkdir()
        # A tool's largest resident set begins with that of the process that starts it, which has to be small.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            records = pool.submit(job, directory / "rings", steps, ranks, hosts, times).result()
        turns = [{tool: measure(directory, tool, steps * times, ranks) for tool in tools} for _ in range(rounds)]
    found = {tool: [turn[tool] for turn in turns] for tool in tools}
    measures = [
        Measure(what, unit, {tool: results.rounded(row[place] for row in rows) for tool, rows in found.items()})
        for place, (what, unit) in enumerate((("time", "s"), ("processors", "s"), ("memory", "B")))
    ]
    setting: results.Setting = {"steps": steps * times, "ranks": ranks, "hosts": hosts, "records": records}
    return Record(setting, measures, machine, date, results.command_line())


def table_of(record: Record) -> Table:
    """Returns the results as a table."""
    setting = record.setting
    title = f"{setting['steps']:,} steps, {setting['ranks']} ranks on {setting['hosts']} hosts"
    table = Table([f"{title}, {setting['records']:,} records", "s", "of processors, s", "MB"])
    used, memory = (record.measure(name).samples for name in ("processors", "memory"))
    for tool, seconds in record.measure("time").samples.items():
        table.add(
            tool, f"{np.median(seconds):.1f}", f"{np.median(used[tool]):.1f}", f"{np.median(memory[tool]) / 1e6:.0f}"
        )
    if int(setting["steps"]) <= MOST_STEPS:
        table.add("goal", f"{GOAL_SECONDS:.1f}", "", f"{GOAL_NBYTES / 1e6:.0f}")
    else:
        table.add("goal", f"{GOAL_OF_LARGER:.1f}", "", "")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    parser = shared.parser(NAME, __doc__)
    parser.add_argument("--steps", type=int, default=5000, help="that are made (%(default)s)")
    parser.add_argument("--times", type=int, default=1, help="how often they are in the job (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="of the job (%(default)s)")
    parser.add_argument("--hosts", type=int, default=0, help="with as many ranks each (as many as ranks)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each tool (%(default)s)")
    parser.add_argument("--tools", default=",".join(TOOLS), help="which (all)")
    shared.add_out(parser, RESULTS)
    shared.add_table(parser)
    arguments = parser.parse_args(argv)
    if arguments.table:
        for record in results.load(arguments.out, NAME).records:
            table_of(record).show()
        return
    tools = shared.chosen(parser, "tool", arguments.tools.split(","), TOOLS)
    hosts = arguments.hosts or arguments.ranks
    if arguments.ranks % hosts:
        parser.error(f"{arguments.ranks} ranks cannot be on {hosts} hosts, as many on each")
    record = run(arguments.steps, arguments.ranks, hosts, arguments.times, arguments.rounds, tools)
    results.keep(arguments.out, NAME, record)
    table_of(record).show()


if __name__ == "__main__":
    main()
