"""Algorithms of other packages, whose part in daemons they bring themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fusion_rt.algorithms import ALGORITHMS, Algorithm, AlgorithmError, Place, parse
from fusiond import algorithms
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


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Working, Silent, Odd, Together):
            patch.setitem(ALGORITHMS, kind.name, kind)
        yield
    parse.cache_clear()


def test_it_brings_what_daemons_do() -> None:
    made = algorithms.make("working", 3)
    assert type(made) is FirstOfAll
    assert (made.spec, made.ranks) == (Working(), 3)


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
