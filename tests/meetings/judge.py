"""Judges the outcome of a cell.

- *equal*: each rank has the weights that the reference computes in one process. This is required where ranks are
  synchronous, nothing is left out, and no update is late.
- *within*: otherwise. All ranks agree after `hvd.consensus`, to the bit; the model has learned, by at least `SHARE` of
  what the synchronous reference learns from the same script; and the script's own checks hold.
- *refused*: all ranks get a sentence that names both of two things that do not go together, and docs/algorithms.md says
  that these two are refused.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence

import numpy as np
import torch

from tests.meetings import cells, reference, scripts
from tests.meetings.cells import Cell
from tests.meetings.ranks import Report

SHARE = 0.25
TOLERANCE = 2e-4  # float32, sums in another order, and a dozen steps
UNEVEN = ("join with uneven data",)  # after which synchronous ranks have the weights with which they joined


class Outcome(enum.Enum):
    """The outcome of a cell, and its mark in docs/algorithms.md."""

    EQUAL = "="
    WITHIN = "≈"
    REFUSED = "no"


def must_be_equal(cell: Cell) -> bool:
    """Returns whether the result has to be equal to the reference, up to rounding."""
    exact = cell.algorithm in reference.RULES and cell.overlap != "stale"
    return exact and (cell.codec == "dense" or (cell.algorithm == "allreduce" and cell.nodes == "one node"))


@functools.cache
def _expected(script: str, size: int, algorithm: str) -> reference.Expected:
    return reference.expected(scripts.SCRIPTS[script], size, algorithm)


def judge(cell: Cell, reports: Sequence[Report]) -> Outcome:
    """Judges the reports of all ranks.

    Raises:
        AssertionError: the cell is neither right nor refused as documented.
    """
    sentences = {report.refused for report in reports}
    if sentences != {""}:
        assert all(sentences), f"some ranks were refused, and others were not: {[r.refused for r in reports]}"
        assert named(cell, reports[0].refused), f"a refusal has to name both of what does not go together: {sentences}"
        return Outcome.REFUSED
    complaints = [f"rank {rank}: {text}" for rank, report in enumerate(reports) for text in report.complaints]
    assert not complaints, complaints
    for report in reports:
        assert np.isfinite(report.weights).all(), "weights are not finite"
    if cell.script not in UNEVEN or cell.algorithm not in ("allreduce", "bsp"):
        assert all((report.agreed == reports[0].agreed).all() for report in reports), "the ranks disagree in the end"
    if must_be_equal(cell):
        expected = _expected(cell.script, cell.size, cell.algorithm)
        for rank, (report, weights) in enumerate(zip(reports, expected.weights, strict=True)):
            off = float(np.abs(report.weights - weights.numpy()).max())
            assert off < TOLERANCE, f"rank {rank} is {off:.3g} away from what one process computes"
        return Outcome.EQUAL
    begun, learned = scripts.quality(_model(cell.script)), _quality_of_reference(cell.script, cell.size)
    reached = max(report.quality for report in reports)
    assert reached < begun - SHARE * (begun - learned), (
        f"loss {begun:.3f} -> {reached:.3f}, the reference {learned:.3f}"
    )
    return Outcome.WITHIN


def _model(script: str) -> scripts.Net:
    return scripts.Net(second=script.startswith("a parameter that only"))


def _quality_of_reference(script: str, size: int) -> float:
    model = _model(script)
    torch.nn.utils.vector_to_parameters(_expected(script, size, "allreduce").weights[0], model.parameters())
    return scripts.quality(model)


def named(cell: Cell, sentence: str) -> list[tuple[str, str]]:
    """Returns the pairs of the cell's things of which a sentence names both."""
    text = sentence.lower()
    words = {
        cell.script: tuple(word.lower() for word in scripts.SCRIPTS[cell.script].words),
        cell.algorithm: (cells.ALGORITHMS[cell.algorithm].partition("(")[0],),
        cell.codec: (cells.CODECS[cell.codec].partition("(")[0],),
        f"overlap {cell.overlap}": ("overlap",) if cell.overlap != "none" else (),
    }
    said = [thing for thing, ways in words.items() if any(word in text for word in ways)]
    return [(one, other) for index, one in enumerate(said) for other in said[index + 1 :]]
