"""Every message exactly once and in order, over connections that may break. No I/O.

The sender of a connection numbers its messages from 1 on and keeps them until they are acknowledged (`Outgoing`); the
receiver takes them in that order, and drops those that it has had (`Incoming`). What a new connection carries first is
what was kept. Acknowledgements are cumulative and ride on every control message, for all connections at once:

    control message:  serial (8 bytes), number of connections (2), what was received of each (8 each), the message
    payload message:  serial (8 bytes), the message; the payload is the next frame

Serial 0 is for what need not arrive: heartbeats, acknowledgements and the last word to a peer that was given up.

A large payload is kept as it was sent, a view of memory that somebody else owns. It must not be sent again when it may
have changed, that is, when credit for it has come. Credit is a control message and was sent after the payload was
received, so it carries the acknowledgement; and of a payload connection that broke, the receiver says first what it
has had. So what is sent again has never been consumed.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from fusion_rt.errors import WireError

ACK_MESSAGES = 256  # received and not acknowledged: then the receiver does not wait for a message to ride on
ACK_BYTES = 4 * 1024 * 1024
MOST_MESSAGES = 1 << 17  # sent and not acknowledged: more, and the peer does not take what it is sent
MOST_BYTES = 256 * 1024 * 1024  # of messages and payloads copied here; borrowed payloads are bounded by credit

_SERIAL = struct.Struct("<Q")
_HEAD = struct.Struct("<QH")
payload_head = _SERIAL.pack


@lru_cache
def _control(connections: int) -> struct.Struct:
    return struct.Struct(f"<QH{connections}Q")


def control_head(serial: int, received: Sequence[int]) -> bytes:
    """What stands before a control message: its serial, and what was received of each of the peer's connections."""
    return _control(len(received)).pack(serial, len(received), *received)


def split_control(data: memoryview) -> tuple[int, tuple[int, ...], memoryview]:
    """Serial, acknowledgements and the message itself.

    Raises:
        WireError: it is too short for that.
    """
    try:
        serial, connections = _HEAD.unpack_from(data)
        head = _control(connections)
        return serial, head.unpack_from(data)[2:], data[head.size :]
    except struct.error:
        raise WireError(f"a control message of {len(data)} bytes is too short") from None


def split_payload_head(data: memoryview) -> tuple[int, memoryview]:
    """Serial, and the message itself.

    Raises:
        WireError: it is too short for that.
    """
    if len(data) < _SERIAL.size:
        raise WireError(f"a message of {len(data)} bytes is too short")
    return _SERIAL.unpack_from(data)[0], data[_SERIAL.size :]


class Kept(NamedTuple):
    """A message that may have to be sent again: its first frame, its payload, and how much of it was copied here."""

    frame: bytes
    payload: bytes | memoryview | None
    nbytes: int
    copied: int


class Outgoing:
    """What was sent on a connection.

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
        """Whether more is kept than a peer that takes its messages leaves unacknowledged."""
        return len(self._kept) > self._most_messages or self._copied > self._most_bytes

    def add(self, frame: bytes, payload: bytes | memoryview | None = None, borrowed: bool = False) -> None:
        """Keeps the message with serial `serial` + 1; `borrowed`: the payload's memory is somebody else's."""
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
        """The peer has received everything up to `serial`; one that is older than what it said before changes nothing.

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
        """What a new connection has to carry first, in order."""
        return iter(tuple(self._kept))

    def forget(self) -> None:
        """The peer is lost: nothing will be sent again."""
        self._kept.clear()
        self.nbytes = self._copied = 0


class Incoming:
    """What has come on a connection. `received`: serial of the last message; `repeated`: how many came again."""

    def __init__(self) -> None:
        self.received = 0
        self.repeated = 0

    def accept(self, serial: int) -> bool:
        """Whether a message is new; one that was had before is counted.

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
