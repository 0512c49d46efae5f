"""The admission of planned buckets: how many of them begin at a time, so that their scratch memory stays bounded.

A worker submits all buckets of a step at once, and each exchange holds its payloads and sums until
its peers have answered. For `int8` that is about as much as the gradients. So an operation begins only where its
exchange's scratch memory has room beside that of those under way; the rest waits in the arena, where it lies anyway.

Nodes must not wait for each other because they have begun different operations. Two rules see to that:

- *The first node of an operation leads.* The others begin the same ones, room or not. So whatever it has under way
  completes, in whatever order their own ranks submit. They ask it (`wire.Held`) about waiting ones, and it answers
  (`wire.CaughtUp`), as for chunks that are held back (`transport.early_credit`).
- *Of each plan, one operation begins without room.* So neither a bucket that is larger than all there is, nor another
  plan, whose ranks may be waiting for this one, keeps a plan from going on.

Ranks submit all buckets of a step before they wait for one of them, so each plan goes on whatever is late. At a node
there is at most twice the room in use: its own, and the leading nodes'.

Rejected: the order of buckets in the plan as the order in which they begin. A rank in which gradients become ready in
another order would begin all of them without room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass

from fusion_rt.wire import OpKey

SCRATCH_BYTES = 96 * 1024 * 1024
"""Bytes that planned buckets under way may hold at a time: in exchanges, and in messages to and from homes, together.
What other nodes lead, or send, may be as much. Two threads of kernels need 64 MiB more for buckets of 16 MiB, and so
all of it is at most 256 MiB."""


class Room:
    """Memory of which several users have parts. It has an end, but each user may have one part beyond it, so that none
    waits for ever for another one.

    Args:
        nbytes: how much there is.
        within: what is taken here is taken there, too, where others take as well; None: there is no such room.

    Attributes:
        used: bytes that are in use.
    """

    def __init__(self, nbytes: int, within: Room | None = None) -> None:
        self.used = 0
        self._nbytes, self._within = nbytes, within
        self._of: Counter[int] = Counter()

    def fits(self, user: int, nbytes: int) -> bool:
        """Returns whether a user may have so many bytes more."""
        return self._has(nbytes) or not self._of[user]

    def take(self, user: int, nbytes: int) -> None:
        """Gives a user so many bytes, whether they fit or not."""
        self._of[user] += nbytes
        self._use(nbytes)

    def give_back(self, user: int, nbytes: int) -> None:
        """Takes so many bytes back, or all that the user has."""
        nbytes = min(nbytes, self._of[user])
        self._of[user] -= nbytes
        self._use(-nbytes)

    def drop(self, user: int) -> None:
        """Takes back all that a user has."""
        self._use(-self._of.pop(user, 0))

    def _has(self, nbytes: int) -> bool:
        return self.used + nbytes <= self._nbytes and (self._within is None or self._within._has(nbytes))

    def _use(self, nbytes: int) -> None:
        self.used += nbytes
        if self._within is not None:
            self._within._use(nbytes)


def scratch_room() -> Room:
    """Returns the room of an engine for all scratch memory of planned buckets."""
    return Room(SCRATCH_BYTES)


@dataclass(slots=True)
class _Waiting:
    """An operation that waits for room. `told`: the node that leads has begun it."""

    nbytes: int
    told: bool = False


class Admission:
    """Admits the operations of one engine.

    Args:
        under_way: those that have a record. One that is no longer in it is over.
        room: for their exchanges. Its users are plans.
    """

    def __init__(self, under_way: Container[OpKey], room: Room) -> None:
        self._under_way = under_way
        self._room = room
        self._admitted: dict[OpKey, int] = {}
        self._waiting: dict[OpKey, _Waiting] = {}  # the first ones first

    def __contains__(self, key: OpKey) -> bool:
        """Returns whether an operation waits."""
        return key in self._waiting

    def admits(self, key: OpKey, nbytes: int) -> bool:
        """Returns whether an operation may begin, with so many bytes of scratch memory; if not, it waits."""
        one = self._waiting.get(key, _Waiting(nbytes))
        if not nbytes:
            return True
        if not self._may_begin(key, one):
            self._waiting[key] = one
            return False
        self._waiting.pop(key, None)
        self._admitted[key] = nbytes
        self._room.take(key.plan, nbytes)
        return True

    def told(self, key: OpKey) -> bool:
        """Notes that the node that leads has begun an operation. Returns whether that waits here."""
        one = self._waiting.get(key)
        if one is not None:
            one.told = True
        return one is not None

    def over(self, completed: OpKey | None) -> None:
        """An operation is over; None: it has failed, and perhaps it is several."""
        keys = (key for key in self._admitted if key not in self._under_way) if completed is None else (completed,)
        for key in list(keys):
            self._room.give_back(key.plan, self._admitted.pop(key, 0))
        if completed is None:
            self._waiting = {key: one for key, one in self._waiting.items() if key in self._under_way}

    def next(self) -> OpKey | None:
        """Returns the operation that waits longest of those that may begin now; None if there is none."""
        return next((key for key, one in self._waiting.items() if self._may_begin(key, one)), None)

    def statistics(self) -> dict[str, int]:
        """Returns the `bytes` of scratch memory that operations under way may hold, and how many are `waiting`."""
        return {"bytes": self._room.used, "waiting": len(self._waiting)}

    def _may_begin(self, key: OpKey, one: _Waiting) -> bool:
        return one.told or self._room.fits(key.plan, one.nbytes)
