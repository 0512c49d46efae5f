"""Waiting at homes: the contributions that local workers wait for (`Waits`), and ranks that are occupied (`Occupied`).

A rank is occupied if it waits in other operations than those at a plan's homes: ranks that wait for it there go on.

The daemon of a rank knows which operations its worker has submitted and not got. Where the plan has shards, it tells
them, and tells them again when the rank is free. Where ranks have replicas, neighbours send what they have to the home
of the rank, which is on its own node: if they are ahead of a rank that is occupied, it *passes* the clocks that they
are ahead, in all its buckets at once, as a worker would that contributes nothing.

Workers of some algorithms go on without their answers. One that does not, because it saves a checkpoint, say, tells its
daemon, and is occupied until it has them.

A rank may look occupied to one node by an operation that another node has completed already, and gone on from. So
whatever goes to homes says which operation its sender completed last (`wire.Piece.after`), and nobody is occupied by
that any more. Scripts in which all ranks take equal steps between two operations are thus not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.buckets.plans import PlanState
from fusiond.core.contribution import NO_VALUES, Contribution
from fusiond.shards.hosted_home import HostedHome
from fusiond.shards.node import ThisNode
from fusiond.shards.push_pull import PushPullClient, PushPullClients
from fusiond.shards.server import HomeServer

_MAX_KNOWN = 4096  # ranks in plans that are not here yet
_MAX_COMPLETED = 1024  # operations that are remembered
_AT_HOMES = 0  # the mark of a wait at homes: another plan's, or, by workers that go on otherwise, this one's
_LONG = 1.0  # seconds after which such a wait counts

Operations = Callable[[int], Iterable[int]]
"""Yields the marks (`wire.mark`) of the operations in which a local rank waits."""


class Occupied:
    """Occupied ranks, as one node sees them.

    Args:
        here: this node.
        clients: of the local workers.
        server: the homes here.
        operations: see there.

    Attributes:
        plans: those at whose homes a rank may wait for another one, by id; without any, nothing is to be looked at.
    """

    def __init__(self, here: ThisNode, clients: PushPullClients, server: HomeServer, operations: Operations) -> None:
        self._here = here
        self._clients = clients
        self._server = server
        self._operations = operations
        self.plans: dict[int, PlanState] = {}
        self._latest = 0  # plan that has been active
        self._told: dict[tuple[int, int], wire.Occupied] = {}  # to shards, by plan and local rank
        self._known: dict[tuple[int, int], wire.Occupied] = {}  # to the shards here, by plan and rank
        self._wanted: dict[tuple[int, int], int] = {}  # the furthest clock of a neighbour, by plan and local rank
        self._long: set[tuple[int, int]] = set()  # plan and local rank that has waited long at a home of it
        self._completed: dict[int, None] = {}  # marks, the oldest first

    def open(self, state: PlanState) -> None:
        """A plan becomes active."""
        self._latest = max(self._latest, state.plan.id)
        if state.home_algorithm.waits and state.buckets:  # else no rank waits for another in it
            self.plans[state.plan.id] = state
            for (plan, _), message in list(self._known.items()):
                if plan == state.plan.id:
                    self.told(message)
            for rank in state.members.local:  # a rank that may wait in an operation that it has begun before
                self.look(rank)

    def drop(self, plan: int) -> None:
        """The plan is no longer active."""
        self.plans.pop(plan, None)
        self._told = {key: value for key, value in self._told.items() if key[0] != plan}
        self._known = {key: value for key, value in self._known.items() if key[0] != plan}
        self._wanted = {key: value for key, value in self._wanted.items() if key[0] != plan}
        self._long = {key for key in self._long if key[0] != plan}

    def restored(self, plan: int) -> None:
        """Clocks of a plan have been set to others."""
        self._wanted = {key: value for key, value in self._wanted.items() if key[0] != plan}

    def clear(self) -> None:
        """The job cannot go on."""
        self.plans.clear()
        self._told.clear()
        self._known.clear()

    # --- local ranks --------------------------------------------------------------------------------------------------

    def look(self, rank: int) -> None:
        """Looks again at what a local rank waits for, which may have changed."""
        for state in list(self.plans.values()):
            if rank in state.members.local:
                if state.plan.homes:
                    self._tell(state, rank)
                else:
                    self._pass(state, rank)

    def look_again(self) -> None:
        """Looks again at what the local ranks wait for that are known to be occupied."""
        for rank in {rank for _, rank in self._told}:
            self.look(rank)

    def tick(self) -> None:
        """A second has passed."""
        before = self._here.outside.clock() - _LONG
        self._long = {(s.plan.plan.id, s.rank) for s in self._clients if s.is_awaited and s.since <= before}
        for rank in {rank for _, rank in self._long}:
            self.look(rank)

    def awaits_answers(self, rank: int, plan: int) -> None:
        """A local rank waits for the answers to all that it has posted to a plan's homes, and posts nothing before."""
        for client in self._clients.of(plan, rank):
            client.awaits = client.post is not None
        self.look(rank)

    def answered(self, plan: int, rank: int) -> None:
        """A local rank has been answered in a bucket of a plan: that matters to shards only if they take somebody for
        occupied, and to replicas only if a neighbour has sent something."""
        self._long.discard((plan, rank))
        if self._told or self._wanted:
            self.look(rank)

    def _occupying(self, state: PlanState, rank: int) -> set[int]:
        """Returns the marks of what occupies a local rank elsewhere than at the homes of a plan."""
        key = state.plan.id, rank
        found = {mark for mark in self._operations(rank) if mark not in self._completed}
        elsewhere = any(whose == rank and plan != state.plan.id for plan, whose in self._long)
        if elsewhere or (not state.spec.waits_for_answers and any(c.awaits for c in self._clients.of(*key))):
            found.add(_AT_HOMES)
        return found

    def _tell(self, state: PlanState, rank: int) -> None:
        """Tells a plan's shards whether a rank is occupied, if that is not what they know."""
        marks, told = self._occupying(state, rank), self._told.get((state.plan.id, rank))
        if marks or told is not None:
            self._tell_that(state, rank, marks, told)

    def _tell_that(self, state: PlanState, rank: int, marks: set[int], told: wire.Occupied | None) -> None:
        """Tells shards, who know what they were told, that a rank is occupied by what has these marks; none: free."""
        key = state.plan.id, rank
        clock = max(client.posted for client in self._clients.of(*key))
        if told is not None and told.clock == clock and not marks.isdisjoint(told.operations):
            return
        message = wire.Occupied(*key, clock, tuple(sorted(marks)[: wire.MAX_OCCUPIED]))
        if marks:
            self._told[key] = message
        else:
            del self._told[key]
        for node in sorted(set(state.plan.homes)):
            if node == self._here.node:
                self.told(message)
            else:
                self._here.outside.to_node(node, message)

    def _pass(self, state: PlanState, rank: int) -> None:
        """Passes the next clock of an occupied rank, if a neighbour is that far. The clock after that is passed when
        this one is over in all buckets."""
        key = state.plan.id, rank
        clock = self._clients[state.plan.id, 0, rank].clock
        if self._wanted.get(key, -1) < clock or not self._occupying(state, rank):
            return
        clients = self._clients.of(*key)
        if any(client.clock != clock or client.waits for client in clients):
            return
        for client in clients:
            client.passing, client.clock = True, clock + 1
        for client in clients:
            now = self._here.outside.clock()
            part = Contribution(client.home, NO_VALUES, kind="pass", clock=clock, arrived=now)
            self._server.arrived(client.home_address, part)

    def passed(self, hosted: HostedHome, clock: int) -> None:
        """A clock that the rank of a home has passed is over there."""
        rank = hosted.ranks[hosted.home.rank]
        client = self._clients.get((hosted.plan.plan.id, hosted.bucket.index, rank))
        if client is not None and client.clock == clock + 1:
            client.passing = False
            self.look(rank)

    def wanted(self, hosted: HostedHome, part: Contribution) -> None:
        """A neighbour of the local rank of a home has sent something: it is at that clock."""
        state = self.plans.get(hosted.plan.plan.id)
        if state is None:
            return
        rank = hosted.ranks[hosted.home.rank]
        key = state.plan.id, rank
        if part.clock > self._wanted.get(key, -1):
            self._wanted[key] = part.clock
            self._pass(state, rank)

    # --- the shards here ----------------------------------------------------------------------------------------------

    def told(self, message: wire.Occupied) -> None:
        """A node has told that one of its ranks is occupied, or free."""
        key = message.plan, message.rank
        occupied = any(mark not in self._completed for mark in message.operations)
        early = message.plan > self._latest and len(self._known) < _MAX_KNOWN
        if occupied and (message.plan in self.plans or early):
            self._known[key] = message
        else:
            self._known.pop(key, None)
        self._server.occupied(message.plan, message.rank, message.clock if occupied else None)

    def completed(self, mark: int) -> None:
        """An operation is completed on all nodes, or about to be."""
        if mark in self._completed:
            return
        self._completed[mark] = None
        if len(self._completed) > _MAX_COMPLETED:
            del self._completed[next(iter(self._completed))]
        for message in [m for m in self._known.values() if mark in m.operations]:
            self.told(message)


