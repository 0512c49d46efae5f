"""Limits of messages that come before a receive.

A message that travels at once lies in the memory of its receiver's daemon until it is received, and goes over the
control connection, where others wait behind it. So a node may send another one `AT_ONCE` of them, of `BYTES_AT_ONCE` in
all, and as many more as that says it has handed on. Any other message is only announced, and its data waits where it
is. Who announces more than `ANNOUNCED` fails here, and there, if it does it all the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fusion_rt.core.errors import WireError
from fusiond.transport.flow_control import CreditExceeded

AT_ONCE = 1024  # messages, each of at most `wire.MAX_INLINE` bytes, between two nodes
BYTES_AT_ONCE = 1 << 20
ANNOUNCED = 16384  # messages, between two nodes


@dataclass(slots=True)
class _Counts:
    """Messages between this node and a peer, and their bytes.

    Attributes:
        sent: at once, and not yet taken there, as far as it has said so.
        came: at once, and not yet said to be taken; `taken`: of these.
        there, here: announced there, or here, and neither accepted nor given up.
    """

    sent: int = 0
    sent_bytes: int = 0
    came: int = 0
    came_bytes: int = 0
    taken: int = 0
    taken_bytes: int = 0
    there: int = 0
    here: int = 0


class Limits:
    """The counts of one node. It is a peer of its own, for the messages between its ranks."""

    def __init__(self) -> None:
        self._peers: defaultdict[int, _Counts] = defaultdict(_Counts)

    @property
    def are_clear(self) -> bool:
        """True if no message counts that came here, or was announced."""
        return not any(
            peer.here or peer.there or (peer.came, peer.came_bytes) != (peer.taken, peer.taken_bytes)
            for peer in self._peers.values()
        )

    def may_send(self, node: int, nbytes: int) -> bool:
        """Returns whether another message may go to a node at once; then it is counted."""
        peer = self._peers[node]
        if peer.sent >= AT_ONCE or peer.sent_bytes + nbytes > BYTES_AT_ONCE:
            return False
        peer.sent += 1
        peer.sent_bytes += nbytes
        return True

    def granted(self, node: int, count: int, nbytes: int) -> None:
        """A node has handed on `count` messages. Raises `WireError` if it had not so many."""
        peer = self._peers[node]
        if count > peer.sent or nbytes > peer.sent_bytes:
            raise WireError(
                f"it has taken {count} messages of {nbytes} bytes, and only {peer.sent} of {peer.sent_bytes} were sent "
                "to it"
            )
        peer.sent -= count
        peer.sent_bytes -= nbytes

    def came(self, node: int, nbytes: int) -> None:
        """A message has come at once. Raises `CreditExceeded` if it is one too many."""
        peer = self._peers[node]
        peer.came += 1
        peer.came_bytes += nbytes
        if peer.came > AT_ONCE or peer.came_bytes > BYTES_AT_ONCE:
            raise CreditExceeded(
                f"it sent more messages that have not been received than {AT_ONCE}, of {BYTES_AT_ONCE} bytes in all"
            )

    def taken(self, node: int, nbytes: int) -> tuple[int, int]:
        """One of these is handed on. Returns how many, of how many bytes, the node is to be told of now; or none."""
        peer = self._peers[node]
        peer.taken += 1
        peer.taken_bytes += nbytes
        if 4 * peer.taken < AT_ONCE and 4 * peer.taken_bytes < BYTES_AT_ONCE:
            return 0, 0
        told = peer.taken, peer.taken_bytes
        peer.came -= peer.taken
        peer.came_bytes -= peer.taken_bytes
        peer.taken = peer.taken_bytes = 0
        return told

    def may_announce(self, node: int) -> bool:
        """Returns whether a message may be announced to a node; then it is counted."""
        peer = self._peers[node]
        if peer.there >= ANNOUNCED:
            return False
        peer.there += 1
        return True

    def announced(self, node: int) -> None:
        """A node has announced a message. Raises `CreditExceeded` if it is one too many."""
        peer = self._peers[node]
        peer.here += 1
        if peer.here > ANNOUNCED:
            raise CreditExceeded(f"it announced more than {ANNOUNCED} messages that have not been received")

    def settled_there(self, node: int) -> None:
        """A message that was announced to a node is accepted or given up."""
        self._peers[node].there -= 1

    def settled_here(self, node: int) -> None:
        """A message that a node has announced is accepted or given up."""
        self._peers[node].here -= 1
