"""The parts of a daemon that belong to one formation: one set of nodes and ranks.

A job has one formation, from its beginning to its end; an elastic job goes from one to the next, as its launcher orders
(`bootstrap.Reform`). Then everything here is made anew, and the parts that outlive that (`daemon_parts`) are handed on:
the loop, the mesh, the connections of workers, the measured links. A formation that is over does nothing any more,
whatever timers, threads or late messages would still have it do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

import msgspec

from fusion_rt import wire
from fusion_rt.core.traceback_format import quoted
from fusion_rt.host import bootstrap
from fusion_rt.host.cores import cores
from fusion_rt.tracing import files
from fusiond.app.daemon_effects import DaemonEffects
from fusiond.app.daemon_parts import DaemonParts
from fusiond.app.job_end import JobEnd
from fusiond.app.peer_dispatch import PeerDispatch
from fusiond.app.ring_files import RingFiles
from fusiond.app.status import figures, identity
from fusiond.app.tool_dispatch import ToolDispatch
from fusiond.live.figures import Gathering
from fusiond.membership.epoch import Membership, not_ours
from fusiond.membership.startup import Starting
from fusiond.workers.relayed_ports import RelayedPorts

if TYPE_CHECKING:
    from fusiond.collectives.cost import CostModel
    from fusiond.engine.engine import Engine
    from fusiond.workers.connections import WorkerLink

_log = logging.getLogger("fusiond")
_PATIENCE = 3  # workers wait so many times as long for this daemon as its peers do, because peers know better


class Formation:
    """One formation of a daemon.

    Args:
        config: this node's place, and the topology.
        parts: the rest of the daemon.
        number: of the formation; 0 of a job that is not elastic, and of one whose first `Reform` has not come.
        absent: nodes that take no part.

    Attributes:
        engine: of the present membership epoch, once `begin` was called.
        membership, ending, losses, starting, peer_dispatch, worker_dispatch: its parts.
    """

    def __init__(
        self, config: bootstrap.DaemonConfig, parts: DaemonParts, number: int = 0, absent: Collection[int] = ()
    ) -> None:
        topology, node, loop = config.topology, config.node, parts.loop
        self.engine: Engine
        self.config = config
        self.number = number
        self.absent = absent
        self.parts = parts
        self._is_over = False
        self._links: dict[int, WorkerLink] = {}  # by rank
        self.membership = Membership(topology, node, absent, wire.first_epoch(number))
        self.membership.mesh_up = parts.mesh is None
        self.effects = DaemonEffects(loop, parts.mesh, parts.stacks, self._links, parts.files, self)
        self.ending = JobEnd(self, parts, self.membership, self.effects, self._links)
        self.losses = self.ending.losses
        self.starting = Starting(config, parts.settings, self.membership, loop, parts.mesh, parts.probe, self)
        gathering = Gathering(topology, node, self, self.effects)
        rings = RingFiles(files.directory_of(parts.settings.trace_root(), config.job), topology, node, self.effects)
        self.relayed = RelayedPorts(loop, node, self.effects)
        self.peer_dispatch = PeerDispatch(
            loop,
            self.membership,
            self.losses,
            self.ending,
            rings.handlers(),
            {**gathering.handlers(), **self.relayed.handlers(), **self.starting.handlers()},
            parts.heard,
        )
        tools = ToolDispatch(config, self.membership, gathering, rings, self.effects, self.ending, parts.daemon)
        self.worker_dispatch = WorkerDispatch(self, self._links, tools)

    def begin(self) -> None:
        """Begins to take part, with an empty engine. To be called once the daemon runs."""
        self.effects.begin(self.parts.workers, self.parts.pool, self.ending.fail)
        self._make_engine()
        if self.parts.mesh is not None:
            self.parts.mesh.take_with(self.peer_dispatch.receive)

    def await_all(self) -> None:
        """Waits for the workers of this node and for the other nodes. These are told that it is here."""
        if self.number:
            self.losses.epoch_begins(self.membership.epoch, self.engine)
        self.starting.begin()
        if not self.membership.local:
            self.starting.report("joined")
        self.peer_dispatch.take_early()

    def end(self) -> None:
        """Ends this formation here, because another one begins. Its workers hear it as soon as no thread has anything
        to do with their memory."""
        self._is_over = True
        self.ending.fail(f"membership epoch {self.number} is over", tell_peers=False)
        self.engine.when_quiet(self.engine.keeper.remember)
        self.starting.end()
        self.peer_dispatch.end()
        self.worker_dispatch.end()
        self.relayed.close()
        self.effects.end()

    def peer_lost(self, node: int, why: str) -> None:
        """Notes that a peer cannot be heard any more."""
        self.relayed.lost(node)
        self.ending.peer_lost(node, why)

    def mesh_up(self) -> None:
        """Notes that the connections to all peers stand."""
        self.membership.mesh_up = True
        self.starting.report("connected")
        self.starting.check_up()

    # --- epochs -------------------------------------------------------------------------------------------------------

    def next_epoch(self) -> None:
        """Begins a membership epoch that awaits no worker of this node: the last one is lost, or there is none."""
        self.begin_epoch()
        self.starting.check_up()

    def begin_epoch(self) -> None:
        """Begins a membership epoch once all local workers (where there are none: all workers) have left and come back.
        Operations of the epoch before fail."""
        self.engine.fail_job("its ranks have left the job")
        if self.parts.mesh is not None:
            self.parts.mesh.hurry()  # that these ranks have left is said before it is said that they are back
        self._make_engine()
        self.losses.epoch_begins(self.membership.epoch, self.engine)

    def _make_engine(self) -> None:
        """Makes the engine of a membership epoch, which gets the messages of peers and workers from now on."""
        from fusiond.core.participants import Participants
        from fusiond.engine.engine import Engine
        from fusiond.operations.context import Context

        topology, node, parts = self.config.topology, self.config.node, self.parts
        participants = Participants(topology, node, self.absent)
        self.engine = Engine(
            Context(topology, node, parts.settings, self.effects, participants, parts.trace, cores()),
            self.membership.epoch,
            parts.left if self.config.elastic else None,
        )
        self.peer_dispatch.engine_begins(self.engine)
        self.worker_dispatch.engine_begins(self.engine)

    def failed(self, reason: str) -> None:
        """The job, or in an elastic one this formation, cannot go on."""
        if not self._is_over:
            self.parts.daemon.formation_failed(self.number, reason, self.starting.unreached())

    # --- coming up ----------------------------------------------------------------------------------------------------

    def first_done(self) -> None:
        """The first operation is done here."""
        self.starting.report("first_done")

    def started(self, start: wire.Start, seconds_per_byte: Mapping[int, float]) -> None:
        """All nodes are up; `seconds_per_byte`: of the links, by node."""
        from fusiond.collectives.cost import CostModel

        settings, mesh = self.parts.settings, self.parts.mesh
        cost = CostModel(start.latency, start.seconds_per_byte)
        links = {path.nodes: CostModel(path.latency, path.seconds_per_byte) for path in start.paths}
        self.engine.measured(cost, CostModel(start.route_latency, start.route_seconds_per_byte), links)
        if mesh is not None:
            mesh.limit(cost.link_credit(settings.link_credit), cost.acknowledged_bytes())
            for nodes, path in links.items():
                if self.config.node in nodes:
                    mesh.stretch(sum(nodes) - self.config.node, path)
        if self.engine.coordinator is not None:
            self.engine.coordinator.seconds_per_byte = dict(seconds_per_byte)
        welcome = wire.Welcome(
            self.config.topology,
            self.config.node,
            settings.fusion_threshold,
            settings.algorithm,
            settings.compression,
            self.membership.epoch,
            *((start.latency, start.seconds_per_byte) if len(self.membership.nodes) > 1 else (0.0, 0.0)),
            patience=_PATIENCE * settings.heartbeat_timeout,
            ring=self._ring(links),
        )
        for link in self._links.values():
            self.effects.workers.send(link, msgspec.structs.replace(welcome, by_address=link.process is not None))

    def _ring(self, links: Mapping[tuple[int, int], CostModel]) -> tuple[float, float] | None:
        """Returns the mean latency, and the seconds a byte of the slowest link, of a ring in the measured order; None
        if the order is not measured."""
        from fusiond.transport.distance import ring_order, time_of

        nodes = sorted(self.membership.nodes)
        measured = all(pair in links for pair in combinations(nodes, 2))
        if len(nodes) < 2 or not measured or self.parts.settings.ring_order != "measured":
            return None
        slowest, around = time_of(ring_order(nodes, links), links)
        return around / len(nodes), slowest

    def start_failed(self, error: str) -> None:
        """Not all nodes are up in time."""
        self.ending.fail(error)
        self.ending.check_over()

    # --- its own description ------------------------------------------------------------------------------------------

    def figures(self, asked: wire.FiguresRequest) -> wire.Figures:
        """Returns the present figures of this node, as it was asked."""
        parts = self.parts
        return figures(asked, self.engine, parts.mesh, self.membership, self.ending.failure, parts.began)

    def identity(self) -> dict[str, object]:
        """Returns which daemon this is, and how it is, for `fusiond status`."""
        told = identity(self.config, self.parts.settings, self.membership, self.ending.failure, self.parts.began)
        views, links, relayed = self.losses.statistics(), self.starting.statistics(), self.relayed.statistics()
        return {**told, "views": views, "links": links, "relayed": relayed}


class WorkerDispatch:
    """One daemon's `WorkerEvents`.

    Args:
        formation: of which they are, with its other parts.
        links: the connections of those that have joined, by rank; kept here.
        tools: answers to tools.

    Attributes:
        handlers: of the messages of workers that have joined, and of tools.
    """

    def __init__(self, formation: Formation, links: dict[int, WorkerLink], tools: ToolDispatch) -> None:
        config = formation.config
        self._formation = formation
        self._number = formation.number if config.elastic else None
        self._is_over = False
        self._job = config.job
        self._host = config.topology.hosts[config.node]
        self._membership = formation.membership
        self._links = links
        self._effects = effects = formation.effects
        self._starting = formation.starting
        self._ending = formation.ending
        self._timeline = formation.parts.timeline
        self._relayed = formation.relayed
        self.handlers: dict[type[Any], Callable[..., None]] = {
            wire.Ping: lambda link, _: effects.workers.send(link, wire.Pong()),
            wire.StatisticsRequest: self._tell_statistics,
            wire.StartTimeline: self._start_timeline,
            wire.StopTimeline: self._stop_timeline,
            wire.RelayPort: self._relay_port,
            **tools.handlers(),
        }

    def engine_begins(self, engine: Engine) -> None:
        """Switches to the engine of a new membership epoch."""
        of_engine = engine.worker_handlers()

        def submit(link: WorkerLink, message: wire.Submit) -> None:
            self._timeline.submitted(message)
            of_engine[wire.Submit](link, message)

        self.handlers.update(of_engine)
        self.handlers[wire.Submit] = submit

    def _tell_statistics(self, link: WorkerLink, asked: wire.StatisticsRequest) -> None:
        assert link.rank is not None
        if asked.about == "traffic":
            told = dict(zip(("sent", "received"), self._effects.traffic(), strict=True))
            self._effects.workers.send(link, wire.Done(asked.handle, json.dumps(told).encode()))
        elif asked.about == "staleness":
            self._formation.engine.staleness(link.rank, asked.handle)
        else:
            self._formation.engine.codecs.statistics(link.rank, asked.handle)

    def end(self) -> None:
        """Ends this formation here: its workers are heard until they leave, without effect."""
        self._is_over = True
        self.handlers = {kind: _ignored for kind in self.handlers} | {wire.Ping: self.handlers[wire.Ping]}

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        refusal = not_ours(hello, self._job, self._number) or self._membership.may_join(hello.rank)
        if refusal or self._ending.failure:
            self._effects.workers.send(link, wire.JobFailed(self._ending.failure or refusal, hello.formation))
            return
        link.rank = hello.rank
        self._links[hello.rank] = link
        epoch = self._membership.epoch
        self._membership.join(hello.rank)
        if self._membership.epoch > epoch:
            self._formation.begin_epoch()
        _log.info("rank %d (pid %d) has joined", hello.rank, link.pid)
        if len(self._membership.joined) == len(self._membership.local):
            self._starting.report("joined")
        self._starting.check_up()

    def worker_left(self, rank: int, bye: wire.Bye) -> None:
        self._membership.left.add(rank)
        del self._links[rank]
        if self._is_over:
            return
        if bye.error:
            self._ending.worker_lost(rank, f"rank {rank} (host {self._host}) failed: {quoted(bye.error)}")
        else:
            self._ending.worker_departed(rank)
        self._ending.check_over()

    def worker_lost(self, rank: int, pid: int, why: str) -> None:
        del self._links[rank]
        if self._is_over:
            return
        self._ending.worker_lost(rank, f"rank {rank} (host {self._host}, pid {pid}) {why}")
        self._ending.check_over()

    def connection_ended(self) -> None:
        self._ending.check_over()

    def _start_timeline(self, link: WorkerLink, message: wire.StartTimeline) -> None:
        assert link.rank is not None
        self._timeline.start(link.rank, message.path, message.mark_cycles, self._tell_why(link.rank, message.handle))

    def _stop_timeline(self, link: WorkerLink, message: wire.StopTimeline) -> None:
        assert link.rank is not None
        self._timeline.stop(link.rank, self._tell_why(link.rank, message.handle))

    def _relay_port(self, link: WorkerLink, asked: wire.RelayPort) -> None:
        try:
            answer = str(self._relayed.port_for(asked.node, asked.port))
        except OSError as error:
            answer = f"no port of host {self._host} can lead to node {asked.node}: {error.strerror}"
        self._effects.workers.send(link, wire.Done(asked.handle, answer.encode()))

    def _tell_why(self, rank: int, handle: int) -> Callable[[str], None]:
        """Returns a callback that answers a rank with the reason why something cannot be done; empty if it is done."""
        return lambda why: self._effects.to_worker(rank, wire.Done(handle, why.encode()))


def _ignored(link: WorkerLink, message: wire.WorkerMessage) -> None:
    """Handles messages of a worker that does not know yet that its membership epoch is over."""
