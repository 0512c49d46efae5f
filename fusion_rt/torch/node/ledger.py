"""Agreement, in a file of the node, on the steps of a plan in which its ranks combine their gradients themselves.

Whoever takes part in such a reduction waits for all others, and the daemon cannot tell one rank to wait for another.
So all ranks of the node have to decide alike about each step, before the first bucket of it is sent, and without
waiting for one that has joined (`hvd.join`). Steps are numbered by the clock of the plan's buckets, alike on all ranks.

- *Enrolling*, each rank says that it can, and in which step it is. When all have, reductions begin with the step after
  the latest of these, so that it does not depend on the order of ranks.
- *Deciding* about a step, a rank notes that it has got there.
- *Withdrawing*, before it joins, a rank ends them with the last step that was decided about. It still takes
  part in that one.
- *Giving up*, because a reduction has failed, it ends them likewise. The last step fails then, for all.
- *Having gathered* the results of a step, it says so: whoever ends its connection waits for those that have not.

All changes are made with the file locked; the kernel frees the lock of a process that dies. No torch here.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from fusion_rt.host.private_files import open_private

NEVER = 2**62  # a step that does not come
REFUSED = "-"  # instead of an offer
_MAX = 64 * 1024  # bytes of the file
_MAX_WHY = 4000  # characters
_Answer = TypeVar("_Answer")


class NodeState(msgspec.Struct):
    """State that the ranks of a node have agreed upon; lists are by position among them.

    Attributes:
        offers: with what each can combine gradients: BACKEND:DEVICE; empty while it has not said; or `REFUSED`.
        seen: the latest step that each has decided about, or enrolled in; -1: none.
        connected: whether each has connected to the others.
        begins, ends: the first step in which gradients are combined, and the first one in which not any more.
        broken: why none can be combined any more; empty if they can.
        gathered: how many times each has gathered results from the others.
    """

    offers: list[str]
    seen: list[int]
    connected: list[bool]
    begins: int = NEVER
    ends: int = NEVER
    broken: str = ""
    gathered: list[int] = msgspec.field(default_factory=list)

    @classmethod
    def of(cls, ranks: int) -> NodeState:
        """Makes the state in which no rank has said anything."""
        return cls([""] * ranks, [-1] * ranks, [False] * ranks, gathered=[0] * ranks)

    def enrol(self, position: int, offer: str, step: int) -> None:
        """Enrols a rank with its offer, in a step in which it does not combine yet."""
        self.offers[position] = offer
        self.seen[position] = max(self.seen[position], step)
        if self.suitable():
            self.begins = max(self.seen) + 1

    def suitable(self) -> bool:
        """Tells whether all have enrolled with the same backend and devices of their own."""
        backends = {offer.partition(":")[0] for offer in self.offers}
        return len(backends) == 1 and len(set(self.offers)) == len(self.offers) and not backends & {"", REFUSED}

    def decide(self, position: int, step: int) -> bool:
        """Notes that a rank begins a step, and tells whether its gradients are combined."""
        self.seen[position] = max(self.seen[position], step)
        return self.includes(step)

    def includes(self, step: int) -> bool:
        """Tells whether a step's gradients are combined, as far as is decided."""
        return self.begins <= step < self.ends

    def withdraw(self) -> None:
        """Ends combining after the steps that have begun, since a rank is about to join."""
        self.ends = min(self.ends, max(self.seen) + 1)

    def connect(self, position: int) -> None:
        """Notes that a rank has connected to the others."""
        self.connected[position] = True

    def refuse(self, position: int) -> None:
        """Notes that a rank cannot connect: no step is combined, unless all have connected in the meantime."""
        if not all(self.connected):
            self.offers[position] = REFUSED
            self.ends = -1

    def outcome(self) -> bool | None:
        """Tells whether all have connected; None while that is open."""
        if self.broken or REFUSED in self.offers:
            return False
        return all(self.connected) or None

    def gather(self, position: int) -> None:
        """Notes that a rank has gathered results from the others."""
        self.gathered[position] += 1

    def is_awaited(self, position: int) -> bool:
        """Tells whether some rank has gathered less often than this one."""
        return not self.broken and min(self.gathered) < self.gathered[position]

    def give_up(self, why: str) -> None:
        """Ends combining for good; the first reason counts. Steps that some rank has begun fail, no others."""
        self.broken = self.broken or why[:_MAX_WHY] or "a rank of this node has stopped"
        self.withdraw()


class NodeLedger:
    """The state in a file that the ranks of a node share. Each change returns the state after it.

    Args:
        path: of the file, in a directory of this user's; it is made by whoever comes first.
        ranks: how many share it.
        position: this one's among them.
    """

    def __init__(self, path: str, ranks: int, position: int) -> None:
        self._path = path
        self._ranks = ranks
        self._position = position
        self._fd = open_private(path, flags=os.O_RDWR)

    def enrol(self, offer: str, step: int) -> None:
        """See `NodeState`. The file has no name any more when all have it open."""
        with self._changing() as state:
            state.enrol(self._position, offer, step)
            if all(state.offers):
                self._unlink()

    def decide(self, step: int) -> bool:
        """See `NodeState`."""
        with self._changing() as state:
            return state.decide(self._position, step)

    def withdraw(self) -> NodeState:
        """See `NodeState`."""
        with self._changing() as state:
            state.withdraw()
        return state

    def connect(self) -> None:
        """See `NodeState`."""
        with self._changing() as state:
            state.connect(self._position)

    def gather(self) -> None:
        """See `NodeState`."""
        with self._changing() as state:
            state.gather(self._position)

    def is_awaited(self) -> bool:
        """See `NodeState`."""
        return self.read().is_awaited(self._position)

    def refuse(self) -> bool:
        """See `NodeState`. Returns whether all have connected nevertheless."""
        with self._changing() as state:
            state.refuse(self._position)
        return state.outcome() is True

    def give_up(self, why: str) -> None:
        """See `NodeState`."""
        with self._changing() as state:
            state.give_up(why)

    def read(self) -> NodeState:
        """Reads the present state."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        try:
            return self._read()
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Closes the file. May be called again."""
        if self._fd >= 0:
            self._unlink()
            os.close(self._fd)
            self._fd = -1

    @contextmanager
    def _changing(self) -> Iterator[NodeState]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            state = self._read()
            yield state
            data = msgspec.msgpack.encode(state)
            os.pwrite(self._fd, len(data).to_bytes(4, "little") + data, 0)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _read(self) -> NodeState:
        data = os.pread(self._fd, _MAX, 0)
        if not data:
            return NodeState.of(self._ranks)
        return msgspec.msgpack.decode(data[4 : 4 + int.from_bytes(data[:4], "little")], type=NodeState)

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)
