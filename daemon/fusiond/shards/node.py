"""This node, as the parts of this package share it, and its way to the other nodes.

A message to a home, or from one, is as large as a bucket. So nothing is encoded before there is room for it: a
contribution stays in the arena of its worker, and a home takes in no contribution whose answer would have to wait. Room
comes back when the receiver has taken a message in (`wire.PieceTaken`), which needs nothing but a thread's time there:

- An *answer* is decoded into an arena, or into a home that has asked for it.
- A *request* may need room for the answer to it, and no room for another request. So nodes that wait for each other's
  room wait for answers, and these never wait.

Rejected: to encode an answer when it leaves, of what the home has then. DC-ASGD's copies of what each rank was told, a
mirror's promise, and the mean of two neighbours hold for what the home had when it took the contribution in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TypeAlias

from msgspec.structs import replace

from fusion_rt import wire
from fusion_rt.units import MIB
from fusiond.core.effects import Effects
from fusiond.operations.admission import Room
from fusiond.operations.context import Context
from fusiond.operations.thread_work import INLINE_WORK, Act, ThreadWork
from fusiond.shards.messages import pieces

ROOM_BYTES = 32 * MIB
"""Bytes of requests, and of answers, that a node may have under way. Two buckets of 16 MiB: one is encoded while the
other one is taken in. Both count as bytes of planned buckets (`admission.SCRATCH_BYTES`)."""
SMALL_BYTES = INLINE_WORK
"""Bytes of a message that needs no room. Its sender and its receiver tell by its length."""
TO_MIRRORS = frozenset({"image", "update"})
_ANSWERS = TO_MIRRORS | {"answer", "refused", "mean", "seed"}

Address: TypeAlias = tuple[int, int, int]  # plan, bucket, and a home's rank (or `wire.SHARD`) or a worker's rank


@dataclass(slots=True, eq=False)
class Reservation:
    """Room for a message that is not encoded yet, or the wait for it.

    Attributes:
        of: all room there is.
        plan, nbytes: whose message it is, and how long it may be; 0: it needs no room.
        nodes: to which it goes.
        then: called when there is room, if there is none at first.
        granted: there is room.
    """

    of: MessageRoom
    plan: int
    nodes: Collection[int]
    nbytes: int
    then: Act
    granted: bool = False

    def end(self) -> None:
        """Gives the room back, or waits no longer: the message has left, or never will."""
        self.of.ended(self)


class MessageRoom:
    """Room for the messages of one direction from this node to all others.

    Where there are several other nodes, each may use half of it, so that a slow link does not hold up the others.

    Args:
        peers: number of other nodes.
        within: the room for all planned buckets of this node.
    """

    def __init__(self, peers: int, within: Room) -> None:
        self._room = Room(ROOM_BYTES, within)  # its users are plans
        self._of_a_node = ROOM_BYTES if peers <= 1 else ROOM_BYTES // 2
        self._under_way: Counter[tuple[int, int]] = Counter()  # bytes, by node and plan
        self._lost: set[int] = set()
        self._waiting: list[Reservation] = []  # the first ones first
        self._granting = False

    def reserve(self, plan: int, nodes: Collection[int], nbytes: int, then: Act) -> Reservation:
        """Returns room for a message to these nodes: it is granted, or waits."""
        needed = nbytes if nodes and nbytes > SMALL_BYTES else 0
        one = Reservation(self, plan, nodes, needed, then, granted=not needed)
        if needed:
            self._waiting.append(one)
            self._go_on(one)
        return one

    def sent(self, plan: int, node: int, nbytes: int) -> None:
        """A message was sent, whether there was room for it or not."""
        if nbytes > SMALL_BYTES and node not in self._lost:
            self._room.take(plan, nbytes)
            self._under_way[node, plan] += nbytes

    def taken(self, plan: int, node: int, nbytes: int) -> None:
        """A node has taken in so many bytes."""
        nbytes = min(nbytes, self._under_way[node, plan])
        self._under_way[node, plan] -= nbytes
        self._room.give_back(plan, nbytes)
        self._go_on()

    def lose(self, node: int) -> None:
        """A node takes nothing in any more: whatever is sent to it needs no room."""
        self._lost.add(node)
        for where, plan in [key for key in self._under_way if key[0] == node]:
            self._room.give_back(plan, self._under_way.pop((where, plan)))
        self._go_on()

    def drop(self, plan: int) -> None:
        """A plan is no longer active."""
        self._waiting = [one for one in self._waiting if one.plan != plan]
        self._under_way = Counter({key: nbytes for key, nbytes in self._under_way.items() if key[1] != plan})
        self._room.drop(plan)
        self._go_on()

    def clear(self) -> None:
        """The job cannot go on."""
        self._waiting.clear()

    def statistics(self) -> dict[str, int]:
        """Returns the `bytes` that are in use, and how many messages are `waiting` for room."""
        return {"bytes": self._room.used, "waiting": len(self._waiting)}

    def ended(self, one: Reservation) -> None:
        """A reservation has ended, perhaps for the second time."""
        if one.granted:
            one.granted = False
            self._room.give_back(one.plan, one.nbytes)
        elif one in self._waiting:
            self._waiting.remove(one)
        self._go_on()

    def _fits(self, one: Reservation) -> bool:
        if not self._room.fits(one.plan, one.nbytes):
            return False
        to = {node: 0 for node in one.nodes}
        for (node, _), nbytes in self._under_way.items():
            if node in to:
                to[node] += nbytes
        return all(not nbytes or nbytes + one.nbytes <= self._of_a_node for nbytes in to.values())

    def _go_on(self, new: Reservation | None = None) -> None:
        """Grants room to those that wait and may have it now; `new`: has just come, and need not be told."""
        if self._granting:
            return  # one that goes on has given room back: the loop below looks again
        self._granting = True
        try:
            while (one := next(filter(self._fits, self._waiting), None)) is not None:
                self._waiting.remove(one)
                one.granted = True
                self._room.take(one.plan, one.nbytes)
                if one is not new:
                    one.then()
        finally:
            self._granting = False


@dataclass(slots=True)
class ThisNode:
    """This node, in one membership epoch.

    Attributes:
        context: the engine's.
        epoch: the membership epoch.
        work: the threads.
        failed: called with an exception when something cannot be gone on with.
        after: the mark of the operation that was completed last here, which goes with all that is sent.
        failure: why the job cannot go on, and so nothing is sent and nothing is begun; empty if it can.
        requests, answers: room for messages to other nodes.
    """

    context: Context
    epoch: int
    work: ThreadWork
    failed: Callable[[BaseException], None]
    after: int = 0
    failure: str = ""
    requests: MessageRoom = field(init=False)
    answers: MessageRoom = field(init=False)
    _gone: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        peers = len(self.context.topology.hosts) - 1
        self.requests, self.answers = (MessageRoom(peers, self.context.room) for _ in range(2))

    @property
    def node(self) -> int:
        return self.context.node

    @property
    def outside(self) -> Effects:
        return self.context.outside

    def lose(self, ranks: Collection[int]) -> None:
        """These ranks take part no longer. A node without others takes nothing in."""
        self._gone.update(ranks)
        topology = self.context.topology
        for node in {topology.node_of(rank) for rank in ranks}:
            if self._gone.issuperset(topology.ranks[node]):
                self.requests.lose(node)
                self.answers.lose(node)

    def do(self, plan: int, work: Act, nbytes: float, then: Act) -> None:
        """Runs `work` for a plan, on a thread if it works on much, and `then` in the event loop, unless the job cannot
        go on."""

        def done(error: BaseException | None) -> None:
            if self.failure:
                return
            if error is None:
                then()
            else:
                self.failed(error)

        self.work.do(plan, [work], nbytes, done)

    def room(self, kind: wire.PieceKind) -> MessageRoom:
        """Returns the room for messages of a kind."""
        return self.answers if kind in _ANSWERS else self.requests

    def send(self, node: int, message: wire.Piece, payload: memoryview) -> None:
        """Sends a message, whose payload nobody will change, to another node."""
        if not self.failure:
            self.room(message.kind).sent(message.plan, node, len(payload))
            for piece, data in pieces(replace(message, after=self.after), payload, self.context.settings.chunk_bytes):
                self.outside.send_piece(node, piece, data)

    def took(self, node: int, message: wire.Piece, nbytes: int) -> None:
        """Tells the sender of a message that so many bytes of it are taken in, or dropped."""
        if (message.nbytes > SMALL_BYTES or message.kind in TO_MIRRORS) and not self.failure:
            plan, bucket, kind, clock = message.plan, message.bucket, message.kind, message.clock
            self.outside.to_node(node, wire.PieceTaken(self.epoch, plan, bucket, kind, clock, nbytes))
