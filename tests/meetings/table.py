"""The tables of docs/algorithms.md that say which features work together: written from the matrix, and read by it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.meetings import cells
from tests.meetings.cells import Cell
from tests.meetings.judge import Outcome
from tests.meetings.scripts import SCRIPTS

BEGIN = "<!-- what works with what: written by `python -m tests.meetings` -->"
END = "<!-- what works with what: end -->"
Pair = frozenset[str]


@dataclass(frozen=True)
class Documented:
    """The contents of the document's tables.

    Attributes:
        refused: pairs of names that do not go together.
    """

    refused: frozenset[Pair]

    def refuses(self, cell: Cell) -> bool:
        return any(pair <= _names(cell) for pair in self.refused)


def _names(cell: Cell) -> frozenset[str]:
    return frozenset((cell.script, cell.algorithm, cell.codec, f"overlap {cell.overlap}"))


def write(document: Path, outcomes: Mapping[Cell, Outcome], sentences: Mapping[Pair, str]) -> None:
    """Writes the tables into the document, between their marks.

    Args:
        outcomes: of all cells of the cover.
        sentences: the error text of each pair that was refused.
    """
    text = document.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    document.write_text(before + BEGIN + "\n" + _page(outcomes, sentences) + END + after, encoding="utf-8")


def _page(outcomes: Mapping[Cell, Outcome], sentences: Mapping[Pair, str]) -> str:
    lines = ["", _row(["", *cells.ALGORITHMS]), _row(["---"] * (1 + len(cells.ALGORITHMS)))]
    for script in SCRIPTS:
        marks = []
        for algorithm in cells.ALGORITHMS:
            found = {out for cell, out in outcomes.items() if (cell.script, cell.algorithm) == (script, algorithm)}
            refused = frozenset((script, algorithm)) in sentences
            best = Outcome.REFUSED if refused else next(o for o in Outcome if o in found or o is Outcome.REFUSED)
            marks.append(best.value)
        lines.append(_row([script, *marks]))
    kinds = [*cells.CODECS, *(f"overlap {way}" for way in cells.OVERLAPS[1:])]
    lines += ["", _row(["", *cells.ALGORITHMS]), _row(["---"] * (1 + len(cells.ALGORITHMS)))]
    for kind in kinds:
        names = [frozenset((algorithm, kind)) in sentences for algorithm in cells.ALGORITHMS]
        lines.append(_row([kind, *("no" if refused else "yes" for refused in names)]))
    lines += ["", "Combinations that are refused, with the error (of the first, where there are several):", ""]
    order = [*SCRIPTS, *kinds, *cells.ALGORITHMS]
    together: dict[str, list[str]] = {}
    for pair in sorted(sentences, key=lambda pair: sorted(map(order.index, pair))):
        one, other = sorted(pair, key=order.index)
        together.setdefault(one, []).append(other)
    for one, others in together.items():
        said = sentences[frozenset((one, others[0]))]
        lines.append(f"- **{one}** with {', '.join(f'**{other}**' for other in others)}: {said}")
    return "\n".join([*lines, ""])


def _row(columns: list[str]) -> str:
    return "| " + " | ".join(columns) + " |"


def read(document: Path) -> Documented:
    """Reads the pairs that are refused according to the document.

    Raises:
        ValueError: it has no tables.
    """
    text = document.read_text(encoding="utf-8")
    page = text.split(BEGIN)[1].split(END)[0]
    found = re.findall(r"^- \*\*(.+?)\*\* with (\*\*.+?\*\*): ", page, re.MULTILINE)
    return Documented(
        frozenset(frozenset((one, each)) for one, rest in found for each in re.findall(r"\*\*(.+?)\*\*", rest))
    )
