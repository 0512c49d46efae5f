"""The daemon: joins the event loop, the local workers, the mesh and the engine, and decides when it all ends.

Nothing is decided here about operations (`engine`), connections (`workers`, `mesh`) or who is there (`membership`);
this is the thin shell that carries events from one to another.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fusion_rt import bootstrap, trace_files, wire
from fusion_rt.errors import FusionError, WireError
from fusion_rt.quoting import quoted
from fusion_rt.settings import Settings
from fusion_rt.trace import Instrument, Owner, open_recorder
from fusion_rt.trace_format import Role
from fusiond.acting import Acting
from fusiond.asked import ask
from fusiond.controls import StandardInput, watch_signals
from fusiond.directory import Directory, listen
from fusiond.from_peers import FromPeers
from fusiond.live import figures as live
from fusiond.loop import EventLoop
from fusiond.losses import Losses
from fusiond.membership import Membership, not_ours
from fusiond.mesh import Mesh
from fusiond.process import allow_many_descriptors, ignore_float_errors, keep_freed_memory
from fusiond.ring_files import RingFiles
from fusiond.stacks import StackReader
from fusiond.starting import Starting
from fusiond.status import figures, identity, state_of
from fusiond.survey import Survey, document, fitting
from fusiond.timeline.desk import Desk
from fusiond.timeline.instrument import Tee
from fusiond.watchdog import Watchdog

if TYPE_CHECKING:
    from fusiond.engine import Engine
    from fusiond.kernel_pool import KernelPool
    from fusiond.live.metrics import Metrics
    from fusiond.workers import WorkerLink, Workers

_log = logging.getLogger("fusiond")
_PLANS = 5.0  # seconds between records of the plans in force
_TICK = 1.0  # seconds between looks at what has waited too long
_FREED = 0.2  # seconds after a failure in which what kernels and connections still had in hand is done with
_LAST_WORDS = 5.0  # seconds that workers of a failed job get to read why, when nobody ends the daemon before


class Daemon:
    """One node's daemon.

    Args:
        config: who this node is.
        settings: every knob.
        stdin: descriptor on which the peers' table comes, and whose end means that the starter is gone.
        stdin_start: what has been read from it beyond the config's line.

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
        self._failure = ""
        self._stopped = False  # somebody has asked for the end
        config.topology.homes(settings.shard_hosts)  # they have to be there
        self._ended: set[int] = set()  # peers that have ended because their workers were done
        self._exit_code = 0
        self._directory = Directory(settings.runtime_root(), config)
        self._trace = Tee(self._open_recorder())
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
                lambda node, message, payload: self._heard(node, message, payload),
                self._mesh_up,
                self._peer_lost,
                self._trace,
            )
        self._timeline = Desk(
            self._loop, self._trace, settings, config.topology, config.node, lambda why: _log.warning("%s", why)
        )
        self._acting = Acting(
            self._loop, self._mesh, self._stacks, self._links, lambda: self._starting.report("first_done")
        )
        self._acting.planned = self._trace.planned
        self._losses = Losses(config.topology, config.node, settings.tolerate_losses, self._membership, self)
        self._starting = Starting(
            config, settings, self._membership, self._loop, self._mesh, self._started, self._start_failed
        )
        self._gathering = live.Gathering(
            config.topology, config.node, self._figures, self.to_node, self._loop.call_later
        )
        self._rings = RingFiles(
            trace_files.directory_of(settings.trace_root(), config.job),
            config.topology,
            config.node,
            self.to_node,
            self._loop.call_later,
        )
        self._from_peers = FromPeers(
            config.topology, self._membership, self._losses, self._starting, self._gathering, self._loop, self
        )
        self._engine: Engine
        self._workers: Workers
        self._pool: KernelPool
        self._metrics: Metrics | None = None
        self._began = time.monotonic()
        # Before anybody is told of this daemon: workers that do not find the socket then know that it is gone.
        self._listener = listen(self._directory.socket_path)

    def _open_recorder(self) -> Instrument:
        config, settings = self._config, self._settings
        try:
            trace_files.begin_job(settings.trace_root(), config.job, settings.trace_jobs)
        except OSError as error:
            _log.warning("records of earlier jobs in %s cannot be removed: %s", settings.trace_root(), error.strerror)
        owner = Owner(config.job, Role.DAEMON, config.node, config.node, len(config.topology.hosts))
        return open_recorder(settings, owner, _log.warning)

    def endpoint(self) -> bootstrap.Endpoint:
        """Where peers reach this daemon."""
        if self._mesh is None:
            return bootstrap.Endpoint(self._config.node, os.getpid(), self._config.address, 0, 0, "")
        return self._mesh.endpoint(os.getpid())

    def run(self) -> int:
        """Serves until the job is over. Returns the exit code: 0, or 1 when the job failed.

        Raises:
            FusionError: what comes on standard input cannot be used.
        """
        # Imported only now: Numba takes half a second, which the workers meanwhile spend importing torch.
        from fusiond.kernel_pool import KernelPool, prepare_kernels
        from fusiond.workers import Workers

        allow_many_descriptors()
        ignore_float_errors()
        keep_freed_memory()
        self._pool = self._acting.pool = KernelPool(self._loop, self._settings.kernel_threads)
        self._directory.show_stacks()
        self._engine = self._make_engine()
        self._workers = self._acting.workers = Workers(self._loop, self._listener, self)
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
        except FusionError:
            raise
        except Exception:  # a bug here: everybody gets to read it, instead of a daemon that is just gone
            self.fail(f"the daemon of host {self._host} failed: {quoted(traceback.format_exc())}")
        finally:
            watchdog.close()
            self._close()
        return self._exit_code

    def _serve_metrics(self) -> None:
        """A job is worth more than its metrics: it goes on without them where they cannot be had."""
        if not self._settings.metrics_port:
            return
        from fusiond.live.metrics import Metrics

        try:
            self._metrics = Metrics(
                self._loop,
                self._settings.metrics_port,
                self._config.job,
                self._config.topology,
                self._config.node,
                lambda: self._figures(0),
            )
        except FusionError as error:
            _log.warning("there are no metrics of node %d (host %s): %s", self._config.node, self._host, error)
        else:
            _log.info("metrics: %s", self._metrics.url)

    # --- workers' Handler ---------------------------------------------------------------------------------------------

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        refusal = not_ours(hello, self._config.job) or self._membership.may_join(hello.rank)
        if refusal or self._failure:
            self._workers.send(link, wire.JobFailed(self._failure or refusal))
            return
        link.rank = hello.rank
        self._links[hello.rank] = link
        epoch = self._membership.epoch
        self._membership.join(hello.rank)
        if self._membership.epoch > epoch:
            self.begin_epoch()
        _log.info("rank %d (pid %d) has joined", hello.rank, link.pid)
        if len(self._membership.joined) == len(self._membership.local):
            self._starting.report("joined")
        self._starting.check_up()

    def worker_message(self, rank: int, link: WorkerLink, message: wire.WorkerMessage) -> None:
        if isinstance(message, wire.Bye):
            self._worker_said_bye(rank, message.error)
        elif isinstance(message, (wire.StartTimeline, wire.StopTimeline)):
            self._timeline_asked(rank, message)
        else:
            if isinstance(message, wire.Submit):
                self._trace.submitted(message)
            ask(self._engine, rank, link, message)

    def _timeline_asked(self, rank: int, message: wire.StartTimeline | wire.StopTimeline) -> None:
        def then(why: str) -> None:
            self._acting.to_worker(rank, wire.Done(message.handle, why.encode()))

        if isinstance(message, wire.StartTimeline):
            self._timeline.start(rank, message.path, message.mark_cycles, then)
        else:
            self._timeline.stop(rank, then)

    def worker_left(self, rank: int, pid: int, why: str) -> None:
        del self._links[rank]
        self._lose_rank(rank, f"rank {rank} (host {self._host}, pid {pid}) {why}")
        self._check_over()

    def _lose_rank(self, rank: int, error: str) -> None:
        """A worker has failed: the job goes on without it, or fails."""
        self._losses.worker_lost(rank, error)
        self._loop.call_later(_FREED, self._free_memory)

    def _free_memory(self) -> None:
        """Lets go of memory of workers that only what has failed still refers to: operations are cycles of references,
        and a daemon that has nothing to do would keep them, and with them the memory, for ever."""
        gc.collect()

    def connection_ended(self) -> None:
        self._check_over()

    def tool_message(self, link: WorkerLink, message: wire.ToolMessage) -> None:
        if isinstance(message, wire.StatusRequest):
            self._workers.send(link, wire.Status(json.dumps(self.statistics())))
            return
        if isinstance(message, wire.HangRequest):
            self._engine.survey(message.everyone, lambda survey: self._tell_what_waits(link, survey))
            return
        if isinstance(message, wire.JobRequest):
            gone = frozenset(self._ended | self._engine.participants.lost_nodes)
            self._gathering.ask(gone, lambda told: self._tell_figures(link, told))
            return
        if isinstance(message, wire.JobRingsRequest):
            gone = frozenset(self._ended | self._engine.participants.lost_nodes)
            self._rings.tell(gone, lambda told: self._workers.send(link, wire.Status(json.dumps(told))))
            return
        if isinstance(message, wire.JobRingRequest):
            self._rings.read(message, lambda told: self._workers.send(link, wire.Status(json.dumps(told))))
            return
        _log.warning("asked to stop: %s", message.reason)
        self._stopped = True
        self.fail(f"the job was stopped on host {self._host}: {message.reason or 'by request'}")
        self._loop.call_later(_LAST_WORDS, self._loop.stop)
        self._workers.send(link, wire.Status("{}"))
        self._check_over()

    def _tell_what_waits(self, link: WorkerLink, survey: Survey) -> None:
        told = {
            "state": state_of(self._failure, self._membership),
            "failure": self._failure,
            "epoch": self._membership.epoch,
            **document(survey, self._config.topology),
        }
        self._workers.send(link, wire.Status(fitting(told)))

    def _tell_figures(self, link: WorkerLink, told: Mapping[int, wire.Figures]) -> None:
        self._workers.send(
            link, wire.Status(live.fitting(live.document(self._config.job, self._config.topology, told)))
        )

    def _figures(self, serial: int) -> wire.Figures:
        return figures(serial, self._engine, self._mesh, self._membership, self._failure, self._began)

    # --- mesh ---------------------------------------------------------------------------------------------------------

    def _heard(self, node: int, message: wire.PeerMessage, payload: memoryview | None) -> None:
        if not self._rings.handle(node, message):
            self._from_peers.receive(node, message, payload)

    def _mesh_up(self) -> None:
        self._membership.mesh_up = True
        self._starting.report("connected")
        self._starting.check_up()

    def _peer_lost(self, node: int, why: str) -> None:
        if not self._failure:
            self._losses.peer_lost(node, why)

    # --- losses' Outside ----------------------------------------------------------------------------------------------

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        self._acting.to_node(node, message)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        return self._loop.call_later(seconds, callback)

    def warn(self, text: str) -> None:
        self._acting.warn(text)

    def current_engine(self) -> Engine:
        return self._engine

    def is_over(self) -> bool:
        """Whether nothing is left to be done for anybody here. Where losses are tolerated, the others' are agreed upon
        as long as there is anybody."""
        return self._everyone_departed or (self._membership.everyone_left and not self._settings.tolerate_losses)

    def departed(self) -> None:
        """Workers have left in good order, here or elsewhere."""
        self._losses.departed()
        self._check_over()

    def peers_gone(self, nodes: Sequence[int], why: str) -> None:
        for node in nodes:
            self._ended.add(node)
            self._engine.depart(self._config.topology.ranks[node])
            if self._mesh is not None and node != self._config.node:
                self._mesh.lose(node, why)
        self._check_over()

    def fail(self, error: str, tell_peers: bool = True) -> None:
        """The job cannot go on. Everybody gets the first reason."""
        if self._failure:
            return
        self._failure = error
        self._exit_code = 1
        self._losses.views.end()
        _log.log(logging.ERROR if tell_peers else logging.INFO, "%s", error)  # an error is logged where it happened
        self._engine.fail_job(error)
        self._loop.call_later(_FREED, self._free_memory)
        for link in self._links.values():
            self._workers.send(link, wire.JobFailed(error))
        if self._mesh is not None and tell_peers:
            for node in range(len(self._config.topology.hosts)):
                if node != self._config.node:
                    self._acting.to_node(node, wire.Abort(error))
        if not self._config.attached:
            self._loop.call_later(_LAST_WORDS, self._loop.stop)

    # --- coming up ----------------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """All local workers (where there are none: all workers) have left and come back. What was under way in the
        epoch before is nobody's any more."""
        self._engine.fail_job("its ranks have left the job")
        self._engine = self._make_engine()
        self._losses.epoch_begins(self._membership.epoch, self._engine)

    def _make_engine(self) -> Engine:
        from fusiond.engine import Engine

        config = self._config
        return Engine(
            config.topology,
            config.node,
            self._settings,
            self._acting,
            self.fail,
            self._membership.epoch,
            self._trace,
        )

    def _started(self, start: wire.Start, seconds_per_byte: Mapping[int, float]) -> None:
        from fusiond.collectives.cost import CostModel

        cost = self._engine.cost = CostModel(start.latency, start.seconds_per_byte)
        if self._mesh is not None:
            self._mesh.limit(cost.link_credit(self._settings.link_credit))
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
        )
        for link in self._links.values():
            self._workers.send(link, welcome)

    def _start_failed(self, error: str) -> None:
        self.fail(error)
        self._check_over()

    # --- ending -------------------------------------------------------------------------------------------------------

    def _worker_said_bye(self, rank: int, error: str) -> None:
        self._membership.left.add(rank)
        del self._links[rank]
        if error:
            self._lose_rank(rank, f"rank {rank} (host {self._host}) failed: {quoted(error)}")
        else:
            self._depart(rank)
        self._check_over()

    def _depart(self, rank: int) -> None:
        """A local rank takes part no longer, and all nodes hear of it."""
        self._engine.depart([rank])
        if self._mesh is not None:
            for node in range(len(self._config.topology.hosts)):
                if node != self._config.node:
                    self._acting.to_node(node, wire.Departed((rank,)))
        self._losses.departed()

    @property
    def _everyone_departed(self) -> bool:
        return len(self._engine.participants.departed) == self._config.topology.size

    @property
    def _may_return(self) -> bool:
        """Whether workers that have left may come back: here, or, to a node that has none left, anywhere."""
        if self._membership.awaited:
            return self._workers.may_return
        others = [node for node in self._membership.nodes if node != self._config.node]
        return any(self._membership.has_workers(node) and node not in self._ended for node in others)

    def _check_over(self) -> None:
        """A daemon that nobody attends ends with the job's last worker; one that is attended, when it is told to."""
        gone = self._everyone_departed and (self._stopped or not self._may_return)
        if (self._stopped or not self._config.attached) and not self._links and (self._failure or gone):
            self._loop.stop()

    def _tick(self) -> None:
        if not self._engine.idle:
            self._engine.tick()

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._workers.close()
        if self._mesh is not None:
            self._mesh.close()
        self._pool.close()
        self._stacks.close()
        self._timeline.close()
        self._loop.close()
        self._trace.close()
        self._directory.release()

    # --- controls' Handler -------------------------------------------------------------------------------------------

    def signalled(self, name: str) -> None:
        if not (self._membership.everyone_left or self._everyone_departed):
            self.fail(f"the daemon of host {self._host} was told to stop ({name})")
        self._loop.stop()

    def peers_known(self, table: bootstrap.PeerTable) -> None:
        if self._mesh is None:
            raise WireError("a table of peers came in a job of one node")
        self._mesh.connect(table)

    def starter_gone(self) -> None:
        if not self._config.attached:
            return
        if self._links:
            # The others will see that this node is gone, and decide what becomes of the job.
            why = f"whoever started the daemon of host {self._host} is gone"
            if self._settings.tolerate_losses:
                self._losses.gone_on_without(why)
            self.fail(why, tell_peers=not self._settings.tolerate_losses)
        self._loop.stop()

    def statistics(self) -> dict[str, object]:
        """What `fusiond status` shows: identity, state, resources, and the statistics of every part."""
        return {
            **identity(self._config, self._settings, self._membership, self._failure, self._began),
            "views": self._losses.statistics(),
            "engine": self._engine.statistics(),
            "workers": self._workers.statistics(),
            "mesh": None if self._mesh is None else self._mesh.statistics(),
            "kernel_pool": self._pool.statistics(),
            "loop": self._loop.statistics(),
        }
