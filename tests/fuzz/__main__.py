"""`python -m tests.fuzz --count 1000000 [--seed S] [--target T]`: all targets, or some; prints a table, and each crash.

The count is divided among the targets: those that are slow get fewer. Exit status 1 if there was a crash. Anything that
asks for more than `_ADDRESS_SPACE` bytes of addresses gets a MemoryError, which no target documents.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import resource

from rich.console import Console
from rich.table import Table

from tests.fuzz.engine import Outcome, Target, fuzz
from tests.fuzz.targets import all_targets

_ADDRESS_SPACE = 1 << 30  # bytes beyond what the process has when it begins
_SHOWN = 400  # bytes of an input


def shares(targets: list[Target], count: int) -> list[int]:
    """How many inputs each target gets; together `count`, or a few more."""
    whole = sum(1 / target.cost for target in targets)
    return [math.ceil(count / target.cost / whole) for target in targets]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="inputs, of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", action="append", help="only targets whose name has this in it; may be repeated")
    options = parser.parse_args(arguments)
    logging.disable()
    targets = [t for t in all_targets() if not options.target or any(part in t.name for part in options.target)]
    if not targets:
        parser.error("there is no such target")
    for target in targets:
        for seed in target.seeds:  # what is made once (kernels, caches) counts for nobody
            with contextlib.suppress(Exception):  # the run tells
                target.run(seed)
    _limit_address_space()
    outcomes = [fuzz(t, n, options.seed) for t, n in zip(targets, shares(targets, options.count), strict=True)]
    _show(outcomes)
    return int(any(outcome.crashed for outcome in outcomes))


def _limit_address_space() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + _ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _show(outcomes: list[Outcome]) -> None:
    table = Table()
    for name in ("target", "executions", "per second", "accepted", "rejected", "crashes", "most memory"):
        table.add_column(name, justify="left" if name == "target" else "right")
    whole = Outcome("all")
    for outcome in outcomes:
        whole.accepted += outcome.accepted
        whole.rejected += outcome.rejected
        whole.crashed += outcome.crashed
        whole.seconds += outcome.seconds
        whole.nbytes = max(whole.nbytes, outcome.nbytes)
    for outcome in (*outcomes, whole):
        table.add_row(
            outcome.target,
            f"{outcome.executions:,}",
            f"{outcome.executions / max(outcome.seconds, 1e-9):,.0f}",
            f"{outcome.accepted:,}",
            f"{outcome.rejected:,}",
            f"{outcome.crashed:,}",
            f"{outcome.nbytes / 1024:,.0f} KiB",
        )
    console = Console(width=120)
    for outcome in outcomes:
        for crash in outcome.crashes:
            console.print(f"--- {outcome.target}: {crash.data[:_SHOWN]!r} ({len(crash.data)} bytes)", markup=False)
            console.print(crash.why, markup=False, highlight=False)
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
