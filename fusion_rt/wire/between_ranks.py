"""The mesh: messages from one rank to another (`Client.send_to`), as the two daemons speak of them.

All but the data travels on the control connection, so a node hears of the messages of another one in the order in which
they were sent there. A message is known by its `OpKey`: the group, `message SOURCE to TARGET`, and its number among
those between these two.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fusion_rt.wire.basics import MAX_INLINE, Count, Rank, Text
from fusion_rt.wire.data import Chunk, Credit
from fusion_rt.wire.operations import OpKey


class MessageSent(msgspec.Struct, tag="m", array_like=True):
    """A rank of the sender's node has sent a message to one of the receiver's.

    Attributes:
        group: id of the process set.
        clock: its number among the messages from `source` to `target`.
        data: all of it, if it travels at once; None: it comes in chunks, when it is accepted.
    """

    group: Count
    source: Rank
    target: Rank
    tag: Count
    clock: Count
    nbytes: Count
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_INLINE)] | None = None


class MessageAccepted(msgspec.Struct, tag="ma", array_like=True):
    """The rank that a message is for has asked for it: its chunks may come."""

    key: OpKey


class MessageOver(msgspec.Struct, tag="mo", array_like=True):
    """A message that was to come in chunks will not; `error` says why. Either side says so."""

    key: OpKey
    error: Text


class MessagesTaken(msgspec.Struct, tag="mt", array_like=True):
    """So many further messages, of so many bytes, that came at once have been received: as many more may come."""

    count: Count
    nbytes: Count


class MessageChunk(Chunk, tag="mc", array_like=True):
    """A chunk of a message that was accepted."""


class MessageCredit(Credit, tag="mk", array_like=True):
    """Credit for chunks of a message."""


def message_key(group: int, source: int, target: int, clock: int) -> OpKey:
    """Returns the key of a message."""
    return OpKey(group, 0, f"message {source} to {target}", clock)
