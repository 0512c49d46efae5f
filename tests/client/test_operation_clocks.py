"""Which operation of its name one is."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest

from fusion_rt import wire
from fusion_rt.client.operation_clocks import Clocks
from fusion_rt.core.errors import FusionError


def test_each_identity_is_counted_for_itself() -> None:
    clocks = Clocks(7)
    assert [used(clocks, 0, "x"), used(clocks, 0, "x"), used(clocks, 1, "x")] == [7, 8, 7]
    assert [clocks.next_named(0, "x"), clocks.next_named(0, "x")] == [9, 9]
    assert [clocks.count(1, 3), clocks.count(1, 3), clocks.count(1, 4), clocks.next(1, 3)] == [7, 8, 7, 9]


def test_operations_without_a_name_are_counted_together_whatever_their_kinds() -> None:
    clocks = Clocks(0)
    kinds = ["allreduce.noname", "barrier.noname", "allreduce.noname"]
    assert [used(clocks, 0, name) for name in [*kinds, "x"]] == [0, 1, 2, 0]


def test_after_a_join_all_begin_at_the_same_clock_which_none_has_had() -> None:
    """Ranks that have taken other numbers of steps, one of them none at all."""
    ranks = [Clocks(0) for _ in range(3)]
    had = {used(rank, 0, "x") for steps, rank in enumerate(ranks) for _ in range(5 * steps)}
    first = max(rank.after_join() for rank in ranks)
    for rank in ranks:
        used(rank, 0, "join")
        rank.joined(first)
    assert [rank.joins for rank in ranks] == [1, 1, 1]
    (clock,) = {used(rank, 0, "x") for rank in ranks}
    assert clock not in had
    assert {used(rank, 0, "x") for rank in ranks} == {clock + 1}


def test_clocks_stay_in_their_epoch_however_often_ranks_join() -> None:
    """After 4,096 joins they were those of the next epoch, and other nodes dropped what came with them."""
    clocks, had = Clocks(wire.first_clock(1)), set[int]()
    for join in range(5000):
        clock = used(clocks, 0, "x")
        assert clock not in had
        had |= {clock, clocks.count(3, 0)}
        first = clocks.after_join()
        had.add(used(clocks, 0, "join"))
        clocks.joined(first)
        assert clocks.joins == join + 1
    assert {clock // wire.CLOCKS_OF_AN_EPOCH for clock in had} == {1}


def test_a_process_set_that_is_removed_takes_its_names_along() -> None:
    clocks = Clocks(7)
    used(clocks, 0, "x")
    assert _bytes_of(lambda: _use_names_of_a_set_and_remove_it(clocks)) < 1000
    assert clocks.next_named(0, "x") == 8


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is forgotten after 100 newer ones, and ranks differ by 10 of these at most."""
    monkeypatch.setattr("fusion_rt.client.operation_clocks._REMEMBERED", 100)
    monkeypatch.setattr("fusion_rt.client.operation_clocks._SKEW", 10)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("first", [0, 1 << 36])
def test_memory_has_a_bound_though_each_operation_has_a_name_of_its_own(first: int) -> None:
    clocks = Clocks(first)
    for step in range(200):
        used(clocks, 0, f"loss.{step}")
    names = [f"loss.{step}" for step in range(200, 5000)]
    assert _bytes_of(lambda: [used(clocks, 0, name) for name in names]) < 110 * 250


@pytest.mark.usefixtures("few")
def test_a_name_that_is_used_again_and_again_keeps_its_count() -> None:
    clocks = Clocks(0)
    for step in range(1000):
        assert used(clocks, 0, f"loss.{step}") == 0
        if step % 80 == 0:
            assert used(clocks, 0, "accuracy") == step // 80


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_submit_in_other_orders_count_alike_or_are_told(seed: int) -> None:
    """Names come again after 80 to 130 newer ones, and each rank has up to 8 operations under way."""
    chosen = random.Random(seed)
    names = [f"loss.{chosen.randrange(step - 130, step - 80) if step % 7 == 0 else step}" for step in range(200, 900)]
    runs = []
    for rank in range(3):
        shuffled = random.Random(100 * seed + rank)
        order = sorted(range(len(names)), key=lambda place: place + shuffled.uniform(0, 4))
        clocks, run = Clocks(0), dict[int, int]()
        for place in order:
            try:
                run[place] = used(clocks, 0, names[place])
            except FusionError:
                break
        runs.append(run)
    for place in set(runs[0]) & set(runs[1]) & set(runs[2]):
        assert len({run[place] for run in runs}) == 1, names[place]


def used(clocks: Clocks, process_set: int, name: str) -> int:
    """The clock of an operation that is submitted."""
    clock = clocks.next_named(process_set, name)
    clocks.count_named(process_set, name)
    return clock


def _use_names_of_a_set_and_remove_it(clocks: Clocks) -> None:
    for step in range(2000):
        used(clocks, 3, f"loss.{step}")
    clocks.remove(3)


def _bytes_of(act: Callable[[], object]) -> int:
    """The bytes that are left allocated when something has been done."""
    tracemalloc.start()
    act()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return grown


@pytest.mark.usefixtures("few")
def test_the_count_of_operations_without_a_name_is_never_forgotten() -> None:
    """It began anew, and an operation got the failure of an earlier one with the same clock."""
    clocks = Clocks(0)
    used(clocks, 0, "barrier.noname")
    for step in range(1000):
        used(clocks, 0, f"loss.{step}")
        if step in (95, 105, 500):  # where ranks might differ in whether they remember a name
            used(clocks, 0, "allreduce.noname")
    assert used(clocks, 0, "barrier.noname") == 4
