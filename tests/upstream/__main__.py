"""Runs torch's own tests with a backend, and says which of those that pass with gloo do not.

python -m tests.upstream                                   # all, with gloo and with fusion; writes the table
python -m tests.upstream --backend fusion --ranks 2,2x2    # on 2 ranks, and on 2 hosts with 2 ranks each
python -m tests.upstream --match all_reduce                # tests whose names contain "all_reduce"; only shows
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from importlib import metadata

from tests.upstream import running, table
from tests.upstream.exceptions import EXCEPTIONS
from tests.upstream.results import FILE, Results, behind
from tests.upstream.running import Outcome, Place
from tests.upstream.suites import SUITES

_SHOWN_LINES = 12  # of what a failed test has said


def main(arguments: list[str]) -> int:
    """Runs the chosen tests; returns 1 if one passes with gloo, does not with another backend, and is no exception."""
    parser = argparse.ArgumentParser(prog="tests.upstream", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="gloo,fusion", help="one or more, with commas")
    parser.add_argument("--ranks", default="2,3,4,2x2", help="numbers of ranks, or hosts x ranks, with commas")
    parser.add_argument("--suite", default=",".join(SUITES), help="one or more, with commas")
    parser.add_argument("--match", default="", help="only tests in whose names this is; only shows")
    parser.add_argument("--show", action="store_true", help="do not write the results and the table")
    parser.add_argument("--at-once", type=int, default=2, help="tests at a time")
    parser.add_argument("--limit", type=float, default=running.LIMIT_S, help="seconds for a test")
    options = parser.parse_args(arguments)
    results = Results.read() if FILE.exists() else Results("")
    version = metadata.version("torch").partition("+")[0]
    if results.torch != version:
        results = Results(version)  # its tests are others
    wrong = 0
    for suite in options.suite.split(","):
        fixed = SUITES[suite].ranks
        places = [Place((fixed,))] if fixed else [Place.parse(each) for each in options.ranks.split(",")]
        for place in places:
            found = {test: why for test, why in running.contents(suite, place.ranks).items() if options.match in test}
            tests = [test for test, why in found.items() if not why]
            for backend in options.backend.split(","):
                began = time.monotonic()
                outcomes = {test: Outcome("skip", why) for test, why in found.items() if why}
                for test, outcome in running.run_all(
                    suite, tests, backend, place, at_once=options.at_once, limit_s=options.limit
                ):
                    outcomes[test] = outcome
                    _show(f"{suite}.{test} {backend} {place}", outcome)
                counts = Counter(outcome.kind for outcome in outcomes.values())
                said = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
                print(f"{suite} on {place} with {backend}: {said}; {time.monotonic() - began:.0f} s", flush=True)
                if not options.match:
                    results.put(suite, str(place), backend, outcomes)
                wrong += _judge(behind(results.of(suite, str(place), "gloo"), outcomes))
    if not options.match and not options.show:
        results.write()
        table.write(results)
    return int(wrong > 0)


def _show(name: str, outcome: Outcome) -> None:
    lines = outcome.said.strip().splitlines()[-_SHOWN_LINES:] if outcome.kind != "pass" else []
    print("\n        ".join([f"{outcome.kind} {name}", *lines]), flush=True)


def _judge(those_behind: Iterable[str]) -> int:
    """Prints what is wrong, and returns how many tests that are."""
    for test in those_behind:
        print(f"    {'known: ' + EXCEPTIONS[test] if test in EXCEPTIONS else 'WRONG, gloo passes it'}: {test}")
    return len(set(those_behind) - set(EXCEPTIONS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
