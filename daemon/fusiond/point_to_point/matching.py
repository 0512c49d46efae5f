"""The matching of messages with receives, of one rank in one group.

A receive takes the first message with its tag of its source, or of any source. A message goes to the first receive that
takes it. Nothing here knows how messages move.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeVar

from fusion_rt.wire import ANYBODY
from fusiond.point_to_point.calls import Message, ReceiveCall

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")


class Mailbox:
    """Messages that no receive has taken, and receives that wait for one: never both of one source and tag."""

    def __init__(self) -> None:
        # Dictionaries as ordered sets, because withdrawals come in any order.
        self._messages: defaultdict[tuple[int, int], dict[Message, None]] = defaultdict(dict)  # by source and tag
        self._of_tag: defaultdict[int, dict[Message, None]] = defaultdict(dict)
        self._receives: defaultdict[tuple[int, int], dict[ReceiveCall, None]] = defaultdict(dict)  # by source and tag
        self._numbers = 0

    def __bool__(self) -> bool:
        return bool(self._of_tag or self._receives)

    def arrive(self, message: Message) -> ReceiveCall | None:
        """Returns the receive that takes a message that has come, which does not wait any more; None keeps the
        message."""
        found: ReceiveCall | None = None
        for source in (message.source, ANYBODY):
            if waiting := self._receives.get((source, message.tag)):
                first = next(iter(waiting))
                if found is None or first.number < found.number:
                    found = first
        if found is not None:
            self.withdraw(found)
            return found
        self._messages[message.source, message.tag][message] = None
        self._of_tag[message.tag][message] = None
        return None

    def receive(self, receive: ReceiveCall) -> Message | None:
        """Returns the message that a receive takes, and does not keep it; None has the receive wait."""
        if receive.other == ANYBODY:
            kept = self._of_tag.get(receive.tag)
        else:
            kept = self._messages.get((receive.other, receive.tag))
        if kept:
            message = next(iter(kept))
            self.drop(message)
            return message
        self._numbers += 1
        receive.number = self._numbers
        self._receives[receive.other, receive.tag][receive] = None
        return None

    def withdraw(self, receive: ReceiveCall) -> None:
        """A receive does not wait any more."""
        _remove(self._receives, (receive.other, receive.tag), receive)

    def drop(self, message: Message) -> None:
        """A message is not kept any more."""
        _remove(self._messages, (message.source, message.tag), message)
        _remove(self._of_tag, message.tag, message)

    def __contains__(self, message: Message) -> bool:
        return message in self._of_tag.get(message.tag, ())

    def messages(self) -> Iterator[Message]:
        """Yields the messages that are kept."""
        for kept in self._of_tag.values():
            yield from kept


def _remove(sets: dict[_Key, dict[_Item, None]], key: _Key, item: _Item) -> None:
    del sets[key][item]
    if not sets[key]:
        del sets[key]
