"""Messages on their way to a peer: which leaves next, and every one exactly once and in order, over connections that
may break. No I/O.

The sender of a connection numbers its messages from 1 on and keeps them until they are acknowledged (`SendWindow`).
The receiver takes them in that order, and drops those that it has had (`ReceiveWindow`). A new connection carries
the kept messages first. Acknowledgements are cumulative and ride on every control message, for all connections at once:

    control message:  serial (8 bytes), number of connections (2), the count received of each (8 each), the message
    payload message:  serial (8 bytes), the message; the payload is the next frame (both sealed: `sealing`)

Serial 0 is for messages that need not arrive: heartbeats, acknowledgements and the last word to a peer that is lost.

A large payload is kept as it was sent, a view of memory that belongs to another object. It must not be sent again when
it may have changed, that is, when credit for it has come. Credit is a control message and was sent after the payload
was received, so it carries the acknowledgement; and of a payload connection that broke, the receiver says first which
ones it has had. So a payload that is sent again has never been consumed.

libzmq's queue leaves in that order, and at 100 Mbit/s a mebibyte takes 84 ms. So no more payload is given to it
than keeps the connection busy: `credit` bytes of each connection that the peer is not known to have received. All else
waits (`Sending`), the most urgent first, so that a small bucket which the next forward pass needs at once overtakes the
chunks of a large one. Among equally urgent ones the order is kept. Every `_TURNS`th message that leaves is the one that
has waited longest, so that nothing waits for ever.

This credit comes back when a message has been *received*, whatever becomes of it there. It spans all operations and
still cannot deadlock, as a credit for consumed bytes would (`flow_control`): a daemon takes messages of operations that
its workers have not reached yet, and keeps them.
"""

from __future__ import annotations

import heapq
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from fusion_rt.core.errors import WireError

ACK_MESSAGES = 256  # received and not acknowledged: then the receiver does not wait for a message to ride on
ACK_BYTES = 4 * 1024 * 1024
MOST_MESSAGES = 1 << 17  # sent and not acknowledged: with more, the peer does not take its messages
MOST_BYTES = 256 * 1024 * 1024  # of messages and payloads copied here; borrowed payloads are bounded by credit

AT_ONCE = 0  # the urgency of data that a worker waits for already; larger numbers are less urgent
_TURNS = 16
_AT_LEAST = 2  # messages under way on a connection, whatever the credit: the next one, while one is acknowledged

_SERIAL = struct.Struct("<Q")
_HEAD = struct.Struct("<QH")
payload_head = _SERIAL.pack


@lru_cache
def _control(connections: int) -> struct.Struct:
    return struct.Struct(f"<QH{connections}Q")


def control_head(serial: int, received: Sequence[int]) -> bytes:
    """Returns the head of a control message: its serial, and the count received of each of the peer's connections."""
    return _control(len(received)).pack(serial, len(received), *received)


def split_control(data: memoryview) -> tuple[int, tuple[int, ...], memoryview]:
    """Splits a control frame into serial, acknowledgements and the message itself.

    Raises:
        WireError: it is too short for that.
    """
    try:
        serial, connections = _HEAD.unpack_from(data)
        head = _control(connections)
        return serial, head.unpack_from(data)[2:], data[head.size :]
    except struct.error:
        raise WireError(f"a control message of {len(data)} bytes is too short") from None


def split_payload_head(data: bytes) -> tuple[int, bytes]:
    """Splits a payload's head into serial and the message itself."""
    return _SERIAL.unpack_from(data)[0], data[_SERIAL.size :]


def payload_nbytes(body: bytes | memoryview, payload: bytes | memoryview) -> int:
    """Returns the bytes of a payload message as both ends count them: without what seals it."""
    return _SERIAL.size + len(body) + len(payload)


class Kept(NamedTuple):
    """A message that may have to be sent again: its first frame, its payload, and how much of it was copied here."""

    frame: bytes
    payload: bytes | memoryview | None
    nbytes: int
    copied: int


