"""The end of a part of the job, of the job, or of this daemon."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from fusion_rt import wire
from fusion_rt.core.traceback_format import in_short
from fusion_rt.host import bootstrap
from fusion_rt.tracing.format import Kind
from fusiond.app.daemon_effects import DaemonEffects
from fusiond.app.daemon_parts import DaemonParts
from fusiond.membership.epoch import Membership
from fusiond.membership.failures import Losses

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine
    from fusiond.workers.connections import WorkerLink

_log = logging.getLogger("fusiond")
_WORKER, _NODE, _JOB = 0, 1, 2  # that is gone, in records
_FREED = 0.2  # seconds after a failure, for kernels and connections to finish their work
_LAST_WORDS = 5.0  # seconds that workers of a failed job get to read the reason, unless the daemon is ended before


class Ended(Protocol):
    """The formation whose end this is.

    Attributes:
        config, number, absent: this node's place, the number of the formation, and the nodes that take no part.
        engine: of this membership epoch.
    """

    config: bootstrap.DaemonConfig
    number: int
    absent: Collection[int]
    engine: Engine

    def next_epoch(self) -> None:
        """Begins the next membership epoch, which awaits no worker of this node."""

    def failed(self, reason: str) -> None:
        """The job cannot go on, or in an elastic one this formation. Called once."""


class JobEnd:
    """The `JobControl` of one daemon: decides on the rest of a job after a loss, and on its end.

    Args:
        formation: owns it.
        parts: the rest of the daemon.
        membership: the workers that have come here.
        links: the connections of the local workers, by rank.

    Attributes:
        losses: handles lost nodes and workers.
        failure: why the job cannot go on; empty while it can.
        exit_code: the daemon's.
    """

    def __init__(
        self,
        formation: Ended,
        parts: DaemonParts,
        membership: Membership,
        effects: DaemonEffects,
        links: Mapping[int, WorkerLink],
    ) -> None:
        config, self._tolerates = formation.config, parts.settings.tolerate_losses
        self.losses = Losses(config.topology, config.node, self._tolerates, membership, effects, self, formation.absent)
        self.failure = ""
        self.exit_code = 0
        self._formation = formation
        self._config = config
        self._host = config.topology.hosts[config.node]
        self._membership = membership
        self._loop = parts.loop
        self._mesh = parts.mesh
        self._trace = parts.trace
        self._effects = effects
        self._links = links
        self._stopped = False  # the end has been asked for
        self._is_ended = False  # the starter ends the workers
        self._ended: set[int] = set()  # peers that have ended because their workers were done

    # --- losses -------------------------------------------------------------------------------------------------------

    def farewell(self) -> None:
        """Notes that the starter of this daemon ends the job: deaths from now on are intended."""
        self._is_ended = True

    def worker_lost(self, rank: int, error: str) -> None:
        """Handles a failed worker: the job goes on without it, or fails."""
        if not self._is_ended:
            self._trace.record(Kind.GONE, error, peer=rank, extra=_WORKER)
        self.losses.worker_lost(rank, error)
        self._loop.call_later(_FREED, _free_memory)

    def worker_departed(self, rank: int) -> None:
        """Removes a local rank that has left; tells all nodes, each behind the messages on their way to it."""
        self._formation.engine.depart([rank])
        if self._mesh is not None:
            departed = wire.Departed((rank,))
            for node in self._others():
                self._mesh.send_last(node, departed)
        self._explain_losses()

    def departed(self) -> None:
        """Called when workers have left in good order, here or elsewhere."""
        self._explain_losses()
        self.check_over()

    def _explain_losses(self) -> None:
        """Lets go of peers that were suspected and whose workers have left. After a failure all workers leave, which
        explains nothing: daemons of an elastic job may be together in the next formation."""
        if not self.failure:
            self.losses.departed()

    def peer_lost(self, node: int, why: str) -> None:
        """Handles a peer that cannot be heard any more."""
        if not self.failure:
            left = self.is_over() or self._is_ended or self._has_left(node)
            if node in self.losses.views.view.nodes and not left:
                self._trace.record(Kind.GONE, why, peer=node, extra=_NODE)
            self.losses.peer_lost(node, why)

    def _has_left(self, node: int) -> bool:
        return self._formation.engine.participants.departed.issuperset(self._config.topology.ranks[node])

    def starter_gone(self) -> None:
        """Ends this daemon, since the process that attended it is gone."""
        if self._links:
            # The others will see that this node is gone, and decide whether the job goes on.
            why = f"the process that started the daemon of host {self._host} is gone"
            if self._tolerates:
                self.losses.gone_on_without(why)
            self.fail(why, tell_peers=not self._tolerates)
        self._loop.stop()

    def signalled(self, name: str) -> None:
        """Stops on a signal. A daemon whose workers are done first delivers its last messages to others."""
        if not (self._membership.everyone_left or self._everyone_departed):
            self.fail(f"the daemon of host {self._host} was told to stop ({name})")
        if self._mesh is None or self.failure:
            self._loop.stop()
        else:
            self._mesh.when_received(self._loop.stop)
            self._loop.call_later(_LAST_WORDS, self._loop.stop)

    def stop(self, reason: str) -> None:
        """Ends the job at a tool's request."""
        _log.warning("asked to stop: %s", reason)
        self._stopped = True
        self.fail(f"the job was stopped on host {self._host}: {reason or 'by request'}")
        self._loop.call_later(_LAST_WORDS, self._loop.stop)
        self.check_over()

    def gone(self) -> frozenset[int]:
        """Returns the nodes that are gone, and need not be asked."""
        return frozenset(self._ended | self._formation.engine.participants.lost_nodes)

    # --- JobControl ---------------------------------------------------------------------------------------------------

    def current_engine(self) -> Engine:
        return self._formation.engine

    def is_over(self) -> bool:
        """Returns whether nothing is left to be done for anybody here. Where losses are tolerated, those of others
        are agreed upon as long as any worker is there."""
        return self._everyone_departed or (self._membership.everyone_left and not self._tolerates)

    def peers_gone(self, nodes: Sequence[int], why: str) -> None:
        for node in nodes:
            self._ended.add(node)
            self._formation.engine.depart(self._config.topology.ranks[node])
            if self._mesh is not None and node != self._config.node:
                self._mesh.lose(node, why)
        self.check_over()

    def drop_peer(self, node: int, why: str) -> None:
        assert self._mesh is not None
        self._mesh.lose(node, why)

    def begin_epoch(self) -> None:
        self._formation.next_epoch()

    # --- endings ------------------------------------------------------------------------------------------------------

    def fail(self, error: str, tell_peers: bool = True) -> None:
        """Fails the job. Only the first reason counts, and everybody gets it."""
        if self.failure:
            return
        self.failure = error
        if not self._is_ended:
            self._trace.record(Kind.GONE, error, extra=_JOB)
        self.exit_code = 1
        self.losses.views.end()
        is_news = tell_peers and not self._is_ended  # an error is logged where it happened
        _log.log(logging.ERROR if is_news else logging.INFO, "%s", in_short(error))  # the worker has printed the rest
        self._formation.engine.fail_job(error)
        self._formation.failed(
            error
        )  # before workers ask for the next epoch, which must not have the ranks that this node has lost
        self._loop.call_later(_FREED, _free_memory)
        if tell_peers:  # before workers, because these may then reuse memory of which chunks are under way
            self._tell_peers(wire.Abort(error))
        self._formation.engine.when_quiet(self.tell_workers)  # threads may still write into their memory
        if not self._config.attached:
            self._loop.call_later(_LAST_WORDS, self._loop.stop)

    def tell_workers(self) -> None:
        """Tells the workers of this node why the job cannot go on."""
        for link in self._links.values():
            self._effects.workers.send(link, wire.JobFailed(self.failure, self._formation.number))

    def check_over(self) -> None:
        """Ends an unattended daemon with the job's last worker, and an attended one when it is told to."""
        gone = self._everyone_departed and (self._stopped or not self._may_return)
        if (self._stopped or not self._config.attached) and not self._links and (self.failure or gone):
            self._loop.stop()

    @property
    def _everyone_departed(self) -> bool:
        return len(self._formation.engine.participants.departed) == self._config.topology.size

    @property
    def _may_return(self) -> bool:
        """True if workers that have left may come back: here, or, to a node that has none left, anywhere."""
        if self._membership.awaited:
            return self._effects.workers.may_return
        others = [node for node in self._membership.nodes if node != self._config.node]
        return any(self._membership.has_workers(node) and node not in self._ended for node in others)

    def _tell_peers(self, message: wire.PeerMessage) -> None:
        if self._mesh is not None:
            for node in self._others():
                self._effects.to_node(node, message)

    def _others(self) -> list[int]:
        return [node for node in range(len(self._config.topology.hosts)) if node != self._config.node]


def _free_memory() -> None:
    """Frees memory of workers that only failed operations still refer to: these are cycles of references, which an idle
    daemon would keep, and with them the memory, for ever."""
    gc.collect()
