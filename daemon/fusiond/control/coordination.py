"""The way to the coordinator, wherever it is, and from it to the nodes. No I/O.

Every view but the first begins with each node's handover to its coordinator, which goes on where the one before
stopped. From the beginning of a view until the coordinator says that this is `Settled`, its messages are of the
view before, and are dropped: the node has handed over their subjects.
"""

from __future__ import annotations

from typing import Protocol

from fusion_rt import wire
from fusion_rt.wire import OpKey
from fusiond.control.handover import inherit, settle_sets
from fusiond.control.negotiation import Coordinator, Outgoing
from fusiond.control.questions import Questions
from fusiond.core.dispatch import Handlers
from fusiond.operations.context import Context

_MAX_WAITING = 65536  # messages of a node that wait for the coordinator to begin


class Receiver(Protocol):
    """The engine, as the coordinator sees it."""

    def peer_message(self, node: int, message: wire.PeerMessage) -> None:
        """A message about operations has come."""


class Coordination:
    """One engine's access to the coordinator.

    Args:
        context: the engine's.
        questions: ask where ranks are.
        engine: gets messages of the coordinator to this node.
        epoch: the membership epoch.

    Attributes:
        coordinator: if it is here, and decides.
        node: where it is.
        settling: the state at the beginning of the view is being put together.
        dropped: messages of coordinators of views before.
    """

    def __init__(
        self,
        context: Context,
        questions: Questions,
        engine: Receiver,
        epoch: int,
    ) -> None:
        self._context = context
        self._questions = questions
        self._engine = engine
        self.node = next(node for node, ranks in enumerate(context.topology.ranks) if ranks)
        self.settling = False
        self.dropped = 0
        self._epoch = epoch
        self._number = 0
        self._nodes: tuple[int, ...] = ()
        self._handovers: dict[int, wire.Handover] = {}  # the latest of each node
        self._after: dict[int, list[wire.PeerMessage]] = {}  # a node's message after that, if it waits
        self.coordinator = self._make() if context.node == self.node else None

    def _make(self) -> Coordinator:
        return Coordinator(self._context.participants, self._context.settings, self._questions, self)

    def handlers(self) -> Handlers:
        """Returns the handlers of the nodes' messages to their coordinator."""
        to_coordinator = (wire.Request, wire.Mismatch, wire.PlanRequest, wire.PlanRequestAlike)
        return {**dict.fromkeys(to_coordinator, self.handle), wire.Handover: self.handed_over}

    def view_begins(self, view: wire.View, coordinator: int, handover: wire.Handover) -> None:
        """Another view begins here, with this node's handover."""
        self.node = coordinator
        self.settling = True
        if self.coordinator is not None:
            self.coordinator.end()
        self.coordinator = None
        self._number, self._nodes = view.number, view.nodes
        if coordinator == self._context.node:
            self.handed_over(coordinator, handover)
        else:
            self._context.outside.to_node(coordinator, handover)

    def handed_over(self, node: int, handover: wire.Handover) -> None:
        """A node hands over; maybe before this one has heard of the view."""
        known = self._handovers.get(node)
        if handover.epoch == self._epoch and (known is None or known.number < handover.number):
            self._handovers[node] = handover
            self._after[node] = []
            self._begin()

    def _begin(self) -> None:
        """Decides from now on, if it is this node that does, and all have handed over."""
        told = {node: self._handovers.get(node) for node in self._nodes}
        here = self.settling and self.node == self._context.node
        if not here or any(handover is None or handover.number != self._number for handover in told.values()):
            return
        handovers = {node: handover for node, handover in told.items() if handover is not None}
        participants = self._context.participants
        next_set, sets = settle_sets(handovers, participants)
        settled = wire.Settled(self._epoch, self._number, next_set, sets)
        self.send([(node, settled) for node in self._nodes])
        self.coordinator = self._make()
        inherited = inherit(handovers, participants, self._number)
        self.send(self.coordinator.take_over(inherited))
        for node, message in inherited.open:
            self.handle(node, message)
        for node in self._nodes:
            for message in self._after.pop(node):
                self.handle(node, message)

    def is_settled(self, settled: wire.Settled) -> bool:
        """The coordinator decides from now on; whether that is about the view that has begun here."""
        if (settled.epoch, settled.number) != (self._epoch, self._number) or not self.settling:
            return False
        self.settling = False
        return True

    def takes(self, node: int) -> bool:
        """Tells whether a message of the coordinator is to be taken: not one of a view that is over."""
        if self.settling or node != self.node:
            self.dropped += 1
            return False
        return True

    def ask(self, message: wire.PeerMessage) -> None:
        """Sends the coordinator a message."""
        if self._context.node == self.node:
            self.handle(self._context.node, message)
        else:
            self._context.outside.to_node(self.node, message)

    def handle(self, node: int, message: wire.PeerMessage) -> None:
        """A node's message to the coordinator has come here. It waits until there is one, unless it is of a view
        before: then it has been handed over."""
        handover = self._handovers.get(node)
        if self.coordinator is None or (handover is not None and handover.number > self._number):
            waiting = self._after.get(node)
            if waiting is None or len(waiting) >= _MAX_WAITING:
                self.dropped += 1
            else:
                waiting.append(message)
            return
        answer = self.coordinator.handle(node, message)
        if answer is None:
            host = self._context.topology.hosts[node]
            self._context.outside.job_failed(
                f"node {node} (host {host}) sent a {type(message).__name__} that no node of this job would send"
            )
            return
        self.send(answer)

    def joined(self) -> None:
        """A rank has joined."""
        if self.coordinator is not None:
            self.send(self.coordinator.joined())

    def forget(self, key: OpKey) -> None:
        """An operation has failed."""
        if self.coordinator is not None:
            self.coordinator.forget(key)

    def forget_set(self, process_set: int) -> None:
        """A process set has been removed."""
        if self.coordinator is not None:
            self.coordinator.forget_set(process_set)

    def statistics(self) -> dict[str, int] | None:
        """The coordinator's, if it is here."""
        return None if self.coordinator is None else self.coordinator.statistics()

    def state(self) -> dict[str, object]:
        """At which `node` the coordinator is, whether a view is `settling`, and messages `dropped`."""
        return {"node": self.node, "settling": self.settling, "dropped": self.dropped}

    def warn(self, text: str) -> None:
        """Tells people that something is late."""
        self._context.outside.warn(text)

    def send(self, messages: Outgoing) -> None:
        """Sends messages of the coordinator to nodes."""
        for node, message in messages:
            if node == self._context.node:
                self._engine.peer_message(node, message)
            else:
                self._context.outside.to_node(node, message)