class SendWindow:
    """Messages sent on a connection, each kept until it is acknowledged.

    Attributes:
        serial: of the last message.
        acknowledged: serial up to which the peer has received everything.
        nbytes: of messages and payloads that are not acknowledged.
    """

    def __init__(self, most_messages: int = MOST_MESSAGES, most_bytes: int = MOST_BYTES) -> None:
        self.serial = 0
        self.acknowledged = 0
        self.nbytes = 0
        self._copied = 0
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._kept: deque[Kept] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def full(self) -> bool:
        """True if more is kept than a peer that takes its messages leaves unacknowledged."""
        return len(self._kept) > self._most_messages or self._copied > self._most_bytes

    def add(self, frame: bytes, payload: bytes | memoryview | None = None, borrowed: bool = False) -> None:
        """Keeps the message with serial `serial` + 1; `borrowed`: the payload's memory belongs to another object."""
        copied = len(frame)
        nbytes = copied
        if payload is not None:
            nbytes += len(payload)
            if not borrowed:
                copied = nbytes
        self.serial += 1
        self.nbytes += nbytes
        self._copied += copied
        self._kept.append(Kept(frame, payload, nbytes, copied))

    def acknowledge(self, serial: int) -> None:
        """Drops the messages up to `serial`, which the peer has received; an older serial changes nothing.

        Raises:
            WireError: nothing with that serial was ever sent.
        """
        if serial > self.serial:
            raise WireError(f"it acknowledges message {serial} of a connection on which {self.serial} were sent")
        while self.acknowledged < serial:
            self.acknowledged += 1
            gone = self._kept.popleft()
            self.nbytes -= gone.nbytes
            self._copied -= gone.copied

    def unacknowledged(self) -> Iterator[Kept]:
        """Returns the messages that a new connection has to carry first, in order."""
        return iter(tuple(self._kept))

    def forget(self) -> None:
        """Drops all messages to a lost peer."""
        self._kept.clear()
        self.nbytes = self._copied = 0


class ReceiveWindow:
    """Messages that have come on a connection. `received`: serial of the last one; `repeated`: how many came again."""

    def __init__(self) -> None:
        self.received = 0
        self.repeated = 0

    def accept(self, serial: int) -> bool:
        """Returns whether a message is new; one that was had before is counted.

        Raises:
            WireError: messages before it are missing.
        """
        if serial == self.received + 1:
            self.received = serial
            return True
        if serial > self.received:
            raise WireError(f"message {serial} came from it after message {self.received}: those between are missing")
        self.repeated += 1
        return False


class PayloadLink(Protocol):
    """Interface of a connection for payloads."""

    number: int
    out: SendWindow
    stands: bool

    def post(self, frame: bytes, payload: bytes | memoryview, borrowed: bool) -> None:
        """Sends a message that has to arrive."""


@dataclass(slots=True)
class _Message:
    """A payload message that waits, until it is `gone`."""

    number: int
    body: bytes
    payload: bytes | memoryview
    borrowed: bool
    about: Any
    gone: bool = False

    @property
    def nbytes(self) -> int:
        return payload_nbytes(self.body, self.payload)

    @property
    def copied(self) -> int:
        return self.nbytes - len(self.payload) if self.borrowed else self.nbytes


class _After:
    """A callback for when messages are received.

    Attributes:
        number: of the last of them.
        serials: the serial to be acknowledged on each connection, once all of them have left.
    """

    __slots__ = ("number", "serials", "then")

    def __init__(self, number: int, then: Callable[[], None]) -> None:
        self.number = number
        self.then = then
        self.serials: list[tuple[SendWindow, int]] = []


