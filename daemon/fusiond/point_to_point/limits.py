"""Limits of what peers send before anybody here has asked for it.

A message that travels at once lies in the memory of its receiver's daemon until it is received. So a node may send
another one `AT_ONCE` of them, and as many more as that says it has handed on. Any other message is only announced, and
its data waits where it is. Who announces more than `ANNOUNCED` fails here, and there, if it does it all the same.
"""

from __future__ import annotations

from collections import Counter

from fusion_rt.core.errors import WireError
from fusiond.transport.flow_control import CreditExceeded

AT_ONCE = 1024  # messages of at most `wire.MAX_INLINE` bytes, between two nodes
ANNOUNCED = 16384  # messages, between two nodes


class Limits:
    """The counts of one node, by peer."""

    def __init__(self) -> None:
        self._sent: Counter[int] = Counter()  # at once, and not yet taken there, as far as it has said so
        self._came: Counter[int] = Counter()  # at once, and not yet said to be taken
        self._taken: Counter[int] = Counter()  # of these
        self._announced_there: Counter[int] = Counter()
        self._announced_here: Counter[int] = Counter()

    @property
    def are_clear(self) -> bool:
        """True if no message counts that came here, or was announced."""
        announced = self._announced_here.total() or self._announced_there.total()
        return not announced and self._came == self._taken

    def may_send(self, node: int) -> bool:
        """Returns whether another message may go to a node at once; then it is counted."""
        if self._sent[node] >= AT_ONCE:
            return False
        self._sent[node] += 1
        return True

    def granted(self, node: int, count: int) -> None:
        """A node has handed on `count` messages. Raises `WireError` if it had not so many."""
        if count > self._sent[node]:
            raise WireError(f"it has taken {count} messages, and only {self._sent[node]} were sent to it")
        self._sent[node] -= count

    def came(self, node: int) -> None:
        """A message has come at once. Raises `CreditExceeded` if it is one too many."""
        self._came[node] += 1
        if self._came[node] > AT_ONCE:
            raise CreditExceeded(f"it sent more than {AT_ONCE} messages that nobody has received")

    def taken(self, node: int) -> int:
        """One of these is handed on. Returns how many the node is to be told of now; 0: none."""
        self._taken[node] += 1
        if 4 * self._taken[node] < AT_ONCE:
            return 0
        count = self._taken.pop(node)
        self._came[node] -= count
        return count

    def may_announce(self, node: int) -> bool:
        """Returns whether a message may be announced to a node; then it is counted."""
        if self._announced_there[node] >= ANNOUNCED:
            return False
        self._announced_there[node] += 1
        return True

    def announced(self, node: int) -> None:
        """A node has announced a message. Raises `CreditExceeded` if it is one too many."""
        self._announced_here[node] += 1
        if self._announced_here[node] > ANNOUNCED:
            raise CreditExceeded(f"it announced more than {ANNOUNCED} messages that nobody has received")

    def settled_there(self, node: int) -> None:
        """A message that was announced to a node is accepted or given up."""
        self._announced_there[node] -= 1

    def settled_here(self, node: int) -> None:
        """A message that a node has announced is accepted or given up."""
        self._announced_here[node] -= 1
