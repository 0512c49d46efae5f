"""The routing ids under which peers may open payload connections to this node. No I/O.

A token is random and told to one peer over the control channel, for one of its connections; it is good for one
connection of TCP. When that breaks, the peer gets another one. A token that comes on a second connection, or was
replaced, is refused. Connections are told apart by the descriptor that libzmq reads them from.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass

_REMEMBERED = 1024  # replaced tokens, so that what comes late with them is told from what strangers send


@dataclass(slots=True)
class Holder:
    """Whose a token is: that node's connection `number`; `descriptor`: where it came first, -1 until then."""

    node: int
    number: int
    token: bytes
    descriptor: int = -1


class Tokens:
    """All tokens of this node. `stale`: messages refused because their token had been used up or replaced."""

    def __init__(self) -> None:
        self._holders: dict[bytes, Holder] = {}
        self._current: dict[tuple[int, int], Holder] = {}
        self._old: set[bytes] = set()
        self._old_order: deque[bytes] = deque()
        self.stale = 0

    def issue(self, node: int, number: int) -> bytes:
        """A new token for a connection, instead of the one that it had."""
        before = self._current.get((node, number))
        if before is not None:
            self._end(before)
        holder = Holder(node, number, secrets.token_bytes(16))
        self._holders[holder.token] = self._current[node, number] = holder
        return holder.token

    def holder(self, token: bytes, descriptor: int) -> Holder | None:
        """Whose message it is that came with this token on this descriptor, which is negative if unknown; None, counted
        if stale: nobody's."""
        holder = self._holders.get(token)
        if holder is None or descriptor < 0:
            self.stale += self.is_stale(token)
            return None
        if holder.descriptor != descriptor:
            if holder.descriptor >= 0:
                self.stale += 1
                return None
            holder.descriptor = descriptor
        return holder

    def node_of_new(self, token: bytes) -> int | None:
        """Whose token it is; None if it is nobody's, or has come on a connection already."""
        holder = self._holders.get(token)
        return holder.node if holder is not None and holder.descriptor < 0 else None

    def is_stale(self, token: bytes) -> bool:
        """Whether it is, or was, a token of this node's."""
        return token in self._old or token in self._holders

    def _end(self, holder: Holder) -> None:
        if self._holders.pop(holder.token, None) is not None:
            self._old.add(holder.token)
            self._old_order.append(holder.token)
            if len(self._old_order) > _REMEMBERED:
                self._old.discard(self._old_order.popleft())
