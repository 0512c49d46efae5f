"""The parts of a daemon that belong to one formation: one set of nodes and ranks.

A job has one formation, from its beginning to its end; an elastic job goes from one to the next, as its launcher orders
(`bootstrap.Reform`). Then everything here is made anew, and what outlives that, a `Shell`, is handed on: the loop, the
mesh, the connections of workers, the measured links. A formation that is over does nothing any more, whatever timers,
threads or late messages would still have it do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec

from fusion_rt import wire
from fusion_rt.host import bootstrap
from fusion_rt.settings import Settings
from fusion_rt.tracing import files
from fusiond.app.daemon_effects import DaemonEffects
from fusiond.app.ending import Ending
from fusiond.app.peer_dispatch import Heard, PeerDispatch
from fusiond.app.ring_files import RingFiles
from fusiond.app.status import figures, identity
from fusiond.app.tool_dispatch import ToolDispatch
from fusiond.app.worker_dispatch import WorkerDispatch
from fusiond.core.tracing import Trace
from fusiond.host.file_work import FileWork
from fusiond.host.loop import EventLoop
from fusiond.live.figures import Gathering
from fusiond.membership.epoch import Membership
from fusiond.membership.startup import Starting
from fusiond.timeline.controller import TimelineController
from fusiond.transport.mesh import Mesh
from fusiond.transport.probe import LinkProbe
from fusiond.workers.relayed_ports import RelayedPorts
from fusiond.workers.stack_reader import StackReader

if TYPE_CHECKING:
    from fusiond.buckets.plans import Memory
    from fusiond.collectives.cost import CostModel
    from fusiond.engine.engine import Engine
    from fusiond.host.thread_pool import KernelPool
    from fusiond.shards import KeptShards
    from fusiond.workers.connections import WorkerLink, Workers

_log = logging.getLogger("fusiond")
_PATIENCE = 3  # workers wait so many times as long for this daemon as its peers do, who know better


@dataclass
class Shell:
    """The parts of a daemon that outlive its formations.

    Attributes:
        mesh: None in a job of one node that stays one.
        heard: the peers' membership epochs.
        probe: knows the links.
        began: when the daemon began (s, by the monotonic clock).
        statistics: returns the data of `fusiond status`.
        failed: called with a formation's number, the reason why it cannot go on, and the nodes that never came up.
        workers, pool: once the daemon runs.
        memory: what codecs remember, on the way from one formation to the next.
        kept: shards on that way; None before there is an engine.
    """

    settings: Settings
    loop: EventLoop
    trace: Trace
    mesh: Mesh | None
    stacks: StackReader
    timeline: TimelineController
    files: FileWork
    heard: Heard
    probe: LinkProbe
    began: float
    statistics: Callable[[], dict[str, object]]
    failed: Callable[[int, str, Sequence[int]], None]

    def __post_init__(self) -> None:
        self.workers: Workers
        self.pool: KernelPool
        self.memory: Memory = {}
        self.kept: KeptShards | None = None


class Formation:
    """One formation of a daemon.

    Args:
        config: this node's place, and the topology.
        shell: the rest of the daemon.
        number: of the formation; 0 of a job that is not elastic, and of one whose first `Reform` has not come.
        absent: nodes that take no part.

    Attributes:
        engine: of the present membership epoch, once `begin` was called.
        membership, ending, losses, starting, peer_dispatch, worker_dispatch: its parts.
    """

    def __init__(
        self, config: bootstrap.DaemonConfig, shell: Shell, number: int = 0, absent: Collection[int] = ()
    ) -> None:
        topology, node, settings, loop = config.topology, config.node, shell.settings, shell.loop
        self.engine: Engine
        self.config = config
        self.number = number
        self._absent = absent
        self._is_over = False
        self._shell = shell
        self._links: dict[int, WorkerLink] = {}  # by rank
        self.membership = Membership(topology, node, absent, wire.first_epoch(number))
        self.membership.mesh_up = shell.mesh is None
        self.effects = DaemonEffects(
            loop, shell.mesh, shell.stacks, self._links, shell.files, lambda: self.starting.report("first_done")
        )
        self.ending = Ending(
            config,
            settings,
            self.membership,
            loop,
            shell.mesh,
            self.effects,
            self._links,
            lambda: self.engine,
            self._next_epoch,
            absent,
            number,
            self._failed,
            shell.trace,
        )
        self.losses = self.ending.losses
        self.starting = Starting(
            config, settings, self.membership, loop, shell.mesh, shell.probe, self._started, self._start_failed
        )
        gathering = Gathering(topology, node, self, self.effects)
        directory = files.directory_of(settings.trace_root(), config.job)
        rings = RingFiles(directory, topology, node, self.effects)
        self.relayed = RelayedPorts(loop, node, lambda to, message: self.effects.to_node(to, message))
        self.peer_dispatch = PeerDispatch(
            topology,
            self.membership,
            self.losses,
            self.starting,
            loop,
            self.ending,
            rings.handlers(),
            {**gathering.handlers(), **self.relayed.handlers()},
            number,
            shell.heard,
        )
        tools = ToolDispatch(config, self.membership, gathering, rings, self.effects, self.ending, shell.statistics)
        self.worker_dispatch = WorkerDispatch(
            config,
            number,
            self.membership,
            self._links,
            self.effects,
            self.starting,
            self.ending,
            shell.timeline,
            tools,
            self.relayed,
            self._begin_epoch,
        )

    def begin(self) -> None:
        """Begins to take part, with an empty engine. To be called once the daemon runs."""
        self.effects.begin(self._shell.workers, self._shell.pool, self.ending.fail)
        self._make_engine()
        if self._shell.mesh is not None:
            self._shell.mesh.take_with(self.peer_dispatch.receive)

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
        self.engine.when_quiet(self.engine.remember)
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

    def _next_epoch(self) -> None:
        """Begins a membership epoch that awaits no worker of this node: the last one is lost, or there is none."""
        self._begin_epoch()
        self.starting.check_up()

    def _begin_epoch(self) -> None:
        """Begins a membership epoch once all local workers (where there are none: all workers) have left and come back.
        Operations of the epoch before fail."""
        self.engine.fail_job("its ranks have left the job")
        if self._shell.mesh is not None:
            self._shell.mesh.hurry()  # that these ranks have left is said before it is said that they are back
        self._make_engine()
        self.losses.epoch_begins(self.membership.epoch, self.engine)

    def _make_engine(self) -> None:
        """Makes the engine of a membership epoch, which gets the messages of peers and workers from now on."""
        from fusiond.engine.engine import Engine
        from fusiond.shards import KeptShards

        self._shell.kept = self._shell.kept or KeptShards()
        self.engine = Engine(
            self.config.topology,
            self.config.node,
            self._shell.settings,
            self.effects,
            self.membership.epoch,
            self._shell.trace,
            self._absent,
            self._shell.memory if self.config.elastic else None,
            self._shell.kept,
        )
        self.peer_dispatch.engine_begins(self.engine)
        self.worker_dispatch.engine_begins(self.engine)

    def _failed(self, reason: str) -> None:
        if not self._is_over:
            self._shell.failed(self.number, reason, self.starting.unreached())

    # --- coming up ----------------------------------------------------------------------------------------------------

    def _started(self, start: wire.Start, seconds_per_byte: Mapping[int, float]) -> None:
        from fusiond.collectives.cost import CostModel

        settings, mesh = self._shell.settings, self._shell.mesh
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
        if len(nodes) < 2 or not measured or self._shell.settings.ring_order != "measured":
            return None
        slowest, around = time_of(ring_order(nodes, links), links)
        return around / len(nodes), slowest

    def _start_failed(self, error: str) -> None:
        self.ending.fail(error)
        self.ending.check_over()

    # --- what it says about itself ------------------------------------------------------------------------------------

    def figures(self, serial: int = 0) -> wire.Figures:
        """Returns the present figures of this node; `serial`: of the question."""
        shell = self._shell
        return figures(serial, self.engine, shell.mesh, self.membership, self.ending.failure, shell.began)

    def identity(self) -> dict[str, object]:
        """Returns which daemon this is, and how it is, for `fusiond status`."""
        told = identity(self.config, self._shell.settings, self.membership, self.ending.failure, self._shell.began)
        views, links, relayed = self.losses.statistics(), self.starting.statistics(), self.relayed.statistics()
        return {**told, "views": views, "links": links, "relayed": relayed}
