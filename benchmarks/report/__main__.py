"""Makes the tables and plots of the documents from benchmarks/results.

    python -m benchmarks.report
    python -m benchmarks.report --check
    python -m benchmarks.report --table allreduce

Tables go where a document has `<!-- table: NAME -->` and `<!-- end -->`, plots to docs/images. With `--check` nothing
is written: the exit status is 1 if a document's tables are not those that the results give.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import arguments as shared
from benchmarks.common import results
from benchmarks.common.machine import ROOT
from benchmarks.common.results import ResultsError
from benchmarks.report import measured, regions, training
from benchmarks.report.measured import All
from benchmarks.report.regions import DocumentError

TABLES = {**measured.TABLES, **training.TABLES}
IMAGES = ROOT / "docs" / "images"


def table(name: str, found: All) -> str:
    """Makes a table in Markdown.

    Raises:
        ResultsError: there is no table of this name, or no results for it.
    """
    if name not in TABLES:
        raise ResultsError(f"There is no table {name!r}; there are {', '.join(TABLES)}.")
    return TABLES[name](found)


def outdated(root: Path, found: All) -> dict[Path, str]:
    """Returns the new text of each document whose tables are out of date.

    Raises:
        DocumentError, ResultsError: a document or the results cannot be used.
    """
    made = {}
    for path in regions.documents(root):
        text = path.read_text(encoding="utf-8")
        if (right := regions.fill(text, lambda name: table(name, found), path.name)) != text:
            made[path] = right
    return made


def draw(folder: Path, found: All) -> list[Path]:
    """Writes the plots for which there are results; returns their paths."""
    from benchmarks.report import plots

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name in (name for name in plots.PLOTS if name in found):
        made.append(folder / f"{name}.svg")
        made[-1].write_text(plots.draw(name, found), encoding="utf-8")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = shared.parser("report", __doc__)
    parser.add_argument("--results", type=Path, default=results.RESULTS, metavar="DIR", help="(%(default)s)")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if documents are out of date")
    parser.add_argument("--table", metavar="NAME", help="print one table, and nothing else")
    options = parser.parse_args(argv)
    try:
        found = results.load_all(options.results)
        if options.table:
            print(table(options.table, found))
            return 0
        changed = outdated(ROOT, found)
    except (DocumentError, ResultsError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for path, text in changed.items():
        print(f"{path.relative_to(ROOT)} {'is out of date' if options.check else 'is written'}")
        if not options.check:
            path.write_text(text, encoding="utf-8")
    if options.check:
        return 1 if changed else 0
    try:
        drawn = draw(IMAGES, found)
    except ModuleNotFoundError as error:
        print(f"Plots need the extra `bench` (pip install '.[bench]'): {error}.", file=sys.stderr)
        return 1
    for path in drawn:
        print(f"{path.relative_to(ROOT)} is drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
