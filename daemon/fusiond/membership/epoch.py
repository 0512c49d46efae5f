"""Record of the workers that have come and left, from the first `Hello` until every process of the job is up. No I/O.

A node is *up* when all its workers have said hello and its connections to the other nodes stand. The coordinator
hears it from every node, measures the links, and tells all to start; then each daemon welcomes its workers.

Workers that have left may come back (`hvd.shutdown()`, then `hvd.init()`). When all of a node have, it is up again, in
the next *membership epoch*; this one starts when every node is.

In an elastic job the launcher orders each *formation* of nodes and ranks (`bootstrap.Reform`), which has epochs of its
own, and a `Membership`. Nodes that are *absent* take no part in it.

A node without workers, or whose workers are all lost, is up as soon as its connections stand, and follows the others
into the next epoch.

Workers and nodes that are lost (`views`) are not waited for. If a local worker is lost while others of its node have
come back already, the next epoch begins with the view that goes on without it, since before an epoch has started no
loss is tolerated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.wire import View


class Membership:
    """The membership epochs as this node sees them; the coordinator's also counts the nodes that are up.

    Args:
        topology, node: the ranks of each node, and this node.
        absent: nodes that take no part.
        epoch: the first one.
    """

    def __init__(self, topology: Topology, node: int, absent: Collection[int] = (), epoch: int = 0) -> None:
        self._topology = topology
        self._node = node
        self.nodes: Sequence[int] = [other for other in range(len(topology.hosts)) if other not in absent]
        self.coordinator = next(index for index, ranks in enumerate(topology.ranks) if ranks)
        self.lost: set[int] = set()  # local ranks
        self.mesh_up = len(topology.hosts) == 1
        self.started = False
        self.epoch = epoch
        self.joined: set[int] = set()  # local ranks
        self.left: set[int] = set()  # local ranks that have said Bye
        self.nodes_up: dict[int, int] = {}  # in which epoch
        self._late: set[int] | None = None  # nodes that are not up in this epoch; None: not looked up yet
        self._behind: set[int] | None = None  # nodes with workers that have not begun a later epoch, likewise
        self._lost: set[int] = set()  # ranks, as far as the view tells
        self._returned: set[int] = set()  # local ranks that have left and come back
        self._reported = False

    @property
    def local(self) -> Sequence[int]:
        return self._topology.ranks[self._node]

    @property
    def awaited(self) -> list[int]:
        """Local ranks that are not lost."""
        return [rank for rank in self.local if rank not in self.lost]

    def lose(self, rank: int) -> None:
        """Notes that a local rank will not come back."""
        self.lost.add(rank)
        self.left.add(rank)
        self._returned.discard(rank)

    def view_begins(self, view: View, coordinator: int) -> None:
        """Takes over a view's nodes and coordinator. When all workers of this node that are not lost have come back, a
        new epoch begins."""
        self.nodes, self.coordinator = view.nodes, coordinator
        self._lost = {loss.rank for loss in view.lost if loss.rank is not None}
        self._late = self._behind = None
        self._begin_if_all_are_back()

    def has_workers(self, node: int) -> bool:
        """Returns whether a node has workers that are not lost."""
        return not self._lost.issuperset(self._topology.ranks[node])

    def may_join(self, rank: int) -> str:
        """Returns why a worker may not join, as a sentence; empty when it may."""
        host = self._topology.hosts[self._node]
        if rank not in self.local:
            return f"rank {rank} does not belong on node {self._node} (host {host}), whose ranks are {list(self.local)}"
        if rank in self.joined and (rank not in self.left or rank in self._returned):
            return f"rank {rank} is taken: another process on host {host} has joined the job as rank {rank}"
        return ""

    def join(self, rank: int) -> None:
        """Notes that a worker has come, or come back. When all of this node have come back, a new epoch begins."""
        if rank in self.joined:
            self._returned.add(rank)
        self.joined.add(rank)
        self._begin_if_all_are_back()

    def _begin_if_all_are_back(self) -> None:
        awaited = self.awaited
        if awaited and self._returned.issuperset(awaited) and self._lost.issuperset(self.lost):
            self.left = set(self.lost)
            self._returned.clear()
            self._begin(self.epoch + 1)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self.started = self._reported = False
        self._late = self._behind = None

    def follow(self, node: int, epochs: Mapping[int, int]) -> bool:
        """Begins a new epoch on a node that awaits no workers, and returns whether it did: once every node that has
        workers is in it, since until then some may still wait for something of the epoch before.

        Args:
            node: has begun an epoch.
            epochs: of the other nodes, by node, those of other formations among them.
        """
        if self.awaited:
            return False
        later = {node: epochs[node]} if self._behind is not None else epochs
        if self._behind is None:
            self._behind = {other for other in self.nodes if self.has_workers(other)}
        formation = wire.formation_of(self.epoch)
        for other, epoch in later.items():
            if epoch > self.epoch and wire.formation_of(epoch) == formation:
                self._behind.discard(other)
        if self._behind:
            return False
        begun = [epochs[other] for other in self.nodes if self.has_workers(other)]
        begun = [epoch for epoch in begun if wire.formation_of(epoch) == formation]
        if begun:
            self._begin(min(begun))
        return bool(begun)

    def became_up(self) -> bool:
        """Returns whether this node has come up; true once in an epoch."""
        if self._reported or not self.mesh_up or not self.all_came:
            return False
        self._reported = True
        return True

    def came_up(self, node: int, epoch: int) -> bool:
        """Notes, at the coordinator, that a node is up in an epoch; returns whether all are up in this one."""
        self.nodes_up[node] = epoch
        if self._late is None:
            self._late = {other for other in self.nodes if self.nodes_up.get(other) != self.epoch}
        elif epoch == self.epoch:
            self._late.discard(node)
        return not self._late

    @property
    def everyone_left(self) -> bool:
        """True if every worker of this node has come and gone, and none has come back."""
        return len(self.left) == len(self.local) > 0 and not self._returned

    def missing(self) -> str:
        """Returns a sentence on ranks that have not come up yet, as far as this node knows."""
        ranks = [rank for rank in self.local if rank not in self.joined]
        if ranks:
            return f"{self._topology.describe(ranks)} did not connect to the daemon"
        first = self.coordinator
        if self._node != first:  # only the coordinator hears which nodes are up
            return f"node {first} did not say that every node is up: {self._topology.describe_node(first)}"
        late = [n for n in self.nodes if self.nodes_up.get(n) != self.epoch and n != self._node]
        if not late:
            return "every node came up, but not all links between them were measured"
        who = ", ".join(self._topology.describe_node(node) for node in late)
        return f"node{'s' if len(late) > 1 else ''} {', '.join(map(str, late))} did not come up: {who}"

    @property
    def all_came(self) -> bool:
        """True if every worker of this node has come."""
        return len(self.joined) >= len(self.local)


def not_ours(hello: wire.Hello, job: str, formation: int | None = None) -> str:
    """Returns why the sender of a `Hello` is no worker of a job, as a sentence; empty when it may be.

    `formation`: of an elastic job.
    """
    if hello.version != wire.PROTOCOL_VERSION:
        return (
            f"rank {hello.rank} speaks version {hello.version} of the protocol and its daemon "
            f"{wire.PROTOCOL_VERSION}: install the same version of fusion_rt for both"
        )
    if hello.job != job:
        return f"rank {hello.rank} belongs to job {hello.job!r}, and this daemon to {job!r}"
    if formation is not None and hello.formation != formation:
        return (
            f"rank {hello.rank} has a place in membership epoch {hello.formation}, and this daemon is in epoch "
            f"{formation}; it has to ask its agent for its place"
        )
    return ""
