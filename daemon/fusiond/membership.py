"""Who has come, who has left: from the first `Hello` to the moment when every process of the job is up. No I/O.

A node is *up* when all its workers have said hello and its connections to the other nodes stand. The coordinator
hears it from every node, measures the links, and tells all to start; then each daemon welcomes its workers.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_rt.topology import Topology


class Membership:
    """One membership epoch as this node sees it; the coordinator's also counts the nodes that are up."""

    def __init__(self, topology: Topology, node: int) -> None:
        self._topology = topology
        self._node = node
        self.mesh_up = len(topology.hosts) == 1
        self.started = False
        self.joined: set[int] = set()  # local ranks
        self.left: set[int] = set()  # local ranks that have said Bye
        self.nodes_up: set[int] = set()
        self._reported = False

    @property
    def local(self) -> Sequence[int]:
        return self._topology.ranks[self._node]

    def may_join(self, rank: int) -> str:
        """Why a worker may not join, as a sentence; empty when it may."""
        host = self._topology.hosts[self._node]
        if rank not in self.local:
            return f"rank {rank} does not belong on node {self._node} (host {host}), whose ranks are {list(self.local)}"
        if rank in self.joined:
            return f"rank {rank} is taken: another process on host {host} has joined the job as rank {rank}"
        return ""

    def became_up(self) -> bool:
        """Whether this node is up, said once."""
        if self._reported or not self.mesh_up or len(self.joined) < len(self.local):
            return False
        self._reported = True
        return True

    @property
    def all_up(self) -> bool:
        """Whether every node is up (the coordinator's to ask)."""
        return len(self.nodes_up) == len(self._topology.hosts)

    @property
    def everyone_left(self) -> bool:
        """Whether every worker of this node has come and gone."""
        return len(self.left) == len(self.local) > 0

    def missing(self) -> str:
        """Who has not come up yet, as far as this node knows."""
        ranks = [rank for rank in self.local if rank not in self.joined]
        if ranks:
            return f"{self._topology.describe(ranks)} did not connect to the daemon"
        hosts = self._topology.hosts
        if self._node != 0:  # only the coordinator hears who is up
            return f"node 0 (host {hosts[0]}) did not say that every node is up"
        nodes = [f"{n} (host {host})" for n, host in enumerate(hosts) if n not in self.nodes_up and n != self._node]
        return f"node{'s' if len(nodes) > 1 else ''} {', '.join(nodes)} did not come up"
