"""Algorithms of other packages, whose part in daemons they bring themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fusion_rt.algorithms import ALGORITHMS, DPSGD, Algorithm, AlgorithmError, Place, parse
from fusion_rt.core.mixing import Mixing
from fusiond import algorithms
from fusiond.algorithms.gossip import Averaging
from fusiond.algorithms.shards import BSP


class FirstOfAll(BSP):
    pass


@dataclass(frozen=True)
class Working(Algorithm):
    name = "working"

    def implementation(self) -> Any:
        return FirstOfAll


@dataclass(frozen=True)
class Silent(Algorithm):
    name = "silent"


@dataclass(frozen=True)
class Odd(Algorithm):
    name = "odd"

    def implementation(self) -> Any:
        return lambda spec, ranks: np.zeros(ranks)


@dataclass(frozen=True)
class Together(Algorithm):
    name = "together"
    place = Place.NOWHERE


class Own(Averaging):
    pass


@dataclass(frozen=True)
class Circle(DPSGD):
    """D-PSGD on a graph that has no text: all take from the rank before, which is not symmetric."""

    name = "circle"

    def graph(self, ranks: int) -> Mixing:
        return Mixing("circle", ranks, (tuple((((rank - 1) % ranks, 1.0),) for rank in range(ranks)),))

    def implementation(self) -> Any:
        return Own


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Working, Silent, Odd, Together, Circle):
            patch.setitem(ALGORITHMS, kind.name, kind)
        yield
    parse.cache_clear()


def test_it_brings_what_daemons_do() -> None:
    made = algorithms.make("working", 3)
    assert type(made) is FirstOfAll
    assert (made.spec, made.ranks) == (Working(), 3)


def test_one_derived_from_a_built_in_one_brings_its_own_and_its_graph() -> None:
    made = algorithms.make("circle", 3)
    assert type(made) is Own
    assert made.graph.matrix(0).tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert parse("circle").receivers(3) == 1


def test_one_whose_ranks_reduce_what_they_post_needs_nothing_in_daemons() -> None:
    assert isinstance(algorithms.make("together", 3), algorithms.AllReduce)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "silent",
            "the algorithm silent .* does not work in a daemon: .* does not say what a daemon does",
        ),
        ("odd", "what the algorithm odd does in a daemon is no HomeAlgorithm"),
    ],
)
def test_what_does_not_work_in_a_daemon_is_refused_in_a_sentence(name: str, why: str) -> None:
    with pytest.raises(AlgorithmError, match=why):
        algorithms.make(name, 3)
