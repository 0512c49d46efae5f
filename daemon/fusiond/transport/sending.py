"""What waits for the payload connections of a peer, and which of it leaves next. No I/O.

What libzmq was given leaves in that order, and at 100 Mbit/s a mebibyte takes 84 ms. So no more is given to it than
keeps the connection busy: `credit` bytes of each connection that the peer is not known to have received. All else waits
here, the most urgent first, so that a small bucket which the next forward pass needs at once overtakes the chunks of a
large one. Among equally urgent ones the order is kept. Every `_TURNS`th message that leaves is the one that has waited
longest, so that nothing waits for ever.

This credit comes back when a message has been *received*, whatever becomes of it there. It spans all operations and
still cannot deadlock, as one for what was consumed would (`flow`): a daemon takes messages of operations that its
workers have not reached yet, and keeps them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from fusiond.transport import delivery
from fusiond.transport.delivery import Outgoing

AT_ONCE = 0  # the urgency of what a worker waits for already; larger numbers are less urgent
_TURNS = 16
_HEAD = len(delivery.payload_head(0))
_AT_LEAST = 2  # messages under way on a connection, whatever the credit: the next one, while one is acknowledged


class PayloadLink(Protocol):
    """A connection, as far as it matters here."""

    number: int
    out: Outgoing
    stands: bool

    def post(self, frame: bytes, payload: bytes | memoryview, borrowed: bool) -> None:
        """Sends a message that has to arrive."""


class _Message:
    """One that waits, until it is `gone`."""

    __slots__ = ("about", "body", "borrowed", "copied", "gone", "nbytes", "number", "payload")

    def __init__(self, number: int, body: bytes, payload: bytes | memoryview, borrowed: bool, about: Any) -> None:
        self.about = about
        self.number = number
        self.body = body
        self.payload = payload
        self.borrowed = borrowed
        self.nbytes = _HEAD + len(body) + len(payload)
        self.copied = self.nbytes - len(payload) if borrowed else self.nbytes
        self.gone = False


class _After:
    """Something to be done when messages are received.

    Attributes:
        number: of the last of them.
        serials: what has to be acknowledged on each connection, once all of them have left.
    """

    __slots__ = ("number", "serials", "then")

    def __init__(self, number: int, then: Callable[[], None]) -> None:
        self.number = number
        self.then = then
        self.serials: list[tuple[Outgoing, int]] = []


class Sending:
    """Payloads on their way to one peer.

    Attributes:
        credit: bytes that may be under way on each connection; 0: any number, in the order of `send`.
        unacknowledged: the peer acknowledges what it has received when that is so many bytes, or more, at the latest.
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
        """Messages that wait."""
        return self._waiting

    @property
    def full(self) -> bool:
        """Whether more waits than a peer that takes its messages lets wait."""
        return self._waiting > delivery.MOST_MESSAGES or self._copied > delivery.MOST_BYTES

    def send(self, urgency: int, body: bytes, payload: bytes | memoryview, borrowed: bool, about: Any = None) -> None:
        """Sends a message, now or when it is its turn; `borrowed`: the payload's memory is somebody else's."""
        self._numbers += 1
        message = _Message(self._numbers, body, payload, borrowed, about)
        if not self._waiting and (link := self._link_for(message)) is not None:
            self._post(link, message)
            return
        heapq.heappush(self._by_urgency, (urgency, message.number, message))
        self._by_age.append(message)
        self._waiting += 1
        self.nbytes += message.nbytes
        self._copied += message.copied
        self.go_on()

    def go_on(self) -> None:
        """To be called when a connection stands, or something was acknowledged: sends what may leave now."""
        self._send_waiting()
        while self._after and self._is_received(self._after[0]):
            self._after.popleft().then()

    def when_received(self, then: Callable[[], None]) -> None:
        """Calls back once the peer has received all messages that were sent so far; at once if it has."""
        self._after.append(_After(self._numbers, then))
        self.go_on()

    def hurry(self) -> None:
        """Calls back now where that was to happen once messages are received."""
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
            link = self._link_for(message)
            if link is None:
                return
            self._left += 1
            self.overtaken += message is not oldest
            self._take(message)
            self._post(link, message)

    def flush(self) -> None:
        """Hands over everything, because this node leaves."""
        self.credit = 0
        self.go_on()
        self.hurry()

    def forget(self) -> None:
        """The peer is lost: nothing will be sent, and nothing is waited for."""
        self._by_urgency.clear()
        self._by_age.clear()
        self._waiting = self.nbytes = self._copied = 0
        self.hurry()

    def _link_for(self, message: _Message) -> PayloadLink | None:
        """The connection with the least under way; None if none stands that has room."""
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
        return None if waits and out.nbytes + message.nbytes > self.credit else best

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

    def _post(self, link: PayloadLink, message: _Message) -> None:
        head = delivery.payload_head(link.out.serial + 1)
        link.post(head + message.body, message.payload, message.borrowed)
        self.posted(message.about, link)
        message.payload = b""  # whoever still knows the message does not keep its memory
