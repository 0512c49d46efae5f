"""Dispatch of the other daemons' messages, by the kinds that each may send now.

Each peer has a table from the type of a message to its handler. It holds the messages that the peer may send now; all
others are refused. It is looked up anew when the view, the peer's membership epoch, or the engine's handlers change;
peers in the same standing share one.

In an elastic job daemons go from one formation to the next at different moments. Messages of a later one wait
until this node is there; that cannot be more than a few words, since no formation starts without all its nodes. What is
of an earlier one is dropped.
"""

from __future__ import annotations

import logging
import traceback
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.traceback_format import quoted
from fusiond.app.daemon_parts import Heard
from fusiond.core.dispatch import Handlers
from fusiond.host.loop import EventLoop
from fusiond.membership.epoch import Membership
from fusiond.membership.failures import JobControl, Losses
from fusiond.transport.flow_control import CreditExceeded

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine

_FROM_COORDINATOR = (wire.Verdict, wire.PlanVerdict, wire.Start, wire.Settled)
_WITH_PAYLOAD = (wire.Chunk, wire.Piece, wire.MessageChunk)  # they say themselves which epoch they are of
_SAY_THEMSELVES = (*_WITH_PAYLOAD, wire.Probe)  # they come on other connections than those that begin a formation
_EARLY = 1024  # words of a peer that is in a later formation
_LAST_DATA = 2.0  # seconds without data, after which an operation complete on one node will not complete on others
_log = logging.getLogger("fusiond")


class _Standing(NamedTuple):
    """Standing of a node, which decides on the messages that it may send: whether it is in the view, in this formation,
    in the formation's present epoch, and the coordinator."""

    in_view: bool
    in_formation: bool
    in_epoch: bool
    coordinates: bool


