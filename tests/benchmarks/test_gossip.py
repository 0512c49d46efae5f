"""Mixing without gradients: what `benchmarks.gossip` runs is right."""

from __future__ import annotations

from benchmarks import gossip
from tests.for_each import for_each


@for_each("name", gossip.CASES)
def test_the_mean_stays_and_ranks_come_closer(name: str) -> None:
    text, codec = gossip.CASES[name]
    for waits in (False, True):
        found = gossip.measured(text, codec, 40, waits)
        assert found["exchanges"][-1] == 40
        assert found["spread"][-1] < (0.99 if "1 %" in name else 0.8) * found["spread"][0] or found["spread"][-1] < 1e-6
        assert max(found["mean"]) < (1e-5 if codec == "dense" else 1e-4)
