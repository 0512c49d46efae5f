"""Agreement on the nodes that go on with the job. No I/O.

A *view* is a number, the nodes in it and what has been lost so far. The next one is decided by one instance of Paxos
(Lamport: Paxos made simple, 2001), whose acceptors are the nodes of the view before. A quorum is more than half of
them, or half of them with their coordinator. Any two quorums have a node in common, so no two views have the same
number, and of the parts into which a network falls, at most one goes on; the others fail with a sentence. (Of two
nodes, the first goes on without the second, and not the other way round.)

Whoever suspects something tells the *decider*: the lowest node with workers that it does not itself suspect. This one
waits a moment, so that the other symptoms of one fault come in, and then either says why the job cannot go on, or
canvasses for a view without the lost ones. That is the coordinator, or, if it is suspected itself, the next one. Of two
nodes of which one does not hear the other, though the decider hears both, the one with more such links is lost, or
else the one that is not heard, or else the higher one.

Messages of a node that is not in the view are dropped and counted. As a coordinator is only ever replaced by being
lost, this fences what it still says; the number fences everything about views.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.wire import Loss, View
from fusiond.core.dispatch import Handlers
from fusiond.core.effects import Effects

SETTLE = 0.15  # seconds in which a decider hears of the other symptoms of a fault
_LAST_NEWS = 0.5  # the same where no workers wait: a peer's last messages may come after the end of its connections
_UNSURE = 0.4  # the same if it still hears a node that the others do not: if that is dead, it will notice soon
PATIENCE = 0.7  # seconds after which whoever told a decider of a loss decides by itself that the job cannot go on
_RETRY = 0.3  # seconds until a canvass without a result is repeated; later on higher nodes, so that they do not collide
_NODES = 1 << 17  # more than there can be: a ballot is round * _NODES + node

_Lost: TypeAlias = tuple[int, int | None]  # a node, and its worker; None: all of it
_Suspicion: TypeAlias = tuple[int, int, int | None]  # the node that noticed, and as above
ViewMessage = wire.Suspected | wire.Canvass | wire.Support | wire.ViewProposal | wire.ViewAnswer | wire.NewView


class ViewEvents(Protocol):
    """Callbacks of a node about its views."""

    def why_not_without(self, losses: Sequence[Loss]) -> str:
        """Returns why the job cannot go on without these, as a sentence; empty if it can."""

    def view_begins(self, view: View, news: Sequence[Loss]) -> None:
        """Called when a view becomes active, with its further losses."""

    def is_over(self) -> bool:
        """Returns whether nothing is left to be done for a worker here, so that losses do not matter."""

    def job_ends(self, error: str, tell: bool) -> None:
        """Called when the job cannot go on; `tell`: on the other nodes neither."""


def coordinator_of(view: View, topology: Topology) -> int:
    """Returns the lowest of a view's nodes with workers left; the lowest of all if none has."""
    lost = {loss.rank for loss in view.lost}
    return min(view.nodes, key=lambda node: (lost.issuperset(topology.ranks[node]), node))


def is_quorum(nodes: Collection[int], view: View, topology: Topology) -> bool:
    """Returns whether these nodes may decide on the view after one."""
    there = len(set(nodes).intersection(view.nodes))
    return 2 * there > len(view.nodes) or (2 * there == len(view.nodes) and coordinator_of(view, topology) in nodes)


@dataclass
class _Canvass:
    ballot: int
    supports: dict[int, wire.Support] = field(default_factory=dict)
    proposal: View | None = None
    accepted: set[int] = field(default_factory=set)


