"""Losses of nodes and workers, each of which leads to nothing, the next view, or the end of the job. No I/O.

Without `tolerate_losses` every loss ends the job; so do those that an algorithm cannot do without. The sentence is that
of whoever decides (`views`), so that all ranks are told the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.wire import Loss, View
from fusiond.core.dispatch import Handlers
from fusiond.core.effects import Effects
from fusiond.membership.epoch import Membership
from fusiond.membership.quorum import Views

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine


class JobControl(Protocol):
    """The part of a daemon that decides on the ranks and nodes that go on."""

    def current_engine(self) -> Engine:
        """Returns the engine of this membership epoch."""

    def begin_epoch(self) -> None:
        """Begins the next membership epoch here."""

    def departed(self) -> None:
        """Called when workers have left in good order, here or elsewhere."""

    def is_over(self) -> bool:
        """Returns whether nothing is left to be done for anybody here."""

    def peers_gone(self, nodes: Sequence[int], why: str) -> None:
        """Called when the daemon need not hear these nodes any more."""

    def drop_peer(self, node: int, why: str) -> None:
        """Takes no more messages from a lost peer."""

    def fail(self, error: str, tell_peers: bool = True) -> None:
        """Fails the job, which cannot go on."""


class Losses:
    """The losses that one daemon knows of, and their consequences.

    Args:
        topology, node: the ranks of each node, and this node.
        tolerate: losses may be tolerated at all.
        membership: the workers that have come here.
        effects: sends, waits and warns.
        job: acts.
        absent: nodes that take no part.

    Attributes:
        topology: the ranks of each node.
        views: which nodes go on.
        coordinated: nodes that coordinated in views before.
    """

    def __init__(
        self,
        topology: Topology,
        node: int,
        tolerate: bool,
        membership: Membership,
        effects: Effects,
        job: JobControl,
        absent: Collection[int] = (),
    ) -> None:
        self.views = Views(topology, node, effects, self, absent)
        self.coordinated: set[int] = set()
        self.topology = topology
        self._node = node
        self._tolerate = tolerate
        self._membership = membership
        self._effects = effects
        self._job = job
        self._handovers: dict[int, wire.Handover] = {}  # the latest of each node
        self._ended: dict[int, str] = {}  # nodes that are not missed, and why they are gone

    def peer_lost(self, node: int, why: str) -> None:
        """Suspects a peer that cannot be heard any more, or lets it go if it is not needed."""
        if node not in self.views.view.nodes:
            return
        if self._job.is_over() or (self._has_left(node) and node != self.views.coordinator):
            self._let_go(node, why)  # it is not needed any more
            return
        self._suspect(node, why)

    def departed(self) -> None:
        """Lets go of suspected nodes whose last workers have left in good order, which explains the suspicion."""
        over = self._job.is_over()
        for node in self.views.suspected:
            nobody_needs_it = over or (self._has_left(node) and node != self.views.coordinator)
            if nobody_needs_it and self.views.forgive(node):
                self._let_go(node, "its workers have left")

    def worker_lost(self, rank: int, error: str) -> None:
        """Suspects a failed worker of this node, or fails the job if losses are not tolerated."""
        if self._may_tolerate:
            self._membership.lose(rank)
            self.views.suspect(Loss(self._node, error, rank))
        else:
            self._job.fail(error, True)

    def gone_on_without(self, why: str) -> None:
        """Resigns this node, which ends; the others decide on the rest of the job."""
        host = self.topology.hosts[self._node]
        self.views.resign(f"node {self._node} (host {host}) is lost: {why}")

    def handlers(self) -> Handlers:
        """Returns the handlers of the view's nodes' messages about views."""
        return {**self.views.handlers(), wire.Handover: self._handed_over}

    def _handed_over(self, node: int, handover: wire.Handover) -> None:
        """Takes in a node's handover to a view's coordinator; kept for the engine of the next epoch, too."""
        self._handovers[node] = handover
        self._job.current_engine().peer_message(node, handover)

    def epoch_begins(self, epoch: int, engine: Engine) -> None:
        """Begins a membership epoch here, with a new engine, in the active view. The others hear of it first: what an
        engine says before is to them of the epoch before, and dropped, and nobody says it again.

        Nodes that were not needed any more when they went are missed now."""
        for node in range(len(self.topology.hosts)):
            if node != self._node:
                self._effects.to_node(node, wire.NewEpoch(epoch))
        if self.views.view.number:
            engine.view_begins(self.views.view, self.views.coordinator)
            for node, handover in self._handovers.items():
                engine.peer_message(node, handover)
        for node, why in self._ended.items():
            self._suspect(node, why)

    def statistics(self) -> dict[str, object]:
        """Returns the active `view`, and messages `fenced` because their sender is not in it."""
        view = self.views.view
        return {
            "view": view.number,
            "nodes": list(view.nodes),
            "coordinator": self.views.coordinator,
            "lost": [loss.why for loss in view.lost],
            "fenced": self.views.fenced,
        }

    # --- the views' ViewEvents ----------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        return self._job.is_over()

    def why_not_without(self, losses: Sequence[Loss]) -> str:
        needed = [loss for loss in losses if loss.rank is not None or not self._has_left(loss.node)]
        if not needed:
            return ""
        if not self._may_tolerate:
            return needed[0].why
        why_not = self._job.current_engine().why_not_without(needed)
        return f"{needed[0].why}; the job cannot go on without it: {why_not}" if why_not else ""

    def view_begins(self, view: View, news: Sequence[Loss]) -> None:
        error = self.why_not_without(news)
        for loss in news:
            self._effects.warn(f"{loss.why}; the job goes on without it")
        self.coordinated.add(self._membership.coordinator)
        epoch = self._membership.epoch
        self._membership.view_begins(view, self.views.coordinator)
        for loss in news:
            if loss.rank is None:
                self._job.peers_gone([loss.node], loss.why)
        if error:  # this node has plans that whoever decided has no part in
            self._job.fail(error, True)
        elif self._membership.epoch > epoch:
            self._job.begin_epoch()  # in this view
        else:
            self._job.current_engine().view_begins(view, self.views.coordinator)

    def job_ends(self, error: str, tell: bool) -> None:
        self._job.fail(error, tell or not self._tolerate)

    def _suspect(self, node: int, why: str) -> None:
        self.views.suspect(Loss(node, f"node {node} (host {self.topology.hosts[node]}) is lost: {why}"))

    def _let_go(self, node: int, why: str) -> None:
        self._ended[node] = why
        self._job.peers_gone([node], why)

    @property
    def _may_tolerate(self) -> bool:
        return self._tolerate and self._membership.started

    def _has_left(self, node: int) -> bool:
        ranks = self.topology.ranks[node]
        return bool(ranks) and self._job.current_engine().participants.departed.issuperset(ranks)
