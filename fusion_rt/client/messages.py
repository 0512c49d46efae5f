"""Messages from one rank to another, as a worker's client sends and receives them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypeAlias

from fusion_rt import wire
from fusion_rt.client.channel import NO_LIMIT, Channel, Completion, Operation
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.tracing.format import Flush, Kind

_SUBMITTED, _DONE = int(Kind.SUBMITTED), int(Kind.DONE)  # see `channel.py`
_UNANSWERED = 32  # small messages sent after another that the daemon need not say that it has

Where: TypeAlias = tuple[int, int] | wire.Address
"""The place of a tensor: segment id and offset in the arena, or its address."""


class Messages:
    """Messages of this worker to other ranks, and from them.

    Args:
        channel: to the daemon.
        rank: this worker's.
        first: number of the first message between two ranks.
    """

    def __init__(self, channel: Channel, rank: int, first: int) -> None:
        self._channel, self._rank, self._first = channel, rank, first
        self._numbers: dict[int, dict[str, Iterator[int]]] = {}  # of the next ones, by group, and the ranks
        self._unanswered = 0
        self._answered: Operation | None = None  # the last small message of which the daemon is to say that it has it

    def forget(self, group: int) -> None:
        """Forgets the numbers of a group that was closed."""
        self._numbers.pop(group, None)

    def send_to(
        self,
        group: int,
        rank: int,
        tag: int,
        *,
        inline: bytes | None = None,
        place: Where | None = None,
        nbytes: int = 0,
        completion: Completion = NO_LIMIT,
    ) -> Operation:
        """Sends a message to one rank of a group, which has to receive it with `receive_from`.

        A message that is `inline` is away when this returns, and its operation has ended, unless too many of them have
        not been received. Any other one has ended when the other rank has it: only then may its memory be used again.

        Args:
            group: id of the process set.
            rank: whom it is for, in the job.
            tag: 0 or more; only a receive with the same tag takes it.
            inline: the message, at most `wire.MAX_INLINE` bytes.
            place: else the place of its `nbytes` bytes, in the arena or in this process's own memory.
            completion: the time in which it has to be received, and its end, which is not told where the operation has
                ended when this returns.

        Raises:
            HorovodInternalError: the job has failed.
            ValueError: it is for this rank itself.
        """
        self._not_myself(rank)
        name = f"message {self._rank} to {rank}"
        if inline is not None and self._needs_no_answer():
            if self._channel.failure is not None:
                raise HorovodInternalError(self._channel.failure)
            operation = Operation(0, name, (name, 0, 0))
            operation.done = True
        else:
            operation = self._channel.begin(name)
            operation.release = completion.release
            operation.keeps, operation.lent = completion.keeps, completion.lent
            if inline is not None:
                self._answered = operation
        clock = self._number(group, name)
        operation.about = (name, clock, 0)
        nbytes = nbytes if inline is None else len(inline)
        self._channel.trace.record(_SUBMITTED, name, nbytes, clock, 0, Flush.ALONE)
        self._send(
            wire.SendTo(operation.handle, group, rank, tag, clock, nbytes, placed(place), inline, completion.seconds)
        )
        if operation.done:
            self._channel.trace.record(_DONE, name, 0, clock)
        return operation

    def receive_from(
        self,
        group: int,
        rank: int | None,
        tag: int,
        nbytes: int,
        *,
        place: Where | None = None,
        completion: Completion = NO_LIMIT,
    ) -> Operation:
        """Receives a message of at most `nbytes` bytes: the first with this tag that no other receive has taken.

        The operation's `sizes` are the rank, in the job, that has sent it, and its bytes.

        Args:
            group: id of the process set.
            rank: its sender, in the job; None: any rank of the group.
            tag: of the message.
            place: where it goes, in the arena or in this process's own memory; None: it is the operation's `inline`,
                and is not longer than `wire.MAX_INLINE`.
            completion: the time in which the message has to be there, and its end.

        Raises:
            HorovodInternalError: the job has failed.
            ValueError: it is from this rank itself.
        """
        source = wire.ANYBODY if rank is None else rank
        self._not_myself(source)
        name = f"message to {self._rank}" if rank is None else f"message {rank} to {self._rank}"
        operation = self._channel.begin(name)
        operation.release = completion.release
        operation.keeps, operation.lent = completion.keeps, completion.lent
        clock = self._number(group, name)
        operation.about = (name, clock, 0)
        self._channel.trace.record(_SUBMITTED, name, nbytes, clock, 0, Flush.ALONE)
        self._send(
            wire.ReceiveFrom(operation.handle, group, source, tag, clock, nbytes, placed(place), completion.seconds)
        )
        return operation

    def _number(self, group: int, name: str) -> int:
        """Returns the number of a message between two ranks. Threads may ask for it concurrently."""
        of_group = self._numbers.get(group) or self._numbers.setdefault(group, {})
        numbers = of_group.get(name)
        if numbers is None:
            numbers = of_group.setdefault(name, itertools.count(self._first))
        return next(numbers)

    def _not_myself(self, rank: int) -> None:
        if rank == self._rank:
            raise ValueError(f"rank {rank} can neither send to itself nor receive from itself")

    def _needs_no_answer(self) -> bool:
        """Counts a small message, and returns whether the daemon need not say that it has it.

        It says so of some of them, and of all as long as it has not said it of the last of these: so it has never more
        than a few that it was not asked to keep.
        """
        if self._answered is not None and not self._channel.poll(self._answered):
            return False
        self._unanswered = (self._unanswered + 1) % _UNANSWERED
        return self._unanswered > 0

    def _send(self, message: wire.SendTo | wire.ReceiveFrom) -> None:
        self._channel.send(wire.encode(message))


def placed(where: Where | None) -> wire.Place | wire.Address | None:
    """Returns a place as messages to the daemon have it."""
    return wire.Place(*where) if isinstance(where, tuple) else where