class Views:
    """One node's part in the agreement on views.

    Args:
        topology, node: the ranks of each node, and this node.
        effects: sends and waits.
        events: called with the decisions.
        absent: nodes that take no part.

    Attributes:
        view: the active one.
        fenced: messages dropped because their sender is not in it.
    """

    def __init__(
        self, topology: Topology, node: int, effects: Effects, events: ViewEvents, absent: Collection[int] = ()
    ) -> None:
        self.view = View(0, tuple(other for other in range(len(topology.hosts)) if other not in absent))
        self.fenced = 0
        self._topology = topology
        self._node = node
        self._effects = effects
        self._events = events
        self._over = False
        self._suspected: dict[_Suspicion, Loss] = {}  # not in the view yet
        self._unheard: set[int] = set()  # nodes that this one itself does not hear
        self._told: set[tuple[int, _Suspicion]] = set()  # decider, and the reports to it
        self._promised = 0  # ballot; of the next view, as all that follows
        self._accepted: tuple[int, View] | None = None
        self._canvass: _Canvass | None = None
        self._settling = False
        self._weighed: set[_Suspicion] = set()  # suspicions of others that this node has had time to share
        self._rounds = 0
        self._takes: Handlers = {
            wire.NewView: self._told_of_view,
            wire.Suspected: self._told_of,
            wire.Canvass: self._vote,
            wire.ViewProposal: self._vote,
            wire.Support: self._count,
            wire.ViewAnswer: self._answered,
        }

    @property
    def coordinator(self) -> int:
        """The node whose daemon coordinates."""
        return coordinator_of(self.view, self._topology)

    def handlers(self) -> Handlers:
        """Returns the handlers of the view's nodes' messages about views."""
        return dict.fromkeys(self._takes, self.message)

    def admits(self, node: int, message: wire.PeerMessage) -> bool:
        """Returns whether a node's message is accepted. A node that was declared lost is told so instead."""
        if node in self.view.nodes:
            return True
        self.fenced += 1
        if isinstance(message, ViewMessage) and not self._over:
            self._effects.to_node(node, wire.NewView(self.view))
        return isinstance(message, wire.NewView)

    # --- suspicions ---------------------------------------------------------------------------------------------------

    def suspect(self, loss: Loss) -> None:
        """Notes that a peer, or a worker of this node, seems to be lost, as seen from here."""
        if loss.rank is None:
            self._unheard.add(loss.node)
        self._note(self._node, [loss])
        self._consider()

    @property
    def suspected(self) -> list[int]:
        """The nodes that seem to be lost, and are not yet."""
        return sorted({node for _, node, rank in self._suspected if rank is None})

    def forgive(self, node: int) -> bool:
        """Drops the suspicion of a peer that is not needed any more; returns whether there was one."""
        found = [key for key in self._suspected if key[1:] == (node, None)]
        for key in found:
            del self._suspected[key]
        self._unheard.discard(node)
        return bool(found)

    def resign(self, why: str) -> None:
        """Tells the other nodes, which may go on, that this one cannot."""
        self._over = True
        for node in self.view.nodes:
            if node != self._node:
                self._effects.to_node(node, wire.Suspected(self.view.number, self._node, (Loss(self._node, why),)))

    def end(self) -> None:
        """Ends deciding: the job is over."""
        self._over = True

    def _note(self, by: int, losses: Iterable[Loss]) -> None:
        known = {(loss.node, loss.rank) for loss in self.view.lost}
        for loss in losses:
            if loss.node in self.view.nodes and by in self.view.nodes and (loss.node, loss.rank) not in known:
                self._suspected.setdefault((by, loss.node, loss.rank), loss)

    def _sure(self) -> dict[_Lost, Loss]:
        """Returns losses that this node has noticed itself, and of workers, which their own node knows best."""
        chosen: dict[_Lost, Loss] = {}
        for (by, node, rank), loss in self._suspected.items():
            if rank is not None or by in (self._node, node):
                chosen.setdefault((node, rank), loss)
        return chosen

    def _disputed(self, chosen: Collection[_Lost]) -> list[_Suspicion]:
        """Returns the pairs of nodes of which one does not hear the other, where neither is declared lost."""
        return [key for key in self._suspected if (key[0], None) not in chosen and key[1:] not in chosen]

    def _losses(self, of: Collection[_Suspicion] | None = None) -> tuple[Loss, ...]:
        """Returns the losses to declare, from all suspicions, or, of the disputed ones, only from these."""
        chosen = self._sure()
        while True:
            links = [key for key in self._disputed(chosen) if of is None or key in of]
            if not links:
                return tuple(chosen.values())
            peers: dict[int, set[int]] = {}
            for by, node, _ in links:
                peers.setdefault(by, set()).add(node)
                peers.setdefault(node, set()).add(by)
            reported = {key[1] for key in links}
            worst = max(peers, key=lambda node: (len(peers[node]), node in reported, node))
            chosen[worst, None] = self._loss_of(worst, links)

    def _loss_of(self, node: int, links: Iterable[_Suspicion]) -> Loss:
        """Returns why a node is declared lost: another one does not hear it, or it does not hear another one."""
        key = next((key for key in links if key[1] == node), None)
        if key is not None:
            return self._suspected[key]
        other = next(key for key in links if key[0] == node)
        host = self._topology.hosts[node]
        return Loss(node, f"node {node} (host {host}) does not hear node {other[1]}: {self._suspected[other].why}")

    def _heard(self) -> list[int]:
        return [node for node in self.view.nodes if node not in self._unheard]

    def _decider(self) -> int:
        return coordinator_of(View(0, tuple(self._heard()), self.view.lost), self._topology)

    @property
    def _nothing_to_do(self) -> bool:
        return self._over or not self._suspected or self._events.is_over()

    def _consider(self) -> None:
        """Decides on suspicions, or has the decider do so."""
        if self._nothing_to_do:
            return
        decider = self._decider()
        if decider == self._node:
            if not self._settling and self._canvass is None:
                self._settling = True
                self._effects.call_later(self._time_to_settle(), self._decide)
            return
        news = {key: loss for key, loss in self._suspected.items() if (decider, key) not in self._told}
        for by in dict.fromkeys(key[0] for key in news):
            told = tuple(loss for key, loss in news.items() if key[0] == by)
            self._effects.to_node(decider, wire.Suspected(self.view.number, by, told))
        if news:
            self._told.update((decider, key) for key in news)
            self._effects.call_later(PATIENCE, self._no_news)

    def _time_to_settle(self) -> float:
        return SETTLE if self._topology.ranks[self._node] else _LAST_NEWS

    def _no_news(self) -> None:
        """Decides without the decider, whose time is up: were it well, it would have ended a job that cannot go on."""
        if self._nothing_to_do:
            return
        error = self._events.why_not_without(self._losses())
        if error or not is_quorum(self._heard(), self.view, self._topology):
            self._give_up(error)
        else:  # its word may have come to a node that was not the decider then
            self._told.clear()
            self._consider()

    def _decide(self) -> None:
        self._settling = False
        if self._nothing_to_do:
            return
        if self._decider() != self._node:
            self._consider()
            return
        losses = self._losses()
        error = self._events.why_not_without(losses)
        if error or not is_quorum(self._without(losses), self.view, self._topology):
            self._give_up(error)
            return
        disputed = set(self._disputed(self._sure()))
        if not disputed <= self._weighed:  # several die at once: whoever noticed first is not to be taken for the cause
            self._weighed |= disputed
            self._settling = True
            self._effects.call_later(_UNSURE, self._decide)
            return
        self._rounds += 1
        self._canvass = _Canvass(self._rounds * _NODES + self._node)
        number = self.view.number + 1
        self._effects.call_later(_RETRY * (1 + self._node / 4), lambda: self._retry(number))
        self._send(self._heard(), wire.Canvass(number, self._canvass.ballot))

    def _retry(self, number: int) -> None:
        if number == self.view.number + 1 and self._canvass is not None:
            self._canvass = None
            self._decide()

    def _without(self, losses: Iterable[Loss]) -> list[int]:
        """Returns the nodes that are left after these losses."""
        whole = {loss.node for loss in losses if loss.rank is None}
        return [node for node in self.view.nodes if node not in whole]

    def _give_up(self, error: str) -> None:
        """Ends the job on this node; for all nodes only if a quorum is on this side."""
        enough = bool(error) and is_quorum(self._heard(), self.view, self._topology)
        host = self._topology.hosts[self._node]
        reasons = "; ".join(dict.fromkeys(loss.why for loss in self._losses()))
        if not error:
            error = (
                f"node {self._node} (host {host}) is cut off from most of the job, which has declared it dead or "
                f"cannot go on either: {reasons}"
            )
        if not enough:
            self.resign(f"node {self._node} (host {host}) is cut off: {reasons}")
        self._over = True
        self._events.job_ends(error, enough)

    # --- agreeing -----------------------------------------------------------------------------------------------------

    def message(self, node: int, message: ViewMessage) -> None:
        """Handles a message about views from an admitted node."""
        if not self._over:
            self._takes[type(message)](node, message)

    def _told_of_view(self, node: int, message: wire.NewView) -> None:
        self._new_view(message.view)

    def _answered(self, node: int, message: wire.ViewAnswer) -> None:
        if message.accepts:
            self._count(node, message)
        else:
            self._rounds = max(self._rounds, message.ballot // _NODES)

    def _told_of(self, node: int, message: wire.Suspected) -> None:
        if message.number < self.view.number:
            self._effects.to_node(node, wire.NewView(self.view))
        by = message.by
        for loss in message.losses:
            if loss.node == self._node and loss.rank is None:
                # One that cannot hear this node, while others can: it is the one that cannot go on.
                host = self._topology.hosts[by]
                why = f"node {by} (host {host}) does not hear node {self._node}: {loss.why}"
                self._note(self._node, [Loss(by, why)])
            else:
                self._note(by, [loss])
            if loss.node == by and loss.rank is None:
                self._unheard.add(by)  # it has resigned
        self._consider()

    def _vote(self, node: int, message: wire.Canvass | wire.ViewProposal) -> None:
        number = message.number if isinstance(message, wire.Canvass) else message.view.number
        if number <= self.view.number:
            self._effects.to_node(node, wire.NewView(self.view))
        elif number == self.view.number + 1 and node not in self._unheard:
            if message.ballot < self._promised:
                self._reply(node, wire.ViewAnswer(number, self._promised, False))
                return
            self._promised = message.ballot
            if isinstance(message, wire.Canvass):
                ballot, accepted = self._accepted or (0, None)
                suspected = tuple(loss for key, loss in self._suspected.items() if key[0] == self._node)
                self._reply(node, wire.Support(number, message.ballot, ballot, accepted, suspected))
            else:
                self._accepted = message.ballot, message.view
                self._reply(node, wire.ViewAnswer(number, message.ballot, True))

    def _count(self, node: int, message: wire.Support | wire.ViewAnswer) -> None:
        canvass = self._canvass
        if canvass is None or message.number != self.view.number + 1 or message.ballot != canvass.ballot:
            return
        if isinstance(message, wire.ViewAnswer):
            canvass.accepted.add(node)
            if is_quorum(canvass.accepted, self.view, self._topology):
                assert canvass.proposal is not None
                self._new_view(canvass.proposal)
            return
        canvass.supports[node] = message
        self._note(node, (loss for loss in message.losses if loss.node != self._node))
        if canvass.proposal is None and is_quorum(canvass.supports, self.view, self._topology):
            canvass.proposal = self._value(canvass)
            if canvass.proposal is None:
                self._canvass = None
                self._give_up(self._events.why_not_without(self._losses()))
                return
            self._send(canvass.supports, wire.ViewProposal(canvass.ballot, canvass.proposal))

    def _value(self, canvass: _Canvass) -> View | None:
        """Returns the view to propose: one that may have been decided already, or else one without the losses; None if
        the job cannot go on without these."""
        accepted = [s for s in canvass.supports.values() if s.accepted is not None]
        if accepted:
            return max(accepted, key=lambda support: support.accepted_ballot).accepted
        losses = self._losses(self._weighed)
        left = self._without(losses)
        if self._events.why_not_without(losses) or not is_quorum(left, self.view, self._topology):
            return None
        return View(self.view.number + 1, tuple(left), (*self.view.lost, *losses))

    def _new_view(self, view: View) -> None:
        """Makes a decided view active."""
        if view.number <= self.view.number:
            return
        before, self.view = self.view, view
        news = view.lost[len(before.lost) :]
        self._promised, self._accepted, self._canvass = 0, None, None
        self._told.clear()
        self._weighed.clear()
        old, self._suspected = self._suspected, {}
        for key, loss in old.items():
            self._note(key[0], [loss])
        for node in before.nodes:  # those that are lost too
            if node != self._node:
                self._effects.to_node(node, wire.NewView(view))
        if self._node not in view.nodes:
            self._over = True
            host = self._topology.hosts[self._node]
            why = next(
                (loss.why for loss in news if loss.node == self._node and loss.rank is None), "it is not in the view"
            )
            error = f"node {self._node} (host {host}) was declared dead by the others, which go on without it: {why}"
            self._events.job_ends(error, False)
            return
        self._events.view_begins(view, news)
        self._consider()

    def _send(self, nodes: Iterable[int], message: wire.Canvass | wire.ViewProposal) -> None:
        """Sends a message to nodes; this one hears it last."""
        wanted = list(nodes)
        for node in wanted:
            if node != self._node:
                self._effects.to_node(node, message)
        if self._node in wanted:
            self._vote(self._node, message)

    def _reply(self, node: int, message: wire.Support | wire.ViewAnswer) -> None:
        if node == self._node:
            self.message(node, message)
        else:
            self._effects.to_node(node, message)
