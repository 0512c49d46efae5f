"""Trouble that is told once."""

from __future__ import annotations

from fusiond.transport.peers import Break, Flapping, Slowness


def test_a_connection_that_breaks_now_and_then_is_not_flapping() -> None:
    flapping = Flapping()
    assert [flapping.broke(100.0 * number) for number in range(10)] == [Break.SINGLE] * 10
    assert flapping.episodes == 0


def test_three_breaks_within_a_minute_begin_an_episode_that_lasts_until_a_quiet_minute() -> None:
    flapping = Flapping()
    found = [flapping.broke(float(now)) for now in (0, 10, 20, 30, 85, 140, 300, 310, 320, 321)]
    assert found == [
        Break.SINGLE, Break.SINGLE, Break.BEGINS, Break.FURTHER, Break.FURTHER, Break.FURTHER,
        Break.SINGLE, Break.SINGLE, Break.BEGINS, Break.FURTHER,
    ]  # fmt: skip
    assert flapping.episodes == 2


def test_a_peer_is_slow_once_until_it_acknowledges_something() -> None:
    slowness = Slowness(2.0, 0.0)
    #         now, acknowledged, due
    looks = [(1, 0, 5), (2, 0, 5), (3.1, 0, 6), (4, 0, 6), (5, 1, 5), (6, 1, 5), (7.1, 1, 5)]
    assert [slowness.look(*look) for look in looks] == [False, False, True, False, False, False, True]
    assert slowness.episodes == 2


def test_a_peer_to_which_nothing_is_sent_is_not_slow() -> None:
    slowness = Slowness(2.0, 0.0)
    assert not any(slowness.look(float(now), 7, 0) for now in range(100))
    assert not slowness.look(101.0, 7, 1)  # and what was sent just now is not late
