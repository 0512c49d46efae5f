"""Which of the strangers' connections is closed."""

from __future__ import annotations

import random
from collections import Counter

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


def test_expected_connections_of_a_host_are_not_counted() -> None:
    pending: Pending[int] = Pending(4, 3)
    pending.expect("a")
    pending.expect("a")
    assert [pending.add(number, "a") for number in range(5)] == [None] * 5
    assert pending.add(5, "a") == 0
    assert pending.add(6, "b") is None
    assert pending.add(7, "b") == 1  # a has most of those that nobody expects
    pending.remove(2)  # it has shown whose it is: nothing changes for others
    assert pending.expect_no_more("a") is None
    assert pending.add(8, "c") == 3
    assert pending.expect_no_more("a") == 4


def test_no_order_of_events_passes_the_limits() -> None:
    rng = random.Random(1)
    pending: Pending[int] = Pending(20, 7)
    hosts: dict[int, str] = {}
    expected: Counter[str] = Counter()

    def closed(connection: int | None) -> None:
        if connection is not None:
            assert connection == min(each for each in hosts if hosts[each] == hosts[connection])
            del hosts[connection]

    for number in range(5000):
        if rng.random() < 0.3 and hosts:
            gone = rng.choice(list(hosts))
            pending.remove(gone)
            del hosts[gone]
        host = rng.choice("abc")
        if rng.random() < 0.1:
            pending.expect(host)
            expected[host] += 1
        elif rng.random() < 0.1 and expected[host]:
            expected[host] -= 1
            closed(pending.expect_no_more(host))
        hosts[number] = rng.choice("abcdef")
        closed(pending.add(number, hosts[number]))
        strangers = [max(0, [*hosts.values()].count(host) - expected[host]) for host in "abcdef"]
        assert len(pending) == len(hosts)
        assert max(strangers) <= 7
        assert sum(strangers) <= 20
    assert sum(expected.values()) > 5
