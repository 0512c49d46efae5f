"""Prints the figures of the product beside their limits.

python -m tests.house            prints them; the exit status is 1 if one is above its limit
python -m tests.house --lower    lowers the limits to the figures, after a change that has made the product simpler
"""

from __future__ import annotations

import argparse
import sys

from tests.house import limits


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.house", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lower", action="store_true", help="lower the limits to the figures")
    lower = parser.parse_args().lower
    found, allowed = limits.measured(), limits.limits()
    for name, number in found.items():
        print(f"{number:10g}  {allowed.get(name, float('nan')):10g}  {name}")
    if lower:
        limits.write(limits.lowered(found, allowed))
    wrong = limits.above(found, allowed)
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