class PeerDispatch:
    """Tables of handlers of one daemon in one formation, by node.

    Args:
        membership: the workers and nodes of the formation.
        losses: knows the view.
        job: acts.
        anybody: handlers of messages that all nodes may send, also those that are not in the view.
        members: handlers of messages that nodes of the view may send, whatever their epoch.
        heard: is kept from one formation to the next.
    """

    def __init__(
        self,
        loop: EventLoop,
        membership: Membership,
        losses: Losses,
        job: JobControl,
        anybody: Handlers,
        members: Handlers,
        heard: Heard | None = None,
    ) -> None:
        self._number = wire.formation_of(membership.epoch)
        self._heard = heard or Heard()
        self._is_over = False
        self._topology = losses.topology
        self._membership = membership
        self._losses = losses
        self._loop = loop
        self._job = job
        self._anybody = anybody
        self._members: Handlers = {
            **anybody,
            **members,
            **losses.handlers(),
            wire.Abort: lambda node, abort: job.fail(abort.error, tell_peers=False),
            wire.NewEpoch: self._new_epoch,
        }
        self._engine: Engine
        self._tables: dict[int, Handlers] = {}  # by node
        self._shared: dict[_Standing, Handlers] = {}
        self._in_view: frozenset[int] = frozenset()
        self._coordinator = -1
        self._made_of: tuple[object, object] = (None, None)  # the view and the engine's handlers

    def engine_begins(self, engine: Engine) -> None:
        """Switches to the engine of a new membership epoch. Drops the one before, which has memory of workers."""
        self._engine = engine
        self._forget_tables()

    def take_early(self) -> None:
        """Handles messages of peers that were here sooner."""
        for node in [node for node in self._heard.early if wire.formation_of(self._heard.of(node)) == self._number]:
            for message in self._heard.early.pop(node):
                self.receive(node, message)

    def end(self) -> None:
        """Ends this formation here."""
        self._is_over = True

    def receive(self, node: int, message: wire.PeerMessage, *payload: memoryview) -> None:
        """Handles a peer's message."""
        view, handlers = self._made_of
        if self._losses.views.view is not view or self._engine.handlers is not handlers:
            self._forget_tables()
        table = self._tables.get(node)
        if table is None:
            table = self._table_of(node)
        try:
            table.get(type(message), self._refused)(node, message, *payload)
        except CreditExceeded as error:
            self._job.drop_peer(node, str(error))
        except Exception as error:  # whatever a message that is valid in itself leads to is its sender's fault
            why = str(error) if isinstance(error, FusionError) else quoted(traceback.format_exc())
            host = self._topology.hosts[node]
            kind = type(message).__name__
            self._job.fail(f"node {node} (host {host}) sent a {kind} that makes no sense here: {why}")

    def _forget_tables(self) -> None:
        view = self._losses.views.view
        self._made_of = view, self._engine.handlers
        self._in_view, self._coordinator = frozenset(view.nodes), self._losses.views.coordinator
        self._tables.clear()
        self._shared.clear()

    def _table_of(self, node: int) -> Handlers:
        """Returns the handlers of messages that a node may send now."""
        epoch = self._heard.of(node)
        standing = _Standing(
            node in self._in_view,
            wire.formation_of(epoch) == self._number,
            epoch == self._membership.epoch,
            node == self._coordinator,
        )
        if standing not in self._shared:
            self._shared[standing] = self._table(standing)
        self._tables[node] = self._shared[standing]
        return self._tables[node]

    def _table(self, standing: _Standing) -> Handlers:
        of_engine = self._engine.handlers
        if not standing.in_view:
            return self._anybody
        if not standing.in_formation:
            ours = {**of_engine, **self._members}
            return {wire.NewEpoch: self._new_epoch, **{kind: ours[kind] for kind in _SAY_THEMSELVES if kind in ours}}
        table = {kind: of_engine[kind] for kind in of_engine if standing.in_epoch or kind in _WITH_PAYLOAD}
        if standing.in_epoch:
            table[wire.Departed] = self._departed
        table.update(self._members)
        return {kind: table[kind] for kind in table if standing.coordinates or kind not in _FROM_COORDINATOR}

    def _refused(self, node: int, message: wire.PeerMessage, *payload: memoryview) -> None:
        """Handles a message that a node may not send now: because it is late, or not in the view."""
        views, kind = self._losses.views, type(message)
        if node not in views.view.nodes:
            if views.admits(node, message):
                self._members[kind](node, message)
        elif (formation := wire.formation_of(self._heard.of(node))) != self._number:
            if formation > self._number and not payload:
                self._keep(node, message)
        elif kind in _FROM_COORDINATOR and node != views.coordinator:
            if node not in self._losses.coordinated:
                raise WireError("it comes from the coordinator only")
            _log.debug("%s of a view that is over came from node %d", kind.__name__, node)
        elif self._heard.of(node) != self._membership.epoch:
            _log.debug("%s of an epoch that is over came from node %d", kind.__name__, node)
        # else the job has failed, and messages about its operations do not matter any more

    def _departed(self, node: int, message: wire.Departed) -> None:
        self._engine.depart(message.ranks)
        self._job.departed()

    def _keep(self, node: int, message: wire.PeerMessage) -> None:
        early = self._heard.early.setdefault(node, [])
        if len(early) >= _EARLY:
            raise WireError(f"it is the {_EARLY + 1}th in a membership epoch that has not begun here")
        early.append(message)

    def _new_epoch(self, node: int, message: wire.NewEpoch) -> None:
        self._heard.epochs[node] = message.epoch
        self._tables.pop(node, None)
        if wire.formation_of(message.epoch) != self._number:
            self._heard.early.pop(node, None)
            return
        if self._membership.follow(node, self._heard.epochs):
            self._job.begin_epoch()
        # The node's operations are complete there, and their data is on the way here.
        self._loop.call_later(_LAST_DATA, partial(self._end_epoch_before, message.epoch, node))

    def _end_epoch_before(self, epoch: int, node: int) -> None:
        """Ends operations of an epoch that a node has left, which cannot complete, once no more data comes, from that
        node or through others."""
        if epoch > self._membership.epoch and not self._is_over:
            quiet = self._engine.quiet_seconds
            if quiet < _LAST_DATA:
                self._loop.call_later(_LAST_DATA - quiet, partial(self._end_epoch_before, epoch, node))
                return
            ranks = self._topology.describe(self._topology.ranks[node])
            self._engine.end(f"{ranks} left the job")
