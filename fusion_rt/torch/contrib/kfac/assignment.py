"""Assignment of layers' decompositions to ranks."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def decomposition_cost(sizes: Sequence[int]) -> int:
    """The relative cost of eigendecompositions of symmetric n x n matrices: the sum of n^3."""
    return sum(size**3 for size in sizes)


def assign(costs: Mapping[str, float], ranks: Sequence[int]) -> dict[str, int]:
    """Gives each layer one owner, so that the ranks' total costs are about equal.

    The most expensive layer that is left goes to the rank that has least so far (R. Graham, "Bounds on multiprocessing
    timing anomalies", 1969: no rank gets more than 4/3 of what the busiest one has in the best of all assignments).
    The result depends on the arguments alone, so that all ranks come to the same one without talking.

    Args:
        costs: of each layer, none of them negative. Equally expensive ones are dealt out in this order.
        ranks: among which to choose; of those with equally little, the first one is taken.

    Returns:
        The owner of each layer, in the order of `costs`.

    Raises:
        ValueError: there are no ranks, or a cost is negative.
    """
    if not ranks:
        raise ValueError("layers cannot be assigned to no ranks at all; give at least one")
    negative = [name for name, cost in costs.items() if cost < 0]
    if negative:
        raise ValueError(f"the cost of layer {negative[0]!r} is negative: {costs[negative[0]]}")
    loads = [(0.0, position) for position in range(len(ranks))]
    owners = {}
    for name in sorted(costs, key=lambda name: -costs[name]):
        load, position = loads[0]
        heapq.heapreplace(loads, (load + costs[name], position))
        owners[name] = ranks[position]
    return {name: owners[name] for name in costs}
