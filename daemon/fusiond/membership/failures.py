"""What follows from a lost node or worker: nothing, the next view, or the end of the job. No I/O.

Without `tolerate_losses` every loss ends the job; so do those that an algorithm cannot do without. The sentence is that
of whoever decides (`views`), so that all ranks are told the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from fusion_rt import wire
from fusion_rt.topology import Topology
from fusion_rt.wire import Loss, View
from fusiond.membership.epoch import Membership
from fusiond.membership.quorum import ViewMessage, Views

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine


class Outside(Protocol):
    """What the daemon does for it."""

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        """Sends a control message to a peer, if it can be reached."""

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        """Calls back when that time has passed."""

    def warn(self, text: str) -> None:
        """Tells people something that is not an error yet."""

    def current_engine(self) -> Engine:
        """The one of this membership epoch."""

    def is_over(self) -> bool:
        """Whether nothing is left to be done for anybody here."""

    def fail(self, error: str, tell_peers: bool) -> None:
        """The job cannot go on."""

    def peers_gone(self, nodes: Sequence[int], why: str) -> None:
        """The daemon need not hear these nodes any more."""

    def begin_epoch(self) -> None:
        """All workers of this node that are not lost have left and come back."""


class Losses:
    """Of one daemon.

    Args:
        topology, node: who is where, and which node this is.
        tolerate: whether a loss may be tolerated at all.
        membership: who has come here.
        outside: acts.

    Attributes:
        views: which nodes go on.
        coordinated: nodes that coordinated in views before.
    """

    def __init__(self, topology: Topology, node: int, tolerate: bool, membership: Membership, outside: Outside) -> None:
        self.views = Views(topology, node, self)
        self.coordinated: set[int] = set()
        self._topology = topology
        self._node = node
        self._tolerate = tolerate
        self._membership = membership
        self._outside = outside
        self._handovers: dict[int, wire.Handover] = {}  # the latest of each node
        self._ended: dict[int, str] = {}  # nodes that are not missed, and why they are gone

    def peer_lost(self, node: int, why: str) -> None:
        """A peer cannot be heard any more."""
        if node not in self.views.view.nodes:
            return
        if self._outside.is_over() or (self._has_left(node) and node != self.views.coordinator):
            self._let_go(node, why)  # nobody needs it any more
            return
        self._suspect(node, why)

    def departed(self) -> None:
        """Workers have left in good order. Where they were the last, that is why connections seemed to be lost."""
        over = self._outside.is_over()
        for node in self.views.view.nodes:
            nobody_needs_it = over or (self._has_left(node) and node != self.views.coordinator)
            if nobody_needs_it and self.views.forgive(node):
                self._let_go(node, "its workers have left")

    def worker_lost(self, rank: int, error: str) -> None:
        """A worker of this node has failed."""
        if self._may_tolerate:
            self._membership.lose(rank)
            self.views.suspect(Loss(self._node, error, rank))
        else:
            self._outside.fail(error, True)

    def gone_on_without(self, why: str) -> None:
        """This node ends, and the others decide what becomes of the job."""
        host = self._topology.hosts[self._node]
        self.views.resign(f"node {self._node} (host {host}) is lost: {why}")

    def takes(self, node: int, message: wire.PeerMessage) -> bool:
        """Whether a peer's message is about what this does, or is to be dropped; both is seen to."""
        if not self.views.admits(node, message):
            return True
        if isinstance(message, wire.Handover):
            self._handovers[node] = message
            self._outside.current_engine().peer_message(node, message, None)
        elif isinstance(message, ViewMessage):
            self.views.message(node, message)
        else:
            return False
        return True

    def epoch_begins(self, epoch: int, engine: Engine) -> None:
        """A membership epoch begins here, with a new engine, in the view that there is. The others hear of it first:
        what an engine says before is to them of the epoch before, and dropped, and nobody says it again.

        Nodes that were not needed any more when they went are missed now."""
        for node in range(len(self._topology.hosts)):
            if node != self._node:
                self._outside.to_node(node, wire.NewEpoch(epoch))
        if self.views.view.number:
            engine.view_begins(self.views.view, self.views.coordinator)
            for node, handover in self._handovers.items():
                engine.peer_message(node, handover, None)
        for node, why in self._ended.items():
            self._suspect(node, why)

    def statistics(self) -> dict[str, object]:
        """The `view` in force, and messages `fenced` because their sender is not in it."""
        view = self.views.view
        return {
            "view": view.number,
            "nodes": list(view.nodes),
            "coordinator": self.views.coordinator,
            "lost": [loss.why for loss in view.lost],
            "fenced": self.views.fenced,
        }

    # --- views' Handler -----------------------------------------------------------------------------------------------

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        self._outside.to_node(node, message)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        return self._outside.call_later(seconds, callback)

    def is_over(self) -> bool:
        return self._outside.is_over()

    def why_not_without(self, losses: Sequence[Loss]) -> str:
        needed = [loss for loss in losses if loss.rank >= 0 or not self._has_left(loss.node)]
        if not needed:
            return ""
        if not self._may_tolerate:
            return needed[0].why
        why_not = self._outside.current_engine().why_not_without(needed)
        return f"{needed[0].why}; the job cannot go on without it: {why_not}" if why_not else ""

    def view_begins(self, view: View, news: Sequence[Loss]) -> None:
        error = self.why_not_without(news)
        for loss in news:
            self._outside.warn(f"{loss.why}; the job goes on without it")
        self.coordinated.add(self._membership.coordinator)
        epoch = self._membership.epoch
        self._membership.view_begins(view, self.views.coordinator)
        for loss in news:
            if loss.rank < 0:
                self._outside.peers_gone([loss.node], loss.why)
        if error:  # this node has plans that whoever decided has no part in
            self._outside.fail(error, True)
        elif self._membership.epoch > epoch:
            self._outside.begin_epoch()  # in this view
        else:
            self._outside.current_engine().view_begins(view, self.views.coordinator)

    def job_ends(self, error: str, tell: bool) -> None:
        self._outside.fail(error, tell or not self._tolerate)

    def _suspect(self, node: int, why: str) -> None:
        self.views.suspect(Loss(node, f"node {node} (host {self._topology.hosts[node]}) is lost: {why}"))

    def _let_go(self, node: int, why: str) -> None:
        self._ended[node] = why
        self._outside.peers_gone([node], why)

    @property
    def _may_tolerate(self) -> bool:
        return self._tolerate and self._membership.started

    def _has_left(self, node: int) -> bool:
        ranks = self._topology.ranks[node]
        return bool(ranks) and self._outside.current_engine().participants.departed.issuperset(ranks)
