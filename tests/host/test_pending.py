"""Which of the strangers' connections is closed."""

from __future__ import annotations

import random

from fusion_rt.host.pending import Pending


def test_few_connections_stay() -> None:
    pending: Pending[int] = Pending(4, 3)
    assert [pending.add(number, "ab"[number % 2]) for number in range(4)] == [None] * 4
    assert len(pending) == 4


def test_the_oldest_of_a_host_that_has_too_many_goes() -> None:
    pending: Pending[int] = Pending(100, 3)
    assert [pending.add(number, "a") for number in range(5)] == [None, None, None, 0, 1]
    pending.remove(3)  # it has shown whose it is
    assert pending.add(5, "a") is None
    assert pending.add(6, "a") == 2


def test_of_too_many_hosts_the_one_with_most_connections_gives_way() -> None:
    pending: Pending[int] = Pending(4, 3)
    for number, host in enumerate("abaa"):
        assert pending.add(number, host) is None
    assert pending.add(4, "c") == 0
    assert pending.add(5, "b") == 2


def test_what_is_not_there_can_be_removed() -> None:
    pending: Pending[int] = Pending(4, 3)
    pending.remove(1)
    assert len(pending) == 0


def test_no_order_of_events_passes_the_limits() -> None:
    rng = random.Random(1)
    pending: Pending[int] = Pending(20, 7)
    hosts: dict[int, str] = {}
    for number in range(5000):
        if rng.random() < 0.3 and hosts:
            gone = rng.choice(list(hosts))
            pending.remove(gone)
            del hosts[gone]
        hosts[number] = rng.choice("abcdef")
        closed = pending.add(number, hosts[number])
        if closed is not None:
            of_its_host = [each for each in hosts if hosts[each] == hosts[closed]]
            assert closed == min(of_its_host)
            del hosts[closed]
        assert len(pending) == len(hosts) <= 20
        assert all(list(hosts.values()).count(host) <= 7 for host in "abcdef")
