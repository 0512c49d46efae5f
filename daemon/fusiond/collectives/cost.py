"""How the model of what a collective costs (`fusion_rt.cost`) is made of measurements."""

from __future__ import annotations

from fusion_rt.cost import CostModel

__all__ = ["CostModel", "measured", "worst"]


def measured(small_round_trip: float, large_round_trip: float, extra_nbytes: int) -> CostModel:
    """The model of a link whose best round trips (s) are known, with and without `extra_nbytes` of payload one way."""
    slope = (large_round_trip - small_round_trip) / extra_nbytes
    return CostModel(small_round_trip / 2, max(slope, 1e-12))


def worst(models: list[CostModel]) -> CostModel:
    """The model that all nodes use: the highest latency and the lowest rate of any link."""
    return CostModel(max(m.latency for m in models), max(m.seconds_per_byte for m in models))
