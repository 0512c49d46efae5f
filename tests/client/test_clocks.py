"""Which operation of its name one is."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from fusion_rt.client.channel import Clocks
from fusion_rt.core.errors import FusionError


def test_each_identity_is_counted_for_itself() -> None:
    clocks = Clocks(7)
    assert [clocks.count(0, "x"), clocks.count(0, "x"), clocks.count(1, "x")] == [7, 8, 7]
    assert [clocks.next(0, "x"), clocks.next(0, "x"), clocks.next(-1, 3)] == [9, 9, 7]


def test_after_a_join_all_begin_at_the_same_clock_which_none_has_had() -> None:
    """Ranks that have taken other numbers of steps, one of them none at all."""
    ranks = [Clocks(0) for _ in range(3)]
    had = {rank.count(0, "x") for steps, rank in enumerate(ranks) for _ in range(5 * steps)}
    for rank in ranks:
        rank.joined()
    assert [rank.joins for rank in ranks] == [1, 1, 1]
    (clock,) = {rank.count(0, "x") for rank in ranks}
    assert clock not in had
    assert {rank.count(0, "x") for rank in ranks} == {clock + 1}


def test_a_process_set_that_is_removed_takes_its_names_along() -> None:
    clocks = Clocks(7)
    clocks.count(0, "x")
    assert _bytes_of(lambda: _use_names_of_a_set_and_remove_it(clocks)) < 1000
    assert clocks.next(0, "x") == 8


@pytest.mark.parametrize("first", [0, 1 << 36])
def test_a_name_costs_little_more_than_its_text(first: int) -> None:
    """In whatever epoch: it was 85 bytes in the first one, and 121 in later ones."""
    names, clocks = [f"loss.{step}" for step in range(20_000)], Clocks(first)
    assert _bytes_of(lambda: [clocks.count(0, name) for name in names]) / len(names) < 40


def test_more_names_than_fit_into_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusion_rt.client.channel._MAX_NAMES", 3)
    clocks = Clocks(0)
    for step in range(3):
        clocks.count(0, f"loss.{step}")
    with pytest.raises(FusionError, match=r"3 different names have been submitted, and 'loss\.3' would be one more"):
        clocks.check(0, "loss.3")
    assert [clocks.next(0, "loss.2"), clocks.next(1, "loss.3"), clocks.next(-1, 3)] == [1, 0, 0]


def _use_names_of_a_set_and_remove_it(clocks: Clocks) -> None:
    for step in range(2000):
        clocks.count(3, f"loss.{step}")
    clocks.remove(3)


def _bytes_of(act: Callable[[], object]) -> int:
    """The bytes that are left allocated when something has been done."""
    tracemalloc.start()
    act()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return grown