class Sending:
    """Payloads on their way to one peer.

    Attributes:
        credit: bytes that may be under way on each connection; 0: any number, in the order of `send`.
        unacknowledged: bytes after whose receipt the peer acknowledges at the latest.
        posted: called with a message's `about` and the connection that it was given to, when it was.
        links: its payload connections.
        nbytes: of messages and payloads that wait here.
        overtaken: how often a message left before an older one.
    """

    def __init__(self, credit: int) -> None:
        self.posted: Callable[[Any, PayloadLink], None] = lambda about, link: None
        self.links: list[PayloadLink] = []
        self.nbytes = 0
        self.overtaken = 0
        self.credit = credit
        self.unacknowledged = credit // 3
        self._copied = 0
        self._waiting = 0
        self._numbers = 0
        self._left = 0
        self._by_urgency: list[tuple[int, int, _Message]] = []
        self._by_age: deque[_Message] = deque()
        self._after: deque[_After] = deque()

    def __len__(self) -> int:
        """Number of messages that wait."""
        return self._waiting

    @property
    def full(self) -> bool:
        """True if more waits than a peer that takes its messages lets wait."""
        return self._waiting > MOST_MESSAGES or self._copied > MOST_BYTES

    def send(self, urgency: int, body: bytes, payload: bytes | memoryview, borrowed: bool, about: Any = None) -> bool:
        """Sends a message, now or when it is its turn; returns whether it has left. `borrowed`: the payload's memory is
        somebody else's."""
        self._numbers += 1
        if not self._waiting and (link := self._link_for(payload_nbytes(body, payload))) is not None:
            self._post(link, body, payload, borrowed, about)
            return True
        return self._queue(urgency, _Message(self._numbers, body, payload, borrowed, about))

    def _queue(self, urgency: int, message: _Message) -> bool:
        """Lets a message wait for its turn, which may be now; returns whether it has left."""
        heapq.heappush(self._by_urgency, (urgency, message.number, message))
        self._by_age.append(message)
        self._waiting += 1
        self.nbytes += message.nbytes
        self._copied += message.copied
        self.go_on()
        return message.gone

    def go_on(self) -> None:
        """Sends the messages that may leave now. To be called when a connection stands, and after acknowledgements."""
        if self._waiting:
            self._send_waiting()
        while self._after and self._is_received(self._after[0]):
            self._after.popleft().then()

    def when_received(self, then: Callable[[], None]) -> None:
        """Calls back once the peer has received all messages that were sent so far; at once if it has."""
        self._after.append(_After(self._numbers, then))
        self.go_on()

    def hurry(self) -> None:
        """Calls back at once instead of when messages are received."""
        while self._after:
            self._after.popleft().then()

    def _is_received(self, after: _After) -> bool:
        if not after.serials:
            if self._waiting and self._oldest().number <= after.number:
                return False
            after.serials = [(link.out, link.out.serial) for link in self.links]
        return all(out.acknowledged >= serial for out, serial in after.serials)

    def _send_waiting(self) -> None:
        while self._waiting:
            oldest = self._oldest()
            turn = self.credit == 0 or (self._left + 1) % _TURNS == 0
            message = oldest if turn else self._most_urgent()
            link = self._link_for(message.nbytes)
            if link is None:
                return
            self._left += 1
            self.overtaken += message is not oldest
            self._take(message)
            self._post(link, message.body, message.payload, message.borrowed, message.about)
            message.payload = b""  # whoever still knows the message does not keep its memory

    def flush(self) -> None:
        """Hands over all messages at once, because this node leaves."""
        self.credit = 0
        self.go_on()
        self.hurry()

    def forget(self) -> None:
        """Drops all messages to a lost peer, and waits for none."""
        self._by_urgency.clear()
        self._by_age.clear()
        self._waiting = self.nbytes = self._copied = 0
        self.hurry()

    def _link_for(self, nbytes: int) -> PayloadLink | None:
        """Returns the connection with the least under way; None if none stands that has room for so many bytes."""
        best = None
        for link in self.links:
            if link.stands and (best is None or link.out.nbytes < best.out.nbytes):
                best = link
        if best is None or not self.credit:
            return best
        out = best.out
        # The peer may have received fewer than `unacknowledged` bytes and not say so: who waited for that would wait
        # until something else makes it speak.
        waits = len(out) >= _AT_LEAST and out.nbytes >= self.unacknowledged
        return None if waits and out.nbytes + nbytes > self.credit else best

    def _oldest(self) -> _Message:
        while self._by_age[0].gone:
            self._by_age.popleft()
        return self._by_age[0]

    def _most_urgent(self) -> _Message:
        while self._by_urgency[0][2].gone:
            heapq.heappop(self._by_urgency)
        return self._by_urgency[0][2]

    def _take(self, message: _Message) -> None:
        message.gone = True
        self._waiting -= 1
        self.nbytes -= message.nbytes
        self._copied -= message.copied
        if not self._waiting:
            self._by_urgency.clear()
            self._by_age.clear()

    def _post(self, link: PayloadLink, body: bytes, payload: bytes | memoryview, borrowed: bool, about: Any) -> None:
        link.post(payload_head(link.out.serial + 1) + body, payload, borrowed)
        self.posted(about, link)
