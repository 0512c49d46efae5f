"""What the other daemons say, passed on to the part of this one that it is about."""

from __future__ import annotations

import logging
import traceback
from functools import partial
from typing import TYPE_CHECKING, Protocol

from fusion_rt import wire
from fusion_rt.errors import FusionError, WireError
from fusion_rt.quoting import quoted
from fusion_rt.topology import Topology
from fusiond.host.loop import EventLoop
from fusiond.live.figures import Gathering
from fusiond.membership.epoch import Membership
from fusiond.membership.failures import Losses
from fusiond.membership.startup import Starting
from fusiond.transport.flow_control import CreditExceeded

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine

_FROM_COORDINATOR = (wire.Verdict, wire.PlanVerdict, wire.Start, wire.Settled)
_LAST_DATA = 2.0  # seconds without data after which what is complete on one node does not complete on the others
_log = logging.getLogger("fusiond")


class Shell(Protocol):
    """What the daemon does about it."""

    def current_engine(self) -> Engine:
        """The one of this membership epoch."""

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        """Sends a control message to a peer."""

    def begin_epoch(self) -> None:
        """A new membership epoch begins here."""

    def departed(self) -> None:
        """Workers have left, here or elsewhere."""

    def drop_peer(self, node: int, why: str) -> None:
        """Nothing more is taken from a peer, which is lost."""

    def fail(self, error: str, tell_peers: bool = True) -> None:
        """The job cannot go on."""


class FromPeers:
    """Of one daemon, whose other parts it uses."""

    def __init__(
        self,
        topology: Topology,
        membership: Membership,
        losses: Losses,
        starting: Starting,
        gathering: Gathering,
        loop: EventLoop,
        shell: Shell,
    ) -> None:
        self._topology = topology
        self._membership = membership
        self._losses = losses
        self._starting = starting
        self._gathering = gathering
        self._loop = loop
        self._shell = shell
        self._epochs: dict[int, int] = {}  # by node

    def receive(self, node: int, message: wire.PeerMessage, payload: memoryview | None) -> None:
        """A peer's message has come."""
        try:
            self._handle(node, message, payload)
        except CreditExceeded as error:
            self._shell.drop_peer(node, str(error))
        except Exception as error:  # whatever a message that is valid in itself leads to is its sender's fault
            why = str(error) if isinstance(error, FusionError) else quoted(traceback.format_exc())
            host = self._topology.hosts[node]
            kind = type(message).__name__
            self._shell.fail(f"node {node} (host {host}) sent a {kind} that makes no sense here: {why}")

    def _handle(self, node: int, message: wire.PeerMessage, payload: memoryview | None) -> None:
        if self._losses.takes(node, message) or self._gathering.handle(node, message):
            return
        if isinstance(message, _FROM_COORDINATOR) and node != self._losses.views.coordinator:
            if node not in self._losses.coordinated:
                raise WireError("it comes from the coordinator only")
            _log.debug("%s of a view that is over came from node %d", type(message).__name__, node)
            return
        if isinstance(message, wire.Abort):
            self._shell.fail(message.error, tell_peers=False)
        elif isinstance(message, wire.NewEpoch):
            self._epochs[node] = message.epoch
            if self._membership.follow(self._epochs):
                self._shell.begin_epoch()
                self._starting.check_up()
            # What the node had a part in is complete there, and its data is on the way here.
            self._loop.call_later(_LAST_DATA, partial(self._end_epoch_before, message.epoch, node))
        elif isinstance(message, wire.Up):
            self._starting.node_up(node, message.epoch)
        elif isinstance(message, wire.Probe):
            self._shell.to_node(node, wire.Echo(message.serial))
        elif isinstance(message, wire.Echo):
            self._starting.echo(node, message)
        elif isinstance(message, wire.Start):
            self._starting.start(message)
        elif payload is None and self._epochs.get(node, 0) != self._membership.epoch:
            _log.debug("%s of an epoch that is over came from node %d", type(message).__name__, node)
        elif isinstance(message, wire.Departed):
            self._shell.current_engine().depart(message.ranks)
            self._shell.departed()
        else:
            self._shell.current_engine().peer_message(node, message, payload)

    def _end_epoch_before(self, epoch: int, node: int) -> None:
        """Whoever still waits for something in an epoch that a node has left behind waits in vain, unless data still
        comes, from that node or through others."""
        if epoch > self._membership.epoch:
            quiet = self._shell.current_engine().quiet_seconds
            if quiet < _LAST_DATA:
                self._loop.call_later(_LAST_DATA - quiet, partial(self._end_epoch_before, epoch, node))
                return
            ranks = self._topology.describe(self._topology.ranks[node])
            self._shell.current_engine().end(f"{ranks} left the job")
