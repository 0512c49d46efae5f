"""The search: what is measured, how often, and what wins."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from fusion_rt.choice.candidates import Setting, Space
from fusion_rt.torch.autotune.search import AutotuneError, OptunaSampler, Search
from fusion_rt.units import KIB, MIB
from tests.for_each import for_each
from tests.torch.autotune.fakes import DEFAULT

SPACE = Space.around(DEFAULT, nbytes=100 * MIB, nodes=4, cores=4, largest_chunk=2 * MIB)


class Script:
    """A sampler that asks for the default, and then for these, again and again."""

    def __init__(self, settings: list[Setting]) -> None:
        self.told: list[float] = []
        self._settings = settings
        self._asked = 0

    def ask(self) -> Setting:
        self._asked += 1
        return DEFAULT if self._asked == 1 else self._settings[(self._asked - 2) % len(self._settings)]

    def tell(self, score: float) -> None:
        self.told.append(score)


def run(search: Search, score: Callable[[Setting], float]) -> list[Setting]:
    asked = []
    while not search.over:
        asked.append(search.ask())
        search.tell(asked[-1], score(asked[-1]))
    return asked


def others(count: int) -> list[Setting]:
    return [replace(DEFAULT, threshold=MIB + n) for n in range(count)]


def test_the_default_is_measured_first_and_as_many_samples_as_were_asked_for() -> None:
    asked = run(Search(SPACE, OptunaSampler(SPACE, 4), 20, 0.8), lambda setting: 1.0)
    assert asked[0] == DEFAULT
    assert len(asked) == 20


def test_sizes_of_buckets_come_first_the_nearest_to_the_default_before_others() -> None:
    asked = run(Search(SPACE, OptunaSampler(SPACE, 5), 20, 0.0), lambda setting: 1.0)[:5]
    assert {replace(setting, threshold=DEFAULT.threshold) for setting in asked} == {DEFAULT}
    where = SPACE.values["threshold"].index(DEFAULT.threshold)
    assert [abs(SPACE.values["threshold"].index(setting.threshold) - where) for setting in asked] == [0, 1, 1, 2, 2]


@for_each(("noise", "again"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_the_more_noise_the_more_is_measured_again(noise: float, again: int) -> None:
    settings = others(20)
    search = Search(SPACE, Script(settings), 12, noise)
    asked = run(search, lambda setting: 3.5 if setting == DEFAULT else float(settings.index(setting)))
    fresh, repeated = asked[: 12 - again], asked[12 - again :]
    assert len(set(fresh)) == len(fresh)
    assert set(repeated) <= {fresh[-1], fresh[-2], DEFAULT}
    assert search.best == fresh[-1]


def test_what_leads_by_luck_is_measured_again_and_loses() -> None:
    lucky, good = others(2)
    search = Search(SPACE, Script([lucky, good]), 9, 1.0)
    seen: dict[Setting, int] = {}

    def score(setting: Setting) -> float:
        seen[setting] = seen.get(setting, 0) + 1
        if setting == lucky:
            return 9.0 if seen[setting] == 1 else 0.5
        return 2.0 if setting == good else 1.0

    run(search, score)
    assert search.best == good
    assert seen[lucky] > 1


def test_the_default_wins_unless_another_one_is_better() -> None:
    search = Search(SPACE, Script(others(3)), 9, 1.0)
    run(search, lambda setting: 1.0)
    assert search.best == DEFAULT


@for_each("seed", range(8))
def test_the_winner_is_never_measured_to_be_worse_than_the_default(seed: int) -> None:
    noise = random.Random(seed)
    search = Search(SPACE, OptunaSampler(SPACE, 4, seed), 20, 0.8)
    run(search, lambda setting: noise.uniform(0.5, 1.5))
    assert search.score(search.best) >= search.score(DEFAULT)


def test_what_is_known_is_told_instead_of_measured_again() -> None:
    sampler = Script(others(2))
    search = Search(SPACE, sampler, 4, 0.0)
    scores = {DEFAULT: 1.0, others(2)[0]: 2.0, others(2)[1]: 3.0}
    asked = run(search, scores.__getitem__)
    assert asked[:3] == [DEFAULT, *others(2)]
    assert sampler.told[:3] == [1.0, 2.0, 3.0]
    assert set(sampler.told[3:]) == {2.0, 3.0}


@for_each("seed", range(4))
def test_optuna_finds_the_bowl(seed: int) -> None:
    """A smooth function of buckets and chunks, and a wrong kind of all-reduce: within 30 samples, nearly the best."""

    def score(setting: Setting) -> float:
        far = abs(math.log2(setting.threshold / (4 * MIB))) + abs(math.log2(setting.chunk_bytes / (1 * MIB)))
        return 100 / (1 + 0.2 * far + (setting.exchange == "ring"))

    search = Search(SPACE, OptunaSampler(SPACE, 7, seed), 30, 0.5)
    run(search, score)
    assert search.score(search.best) >= 0.8 * 100
    assert search.score(search.best) > score(DEFAULT)


def test_without_optuna_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(AutotuneError, match="pip install optuna, or leave --autotune out"):
        OptunaSampler(SPACE, 4)


def test_values_of_one_kind_only_can_be_searched() -> None:
    space = Space.around(DEFAULT, nbytes=KIB, nodes=1, cores=1, largest_chunk=2 * MIB, keep_order=True)
    asked = run(Search(space, OptunaSampler(space, 2), 5, 0.0), lambda setting: setting.threads)
    assert {setting.threads for setting in asked} == {1, 2}
