"""Which operation of its name one is."""

from __future__ import annotations

from fusion_rt.client.clocks import Clocks


def test_each_identity_is_counted_for_itself() -> None:
    clocks = Clocks(7)
    assert [clocks.count((0, "x")), clocks.count((0, "x")), clocks.count((1, "x"))] == [7, 8, 7]
    assert [clocks.next((0, "x")), clocks.next((0, "x")), clocks.next((-1, 3))] == [9, 9, 7]


def test_after_a_join_all_begin_at_the_same_clock_which_none_has_had() -> None:
    """Ranks that have taken other numbers of steps, one of them none at all."""
    ranks = [Clocks(0) for _ in range(3)]
    had = {rank.count((0, "x")) for steps, rank in enumerate(ranks) for _ in range(5 * steps)}
    for rank in ranks:
        rank.joined()
    assert [rank.joins for rank in ranks] == [1, 1, 1]
    (clock,) = {rank.count((0, "x")) for rank in ranks}
    assert clock not in had
    assert {rank.count((0, "x")) for rank in ranks} == {clock + 1}
