"""The page that `fusion-trace topology` shows: how fast a mixing graph averages, what a step costs, and a drawing in
text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from fusion_rt.core.errors import MixingError
from fusion_rt.core.mixing import Mixing, check_dpsgd, check_pairwise, check_push_sum, parse
from fusion_trace.report.wording import console

__all__ = ["Speed", "as_document", "drawing", "fits", "parse", "show", "speed"]

COMPARED = ("ring", "exponential")
MOST_ON_A_CIRCLE = 24  # ranks; more of them make the lines run into each other
MOST_IN_A_MATRIX = 128  # ranks; a character each, so that a row fits on a wide terminal
_WIDTH = 120  # characters, where there is no terminal that has a width
_ALGORITHMS: tuple[tuple[str, Callable[[Mixing], None]], ...] = (
    ("D-PSGD", check_dpsgd),
    ("SGP (push-sum)", check_push_sum),
    ("AD-PSGD", check_pairwise),
)


@dataclass(frozen=True)
class Speed:
    """Costs of mixing, and what it brings.

    Attributes:
        degree: the most vectors that a rank takes in one step.
        gap: `Mixing.spectral_gap`.
        steps: after so many steps the distance of ranks from the mean (its norm) is a tenth of what it was, by the gap;
            infinite where it never is.
        vectors: the vectors that a rank takes in these steps.
        exact: the distance is 0, and not only a tenth, after these steps.
    """

    degree: int
    gap: float
    steps: float
    vectors: float
    exact: bool


def speed(mixing: Mixing) -> Speed:
    degree = _degrees(mixing)[1]
    gap = mixing.spectral_gap()
    exact = gap > 1 - 1e-9
    steps: float
    if exact:
        steps = mixing.period if mixing.ranks > 1 else 0
    elif gap < 1e-12:
        steps = math.inf
    else:
        steps = math.log(10) / -math.log1p(-gap)
    return Speed(degree, gap, steps, degree * steps if degree else 0.0, exact)


def fits(mixing: Mixing) -> dict[str, str]:
    """Returns, for each algorithm, why it cannot use the graph; empty when it can."""
    found = {}
    for name, check in _ALGORITHMS:
        try:
            check(mixing)
            found[name] = ""
        except MixingError as error:
            found[name] = str(error)
    return found


def as_document(mixing: Mixing, clock: int | None) -> dict[str, Any]:
    """Returns everything as JSON types. Edges are [receiver, sender, weight], those of the clock, or of each clock in
    turn."""
    clocks = range(mixing.period) if clock is None else (clock,)
    least, most = _degrees(mixing)
    return {
        "graph": mixing.text,
        "ranks": mixing.ranks,
        "note": mixing.note,
        "period": mixing.period,
        "degree": {"least": least, "most": most},
        "symmetric": mixing.symmetric,
        "row_stochastic": mixing.row_stochastic,
        "column_stochastic": mixing.column_stochastic,
        "doubly_stochastic": mixing.doubly_stochastic,
        "bipartite": mixing.bipartite,
        **_speed_document(mixing),
        "comparison": {other.text: _speed_document(other) for other in _compared(mixing)},
        "algorithms": {name: {"fits": not why, "why_not": why or None} for name, why in fits(mixing).items()},
        "clocks": [
            {
                "clock": at,
                "own": [mixing.own(rank, at) for rank in range(mixing.ranks)],
                "edges": [[rank, *entry] for rank in range(mixing.ranks) for entry in mixing.incoming(rank, at)],
            }
            for at in clocks
        ],
    }


def show(mixing: Mixing) -> None:
    """Prints what the graph is, its speed beside that of others of the same size, and which algorithms can use it."""
    out = console(width=_WIDTH)
    least, most = _degrees(mixing)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("ranks", str(mixing.ranks))
    facts.add_row("degree", f"{most}" if least == most else f"{least} to {most}")
    facts.add_row("period", f"{mixing.period} clock{'s' if mixing.period > 1 else ', it never changes'}")
    facts.add_row("spectral gap", f"{mixing.spectral_gap():.3g}")
    facts.add_row("symmetric", _yes(mixing.symmetric))
    facts.add_row("doubly stochastic", _yes(mixing.doubly_stochastic))
    if not mixing.doubly_stochastic:
        facts.add_row("column stochastic", _yes(mixing.column_stochastic))
    facts.add_row("only even with odd ranks", _yes(mixing.bipartite))
    for name, why in fits(mixing).items():
        facts.add_row(f"fits {name}", f"no: {why}" if why else "yes")
    out.print(f"{mixing.text} of {mixing.ranks} ranks. {mixing.note}".rstrip())
    out.print(facts)
    out.print()
    out.print(_comparison(mixing))


def _comparison(mixing: Mixing) -> Table:
    table = Table(title="until the distance from the mean is a tenth")
    for column in ("graph", "vectors a step", "period", "spectral gap", "steps", "vectors taken"):
        table.add_column(column, justify="left" if column == "graph" else "right")
    for other in (mixing, *_compared(mixing)):
        found = speed(other)
        table.add_row(
            other.text,
            str(found.degree),
            str(other.period),
            f"{found.gap:.3g}",
            f"{found.steps:g} (then exact)" if found.exact else _count(found.steps),
            _count(found.vectors),
        )
    return table


def drawing(mixing: Mixing, clock: int | None) -> str:
    """Draws the edges of a clock, or of all clocks: ranks on a circle with lines between them, or a matrix where they
    are many."""
    clocks = range(mixing.period) if clock is None else (clock,)
    edges = {(to, by) for at in clocks for to in range(mixing.ranks) for by, _ in mixing.incoming(to, at)}
    when = "" if mixing.period == 1 else " at any clock" if clock is None else f" at clock {clock}"
    if mixing.ranks > MOST_IN_A_MATRIX:
        return (
            f"{mixing.ranks} ranks are too many for a drawing, which has at most {MOST_IN_A_MATRIX}; --json lists all "
            "edges."
        )
    if mixing.ranks > MOST_ON_A_CIRCLE:
        return f"Row: who takes; column: from whom{when}.\n{_matrix(mixing.ranks, edges)}"
    one_way = any((by, to) not in edges for to, by in edges)
    how = "'o' is at the end of who takes." if one_way else "Both ends take from each other."
    return f"Who takes from whom{when}. {how}\n{_circle(mixing.ranks, edges)}"


def _circle(ranks: int, edges: set[tuple[int, int]]) -> str:
    """Draws ranks on a circle, clockwise from the top; an edge is a line of dots.

    On an edge that is used in one direction only the dot at the receiver is an `o`.
    """
    tall = min(max(9, 2 * ranks + 1), 31)  # lines; a character is about twice as high as wide
    wide = 2 * tall
    middle_y, middle_x = (tall - 1) / 2, (wide - 1) / 2
    places = []
    for rank in range(ranks):
        angle = 2 * math.pi * rank / ranks
        radius = 1.0 if ranks > 1 else 0.0
        y = middle_y - radius * middle_y * math.cos(angle)
        x = middle_x + radius * middle_x * math.sin(angle)
        places.append((round(y), round(x)))
    grid = [[" "] * (wide + 2) for _ in range(tall)]
    tips = []
    for to, by in sorted(edges):
        (y0, x0), (y1, x1) = places[by], places[to]
        dots = max(2 * abs(y1 - y0), abs(x1 - x0), 1) // 2  # a dot in every second column, or in every line
        line = [(round(y0 + (y1 - y0) * i / dots), round(x0 + (x1 - x0) * i / dots)) for i in range(1, dots)]
        for y, x in line:
            grid[y][x] = "."
        if line and (by, to) not in edges:
            label = {(y1, x1 + offset) for offset in (-1, 0, 1, 2)}
            tips.append(next((place for place in reversed(line) if place not in label), line[-1]))
    for y, x in tips:  # after all lines, which would else hide them
        grid[y][x] = "o"
    for rank, (y, x) in enumerate(places):
        for offset, character in enumerate(str(rank)):
            grid[y][x + offset] = character
    return "\n".join("".join(line).rstrip() for line in grid)


def _matrix(ranks: int, edges: set[tuple[int, int]]) -> str:
    """Draws a row of characters for each rank: `o` for whom it takes from, `\\` for itself."""
    margin = len(str(ranks - 1))
    heads = [" " * margin + " " + "".join(f"{rank:<10}" for rank in range(0, ranks, 10)).rstrip()]
    for to in range(ranks):
        cells = "".join("\\" if by == to else "o" if (to, by) in edges else "." for by in range(ranks))
        heads.append(f"{to:>{margin}} {cells}")
    return "\n".join(heads)


def _compared(mixing: Mixing) -> list[Mixing]:
    return [parse(text, mixing.ranks) for text in COMPARED if text != mixing.text]


def _speed_document(mixing: Mixing) -> dict[str, Any]:
    found = speed(mixing)
    return {
        "spectral_gap": found.gap,
        "steps_to_a_tenth": None if math.isinf(found.steps) else found.steps,
        "vectors_to_a_tenth": None if math.isinf(found.vectors) else found.vectors,
        "exact": found.exact,
    }


def _degrees(mixing: Mixing) -> tuple[int, int]:
    """Returns the least and the most others that a rank takes from at a clock."""
    counts = [len(mixing.incoming(rank, clock)) for rank in range(mixing.ranks) for clock in range(mixing.period)]
    return min(counts), max(counts)


def _count(number: float) -> str:
    return "never" if math.isinf(number) else f"{number:.1f}"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
