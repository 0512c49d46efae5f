"""The model of the cost of collectives (`fusion_rt.core.cost`), made of measurements."""

from __future__ import annotations

from fusion_rt.core.cost import CostModel

__all__ = ["CostModel", "measured", "worst"]


def measured(small_round_trip: float, large_round_trip: float, extra_nbytes: int) -> CostModel:
    """Returns the model of a link whose best round trips (s) are known, with and without `extra_nbytes` one way."""
    slope = (large_round_trip - small_round_trip) / extra_nbytes
    return CostModel(small_round_trip / 2, max(slope, 1e-12))


def worst(models: list[CostModel]) -> CostModel:
    """Returns the model that all nodes use: the highest latency and the lowest rate of any link."""
    return CostModel(max(m.latency for m in models), max(m.seconds_per_byte for m in models))
