"""Judges the outcome of a cell.

- *equal*: each rank has the weights that the reference computes in one process. This is required where the result does
  not depend on the order in which ranks act, and no codec changes it.
- *within*: otherwise. All ranks agree after `hvd.consensus`, to the bit, and the script's own checks hold. The judge of
  a property (`properties.py`) agrees. Of any other script, the model has learned, by at least `SHARE` of what the
  synchronous reference learns from it.
- *refused*: all ranks get a sentence that names both of two things that do not go together, and docs/algorithms.md says
  that these two are refused.

Whatever the outcome, where something is sent to another node a codec has encoded `ENCODED` of its elements, and has
sent fewer bytes than they take.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence

import numpy as np
import torch

from tests.meetings import cells, properties, reference, scripts
from tests.meetings.cells import Cell
from tests.meetings.ranks import Report

SHARE = 0.25
TOLERANCE = 2e-4  # float32, sums in another order, and a dozen steps
OF_ADAPTIVE = 1e-3  # which divide by roots of sums of squares
ENCODED = 0.8
UNEVEN = ("join with uneven data", "an exception in backward that the script catches")
ORDER = dict.fromkeys(("dpsgd", "sgp", "noloco", "easgd, synchronous home"), UNEVEN)
"""Scripts in which a rank stops before the others, whose result then depends on when they hear of it."""


class Outcome(enum.Enum):
    """The outcome of a cell, and its mark in docs/algorithms.md."""

    EQUAL = "="
    WITHIN = "≈"
    REFUSED = "no"


def must_be_equal(cell: Cell) -> bool:
    """Returns whether the result has to be equal to the reference, up to rounding."""
    exact = cell.algorithm in reference.RULES and cell.overlap != "stale"
    exact = exact and not scripts.SCRIPTS[cell.script].property and cell.script not in ORDER.get(cell.algorithm, ())
    if cell.algorithm == "bsp" and cell.script in UNEVEN and cell.rates != "constant":
        return False  # a shard has the rate of the rank that posted last, which is behind in the schedule or not
    return exact and (cell.codec == "dense" or (cell.algorithm == "allreduce" and cell.world == "one node"))


@functools.cache
def _expected(script: str, size: int, algorithm: str, how: reference.How) -> reference.Expected:
    return reference.expected(scripts.SCRIPTS[script], size, algorithm, how)


def _how(cell: Cell) -> reference.How:
    return reference.How(cell.optimizer, cell.rates, cell.graph)


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
    if cell.encodes:
        _check_encoded(cell, reports)
    if scripts.SCRIPTS[cell.script].property:
        properties.JUDGES[cell.script](cell, reports)
        return Outcome.WITHIN
    assert all((report.agreed == reports[0].agreed).all() for report in reports), "the ranks disagree in the end"
    if must_be_equal(cell):
        expected = _expected(cell.script, cell.size, cell.algorithm, _how(cell))
        for rank, (report, weights) in enumerate(zip(reports, expected.weights, strict=True)):
            most = TOLERANCE if cell.optimizer.startswith("SGD") else OF_ADAPTIVE
            off = float(np.abs(report.weights - weights.numpy()).max())
            assert off < most, f"rank {rank} is {off:.3g} away from what one process computes"
        return Outcome.EQUAL
    begun, learned = scripts.quality(_model(cell.script)), _quality_of_reference(cell)
    reached = max(report.quality for report in reports)
    if begun - learned < 0.1 * begun:  # rates are too small to tell, or weights were loaded a few steps ago
        assert reached < 1.1 * begun, f"loss {begun:.3f} -> {reached:.3f}"
        return Outcome.WITHIN
    assert reached < begun - SHARE * (begun - learned), (
        f"loss {begun:.3f} -> {reached:.3f}, the reference {learned:.3f}"
    )
    return Outcome.WITHIN


def _check_encoded(cell: Cell, reports: Sequence[Report]) -> None:
    """Checks that what the daemons have counted is a codec's work. Raises `AssertionError`."""
    of_nodes = {report.node: report.counted for report in reports}.values()
    elements, encoded, packed, dense = (
        sum(counted.get(name, 0) for counted in of_nodes)
        for name in ("elements", "encoded", "bytes_packed", "bytes_dense")
    )
    assert elements, f"{cell.codec} has encoded nothing"
    assert encoded >= ENCODED * elements, f"{cell.codec} has encoded {encoded} of {elements} elements"
    assert packed < 0.75 * dense, f"{cell.codec} has sent {packed} bytes where elements take {dense}"


def _model(script: str) -> scripts.Net:
    return scripts.Net(second=script.startswith("a parameter that only"))


def _quality_of_reference(cell: Cell) -> float:
    model, how = _model(cell.script), reference.How(cell.optimizer, cell.rates)
    weights = _expected(cell.script, cell.size, "allreduce", how).weights[0]
    with torch.no_grad():
        for parameter, values in zip(
            model.parameters(), weights.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.copy_(values.view(parameter.shape))
    return scripts.quality(model)


def named(cell: Cell, sentence: str) -> list[tuple[str, str]]:
    """Returns the pairs of the cell's things of which a sentence names both."""
    text = sentence.lower()
    words = {
        cell.script: tuple(word.lower() for word in scripts.SCRIPTS[cell.script].words),
        cell.algorithm: (cells.ALGORITHMS[cell.algorithm].partition("(")[0],),
        cell.codec: (cells.CODECS[cell.codec].partition("(")[0],),
        f"overlap {cell.overlap}": ("overlap",) if cell.overlap != "none" else (),
        cell.optimizer: (cell.optimizer.partition(" ")[2] or cell.optimizer).lower().split(),
    }
    said = [thing for thing, ways in words.items() if any(word in text for word in ways)]
    return [(one, other) for index, one in enumerate(said) for other in said[index + 1 :]]
