"""Who decomposes what: balanced, complete, and the same for everybody who asks."""

from __future__ import annotations

import itertools
import random

import pytest

from fusion_rt.torch.kfac import assign, decomposition_cost
from tests.for_each import for_each


def loads(costs: dict[str, float], owners: dict[str, int], ranks: list[int]) -> list[float]:
    return [sum(costs[name] for name, owner in owners.items() if owner == rank) for rank in ranks]


def test_cost_is_that_of_both_factors() -> None:
    assert decomposition_cost((3, 2)) == 27 + 8


def test_the_longest_goes_first_to_whoever_has_least() -> None:
    costs = {"a": 2.0, "b": 7.0, "c": 5.0, "d": 3.0, "e": 1.0}
    owners = assign(costs, [4, 9])
    assert list(owners.items()) == [("a", 4), ("b", 4), ("c", 9), ("d", 9), ("e", 9)]  # 7, 5, 3, 2 and 1
    assert loads(costs, owners, [4, 9]) == [9.0, 9.0]


@for_each("seed", range(20))
def test_no_rank_has_more_than_four_thirds_of_the_best_there_is(seed: int) -> None:
    draw = random.Random(seed)
    ranks = list(range(draw.choice([2, 3])))
    costs = {f"layer{i}": float(draw.randint(1, 30) ** 3) for i in range(8)}
    best = min(
        max(loads(costs, dict(zip(costs, choice, strict=True)), ranks))
        for choice in itertools.product(ranks, repeat=len(costs))
    )
    assert max(loads(costs, assign(costs, ranks), ranks)) <= (4 / 3 - 1 / (3 * len(ranks))) * best + 1e-9


def test_equal_layers_are_dealt_out_evenly() -> None:
    costs = {f"layer{i}": 8.0 for i in range(12)}
    assert loads(costs, assign(costs, [0, 1, 2, 3]), [0, 1, 2, 3]) == [24.0] * 4


def test_more_ranks_than_layers_leave_some_idle() -> None:
    assert assign({"a": 1.0, "b": 2.0}, [0, 1, 2]) == {"a": 1, "b": 0}


def test_there_may_be_no_layers_but_not_no_ranks() -> None:
    assert assign({}, [0]) == {}
    with pytest.raises(ValueError, match="no ranks"):
        assign({"a": 1.0}, [])


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="'b' is negative"):
        assign({"a": 1.0, "b": -1.0}, [0])
