"""Measures fusion_rt beside its peers, and keeps raw results as JSON.

    python -m benchmarks --list
    python -m benchmarks step allreduce
    python -m benchmarks step allreduce --quick
    python -m benchmarks footprint --parameters 1e8,3e8
    python -m benchmarks --out /tmp/results
    python -m benchmarks allreduce --out /tmp/new --compare benchmarks/results
    python -m benchmarks --no-run --out /tmp/new --compare /tmp/old/allreduce.json

Each suite is a command of its own (`python -m benchmarks.NAME --help`), and writes NAME.json. Options that are its own
take the place of those that it is usually run with. Its results replace
older ones of the same settings in its file. `--quick` shows within seconds that a suite runs; its measurements mean
little, and are kept in build/benchmarks unless --out gives another folder.

With `--compare` the exit status is 1 if anything has become worse beyond noise (see docs/benchmarks.md).
`python -m benchmarks.report` makes the tables and plots of the documents.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import arguments as shared
from benchmarks.common import compare, machine, results
from benchmarks.common.results import Results, ResultsError
from benchmarks.common.tables import Table
from benchmarks.netlab import preflight
from benchmarks.suites import SUITES, Part, missing, module

QUICK = machine.ROOT / "build" / "benchmarks"


def show_list() -> None:
    """Prints a table of all suites."""
    table = Table(["suite", "minutes", "root", "what it measures"], left=1)
    for name, suite in SUITES.items():
        needs = {part.lab for part in suite.full}
        root = "no" if needs == {False} else "yes" if needs == {True} else "some"
        table.add(name, f"{suite.minutes}", root, suite.about if not missing(name) else f"(not there) {suite.about}")
    table.show()


def run(name: str, quick: bool, folder: Path, own: Sequence[str] = ()) -> str:
    """Measures a suite; returns the outcome in a few words, which begin with "failed" if it has failed.

    Args:
        own: options of the suite, in place of those that it is usually run with.
    """
    parts = SUITES[name].quick if quick else SUITES[name].full
    out = folder / f"{name}.json"
    left_out = 0
    for part in (Part(tuple(own)),) if own else parts:
        if part.lab and (problem := preflight()):
            print(f"{name} {shlex.join(part.arguments)} is left out: {problem}", file=sys.stderr)
            left_out += 1
            continue
        command = _command(name, part, out)
        print(f"$ {shlex.join(['python', *command[1:]])}", file=sys.stderr, flush=True)
        status = subprocess.run(command).returncode
        if status:
            return f"failed with status {status}: {shlex.join(part.arguments)}"
    if not out.exists():
        return "left out: it needs root" if left_out else f"failed: it wrote no {out}"
    if not SUITES[name].common:
        return f"{out}, in a form of its own"
    try:
        found = results.load(out, name)
    except ResultsError as error:
        return f"failed: {error}"
    return f"{len(found.records)} records in {out}" + (f", {left_out} left out" if left_out else "")


def _command(name: str, part: Part, out: Path) -> list[str]:
    return [sys.executable, "-m", module(name), *part.arguments, "--out", str(out)]


def load(path: Path, names: Sequence[str]) -> dict[str, Results]:
    """Loads the results of these suites from a file or folder; of all, if none is named.

    Raises:
        ResultsError: they are not in order, or there are none.
    """
    if path.is_dir():
        found = results.load_all(path)
    else:
        one = results.load(path)
        found = {one.suite: one}
    chosen = {name: each for name, each in found.items() if not names or name in names}
    if not chosen:
        raise ResultsError(f"There are no results of {', '.join(names) or 'any suite'} in {path}.")
    return chosen


def judge(old: dict[str, Results], new: dict[str, Results], tolerance: float) -> int:
    """Prints what has changed; returns 1 if anything is worse, 2 if nothing could be compared."""
    found = compare.compare(old, new, tolerance)
    for note in found.notes:
        print(note, file=sys.stderr)
    if not found.rows:
        print("Nothing could be compared.", file=sys.stderr)
        return 2
    improved = [row for row in found.rows if row.verdict == compare.BETTER]
    if improved:
        compare.table(improved, "better than before").show()
    if found.regressions:
        compare.table(found.regressions, "worse than before, beyond noise").show()
    same = len(found.rows) - len(improved) - len(found.regressions)
    print(f"{len(found.regressions)} worse, {len(improved)} better, {same} without a change beyond noise.")
    return 1 if found.regressions else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = shared.parser("", __doc__)
    parser.prog = "python -m benchmarks"
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="of --list (all of them)")
    parser.add_argument("--list", action="store_true", help="show the suites")
    parser.add_argument("--quick", action="store_true", help="seconds each, to see that they run")
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"for the results ({results.RESULTS})")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="a file or folder of results to compare with")
    parser.add_argument("--no-run", action="store_true", help="compare the results in --out, without a run")
    parser.add_argument(
        "--tolerance", type=float, default=compare.TOLERANCE, metavar="SHARE",
        help="by which anything may become worse (%(default)s)",
    )  # fmt: skip
    options, own = parser.parse_known_args(argv)
    if options.list:
        show_list()
        return 0
    if options.no_run and options.compare is None:
        parser.error("--no-run needs --compare")
    names = shared.chosen(parser, "suite", options.suites, SUITES)
    if own and (len(names) != 1 or options.no_run):
        parser.error(f"{shlex.join(own)} is for one suite that is run, which has to be named")
    folder: Path = options.out or (QUICK if options.quick else results.RESULTS)
    try:
        # Loaded first: the new results may replace the old ones.
        old = load(options.compare, names) if options.compare else {}
        status = 0 if options.no_run else measure(names, options.quick, folder, own)
        if options.compare:
            chosen = [name for name in old if (folder / f"{name}.json").exists()]
            status = max(status, judge(old, load(folder, chosen), options.tolerance))
    except ResultsError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return status


def measure(names: Sequence[str], quick: bool, folder: Path, own: Sequence[str] = ()) -> int:
    """Runs suites one after the other; returns 1 if any has failed, or was asked for by name and is not there."""
    here = machine.describe()
    print(here.sentence(), file=sys.stderr)
    if here.busy:
        print(
            f"The machine is busy (load {here.load:g}): times will be worse, and their spread larger.", file=sys.stderr
        )
    if not quick and not names:
        print(f"All suites take about {sum(s.minutes for s in SUITES.values()) / 60:.0f} hours.", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    table, failed = Table(["suite", "seconds", "outcome"]), False
    for name in names or SUITES:
        began = time.monotonic()
        if problem := missing(name):
            outcome = problem
            failed = failed or bool(names)
        else:
            outcome = run(name, quick, folder, own)
            failed = failed or outcome.startswith("failed")
        table.add(name, f"{time.monotonic() - began:.0f}", outcome)
    table.show()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
