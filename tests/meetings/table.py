"""The tables of docs/algorithms.md that say which features work together: written from the matrix, and read by it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.meetings import cells
from tests.meetings.cells import Cell
from tests.meetings.judge import Outcome
from tests.meetings.scripts import OPTIMIZERS, SCRIPTS

BEGIN = "<!-- what works with what: written by `python -m tests.meetings` -->"
END = "<!-- what works with what: end -->"
Pair = frozenset[str]
SAID = {Outcome.EQUAL: "as one process", Outcome.WITHIN: "within limits", Outcome.REFUSED: "refused"}


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
    return frozenset((cell.script, cell.algorithm, cell.codec, f"overlap {cell.overlap}", cell.optimizer))


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


def summary(outcomes: Mapping[Cell, Outcome]) -> list[str]:
    """Returns a table of how many cells there were in each world, by outcome, and how many had something encoded."""
    lines = [_row(["ranks", "nodes", "graphs", "cells", *SAID.values(), "with a codec at work"])]
    lines.append(_row(["---"] * (5 + len(SAID))))
    for name, world in cells.WORLDS.items():
        here = {cell: outcome for cell, outcome in outcomes.items() if cell.world == name}
        graphs = sorted({cell.graph for cell in here} - {""})
        counts = [sum(outcome is kind for outcome in here.values()) for kind in SAID]
        encoded = sum(cell.encodes and outcome is not Outcome.REFUSED for cell, outcome in here.items())
        numbers = [world.size, len(world.nodes), ", ".join(graphs), len(here), *counts, encoded]
        lines.append(_row([str(number) for number in numbers]))
    return lines


def _page(outcomes: Mapping[Cell, Outcome], sentences: Mapping[Pair, str]) -> str:
    lines = ["", _row(["", *cells.ALGORITHMS]), _row(["---"] * (1 + len(cells.ALGORITHMS)))]
    for script in (name for name in SCRIPTS if any(cell.script == name for cell in outcomes)):
        marks = []
        for algorithm in cells.ALGORITHMS:
            found = {out for cell, out in outcomes.items() if (cell.script, cell.algorithm) == (script, algorithm)}
            refused = frozenset((script, algorithm)) in sentences
            best = Outcome.REFUSED if refused else next((o for o in Outcome if o in found), None)
            marks.append("" if best is None else best.value)
        lines.append(_row([script, *marks]))
    kinds = [*cells.CODECS, *(f"overlap {way}" for way in cells.OVERLAPS[1:])]
    lines += ["", _row(["", *cells.ALGORITHMS]), _row(["---"] * (1 + len(cells.ALGORITHMS)))]
    for kind in kinds:
        names = [frozenset((algorithm, kind)) in sentences for algorithm in cells.ALGORITHMS]
        lines.append(_row([kind, *("no" if refused else "yes" for refused in names)]))
    lines += ["", "Combinations that are refused, with the error (of the first, where there are several):", ""]
    order = [*SCRIPTS, *kinds, *OPTIMIZERS, *cells.ALGORITHMS]
    together: dict[str, list[str]] = {}
    for pair in sorted(sentences, key=lambda pair: sorted(map(order.index, pair))):
        one, other = sorted(pair, key=order.index)
        together.setdefault(one, []).append(other)
    for one, others in together.items():
        said = sentences[frozenset((one, others[0]))]
        lines.append(f"- **{one}** with {', '.join(f'**{other}**' for other in others)}: {said}")
    lines += [
        "",
        "The cells of the last run, which also judges properties, with more ranks on graphs that are sparse:",
        "",
    ]
    return "\n".join([*lines, *summary(outcomes), ""])


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
