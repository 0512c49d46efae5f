"""The daemon: joins the event loop, the local workers, the mesh and the engine.

Nothing is decided here about operations (`engine`), connections (`workers`, `mesh`), who is there (`membership`,
`formation`) or when it all ends (`job_end`); this is the thin shell that makes these parts and joins them: those
of the present formation (`formation`), and those that outlive it.
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.traceback_format import quoted
from fusion_rt.host import bootstrap
from fusion_rt.host.cores import cores, kernel_threads
from fusion_rt.host.private_files import read_secret
from fusion_rt.settings import Settings
from fusion_rt.tracing import resident_memory
from fusion_rt.tracing.format import Kind
from fusiond.app.daemon_parts import DaemonParts, Heard
from fusiond.app.formation import Formation
from fusiond.core.tracing import Trace
from fusiond.host.file_work import FileWork
from fusiond.host.loop import EventLoop
from fusiond.host.process import (
    allow_many_descriptors,
    exempt_from_collections,
    ignore_float_errors,
    keep_freed_memory,
)
from fusiond.host.runtime_directory import Directory, listen
from fusiond.host.signals import StandardInput, tell_starter, watch_signals
from fusiond.host.watchdog import Watchdog
from fusiond.timeline.controller import TimelineController
from fusiond.transport.mesh import Mesh
from fusiond.transport.probe import LinkProbe
from fusiond.workers.stack_reader import StackReader

if TYPE_CHECKING:
    from fusiond.host.thread_pool import KernelPool
    from fusiond.live.metrics import Metrics

_log = logging.getLogger("fusiond")
_PLANS = 5.0  # seconds between records of the active plans
_TICK = 1.0  # seconds between looks at waits that are too long, and records of memory


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
        self._metrics: Metrics | None = None
        loop = self._loop = EventLoop()
        self._mesh: Mesh | None = None
        self._lanes: KernelPool | None = None
        if config.elastic or len(config.topology.hosts) > 1:
            self._mesh = Mesh(loop, config, settings, self, self._trace)
        timeline = TimelineController(
            loop,
            self._trace,
            settings,
            config.topology,
            config.node,
            lambda: self._formation.engine.record_plans(),
            lambda why: _log.warning("%s", why),
        )
        self._parts = DaemonParts(
            settings,
            loop,
            self._trace,
            self._mesh,
            StackReader(loop),
            timeline,
            FileWork(loop),
            Heard(),
            LinkProbe(loop.clock),
            time.monotonic(),
            self,
        )
        self._formation = Formation(config, self._parts)
        # Before this daemon is announced: workers that do not find the socket then know that it is gone.
        self._listener = listen(self._directory.socket_path)

    def endpoint(self) -> bootstrap.Endpoint:
        """Returns the endpoint at which peers reach this daemon."""
        if self._mesh is None:
            return bootstrap.Endpoint(self._config.node, os.getpid(), self._config.address, 0, 0, "")
        return self._mesh.endpoint(os.getpid())

    def run(self) -> int:
        """Serves until the job is over. Returns the exit code: 0, or 1 when the job failed.

        Raises:
            FusionError: the lines on standard input cannot be used.
        """
        # Imported only now: Numba takes half a second, which the workers meanwhile spend importing torch.
        from fusiond.host.thread_pool import LANES_ABOVE, KernelPool, prepare_kernels
        from fusiond.workers.connections import Workers

        allow_many_descriptors()
        ignore_float_errors()
        keep_freed_memory()
        threads = self._settings.kernel_threads or kernel_threads(cores())
        self._parts.pool = KernelPool(self._loop, threads)
        if self._mesh is not None and threads > LANES_ABOVE:
            self._lanes = KernelPool(self._loop, threads, "lane")
            self._mesh.work_on(self._lanes.run)
        self._directory.show_stacks()
        self._parts.workers = Workers(self._loop, self._listener, self._formation.worker_dispatch)
        self._formation.begin()
        prepare_kernels(
            self._parts.pool,
            self._settings.compression if self._mesh is not None else "dense",
            ["float32"],
            self._cannot_reduce,
        )
        watchdog = Watchdog(self._loop, self._settings.heartbeat_timeout / 2)
        self._loop.call_every(_TICK, self._tick)
        self._loop.call_every(_PLANS, lambda: self._formation.engine.record_plans())
        if self._settings.snapshot_every:
            self._loop.call_every(self._settings.snapshot_every, lambda: self._formation.engine.snapshots.take())
        if not self._config.elastic:
            self._formation.await_all()
        self._serve_metrics()
        exempt_from_collections()
        try:
            watch_signals(self._loop, self)
            if self._config.attached or self._mesh is not None:
                elastic = bootstrap.Reform | bootstrap.Abandon | bootstrap.Knock
                orders = elastic if self._config.elastic else bootstrap.PeerTable
                StandardInput(self._loop, self._stdin, self._stdin_start, orders | bootstrap.Farewell, self)
            self._loop.run()
        except Exception as error:  # everybody gets to read it, instead of a daemon that is just gone
            said = str(error) if isinstance(error, FusionError) else quoted(traceback.format_exc())
            self.fail(f"the daemon of host {self._host} failed: {said}")
            self._parts.pool.close()  # after which no thread writes into the memory of workers
            self._formation.ending.tell_workers()
            if isinstance(error, FusionError):
                raise
        finally:
            watchdog.close()
            self._close()
        return self._formation.ending.exit_code

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
                self,
                token,
            )
        except FusionError as error:
            _log.warning("there are no metrics of node %d (host %s): %s", self._config.node, self._host, error)
        else:
            _log.info("metrics: %s", self._metrics.url)

    # --- formations ---------------------------------------------------------------------------------------------------

    def fail(self, error: str) -> None:
        """Fails the job, or in an elastic one this formation."""
        self._formation.ending.fail(error)

    def _cannot_reduce(self, error: BaseException | str) -> None:
        self.fail(f"the daemon of host {self._host} cannot reduce: {error}")
        if self._config.elastic:  # in no formation
            self._loop.stop()

    def _reform(self, order: bootstrap.Reform) -> None:
        """Goes over to another formation, whatever becomes of the one before, which may still be coming up."""
        assert self._mesh is not None
        if order.number <= self._formation.number:
            _log.warning("told to begin membership epoch %d in epoch %d", order.number, self._formation.number)
            return
        self._formation.end()
        config = msgspec.structs.replace(self._config, topology=order.topology)
        self._formation = formation = Formation(config, self._parts, order.number, order.absent)
        formation.begin()
        self._parts.workers.events = formation.worker_dispatch
        self._parts.timeline.reform(order.topology)
        if self._metrics is not None:
            self._metrics.topology = order.topology
        dropped, given_up = self._mesh.reform(order.topology.hosts, order.peers)
        for node in dropped:
            self._parts.heard.forget(node)
        for peer in order.peers:
            self._parts.probe.admit(peer.node, peer.public_key)
        tell_starter(bootstrap.Reformed(order.number))
        formation.await_all()
        for node in given_up:
            host = order.topology.hosts[node]
            self.fail(
                f"node {node} (host {host}) was declared dead before by host {self._host}; it needs another daemon"
            )

    def formation_failed(self, number: int, reason: str, unreached: Sequence[int]) -> None:
        """A formation cannot go on."""
        if self._config.elastic and self._mesh is not None and number:
            tell_starter(bootstrap.EpochOver(number, (*self._mesh.lost, *unreached), reason))

    # --- coming up and ending -----------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._trace.record(Kind.MEMORY, "", resident_memory.nbytes())
        if not self._formation.engine.idle:
            self._formation.engine.tick()

    def _close(self) -> None:
        self._parts.workers.close()
        self._formation.relayed.close()
        if self._mesh is not None:
            self._mesh.close()
        if self._lanes is not None:
            self._lanes.close()
        self._parts.pool.close()
        self._parts.files.close()
        self._parts.stacks.close()
        self._parts.timeline.close()
        if self._metrics is not None:  # when no process waits for this daemon any more
            self._metrics.close()
        self._loop.close()
        self._trace.close()
        self._directory.release()

    # --- ProcessEvents ------------------------------------------------------------------------------------------------

    def signalled(self, name: str) -> None:
        self._formation.ending.signalled(name)

    def ordered(self, order: bootstrap.Order) -> None:
        match order:
            case bootstrap.PeerTable():
                if self._mesh is None:
                    raise WireError("a table of peers came in a job of one node")
                self._mesh.connect(order)
            case bootstrap.Reform():
                self._reform(order)
            case bootstrap.Farewell():
                self._formation.ending.farewell()
            case bootstrap.Abandon(number, reason):
                if number == self._formation.number:
                    self.fail(reason)
            case bootstrap.Knock():
                tell_starter(bootstrap.Awake())

    def starter_gone(self) -> None:
        if self._config.attached:
            self._formation.ending.starter_gone()

    # --- MeshEvents ---------------------------------------------------------------------------------------------------

    def mesh_up(self) -> None:
        self._formation.mesh_up()

    def peer_lost(self, node: int, why: str) -> None:
        self._formation.peer_lost(node, why)

    # --- its own description ------------------------------------------------------------------------------------------

    def figures(self, asked: wire.FiguresRequest) -> wire.Figures:
        """Returns the present figures of this node, as it was asked."""
        return self._formation.figures(asked)

    def statistics(self) -> dict[str, object]:
        """Returns the data of `fusiond status`: identity, state, resources, and the statistics of every part."""
        return {
            **self._formation.identity(),
            "engine": self._formation.engine.statistics(),
            "workers": self._parts.workers.statistics(),
            "mesh": None if self._mesh is None else self._mesh.statistics(),
            "kernel_pool": self._parts.pool.statistics(),
            "loop": {**self._loop.statistics(), "longest": self._loop.longest},
            "metrics": "" if self._metrics is None else self._metrics.address,
        }
