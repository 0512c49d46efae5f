"""What leaves first of what waits for a peer: nothing is lost, little is under way, and what is urgent overtakes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusiond.transport import delivery
from fusiond.transport.delivery import AT_ONCE, ReceiveWindow, Sending, SendWindow

CREDIT = 1000


class Line:
    """A connection that takes messages, and the peer at its other end, which receives them when it is told to."""

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.out = SendWindow()
        self.stands = True
        self.most = 0  # bytes under way at once, of more than two messages and more than the peer may keep to itself
        self.sent: list[bytes] = []  # handed over, in order
        self.received: list[bytes] = []
        self._incoming = ReceiveWindow()

    def post(self, frame: bytes, payload: bytes | memoryview, borrowed: bool) -> None:
        more = len(self.out) >= 2 and self.out.nbytes >= CREDIT // 3
        self.out.add(frame, payload, borrowed)
        self.sent.append(bytes(payload))
        if more:
            self.most = max(self.most, self.out.nbytes)

    def receive(self, count: int = 1) -> None:
        """The peer takes messages, and says so."""
        for kept in list(self.out.unacknowledged())[:count]:
            serial, _ = delivery.split_payload_head(kept.frame)
            assert self._incoming.accept(serial)
            assert kept.payload is not None
            self.received.append(bytes(kept.payload))
        self.out.acknowledge(self._incoming.received)


def sending(*lines: Line, credit: int = CREDIT) -> Sending:
    made = Sending(credit)
    made.links.extend(lines)
    return made


def named(name: str, nbytes: int = 400) -> bytes:
    return name.encode().ljust(nbytes, b".")


def names(payloads: list[bytes]) -> list[str]:
    return [payload.rstrip(b".").decode() for payload in payloads]


def give(to: Sending, name: str, urgency: int = 5, nbytes: int = 400) -> None:
    to.send(urgency, b"", named(name, nbytes), False)


def drain(queue: Sending, *lines: Line) -> None:
    while any(line.out for line in lines if line.stands) or len(queue):
        for line in lines:
            if line.stands:
                line.receive()
        queue.go_on()


def test_a_small_urgent_bucket_overtakes_the_chunks_of_a_large_one() -> None:
    line = Line()
    queue = sending(line)
    for number in range(6):
        give(queue, f"large {number}", urgency=9)
    give(queue, "small 0", urgency=1)
    give(queue, "small 1", urgency=1)
    assert names(line.sent) == ["large 0", "large 1"]  # what was handed over cannot be overtaken any more
    drain(queue, line)
    assert names(line.received) == [
        "large 0", "large 1", "small 0", "small 1", "large 2", "large 3", "large 4", "large 5",
    ]  # fmt: skip
    assert queue.overtaken == 2


def test_buckets_that_are_equally_urgent_take_turns_by_arrival() -> None:
    line = Line()
    queue = sending(line)
    for name in ("a0", "b0", "a1", "b1", "a2", "b2"):
        give(queue, name)
    drain(queue, line)
    assert names(line.received) == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert queue.overtaken == 0


def test_a_message_that_is_larger_than_the_credit_leaves_while_one_is_under_way() -> None:
    line = Line()
    queue = sending(line)
    for name in ("first", "second", "third"):
        give(queue, name, nbytes=10 * CREDIT)
    assert names(line.sent) == ["first", "second"]
    assert len(queue) == 1
    line.receive()
    queue.go_on()
    assert names(line.sent) == ["first", "second", "third"]


def test_a_large_message_does_not_wait_for_small_ones_that_nobody_acknowledges() -> None:
    """The peer acknowledges a third of the credit, or what it would have to."""
    line = Line()
    queue = sending(line)
    for name, nbytes in (("small 0", 100), ("small 1", 100), ("large", 900), ("next", 900)):
        give(queue, name, nbytes=nbytes)
    assert names(line.sent) == ["small 0", "small 1", "large"]


def test_something_is_told_once_all_before_it_was_received_and_waits_for_nothing_else() -> None:
    lines = Line(1), Line(2)
    queue = sending(*lines)
    told: list[str] = []
    queue.when_received(lambda: told.append("nothing to wait for"))
    for number in range(6):
        give(queue, str(number))
    queue.when_received(lambda: told.append("six"))
    while "six" not in told:
        assert told == ["nothing to wait for"]
        give(queue, "more urgent", urgency=1)
        for line in lines:
            line.receive()
        queue.go_on()
    received = names(lines[0].received + lines[1].received)
    assert {str(number) for number in range(6)} <= set(received)
    assert len(queue) or any(line.out for line in lines)  # what came later is not waited for


def test_whoever_hurries_or_loses_the_peer_waits_for_nothing() -> None:
    for end in (Sending.hurry, Sending.flush, Sending.forget):
        queue, told = sending(Line()), []
        give(queue, "under way")
        queue.when_received(lambda told=told: told.append("now"))  # type: ignore[misc]
        assert told == []
        end(queue)
        assert told == ["now"]


def test_without_credit_nothing_waits_and_nothing_overtakes() -> None:
    line = Line()
    queue = sending(line, credit=0)
    for number in range(100):
        give(queue, str(number), urgency=100 - number)
    assert names(line.sent) == [str(number) for number in range(100)]


@pytest.mark.parametrize("more_urgent", [1, 10])
def test_what_is_never_urgent_does_not_wait_for_ever(more_urgent: int) -> None:
    """While there is always something that is more urgent, and new."""
    line = Line()
    queue = sending(line)
    waiting = {f"patient {number}" for number in range(10)}
    for name in waiting:
        give(queue, name, urgency=1000)
    steps = 0
    while not waiting.issubset(names(line.received)):
        steps += 1
        assert steps < 17 * 10
        while len(queue) < 40:
            give(queue, "urgent", urgency=more_urgent)
        line.receive()
        queue.go_on()
    assert steps > 10  # most of the time they were overtaken


def test_a_connection_that_is_down_gets_nothing_and_another_one_goes_on() -> None:
    broken, good = Line(1), Line(2)
    queue = sending(broken, good)
    give(queue, "kept")
    assert names(broken.sent) == ["kept"]
    broken.stands = False
    for number in range(4):
        give(queue, str(number))
    while len(queue):
        good.receive()
        queue.go_on()
    assert names(good.sent) == ["0", "1", "2", "3"]
    assert len(broken.out) == 1  # to be sent again when it stands; that is the link's part
    assert broken.sent == [named("kept")]


def test_what_waits_while_no_connection_stands_leaves_when_one_does() -> None:
    line = Line()
    line.stands = False
    queue = sending(line)
    give(queue, "late", urgency=7)
    give(queue, "soon", urgency=AT_ONCE)
    assert line.sent == []
    assert (len(queue), queue.nbytes) == (2, 2 * (8 + 400))
    line.stands = True
    queue.go_on()
    assert names(line.sent) == ["soon", "late"]
    assert (len(queue), queue.nbytes) == (0, 0)


def test_who_leaves_hands_over_everything() -> None:
    line = Line()
    queue = sending(line)
    for number in range(10):
        give(queue, str(number), urgency=10 - number)
    queue.flush()
    assert len(line.sent) == 10
    assert len(queue) == 0


def test_a_peer_that_is_lost_is_sent_nothing_more() -> None:
    line = Line()
    queue = sending(line)
    for number in range(10):
        give(queue, str(number))
    queue.forget()
    drain(queue, line)
    assert len(line.received) == 2
    assert (len(queue), queue.nbytes, queue.full) == (0, 0, False)


def test_too_much_that_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MOST_BYTES", 5 * CREDIT)
    line = Line()
    queue = sending(line)
    borrowed = bytes(CREDIT)
    for _ in range(20):
        queue.send(1, b"", borrowed, True)
    assert not queue.full  # that memory is there anyway
    for _ in range(6):
        queue.send(1, b"", borrowed, False)
    too_much = queue.full
    drain(queue, line)
    assert (too_much, queue.full) == (True, False)


messages = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3 * CREDIT), st.booleans()),
    min_size=1,
    max_size=60,
)


@settings(deadline=None)
@given(drawn=messages, lines=st.integers(1, 3), choices=st.randoms(use_true_random=False))
def test_whatever_happens_everything_arrives_once_and_little_is_under_way(
    drawn: list[tuple[int, int, bool]], lines: int, choices: random.Random
) -> None:
    """Connections break and stand again meanwhile; equally urgent messages leave in their order."""
    all_lines = [Line(number) for number in range(1, 1 + lines)]
    queue = sending(*all_lines)
    left: list[tuple[int, int]] = []

    def posted(about: Any, link: Any) -> None:
        assert link.stands
        left.append(about)

    queue.posted = posted
    for number, (urgency, nbytes, borrowed) in enumerate(drawn):
        payload = number.to_bytes(2, "big") + bytes(nbytes)
        queue.send(urgency, b"", payload, borrowed, (urgency, number))
        for line in all_lines:
            if choices.random() < 0.1:
                line.stands = not line.stands
            if line.stands and choices.random() < 0.5:
                line.receive(choices.randrange(1, 4))
        queue.go_on()
    for line in all_lines:
        line.stands = True
    queue.go_on()
    drain(queue, *all_lines)
    arrived = sorted(int.from_bytes(payload[:2], "big") for line in all_lines for payload in line.received)
    assert arrived == list(range(len(drawn)))
    assert sorted(number for _, number in left) == arrived
    for urgency in range(5):
        numbers = [number for of, number in left if of == urgency]
        assert numbers == sorted(numbers)
    assert all(line.most <= CREDIT for line in all_lines)
    assert queue.nbytes == 0


@settings(deadline=None)
@given(
    urgencies=st.lists(st.integers(0, 9), min_size=2, max_size=15),
    urgent=st.integers(0, 9),
)
def test_the_most_urgent_leaves_next(urgencies: list[int], urgent: int) -> None:
    """Of up to 15 that wait: the sixteenth would be the oldest."""
    line = Line()
    queue = sending(line)
    give(queue, "under way", nbytes=CREDIT)
    give(queue, "under way", nbytes=CREDIT)
    for number, urgency in enumerate([*urgencies, urgent]):
        give(queue, str(number), urgency=urgency)
    drain(queue, line)
    expected = sorted(range(len(urgencies) + 1), key=lambda number: ([*urgencies, urgent][number], number))
    assert names(line.received)[2:][:14] == [str(number) for number in expected][:14]
