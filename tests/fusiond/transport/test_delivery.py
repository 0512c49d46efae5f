"""Every message exactly once and in order, whatever breaks; and no more memory than the limits say."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.core.errors import WireError
from fusiond.transport import delivery
from fusiond.transport.delivery import ReceiveWindow, SendWindow


@dataclass
class Connection:
    """A connection of TCP: what was written and not read yet; the reader is told apart from those of older ones."""

    written: deque[tuple[int, bytes]] = field(default_factory=deque)


class Pair:
    """A sender and a receiver. The connection between them may break at any time, and lose any part of its end.

    Args:
        asks: whether the receiver says what it has had before anything is sent again, as for payloads; older
            connections are then read no more. Otherwise, as for control messages, both are read, in any order.
    """

    def __init__(self, asks: bool) -> None:
        self.asks = asks
        self.out = SendWindow()
        self.incoming = ReceiveWindow()
        self.connections = [Connection()]
        self.sent: list[bytes] = []
        self.received: list[bytes] = []
        self.sent_after_receipt = 0
        self.most_kept = 0

    def send(self, body: bytes) -> None:
        self.sent.append(body)
        self.out.add(body)
        self.connections[-1].written.append((self.out.serial, body))
        self.most_kept = max(self.most_kept, len(self.out))

    def read(self, which: int) -> None:
        written = self.connections[which % len(self.connections)].written
        if written:
            serial, body = written.popleft()
            if self.incoming.accept(serial):
                self.received.append(body)
        if len(self.received) - self.out.acknowledged >= delivery.ACK_MESSAGES:
            self.acknowledge()

    def acknowledge(self) -> None:
        self.out.acknowledge(self.incoming.received)

    def break_off(self, lost: int) -> None:
        """The connection breaks, and the last `lost` messages in it never arrive."""
        written = self.connections[-1].written
        for _ in range(min(lost, len(written))):
            written.pop()
        if self.asks:
            self.connections.clear()
            self.acknowledge()
        self.connections.append(Connection())
        for serial, kept in enumerate(self.out.unacknowledged(), self.out.acknowledged + 1):
            self.sent_after_receipt += serial <= self.incoming.received
            self.connections[-1].written.append((serial, kept.frame))

    def finish(self) -> None:
        for which in range(len(self.connections)):
            while self.connections[which].written:
                self.read(which)
        self.acknowledge()


actions = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.binary(max_size=8)),
        st.tuples(st.just("read"), st.integers(0, 5)),
        st.tuples(st.just("break"), st.integers(0, 6)),
        st.tuples(st.just("acknowledge"), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=300, deadline=None)
@given(actions, st.booleans())
def test_every_message_arrives_once_and_in_order_however_often_the_connection_breaks(
    plan: list[tuple[str, bytes | int]], asks: bool
) -> None:
    pair = Pair(asks)
    for what, value in plan:
        if isinstance(value, bytes):
            pair.send(value)
        elif what == "read":
            pair.read(value)
        elif what == "break":
            pair.break_off(value)
        else:
            pair.acknowledge()
        assert pair.received == pair.sent[: len(pair.received)]
    pair.finish()
    assert pair.received == pair.sent
    assert len(pair.out) == pair.out.nbytes == 0
    if asks:  # what was received, and whose memory may have changed since, is never sent again
        assert pair.sent_after_receipt == pair.incoming.repeated == 0


def test_a_receiver_that_reads_bounds_what_the_sender_keeps() -> None:
    pair = Pair(asks=True)
    for number in range(10 * delivery.ACK_MESSAGES):
        pair.send(number.to_bytes(4, "big"))
        pair.read(0)
    assert pair.most_kept <= delivery.ACK_MESSAGES
    assert len(pair.received) == 10 * delivery.ACK_MESSAGES


@given(st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=50), st.booleans()), max_size=30), st.data())
def test_what_is_kept_is_counted(messages: list[tuple[bytes, bytes, bool]], data: st.DataObject) -> None:
    out = SendWindow(most_messages=20, most_bytes=500)
    for frame, payload, borrowed in messages:
        out.add(frame, payload, borrowed)
    upto = data.draw(st.integers(0, len(messages)))
    out.acknowledge(upto)
    left = messages[upto:]
    assert [(kept.frame, kept.payload) for kept in out.unacknowledged()] == [each[:2] for each in left]
    assert out.nbytes == sum(len(frame) + len(payload) for frame, payload, _ in left)
    copied = sum(len(frame) + (0 if borrowed else len(payload)) for frame, payload, borrowed in left)
    assert out.full == (len(left) > 20 or copied > 500)
    out.acknowledge(upto // 2)  # what was said before changes nothing
    assert len(out) == len(left)
    out.forget()
    assert (len(out), out.nbytes, out.full) == (0, 0, False)


def test_a_borrowed_payload_is_kept_as_it_is_and_not_copied() -> None:
    memory = bytearray(b"before")
    out = SendWindow()
    out.add(b"head", memoryview(memory), borrowed=True)
    memory[:] = b"after!"
    assert [bytes(kept.payload or b"") for kept in out.unacknowledged()] == [b"after!"]


def test_what_was_never_sent_cannot_be_acknowledged() -> None:
    out = SendWindow()
    out.add(b"x")
    with pytest.raises(WireError, match="it acknowledges message 2 of a connection on which 1 were sent"):
        out.acknowledge(2)


def test_a_gap_is_an_error_and_not_a_part_of_the_data() -> None:
    incoming = ReceiveWindow()
    assert incoming.accept(1)
    with pytest.raises(WireError, match=r"message 3 came from it after message 1: those between are missing"):
        incoming.accept(3)
    assert not incoming.accept(1)
    assert incoming.accept(2)
    assert (incoming.received, incoming.repeated) == (2, 1)


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=20), st.binary(max_size=40))
def test_heads_are_read_as_they_were_written(serial: int, received: list[int], message: bytes) -> None:
    data = delivery.control_head(serial, received) + message
    *head, rest = delivery.split_control(memoryview(data))
    assert (*head, bytes(rest)) == (serial, tuple(received), message)
    assert delivery.split_payload_head(delivery.payload_head(serial) + message) == (serial, message)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_an_error(data: bytes) -> None:
    declared = int.from_bytes(data[8:10], "little")
    if len(data) < 10 + 8 * declared:
        with pytest.raises(WireError, match="too short"):
            delivery.split_control(memoryview(data))
    else:
        _, received, message = delivery.split_control(memoryview(data))
        assert len(received) == declared
        assert len(message) == len(data) - 10 - 8 * declared
