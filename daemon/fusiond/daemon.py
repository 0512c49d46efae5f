"""The daemon: joins the event loop, the local workers, the mesh and the engine, and decides when it all ends.

Nothing is decided here about operations (`engine`), connections (`workers`, `mesh`) or who is there (`membership`);
this is the thin shell that carries events from one to another.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

from fusion_rt import __version__, bootstrap, wire
from fusion_rt.dtypes import DTYPES, DType
from fusion_rt.errors import FusionError, WireError
from fusion_rt.settings import Settings
from fusiond.loop import EventLoop, Timer
from fusiond.membership import Membership
from fusiond.mesh import Mesh
from fusiond.process import allow_many_descriptors, ignore_float_errors, keep_freed_memory

if TYPE_CHECKING:
    from fusiond.collectives.base import Job, Result
    from fusiond.engine import Engine
    from fusiond.kernel_pool import KernelPool
    from fusiond.probe import LinkProbe
    from fusiond.workers import WorkerLink, Workers

_FROM_COORDINATOR = (wire.Verdict, wire.PlanVerdict, wire.Inquiry, wire.Start)
_log = logging.getLogger("fusiond")
_TICK = 1.0  # seconds between looks at what has waited too long
_LAST_DATA = 2.0  # seconds in which what is complete on one node completes on the others
_LAST_NEWS = 0.5  # seconds by which a peer's last messages may come after the end of its connections
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
        self._stdin_data = stdin_start
        self._host = config.topology.hosts[config.node]
        self._failure = ""
        self._stopped = False  # somebody has asked for the end
        self._homes = config.topology.homes(settings.shard_hosts)  # nodes that may keep parameter shards
        self._ended: set[int] = set()  # peers that have ended because their workers were done
        self._exit_code = 0
        root = settings.runtime_root()
        self._directory = bootstrap.job_directory(root, config.job, config.node)
        socket_path = bootstrap.socket_path(root, config.job, config.node)
        bootstrap.make_private_directory(root)
        bootstrap.make_private_directory(self._directory)
        self._lock = _lock(self._directory, config)
        self._links: dict[int, WorkerLink] = {}  # by rank
        self._membership = Membership(config.topology, config.node)
        self._loop = EventLoop()
        self._peer_epochs: dict[int, int] = {}
        self._mesh: Mesh | None = None
        if len(config.topology.hosts) > 1:
            self._mesh = Mesh(self._loop, config, settings, self._peer_message, self._mesh_up, self._peer_lost)
        self._socket_path = socket_path
        self._engine: Engine
        self._workers: Workers
        self._pool: KernelPool
        self._probe: LinkProbe | None = None
        self._start_timer: Timer | None = None
        self._began = time.monotonic()
        self._first_done = False  # an operation

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
        from fusiond.kernel_pool import KernelPool
        from fusiond.workers import Workers

        allow_many_descriptors()
        ignore_float_errors()
        keep_freed_memory()
        self._pool = KernelPool(self._loop, self._settings.kernel_threads)
        self._engine = self._make_engine()
        self._workers = Workers(self._loop, self._socket_path, self)
        self._prepare_kernels(["float32"])
        self._loop.call_every(_TICK, self._tick)
        if self._settings.snapshot_every:
            self._loop.call_every(self._settings.snapshot_every, lambda: self._engine.snapshots.take())
        self._start_timer = self._loop.call_later(self._settings.start_timeout, self._start_timed_out)
        try:
            self._watch_signals()
            if self._config.attached or self._mesh is not None:
                self._watch_stdin()
            if not self._membership.local:
                self._report("joined")
            self._loop.run()
        except FusionError:
            raise
        except Exception:  # a bug here: everybody gets to read it, instead of a daemon that is just gone
            self._fail(f"the daemon of host {self._host} failed:\n{traceback.format_exc()}")
        finally:
            self._close()
        return self._exit_code

    def _prepare_kernels(self, dtypes: Sequence[str]) -> None:
        """Loads or compiles kernels before they are needed, beside the event loop."""
        from fusion_rt import codecs
        from fusion_rt.kernels import cpu

        codec = codecs.parse(self._settings.compression)

        def prepare() -> None:
            cpu.prepare([DType.named(name) for name in dtypes])
            if self._mesh is not None:
                for name in dtypes:
                    codec.open(codecs.Layout(DTYPES[name], 1))

        def done(error: BaseException | None) -> None:
            if error is not None:
                self._fail(f"the daemon of host {self._host} cannot reduce: {error}")

        self._pool.run([prepare], done)

    # --- engine's Outside ---------------------------------------------------------------------------------------------

    def to_worker(self, rank: int, message: wire.DaemonMessage, result: Result | None = None) -> None:
        if not self._first_done and isinstance(message, wire.Done):
            self._first_done = True
            self._report("first_done")
        link = self._links.get(rank)
        if link is not None:
            segment = None if result is None else result.segment
            self._workers.send(link, message, -1 if segment is None else os.dup(segment.fd))

    def to_node(self, node: int, message: wire.PeerMessage) -> None:
        assert self._mesh is not None
        self._mesh.send(node, message)

    def send_chunk(self, node: int, chunk: wire.Chunk, payload: bytes | memoryview) -> bool:
        assert self._mesh is not None
        return self._mesh.send_payload(node, chunk, payload)

    def send_piece(self, node: int, piece: wire.Piece, payload: memoryview) -> None:
        assert self._mesh is not None
        self._mesh.send_payload(node, piece, payload)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> object:
        return self._loop.call_later(seconds, callback)

    def run_jobs(self, jobs: Sequence[Job], then: Callable[[BaseException | None], None]) -> None:
        self._pool.run(jobs, then)

    def warn(self, text: str) -> None:
        _log.warning("%s", text)

    def clock(self) -> float:
        return self._loop.clock()

    # --- workers' Handler ---------------------------------------------------------------------------------------------

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        refusal = self._membership.may_join(hello.rank)
        if hello.version != wire.PROTOCOL_VERSION:
            refusal = (
                f"rank {hello.rank} speaks version {hello.version} of the protocol and its daemon "
                f"{wire.PROTOCOL_VERSION}: install the same version of fusion_rt for both"
            )
        elif hello.job != self._config.job:
            refusal = f"rank {hello.rank} belongs to job {hello.job!r}, and this daemon to {self._config.job!r}"
        if refusal or self._failure:
            self._workers.send(link, wire.JobFailed(self._failure or refusal))
            return
        link.rank = hello.rank
        self._links[hello.rank] = link
        epoch = self._membership.epoch
        self._membership.join(hello.rank)
        if self._membership.epoch > epoch:
            self._begin_epoch()
        _log.info("rank %d (pid %d) has joined", hello.rank, link.pid)
        if len(self._membership.joined) == len(self._membership.local):
            self._report("joined")
        self._check_up()

    def worker_message(self, rank: int, link: WorkerLink, message: wire.WorkerMessage) -> None:
        if isinstance(message, wire.Ready):
            self._engine.ready(rank, message)
        elif isinstance(message, wire.Submit):
            memory = None
            if message.place is not None:
                memory = link.at(message.place, _nbytes(message.signature))
            self._engine.submit(rank, message, memory)
        elif isinstance(message, wire.SaveState):
            self._engine.codecs.save_state(rank, message)
        elif isinstance(message, wire.LoadState):
            self._engine.codecs.load_state(rank, message, link.at(message.place, message.nbytes))
        elif isinstance(message, wire.CompressionRequest):
            self._engine.codecs.statistics(rank, message.handle)
        elif isinstance(message, wire.StalenessRequest):
            told = json.dumps(self._engine.homes.statistics()).encode()
            self._workers.send(link, wire.Done(message.handle, told))
        elif isinstance(message, wire.Propose):
            self._engine.propose(rank, message.handle, message.proposal)
        elif isinstance(message, wire.AddSegment):
            if message.plan:
                self._engine.add_plan_memory(rank, message.plan, link.memory[message.segment])
        elif isinstance(message, wire.DropSegment):
            if message.segment in link.plans:
                self._engine.drop_plan_memory(rank, link.plans[message.segment])
        elif isinstance(message, wire.Bye):
            self._worker_said_bye(rank, message.error)
        else:
            raise WireError(f"{type(message).__name__} is not expected here")

    def worker_left(self, rank: int, pid: int, why: str) -> None:
        del self._links[rank]
        self._lose_rank(rank, f"rank {rank} (host {self._host}, pid {pid}) {why}")
        self._check_over()

    def _lose_rank(self, rank: int, error: str) -> None:
        """A worker has failed: the job goes on without it, or fails."""
        if not self._tolerates(error, self._config.node, whole=False):
            return
        self._membership.left.add(rank)
        self._depart(rank)

    def _tolerates(self, error: str, node: int, whole: bool) -> bool:
        """Whether the job goes on without a worker of that node, or the whole node. If not, it fails with the error."""
        if not (self._settings.tolerate_losses and self._membership.started) or self._failure:
            self._fail(error)
            return False
        why_not = self._engine.why_not_without(node, whole)
        if why_not:
            self._fail(f"{error}; the job cannot go on without it: {why_not}")
            return False
        _log.warning("%s; the job goes on without it", error)
        return True

    def connection_ended(self) -> None:
        self._check_over()

    def tool_message(self, link: WorkerLink, message: wire.StatusRequest | wire.StopRequest) -> None:
        if isinstance(message, wire.StatusRequest):
            self._workers.send(link, wire.Status(json.dumps(self.statistics())))
            return
        _log.warning("asked to stop: %s", message.reason)
        self._stopped = True
        self._fail(f"the job was stopped on host {self._host}: {message.reason or 'by request'}")
        self._loop.call_later(_LAST_WORDS, self._loop.stop)
        self._workers.send(link, wire.Status("{}"))
        self._check_over()

    # --- mesh ---------------------------------------------------------------------------------------------------------

    def _peer_message(self, node: int, message: wire.PeerMessage, payload: memoryview | None) -> None:
        try:
            self._handle_peer(node, message, payload)
        except Exception as error:  # whatever a message that is valid in itself leads to is its sender's fault
            why = str(error) if isinstance(error, FusionError) else traceback.format_exc()
            host = self._config.topology.hosts[node]
            self._fail(f"node {node} (host {host}) sent a {type(message).__name__} that makes no sense here: {why}")

    def _handle_peer(self, node: int, message: wire.PeerMessage, payload: memoryview | None) -> None:
        if isinstance(message, _FROM_COORDINATOR) and node != 0:
            raise WireError("it comes from the coordinator only")
        assert self._mesh is not None
        if isinstance(message, wire.Abort):
            self._fail(message.error, tell_peers=False)
        elif isinstance(message, wire.NewEpoch):
            self._peer_epochs[node] = message.epoch
            if self._membership.follow(self._peer_epochs):
                self._begin_epoch()
                self._check_up()
            # What the node had a part in is complete there, and its data is on the way here.
            self._loop.call_later(_LAST_DATA, partial(self._end_epoch_before, message.epoch, node))
        elif isinstance(message, wire.Up):
            self._node_up(node, message.epoch)
        elif isinstance(message, wire.Probe):
            self._mesh.send(node, wire.Echo(message.serial))
        elif isinstance(message, wire.Echo):
            if self._probe is not None:
                self._send_probe(self._probe.echo(node, message.serial))
        elif isinstance(message, wire.Start):
            self._start(message)
        elif payload is None and self._peer_epochs.get(node, 0) != self._membership.epoch:
            _log.debug("%s of an epoch that is over came from node %d", type(message).__name__, node)
        elif isinstance(message, wire.Departed):
            self._engine.depart(message.ranks)
            self._check_over()
        else:
            self._engine.peer_message(node, message, payload)

    def _mesh_up(self) -> None:
        self._membership.mesh_up = True
        self._report("connected")
        self._check_up()

    def _peer_lost(self, node: int, why: str) -> None:
        if self._membership.local:
            self._without_peer(node, why)
        elif self._config.topology.ranks[node]:  # else those who have workers say whether they needed it
            self._loop.call_later(_LAST_NEWS, partial(self._without_peer, node, why))

    def _without_peer(self, node: int, why: str) -> None:
        if self._failure:
            return
        ranks = self._config.topology.ranks[node]
        departed = self._engine.participants.departed
        if self._is_over or (ranks and departed.issuperset(ranks)):
            self._ended.add(node)
            self._engine.depart(ranks)  # nobody needs it any more
            self._check_over()
            return
        host = self._config.topology.hosts[node]
        if self._tolerates(f"node {node} (host {host}) is lost: {why}", node, whole=True):
            self._ended.add(node)
            self._engine.depart(ranks)
            self._check_over()

    # --- coming up ----------------------------------------------------------------------------------------------------

    def _check_up(self) -> None:
        if not self._membership.became_up():
            return
        if self._config.node == 0:
            self._node_up(0, self._membership.epoch)
        else:
            self.to_node(0, wire.Up(self._membership.epoch))

    def _begin_epoch(self) -> None:
        """All local workers (where there are none: all workers) have left and come back. What was under way in the
        epoch before is nobody's any more."""
        self._engine.fail_job("its ranks have left the job")
        self._engine = self._make_engine()
        for node in range(len(self._config.topology.hosts)):
            if node != self._config.node:
                self.to_node(node, wire.NewEpoch(self._membership.epoch))

    def _end_epoch_before(self, epoch: int, node: int) -> None:
        """Whoever still waits for something in an epoch that a node has left behind waits in vain."""
        if epoch > self._membership.epoch:
            ranks = self._config.topology.describe(self._config.topology.ranks[node])
            self._engine.end(f"{ranks} left the job")

    def _make_engine(self) -> Engine:
        from fusiond.engine import Engine

        config = self._config
        return Engine(config.topology, config.node, self._settings, self, self._fail, self._membership.epoch)

    def _node_up(self, node: int, epoch: int) -> None:
        from fusiond.probe import LinkProbe

        self._membership.nodes_up[node] = epoch
        if not self._membership.all_up:
            return
        if self._probe is not None:  # measured in an earlier epoch
            self._send_probe(None)
        else:
            self._probe = LinkProbe(range(1, len(self._config.topology.hosts)), self._loop.clock)
            self._send_probe(self._probe.begin())

    def _send_probe(self, probe: tuple[int, int, int] | None) -> None:
        assert self._probe is not None
        if probe is not None:
            assert self._mesh is not None
            node, serial, nbytes = probe
            self._mesh.send_payload(node, wire.Probe(serial), bytes(nbytes))
        elif self._probe.cost is not None and not self._membership.started:
            start = wire.Start(self._probe.cost.latency, self._probe.cost.seconds_per_byte)
            for node in range(1, len(self._config.topology.hosts)):
                self.to_node(node, start)
            self._start(start)

    def _start(self, start: wire.Start) -> None:
        from fusiond.collectives.cost import CostModel

        self._membership.started = True
        self._engine.cost = CostModel(start.latency, start.seconds_per_byte)
        if self._engine.coordinator is not None and self._probe is not None:
            self._engine.coordinator.seconds_per_byte = self._probe.seconds_per_byte
        if self._start_timer is not None:
            self._start_timer.cancel()
        welcome = wire.Welcome(
            self._config.topology,
            self._config.node,
            self._settings.fusion_threshold,
            self._settings.algorithm,
            self._settings.compression,
            self._membership.epoch,
        )
        for link in self._links.values():
            self._workers.send(link, welcome)
        _log.info("the job has started after %.2f s", time.monotonic() - self._began)
        self._report("started")
        if not self._membership.local:
            self._report("first_done")  # there is none to wait for

    def _report(self, phase: Literal["joined", "connected", "started", "first_done"]) -> None:
        """Tells whoever attends how far the start has come."""
        if self._config.attached:
            with suppress(BrokenPipeError):  # not everybody who starts a daemon wants to know
                os.write(1, bootstrap.encode_line(bootstrap.Phase(phase)))

    def _start_timed_out(self) -> None:
        who = self._membership.missing()
        if self._mesh is not None and (nodes := self._mesh.missing()):
            hosts = ", ".join(f"{n} (host {self._config.topology.hosts[n]})" for n in nodes)
            who = f"the daemons of nodes {hosts} could not be reached from host {self._host}"
        self._fail(f"the job did not come up within {self._settings.start_timeout:g} s: {who}")
        self._check_over()

    # --- ending -------------------------------------------------------------------------------------------------------

    def _worker_said_bye(self, rank: int, error: str) -> None:
        self._membership.left.add(rank)
        del self._links[rank]
        if error:
            self._lose_rank(rank, f"rank {rank} (host {self._host}) failed: {error}")
        else:
            self._depart(rank)
        self._check_over()

    def _depart(self, rank: int) -> None:
        """A local rank takes part no longer, and all nodes hear of it."""
        self._engine.depart([rank])
        if self._mesh is not None:
            for node in range(len(self._config.topology.hosts)):
                if node != self._config.node:
                    self.to_node(node, wire.Departed((rank,)))

    def _fail(self, error: str, tell_peers: bool = True) -> None:
        """The job cannot go on. Everybody gets the first reason."""
        if self._failure:
            return
        self._failure = error
        self._exit_code = 1
        _log.log(logging.ERROR if tell_peers else logging.INFO, "%s", error)  # an error is logged where it happened
        self._engine.fail_job(error)
        for link in self._links.values():
            self._workers.send(link, wire.JobFailed(error))
        if self._mesh is not None and tell_peers:
            for node in range(len(self._config.topology.hosts)):
                if node != self._config.node:
                    self.to_node(node, wire.Abort(error))
        if not self._config.attached:
            self._loop.call_later(_LAST_WORDS, self._loop.stop)

    @property
    def _everyone_departed(self) -> bool:
        return len(self._engine.participants.departed) == self._config.topology.size

    @property
    def _is_over(self) -> bool:
        """Whether nothing is left to be done for anybody here."""
        return self._membership.everyone_left or self._everyone_departed

    @property
    def _may_return(self) -> bool:
        """Whether workers that have left may come back: here, or, to a node without workers, anywhere."""
        if self._membership.local:
            return self._workers.may_return
        return any(ranks and node not in self._ended for node, ranks in enumerate(self._config.topology.ranks))

    def _check_over(self) -> None:
        """A daemon that nobody attends ends with the job's last worker; one that is attended, when it is told to."""
        gone = self._everyone_departed and (self._stopped or not self._may_return)
        if (self._stopped or not self._config.attached) and not self._links and (self._failure or gone):
            self._loop.stop()

    def _tick(self) -> None:
        if not self._engine.idle:
            self._engine.tick()

    def _close(self) -> None:
        self._workers.close()
        if self._mesh is not None:
            self._mesh.close()
        self._pool.close()
        self._loop.close()
        log = os.path.join(self._directory, "log")
        if os.path.exists(log) and os.path.getsize(log) == 0:
            os.unlink(log)
        os.unlink(os.path.join(self._directory, "lock"))
        os.close(self._lock)
        if not os.listdir(self._directory):  # a log with something in it stays, for `fusiond logs`
            os.rmdir(self._directory)

    # --- signals and standard input -----------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)

        def signalled() -> None:
            name = signal.Signals(os.read(reader, 1)[0]).name
            if not self._is_over:
                self._fail(f"the daemon of host {self._host} was told to stop ({name})")
            self._loop.stop()

        self._loop.add_reader(reader, signalled)

    def _watch_stdin(self) -> None:
        os.set_blocking(self._stdin, False)
        try:
            self._loop.add_reader(self._stdin, self._read_stdin)
        except PermissionError:
            raise FusionError("standard input has to be a pipe, from which the peers' table and the end of the job "
                              "are read") from None  # fmt: skip
        self._take_lines()

    def _read_stdin(self) -> None:
        try:
            data = os.read(self._stdin, 1 << 20)
        except BlockingIOError:
            return
        self._stdin_data += data
        if len(self._stdin_data) > bootstrap.MAX_LINE:
            raise WireError(f"more than {bootstrap.MAX_LINE} bytes without a line's end on standard input")
        self._take_lines()
        if not data:
            self._loop.remove(self._stdin)
            if self._config.attached:
                if self._links:
                    # The others will see that this node is gone, and decide what becomes of the job.
                    tell = not self._settings.tolerate_losses
                    self._fail(f"whoever started the daemon of host {self._host} is gone", tell_peers=tell)
                self._loop.stop()

    def _take_lines(self) -> None:
        while b"\n" in self._stdin_data:
            line, self._stdin_data = self._stdin_data.split(b"\n", 1)
            if self._mesh is None:
                raise WireError("a table of peers came in a job of one node")
            self._mesh.connect(bootstrap.decode_line(line, bootstrap.PeerTable))

    def _role(self) -> str:
        """What this node is there for: `worker`, `shard`, or `worker and shard` where shard hosts were named."""
        is_shard = bool(self._settings.shard_hosts) and self._config.node in self._homes
        if not self._membership.local:
            return "shard"
        return "worker and shard" if is_shard else "worker"

    def statistics(self) -> dict[str, object]:
        """What `fusiond status` shows: identity, state, resources, and the statistics of every part."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        topology = self._config.topology
        return {
            "version": __version__,
            "job": self._config.job,
            "pid": os.getpid(),
            "node": self._config.node,
            "host": self._host,
            "nodes": len(topology.hosts),
            "size": topology.size,
            "role": self._role(),
            "ranks": list(self._membership.local),
            "joined": sorted(self._membership.joined),
            "left": sorted(self._membership.left),
            "epoch": self._membership.epoch,
            "state": "failed" if self._failure else "running" if self._membership.started else "starting",
            "failure": self._failure,
            "uptime_seconds": round(time.monotonic() - self._began, 3),
            "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
            "engine": self._engine.statistics(),
            "workers": self._workers.statistics(),
            "mesh": None if self._mesh is None else self._mesh.statistics(),
            "kernel_pool": self._pool.statistics(),
            "loop": self._loop.statistics(),
        }


def _lock(directory: str, config: bootstrap.DaemonConfig) -> int:
    """Takes the directory for this daemon: one runs for each job and node, and the kernel frees the lock when it dies.

    Raises:
        FusionError: another one runs.
    """
    fd = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise FusionError(
            f"a daemon of job {config.job!r} runs on this host already (pid {pid}); stop it with `fusiond stop "
            f"--job {config.job}`, or give the new job another name"
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _nbytes(signature: wire.Signature) -> int:
    """Of a tensor; 0 where its dtype does not exist, which is the engine's to refuse."""
    return math.prod(signature.shape) * DTYPES[signature.dtype].itemsize if signature.dtype in DTYPES else 0


def configure_logging(level: str, timestamp: bool) -> None:
    """One line a message on standard error, from `level` on; `timestamp`: each begins with the time."""
    names = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}
    logging.basicConfig(
        stream=sys.stderr,
        level=names.get(level, level),
        format=("%(asctime)s " if timestamp else "") + "fusiond[%(process)d] %(levelname)s: %(message)s",
    )
