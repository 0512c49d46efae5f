"""python -m tests.diagnosis: judges what the trace tools say of jobs with known faults, and of jobs without any.

python -m tests.diagnosis                     2,600 faulty and 1,000 clean jobs with seeds that nobody has looked at
python -m tests.diagnosis --seeds 0:260 --show        others, and what was said wrongly
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from tests.diagnosis.cases import HELD_OUT, clean, faulty, uneven
from tests.diagnosis.scoring import Verdict, judge, rows, score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default=f"{HELD_OUT}:{HELD_OUT + 2600}", help="of faulty jobs, A:B")
    parser.add_argument("--clean", default=f"{HELD_OUT}:{HELD_OUT + 500}", help="of jobs without a fault, A:B")
    parser.add_argument("--show", action="store_true", help="show each case of which something wrong was said")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    begin = time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        verdicts = list(pool.map(_faulty, _range(options.seeds), chunksize=8))
        quiet = list(pool.map(_clean, _range(options.clean), chunksize=8))
        late = list(pool.map(_uneven, _range(options.clean), chunksize=8))
    if options.show:
        for verdict in [*verdicts, *quiet, *late]:
            if verdict.wrong or (verdict.asked and not verdict.found) or (verdict.error or 0) > 0.25:
                case = verdict.case
                print(f"{case.seed} {case.fault or 'clean'}, {case.pattern}: {verdict.told}")
    table = "{:<20}{:>7}{:>11}{:>9}{:>15}{:>9}"
    print(table.format("", "cases", "precision", "recall", "error of cost", "period"))
    for name, found in [*rows(verdicts, "fault"), *rows(verdicts, "pattern"), ("all", score(verdicts))]:
        shares = (f"{found.precision:.1%}", f"{found.recall:.1%}", f"{found.error:.1%}", f"{found.regular:.1%}")
        print(table.format(name, found.cases, *shares))
    errors = [verdict.error for verdict in verdicts if verdict.error is not None]
    half, most = np.quantile(errors, (0.5, 0.95)) if errors else (0.0, 0.0)
    print(f"costs: half are off by {half:.1%} or less, 95 % by {most:.1%} or less")
    silent = [sum(not verdict.wrong for verdict in its) / max(1, len(its)) for its in (quiet, late)]
    print(f"clean: nobody is named in {silent[0]:.1%} of {len(quiet)}; with late daemons in {silent[1]:.1%}")
    print(f"{time.monotonic() - begin:.0f} s")
    found = score(verdicts)
    good = found.precision >= 0.95 and found.recall >= 0.95 and found.error <= 0.1 and min(silent) >= 0.95
    return 0 if good else 1


def _range(text: str) -> range:
    first, _, stop = text.partition(":")
    return range(int(first), int(stop))


def _faulty(seed: int) -> Verdict:
    return judge(faulty(seed))


def _clean(seed: int) -> Verdict:
    return judge(clean(seed))


def _uneven(seed: int) -> Verdict:
    return judge(uneven(seed))


if __name__ == "__main__":
    sys.exit(main())
