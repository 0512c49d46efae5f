"""Messages in the workers' own memory are read and written there, and what cannot be fails both ends."""

from __future__ import annotations

import numpy as np
import pytest

from tests.for_each import for_each
from tests.fusiond.point_to_point.mail import Mail

both = for_each("sizes", [[2], [1, 1]])
N = 100_001


def data_of(seed: int, nbytes: int = N) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@both
@for_each("seed", range(3))
@for_each(("sender", "receiver"), [(True, True), (True, False), (False, True)])
def test_a_message_goes_from_and_to_own_memory(sizes: list[int], sender: bool, receiver: bool, seed: int) -> None:
    mail = Mail(sizes, seed)
    sent = [mail.send(0, 1, data_of(number), own=sender) for number in range(3)]
    got = [mail.receive(1, 0, N + 5, own=receiver) for _ in sent]
    while not mail.sent(0, sent[0]):
        assert mail.job.step()
    mail.may_use_again(sent[0])
    mail.job.settle()
    assert [mail.received(1, handle) for handle in got] == [(0, data_of(number)) for number in range(3)]
    assert all(mail.sent(0, handle) for handle in sent)
    mail.nothing_is_left()


@both
def test_a_small_message_goes_to_own_memory(sizes: list[int]) -> None:
    mail = Mail(sizes)
    mail.send(0, 1, b"abcd", inline=True)
    got = mail.receive(1, 0, N, own=True)
    mail.job.settle()
    assert mail.received(1, got) == (0, b"abcd")
    mail.nothing_is_left()


@both
@for_each("whose", ["sender", "receiver"])
def test_memory_that_cannot_be_reached_fails_both_ends(sizes: list[int], whose: str) -> None:
    mail = Mail(sizes)
    mail.process.end()  # as when the connection ends
    sent = mail.send(0, 1, data_of(1), own=whose == "sender")
    got = mail.receive(1, 0, N, own=whose == "receiver")
    mail.job.settle()
    assert "the ranks" in mail.job.error(1, got)
    if len(sizes) == 1 or whose == "sender":
        assert mail.job.error(0, sent) == mail.job.error(1, got)
    else:
        assert mail.sent(0, sent)  # its data was there
    mail.nothing_is_left()


@pytest.mark.parametrize("own", [(True, False), (False, True)])
def test_a_time_out_while_own_memory_is_copied_fails_both_ends(own: tuple[bool, bool]) -> None:
    mail = Mail([2])
    sent = mail.send(0, 1, data_of(1), own=own[0], seconds=1.0)
    got = mail.receive(1, 0, N, own=own[1])
    mail.job.now += 2
    for _, callback in mail.job.timers:
        callback()
    assert not mail.job.is_answered(0, sent)  # a thread is at its memory
    mail.job.settle()
    assert "has waited 1 s for its data" in mail.job.error(0, sent)
    assert mail.job.error(1, got) == mail.job.error(0, sent)
    mail.nothing_is_left()
