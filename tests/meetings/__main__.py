"""Runs the matrix, and writes into docs/algorithms.md which features work together.

python -m tests.meetings                      # the cover; writes the tables
python -m tests.meetings --match clip --show  # cells whose names contain "clip", of the whole product; only shows
"""

from __future__ import annotations

import argparse
import sys

from tests.harness import WorkerError
from tests.meetings import cells, ranks, table
from tests.meetings.cells import Cell
from tests.meetings.conftest import Jobs
from tests.meetings.judge import Outcome, judge, named
from tests.meetings.test_meetings import DOCUMENT


def main(arguments: list[str]) -> int:
    """Runs the chosen cells; returns 1 if one is neither right nor refused."""
    parser = argparse.ArgumentParser(prog="tests.meetings", description=__doc__.partition("\n")[0])
    parser.add_argument("--match", default="", help="only cells in whose names this is; more, with ' & '")
    parser.add_argument("--all", action="store_true", help="of the product, not of the cover")
    parser.add_argument("--show", action="store_true", help="do not write the tables")
    options = parser.parse_args(arguments)
    parts = options.match.split(" & ")
    chosen = [
        cell for cell in (cells.product() if options.all else cells.cover()) if all(p in str(cell) for p in parts)
    ]
    jobs, outcomes, said, wrong = Jobs(), dict[Cell, Outcome](), dict[Cell, str](), 0
    try:
        for number, cell in enumerate(chosen, 1):
            try:
                reports = jobs.run(cell.nodes, ranks.run, cell)
                outcomes[cell] = judge(cell, reports)
                said[cell] = reports[0].refused
                print(f"{number:4d}/{len(chosen)} {outcomes[cell].name.lower():8s} {cell} {said[cell]}", flush=True)
            except (AssertionError, WorkerError) as error:
                wrong += 1
                last = str(error).strip().splitlines()
                print(f"{number:4d}/{len(chosen)} WRONG    {cell}\n        {' | '.join(last[-2:])}", flush=True)
    finally:
        jobs.close()
    counts = ", ".join(f"{sum(o is kind for o in outcomes.values())} {kind.name.lower()}" for kind in Outcome)
    print(f"{len(chosen)} cells: {counts}, {wrong} wrong")
    if not (options.show or options.match or wrong):
        table.write(DOCUMENT, outcomes, _sentences(outcomes, said))
    return int(wrong > 0)


def _sentences(outcomes: dict[Cell, Outcome], said: dict[Cell, str]) -> dict[table.Pair, str]:
    """Returns the error text for each pair that is refused wherever it meets."""
    found: dict[table.Pair, str] = {}
    accepted = [cell for cell, outcome in outcomes.items() if outcome is not Outcome.REFUSED]
    for cell, outcome in outcomes.items():
        if outcome is Outcome.REFUSED:
            for pair in map(frozenset, named(cell, said[cell])):
                if not any(table.Documented(frozenset({pair})).refuses(each) for each in accepted):
                    found.setdefault(pair, said[cell])
    for cell in cells.refused():
        kind = f"overlap {cell.overlap}" if cell.overlap != "none" else cell.codec
        found[frozenset((cell.algorithm, kind))] = cells.refusal(cell)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