class Waits:
    """The contributions of one node, and its homes.

    Args:
        here: this node.
        clients: of the workers that wait.
        server: the homes here.
    """

    def __init__(self, here: ThisNode, clients: PushPullClients, server: HomeServer) -> None:
        self._here = here
        self._clients = clients
        self._server = server

    def contributions(self) -> list[PushPullClient]:
        """Those whose answers workers wait for."""
        return [client for client in self._clients if client.is_awaited]

    def end(self, client: PushPullClient, why: str) -> None:
        """Tells a worker why it waits no longer, if no thread and no home is at its arena now."""
        if not client.busy and self._server.withdraw(client):
            client.failed = why
            self._clients.fail(client, client.release(), why)

    def under_way(self) -> list[wire.Waiting]:
        """Returns what local ranks wait for at homes, and what the homes here wait for."""
        now, describe = self._here.outside.clock(), self._here.context.topology.describe
        found = [
            _waiting(client.plan, client.bucket, client.home, now - client.since, submitted=(client.rank,))
            for client in self.contributions()
        ]
        for hosted in self._server:
            if awaits := self._server.awaited(hosted):
                note = (
                    "" if hosted.seeded else f"it has nothing to begin with, which has to come from {describe(awaits)}"
                )
                found.append(
                    _waiting(hosted.plan, hosted.bucket, hosted.home.rank, awaits=awaits, note=note[: wire.MAX_LINE])
                )
        return found


def key_of(state: PlanState, bucket: wire.Bucket, home: int) -> OpKey:
    """The key of what is told of a home; `home`: the position of its rank, or `wire.SHARD`."""
    return OpKey(state.plan.process_set, state.plan.id, str(bucket.index), home + 1)


def _waiting(
    state: PlanState,
    bucket: wire.Bucket,
    home: int,
    seconds: float = 0.0,
    submitted: tuple[int, ...] = (),
    awaits: tuple[int, ...] = (),
    note: str = "",
) -> wire.Waiting:
    what = f"bucket {bucket.index} of {state.plan.group!r} at its home"
    if not state.plan.homes:
        what += f" with rank {state.members.set.ranks[home]}"
    key = key_of(state, bucket, home)
    return wire.Waiting("home", key, what[: wire.MAX_LINE], seconds, submitted, awaits, note=note)
