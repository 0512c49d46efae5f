"""Runs the matrix, and writes into docs/algorithms.md which features work together.

python -m tests.meetings                            # the cover, and the properties; writes the tables
python -m tests.meetings --match clip --show        # cells whose names contain "clip"; only shows
python -m tests.meetings --sample 50 --match sgp    # of fifty drawn cells of each script
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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
    parser.add_argument("--sample", type=int, default=0, help="so many drawn cells of each script, and not the cover")
    parser.add_argument("--show", action="store_true", help="do not write the tables")
    options = parser.parse_args(arguments)
    chosen = _chosen(options.sample, options.match.split(" & "))
    jobs, outcomes, said, wrong = Jobs(), dict[Cell, Outcome](), dict[Cell, str](), 0
    try:
        for number, cell in enumerate(chosen, 1):
            try:
                reports = jobs.run(cell.world, ranks.run, cell)
                outcomes[cell] = judge(cell, reports)
                said[cell] = reports[0].refused
                print(f"{number:4d}/{len(chosen)} {outcomes[cell].name.lower():8s} {cell} {said[cell]}", flush=True)
            except (AssertionError, WorkerError) as error:
                wrong += 1
                last = str(error).strip().splitlines()
                print(f"{number:4d}/{len(chosen)} WRONG    {cell}\n        {' | '.join(last[-2:])}", flush=True)
    finally:
        jobs.close()
    print("\n".join(table.summary(outcomes)))
    print(f"{len(chosen)} cells, {wrong} wrong")
    if not (options.show or options.match or options.sample or wrong):
        table.write(DOCUMENT, outcomes, _sentences(outcomes, said))
    return int(wrong > 0)


def _chosen(sample: int, parts: Sequence[str]) -> list[Cell]:
    """Returns the cells in whose names all of these parts are."""
    drawn = [cell for script in cells.FEATURES for cell in cells.sample(script, sample)]
    return [cell for cell in drawn or (*cells.cover(), *cells.properties()) if all(p in str(cell) for p in parts)]


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
