"""Judges what algorithms promise besides a trained model, by the numbers that scripts of properties leave.

- *Mean*: without gradients, mixing keeps the mean of all ranks' weights, whoever waits. *Contraction*: it brings ranks
  together.
- *Fixed point*: with a quadratic loss on each rank, all come to the optimum of their sum.
- *Conservation*: what codecs have not sent yet and what was applied add up to all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusion_rt import algorithms
from fusion_rt.algorithms import Place
from tests.meetings import scripts
from tests.meetings.cells import Cell

if TYPE_CHECKING:
    from tests.meetings.ranks import Report

ROUNDING = 5e-6  # of float32 weights below 2, after a dozen sums


def at_rest(cell: Cell, reports: Sequence[Report]) -> None:
    """Weights do not move but by mixing. Homes have those of the first rank, with which they began."""
    begun, settled, agreed = (
        np.stack([each[name] for each in map(_numbers, reports)]) for name in ("begun", "settled", "agreed")
    )
    algorithm = algorithms.parse(cell.chosen)
    if algorithm.sums_gradients:
        _near(settled, begun, 0, "weights of a rank have moved")
        return
    _near(agreed, agreed[0], 0, "the ranks disagree in the end")
    elastic = algorithm.name in ("easgd", "ea_wild")
    if algorithm.at_shards and not elastic:
        _near(agreed[0], begun[0], 0, "the homes have moved")
        return
    if elastic:
        _near(settled.sum(0) + agreed[0], begun.sum(0) + begun[0], ROUNDING * 10, "the sum of ranks and home has moved")
    else:
        # A rank that waits has still to take a part of its outer momentum.
        most = 0.1 if algorithm.name == "noloco" else _grid(cell)
        _near(agreed[0], begun.mean(0), most, "the mean of the ranks has moved")
    if algorithm.place is Place.REPLICA or algorithm.name == "local_sgd" or elastic:
        left = _spread(settled) / _spread(begun)
        most = 0.9 if algorithm.name == "choco" or elastic else 0.5
        if algorithm.name == "choco" and cell.codec in ("int2", "onebit"):
            most = 0.98  # its step follows from the worst case of these codecs
        assert left < most, f"after {scripts.STEPS} steps, {left:.2f} of the distance between ranks is left"


def quadratic(cell: Cell, reports: Sequence[Report]) -> None:
    """All ranks come to the mean of their optima. Where gradients are used one after the other, those that came last
    count for more, by the rate times the distance of optima; where some are left out or old, by that distance."""
    optimum = np.stack([scripts.optimum(rank).numpy() for rank in range(cell.size)]).mean(0)
    agreed = reports[0].agreed
    algorithm = algorithms.parse(cell.chosen)
    for report in reports:
        _near(report.agreed, agreed, 0, "the ranks disagree in the end")
    slack = 0.0 if algorithm.synchronous else scripts.TARGETS
    if algorithm.place is Place.REPLICA and algorithm.name != "adpsgd":
        slack = 0.0
    if cell.encodes and cell.codec != "dense":
        slack += 0.05
    _near(agreed, optimum, slack + 0.01, "the optimum is not reached")
    for rank, report in enumerate(reports):
        _near(report.notes["end"], agreed, 2 * scripts.TARGETS + 0.05, f"rank {rank} is far from what all agree on")


def small_steps(cell: Cell, reports: Sequence[Report]) -> None:
    """All steps arrive, but for what the grid of a half of about 1 holds back, and a home that follows late."""
    moved = reports[0].notes["begun"] - reports[0].agreed
    total = scripts.SMALL * scripts.MANY
    _near(moved, np.full_like(moved, total), 2**-7 + total / 6, f"weights should have moved by {total:.3f}")


def ledger(cell: Cell, reports: Sequence[Report]) -> None:
    """The sum of rates times mean gradients is what was applied and the residuals of all nodes, at the last rate."""
    given = np.stack([report.notes["given"] for report in reports]).mean(0)
    applied = reports[0].notes["begun"] - reports[0].notes["end"]
    rate = reports[0].notes["last"]
    model = scripts.Net()
    of_nodes = {report.node: report.residual for report in reports}.values()
    left = np.concatenate(
        [sum(residual[name] for residual in of_nodes) for name, _ in model.named_parameters()]  # type: ignore[misc]
    ) * (rate / cell.size)
    assert np.abs(left).max() > 0, "nothing waits"
    _near(applied + left, given, 1e-6 + 1e-5 * float(np.abs(given).max()), "gradients are lost, or counted twice")


def uneven_then_set(cell: Cell, reports: Sequence[Report]) -> None:
    """Without gradients, weights that all ranks have set stay."""
    most = _grid(cell)
    for rank, report in enumerate(reports):
        _near(report.notes["end"], np.full_like(report.agreed, 0.5), most, f"rank {rank} has other weights")
        _near(report.agreed, np.full_like(report.agreed, 0.5), most, "the ranks agree on other weights")


def _numbers(report: Report) -> dict[str, Any]:
    return {**report.notes, "agreed": report.agreed}


def _grid(cell: Cell) -> float:
    """How far rounding may take weights of about 1."""
    return {"fp16": 2**-9, "bf16": 2**-6}.get(cell.codec, ROUNDING)


def _near(values: Any, wanted: Any, tolerance: float, otherwise: str) -> None:
    off = float(np.abs(values - wanted).max())
    assert off <= tolerance, f"{otherwise}: {off:.3g} off, of {tolerance:.3g} at most"


def _spread(weights: Any) -> float:
    return float(np.sqrt(np.square(weights - weights.mean(0)).sum(1).mean()))


JUDGES: dict[str, Callable[[Cell, Sequence[Report]], None]] = {
    "ranks that begin apart and wait, at rate 0": at_rest,
    "a quadratic loss, to its optimum": quadratic,
    "many small steps": small_steps,
    "a ledger of gradients": ledger,
    "a ledger of gradients, scale doubles": ledger,
    "uneven data, then weights set and reseed()": uneven_then_set,
}
