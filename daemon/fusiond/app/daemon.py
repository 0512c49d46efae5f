"""The daemon: joins the event loop, the local workers, the mesh and the engine.

Nothing is decided here about operations (`engine`), connections (`workers`, `mesh`), who is there (`membership`,
`worker_dispatch`) or when it all ends (`ending`); this is the thin shell that makes these parts and joins them.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.traceback_format import quoted
from fusion_rt.host import bootstrap
from fusion_rt.host.private_files import read_secret
from fusion_rt.settings import Settings
from fusion_rt.tracing import files
from fusiond.app.daemon_effects import DaemonEffects
from fusiond.app.ending import Ending
from fusiond.app.peer_dispatch import PeerDispatch
from fusiond.app.ring_files import RingFiles
from fusiond.app.status import figures, identity
from fusiond.app.tool_dispatch import ToolDispatch
from fusiond.app.worker_dispatch import WorkerDispatch
from fusiond.core.tracing import Trace
from fusiond.host.loop import EventLoop
from fusiond.host.process import allow_many_descriptors, ignore_float_errors, keep_freed_memory
from fusiond.host.runtime_directory import Directory, listen
from fusiond.host.signals import StandardInput, watch_signals
from fusiond.host.watchdog import Watchdog
from fusiond.live import figures as live
from fusiond.membership.epoch import Membership
from fusiond.membership.startup import Starting
from fusiond.timeline.controller import TimelineController
from fusiond.transport.mesh import Mesh
from fusiond.workers.stack_reader import StackReader

if TYPE_CHECKING:
    from fusiond.engine.engine import Engine
    from fusiond.host.thread_pool import KernelPool
    from fusiond.live.metrics import Metrics
    from fusiond.workers.connections import WorkerLink, Workers

_log = logging.getLogger("fusiond")
_PLANS = 5.0  # seconds between records of the active plans
_PATIENCE = 3  # workers wait so many times as long for this daemon as its peers do, who know better
_TICK = 1.0  # seconds between looks at what has waited too long


class Daemon:
    """One node's daemon.

    Args:
        config: this node's place in the job.
        settings: every knob.
        stdin: descriptor on which the peers' table comes, and whose end means that the starter is gone.
        stdin_start: bytes read from it beyond the config's line.

    Raises:
        FusionError: it cannot come up; the sentence says why.
    """

    def __init__(
        self, config: bootstrap.DaemonConfig, settings: Settings, stdin: int = 0, stdin_start: bytes = b""
    ) -> None:
        self._config = config
        self._settings = settings
        self._stdin = stdin
        self._stdin_start = stdin_start
        self._host = config.topology.hosts[config.node]
        config.topology.homes(settings.shard_hosts)  # they have to be there
        self._directory = Directory(settings.runtime_root(), config)
        self._trace = Trace(config, settings)
        self._began = time.monotonic()
        self._engine: Engine
        self._workers: Workers
        self._pool: KernelPool
        self._metrics: Metrics | None = None
        self._links: dict[int, WorkerLink] = {}  # by rank
        self._membership = Membership(config.topology, config.node)
        self._loop = EventLoop()
        self._stacks = StackReader(self._loop)
        self._mesh: Mesh | None = None
        if len(config.topology.hosts) > 1:
            self._mesh = Mesh(
                self._loop,
                config,
                settings,
                self._mesh_up,
                lambda node, why: self._ending.peer_lost(node, why),
                self._trace,
            )
        self._timeline = TimelineController(
            self._loop,
            self._trace,
            settings,
            config.topology,
            config.node,
            lambda: self._engine.record_plans(),
            lambda why: _log.warning("%s", why),
        )
        self._effects = DaemonEffects(
            self._loop, self._mesh, self._stacks, self._links, lambda: self._starting.report("first_done")
        )
        self._ending = Ending(
            config,
            settings,
            self._membership,
            self._loop,
            self._mesh,
            self._effects,
            self._links,
            self.current_engine,
            self._next_epoch,
        )
        self._losses = self._ending.losses
        self._starting = Starting(
            config, settings, self._membership, self._loop, self._mesh, self._started, self._start_failed
        )
        self._gathering = live.Gathering(
            config.topology, config.node, self._figures, self._effects.to_node, self._loop.call_later
        )
        self._rings = RingFiles(
            files.directory_of(settings.trace_root(), config.job),
            config.topology,
            config.node,
            self._effects.to_node,
            self._loop.call_later,
        )
        self._peer_dispatch = PeerDispatch(
            config.topology,
            self._membership,
            self._losses,
            self._starting,
            self._loop,
            self._ending,
            self._rings.handlers(),
            self._gathering.handlers(),
        )
        if self._mesh is not None:
            self._mesh.take_with(self._peer_dispatch.receive)
        tools = ToolDispatch(
            config, self._membership, self._gathering, self._rings, self._effects, self._ending, self.statistics
        )
        self._worker_dispatch = WorkerDispatch(
            config,
            self._membership,
            self._links,
            self._effects,
            self._starting,
            self._ending,
            self._timeline,
            tools,
            self._begin_epoch,
        )
        # Before anybody is told of this daemon: workers that do not find the socket then know that it is gone.
        self._listener = listen(self._directory.socket_path)

    def endpoint(self) -> bootstrap.Endpoint:
        """Returns the endpoint at which peers reach this daemon."""
        if self._mesh is None:
            return bootstrap.Endpoint(self._config.node, os.getpid(), self._config.address, 0, 0, "")
        return self._mesh.endpoint(os.getpid())

    def run(self) -> int:
        """Serves until the job is over. Returns the exit code: 0, or 1 when the job failed.

        Raises:
            FusionError: what comes on standard input cannot be used.
        """
        # Imported only now: Numba takes half a second, which the workers meanwhile spend importing torch.
        from fusiond.host.thread_pool import KernelPool, prepare_kernels
        from fusiond.workers.connections import Workers

        allow_many_descriptors()
        ignore_float_errors()
        keep_freed_memory()
        self._pool = self._effects.pool = KernelPool(self._loop, self._settings.kernel_threads)
        self._directory.show_stacks()
        self._make_engine()
        self._workers = self._effects.workers = Workers(self._loop, self._listener, self._worker_dispatch)
        prepare_kernels(
            self._pool,
            self._settings.compression if self._mesh is not None else "dense",
            ["float32"],
            lambda error: self.fail(f"the daemon of host {self._host} cannot reduce: {error}"),
        )
        watchdog = Watchdog(self._loop, self._settings.heartbeat_timeout / 2)
        self._loop.call_every(_TICK, self._tick)
        self._loop.call_every(_PLANS, lambda: self._engine.record_plans())
        if self._settings.snapshot_every:
            self._loop.call_every(self._settings.snapshot_every, lambda: self._engine.snapshots.take())
        self._starting.begin()
        self._serve_metrics()
        try:
            watch_signals(self._loop, self)
            if self._config.attached or self._mesh is not None:
                StandardInput(self._loop, self._stdin, self._stdin_start, self)
            if not self._membership.local:
                self._starting.report("joined")
            self._loop.run()
        except Exception as error:  # everybody gets to read it, instead of a daemon that is just gone
            said = str(error) if isinstance(error, FusionError) else quoted(traceback.format_exc())
            self.fail(f"the daemon of host {self._host} failed: {said}")
            self._pool.close()  # after which no thread writes into the memory of workers
            self._ending.tell_workers()
            if isinstance(error, FusionError):
                raise
        finally:
            watchdog.close()
            self._close()
        return self._ending.exit_code

    def _serve_metrics(self) -> None:
        """Serves metrics, if they are wanted. If that fails the job goes on without them."""
        if not self._settings.metrics_port:
            return
        from fusiond.live.metrics import Metrics

        try:
            file = self._settings.metrics_token_file
            token = read_secret(file, "FUSION_METRICS_TOKEN_FILE").decode("ascii", "replace") if file else ""
            self._metrics = Metrics(
                self._loop,
                self._settings.metrics_port,
                self._config.job,
                self._config.topology,
                self._config.node,
                lambda: self._figures(0),
                token,
            )
        except FusionError as error:
            _log.warning("there are no metrics of node %d (host %s): %s", self._config.node, self._host, error)
        else:
            _log.info("metrics: %s", self._metrics.url)

    # --- mesh ---------------------------------------------------------------------------------------------------------

    def _mesh_up(self) -> None:
        self._membership.mesh_up = True
        self._starting.report("connected")
        self._starting.check_up()

    # --- epochs -------------------------------------------------------------------------------------------------------

    def current_engine(self) -> Engine:
        return self._engine

    def fail(self, error: str) -> None:
        self._ending.fail(error)

    def _next_epoch(self) -> None:
        """Begins a membership epoch that awaits no worker of this node: the last one is lost, or there is none."""
        self._begin_epoch()
        self._starting.check_up()

    def _begin_epoch(self) -> None:
        """Begins a membership epoch once all local workers (where there are none: all workers) have left and come back.
        Operations of the epoch before fail."""
        self._engine.fail_job("its ranks have left the job")
        if self._mesh is not None:
            self._mesh.hurry()  # that these ranks have left is said before it is said that they are back
        self._make_engine()
        self._losses.epoch_begins(self._membership.epoch, self._engine)

    # --- coming up and ending -----------------------------------------------------------------------------------------

    def _make_engine(self) -> None:
        """Makes the engine of a membership epoch, which gets the messages of peers and workers from now on."""
        from fusiond.engine.engine import Engine

        config = self._config
        self._engine = Engine(
            config.topology,
            config.node,
            self._settings,
            self._effects,
            self.fail,
            self._membership.epoch,
            self._trace,
        )
        self._peer_dispatch.engine_begins(self._engine)
        self._worker_dispatch.engine_begins(self._engine)

    def _started(self, start: wire.Start, seconds_per_byte: Mapping[int, float]) -> None:
        from fusiond.collectives.cost import CostModel

        cost = CostModel(start.latency, start.seconds_per_byte)
        self._engine.measured(cost, CostModel(start.route_latency, start.route_seconds_per_byte))
        if self._mesh is not None:
            self._mesh.limit(cost.link_credit(self._settings.link_credit), cost.acknowledged_bytes())
        if self._engine.coordinator is not None:
            self._engine.coordinator.seconds_per_byte = dict(seconds_per_byte)
        welcome = wire.Welcome(
            self._config.topology,
            self._config.node,
            self._settings.fusion_threshold,
            self._settings.algorithm,
            self._settings.compression,
            self._membership.epoch,
            *((start.latency, start.seconds_per_byte) if self._mesh is not None else (0.0, 0.0)),
            patience=_PATIENCE * self._settings.heartbeat_timeout,
        )
        for link in self._links.values():
            self._workers.send(link, msgspec.structs.replace(welcome, by_address=link.process is not None))

    def _start_failed(self, error: str) -> None:
        self.fail(error)
        self._ending.check_over()

    def _tick(self) -> None:
        if not self._engine.idle:
            self._engine.tick()

    def _close(self) -> None:
        self._workers.close()
        if self._mesh is not None:
            self._mesh.close()
        self._pool.close()
        self._effects.files.close()
        self._stacks.close()
        self._timeline.close()
        if self._metrics is not None:  # when nobody waits for this daemon any more
            self._metrics.close()
        self._loop.close()
        self._trace.close()
        self._directory.release()

    # --- ProcessEvents ------------------------------------------------------------------------------------------------

    def signalled(self, name: str) -> None:
        self._ending.signalled(name)

    def peers_known(self, table: bootstrap.PeerTable) -> None:
        if self._mesh is None:
            raise WireError("a table of peers came in a job of one node")
        self._mesh.connect(table)

    def starter_gone(self) -> None:
        if self._config.attached:
            self._ending.starter_gone()

    # --- what it says about itself ------------------------------------------------------------------------------------

    def _figures(self, serial: int) -> wire.Figures:
        return figures(serial, self._engine, self._mesh, self._membership, self._ending.failure, self._began)

    def statistics(self) -> dict[str, object]:
        """Returns the data of `fusiond status`: identity, state, resources, and the statistics of every part."""
        return {
            **identity(self._config, self._settings, self._membership, self._ending.failure, self._began),
            "views": self._losses.statistics(),
            "engine": self._engine.statistics(),
            "workers": self._workers.statistics(),
            "mesh": None if self._mesh is None else self._mesh.statistics(),
            "kernel_pool": self._pool.statistics(),
            "loop": self._loop.statistics(),
            "metrics": "" if self._metrics is None else self._metrics.address,
        }
