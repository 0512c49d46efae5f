"""The agent of one host: it checks the host, starts daemons and workers, and passes on their output.

It reads an `agent_messages.Job` and commands from standard input and writes `agent_messages.FromAgent` to standard
output. The end of input means that the launcher, or the connection to it, is gone; it then ends everything, as it does
on TERM, INT and HUP. When the agent itself is killed, the kernel kills its children (`child_processes`).

In an elastic job the daemon and the workers go from one membership epoch to the next, and workers without a place in
the present one begin beside them. A job whose membership is fixed has one epoch.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host.address import listen_address
from fusion_rt.host.bootstrap import Abandon, DaemonConfig, Endpoint, Farewell, StartError
from fusion_rt.local import elastic
from fusion_rt.runner.agent import preflight, worker_variables
from fusion_rt.runner.agent.daemon_process import DaemonProcess
from fusion_rt.runner.agent.function_call import FunctionFile
from fusion_rt.runner.agent.local_workers import TERM_GRACE, LocalWorkers
from fusion_rt.runner.agent.oom import OomKills
from fusion_rt.runner.agent.tasks import Tasks
from fusion_rt.runner.agent.worker_server import WorkerServer
from fusion_rt.runner.protocol import agent_messages, child_processes
from fusion_rt.runner.protocol.agent_messages import Begin, Job, StartDaemon
from fusion_rt.runner.protocol.pipes import BEATS, LineWriter, Reader, Silence, settle
from fusion_rt.settings import Settings

LOST_GRACE = 3.0  # seconds between TERM and KILL when the launcher is gone: with the rest, nothing is left after 5
_DAEMON_S = 1.0  # seconds the daemon has to end by itself
_OLD_DAEMON_S = 2.0  # the same for the daemon of an epoch that is over
_AWAKE_S = 0.5  # seconds a daemon has to say that it runs, when others have declared it dead
_STUCK = f"other hosts had declared it dead, and it did not answer its agent within {_AWAKE_S:g} s"
DRAIN_S = 5.0  # seconds the launcher has to take the last output
_TRY_S = 1.0  # seconds for one attempt to connect
_PAUSE_S = 0.25  # seconds between two
_T = TypeVar("_T")


class Agent:
    """One job on one host."""

    def __init__(self, job: Job, channel: LineWriter) -> None:
        self._job = job
        self._channel = channel
        self._environ: dict[bytes, bytes] = {}  # of the job on this host
        self._root = ""  # absolute path of the directory that holds the job's
        self._number = 0  # of the present epoch
        self._beginning: Begin | None = None  # the epoch that the daemon was told of and has not entered yet
        self._daemon: DaemonProcess | None = None
        self._reaching: asyncio.Task[None] | None = None  # tries to reach other hosts
        self._retired: set[DaemonProcess] = set()  # of epochs that are over, which have not ended yet
        self._workers: LocalWorkers  # once the host has passed its checks
        self._children = child_processes.Children()
        self._oom_kills = OomKills()
        self._silence = Silence(job.silence_limit)
        self._silence.listening = True
        self._function = FunctionFile(job.function_bytes) if job.function_bytes else None
        self._grace: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()
        self._tasks = Tasks(channel)

    def stop(self, grace: float) -> None:
        """Ends the job here, with `grace` seconds between TERM and KILL. A second call matters only if it has none."""
        if not self._grace.done():
            self._grace.set_result(grace)
        if grace == 0:
            self._hurry.set()

    async def run(self, commands: Reader) -> None:
        """Runs the job until the launcher says stop or is gone; then nothing of it is left."""
        bring_up = self._tasks.start(self._bring_up())
        self._tasks.start(self._follow(commands))
        if self._job.silence_limit:
            self._tasks.start(self._beat())
            self._tasks.start(self._watch_launcher())
        grace = await self._grace
        bring_up.cancel()
        await self._end(grace)
        self._tasks.cancel()
        self._channel.send_now(agent_messages.Stopped())  # perhaps the other end does not read: `close` has a limit

    # The launcher

    async def _follow(self, commands: Reader) -> None:
        """Follows the launcher's orders, and ends the job when that cannot be done any more."""
        try:
            while line := await commands.line():
                self._silence.heard()
                await self._do(agent_messages.decode_command(line))
        finally:
            self.stop(LOST_GRACE)

    async def _do(self, command: agent_messages.Command) -> None:
        match command:
            case agent_messages.Stop(grace):
                self.stop(grace)
            case agent_messages.Function(data):
                if self._function is None:
                    raise WireError("the launcher sent a function, but the job has none")
                self._function.feed(data)
            case agent_messages.Hail():
                self._tasks.start(self._tell_soon(agent_messages.Present()))
            case agent_messages.CheckDaemon(serial):
                if self._daemon is not None and self._daemon.config.serial == serial:
                    self._tasks.start(self._daemon.end_if_stuck(_AWAKE_S))
            case agent_messages.Introduce(table):
                self._present_daemon().tell(table)
            case StartDaemon():
                await self._replace_daemon(command)
            case agent_messages.Reach():
                if self._reaching is not None:
                    self._reaching.cancel()
                self._reaching = self._tasks.start(self._reach(command))
            case Begin(reform):
                self._present_daemon().tell(reform)
                self._number, self._beginning = reform.number, command
            case agent_messages.Recruit(slot, would):
                if not self._root or slot in self._workers.slots() or slot not in would.slots:
                    raise WireError(f"the launcher wants a worker in slot {slot}, which is not free")
                await self._workers.start(would, self._present_daemon().socket, slot, has_place=False)
            case Abandon(number):
                if self._number == number and self._daemon is not None:
                    self._daemon.tell(command)
                    self._workers.end_unused(number)
            case agent_messages.Remove(slots, reason):
                if self._root:
                    self._workers.remove(slots, reason)
            case agent_messages.Release(reason):
                self._tasks.start(self._release(reason))
            case agent_messages.Kill(slots):
                if self._root:
                    self._workers.kill(slots)
            case agent_messages.Changed(timestamp, added, removed):
                if self._root and self._workers.server is not None:
                    self._workers.server.tell_all(elastic.HostsChanged(timestamp, added, removed))

    async def _beat(self) -> None:
        """Tells the launcher again and again that this agent is there, unless there is more than that to be read."""
        while True:
            await asyncio.sleep(self._job.silence_limit / BEATS)
            if self._channel.has_room:
                self._channel.send_now(agent_messages.SignOfLife())

    async def _watch_launcher(self) -> None:
        """Ends the job when the launcher has been silent for too long: it is gone, or as good as."""
        await self._silence.wait()
        self.stop(LOST_GRACE)

    # The beginning

    async def _bring_up(self) -> None:
        """Checks the host; starts the daemon and the workers if the epoch is known."""
        job = self._job
        environ = worker_variables.on_host(job, os.environb)
        os.environb.clear()
        os.environb.update(environ)
        root = os.path.normpath(os.path.join(os.fsdecode(job.directory), Settings.from_env().runtime_root()))
        environ[b"FUSION_RUNTIME_DIR"] = os.fsencode(root)
        if problems := preflight.check(job, root):
            await self._tasks.refuse(*problems)
            return
        self._workers = LocalWorkers(
            *(job, environ, self._channel, self._children, self._function, self._oom_kills, self._tasks)
        )
        if job.elastic:
            directory = os.path.join(root, f"{job.job}.agent{job.elastic}")
            self._workers.server = WorkerServer(directory, self._workers.connectable, self._on_rejoin)
        self._environ, self._root = environ, root
        await self._channel.send(agent_messages.HostReady())
        if job.epoch is not None:
            await self._start_daemon(job.epoch.node, job.epoch.topology)
            # The workers need not wait until it listens: they import torch meanwhile, and try until it does.
            await self._workers.give_places(job.epoch, self._present_daemon().socket)

    # Daemons

    async def _start_daemon(self, node: int, topology: Topology, serial: int = 1) -> None:
        job, address = self._job, "127.0.0.1"
        if job.elastic or len(topology.hosts) > 1:
            try:
                own = partial(listen_address, topology.hosts[node], job.interfaces, bool(job.loopback))
                own = partial(listen_address, topology.hosts[node], job.interfaces, bool(job.loopback))
                address = await in_thread(own)
            except FusionError:
                if job.loopback is not None:
                    raise
        config = DaemonConfig(job.job, node, topology, address, elastic=bool(job.elastic), serial=serial)
        daemon = await DaemonProcess.start(
            config, self._environ, job.directory, self._children, self._channel, self._root, self._on_reformed
        )
        self._daemon = daemon
        self._tasks.start(self._watch_daemon(daemon))

    async def _replace_daemon(self, command: StartDaemon) -> None:
        if not self._root or not 0 <= command.node < len(command.nodes):
            raise WireError("the launcher wants a daemon that cannot be started")
        self._retire_daemon()
        await self._take_back()
        own = tuple(range(max(1, self._job.slots)))  # which is only for the form: epochs have topologies
        ranks = tuple(own if node == command.node else () for node in range(len(command.nodes)))
        await self._start_daemon(command.node, Topology(command.nodes, ranks), command.serial)

    def _present_daemon(self) -> DaemonProcess:
        if self._daemon is None:
            raise WireError("the launcher has an order for a daemon, and there is none")
        return self._daemon

    def _on_reformed(self, number: int) -> None:
        """The daemon takes workers of an epoch: they get their places."""
        begin = self._beginning
        if begin is not None and begin.reform.number == number:
            self._beginning = None
            if self._workers.server is not None:
                self._workers.server.begin_epoch()
            self._tasks.start(self._workers.give_places(begin.epoch, self._present_daemon().socket, begin.waiting))

    async def _watch_daemon(self, daemon: DaemonProcess) -> None:
        """Tells the launcher where the daemon listens, or why it does not, and when it ends."""
        stderr, stdout = daemon.log
        self._tasks.pump(stderr)
        serial = daemon.config.serial
        answer = await daemon.endpoint()
        if isinstance(answer, StartError):
            status = await daemon.last_status()
            await settle([stderr], self._channel)
            if not daemon.is_unwanted:
                await self._channel.send(agent_messages.DaemonDown(serial, status, answer.error))
        else:
            self._tasks.pump(stdout)
            await self._channel.send(agent_messages.DaemonUp(answer, serial))
            status = await daemon.wait()
            if not self._grace.done() and (not daemon.is_unwanted or (status < 0 and not daemon.is_killed)):
                await settle(daemon.log, self._channel)
                killed = _STUCK if daemon.is_stuck else self._oom_kills.explain(status)
                await self._channel.send(agent_messages.DaemonDown(serial, status, killed))
        daemon.is_told.set()
        if daemon is self._daemon:
            await self._take_back()

    async def _take_back(self) -> None:
        """Tells the launcher that an epoch has not begun here, if it was told to, and is not to any more: its workers
        still wait, and those that it was to start have not been."""
        begin, self._beginning = self._beginning, None
        if begin is None:
            return
        for slot in begin.epoch.slots:
            if slot in begin.waiting:
                await self._channel.send(
                    agent_messages.Asked(slot, begin.reform.number, "the daemon of its host is gone")
                )
            else:
                await self._channel.send(agent_messages.Exited(slot, 0, unused=True))

    async def _reach(self, order: agent_messages.Reach) -> None:
        """Tries to reach the daemons of other hosts until it has."""
        await reach_all(order.endpoints)
        await self._channel.send(agent_messages.InReach(order.serial))

    def _retire_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.is_unwanted = True
            self._retired.add(self._daemon)
            self._tasks.start(self._end_daemon(self._daemon))
            self._daemon = None

    async def _end_daemon(self, daemon: DaemonProcess) -> None:
        await daemon.end(_OLD_DAEMON_S)
        self._retired.discard(daemon)

    # Workers

    def _on_rejoin(self, slot: int, message: elastic.Rejoin) -> None:
        self._tasks.start(self._tell_soon(agent_messages.Asked(slot, message.epoch, message.error, message.is_unfit)))

    async def _tell_soon(self, message: agent_messages.FromAgent) -> None:
        """Tells the launcher something, and before that, if that is why, of the end of the daemon."""
        if self._daemon is not None and self._daemon.has_ended:
            await self._daemon.is_told.wait()
        await self._channel.send(message)

    async def _release(self, reason: str) -> None:
        if self._root:
            self._workers.remove(self._workers.slots(), reason)
            await self._workers.all_have_left()
        self.stop(TERM_GRACE)

    # The end

    async def _end(self, grace: float) -> None:
        """Ends the workers, then the daemon, then whatever else is left, files of killed daemons included."""
        if self._daemon is not None:
            self._daemon.tell(Farewell())
            await child_processes.end_descendants([self._daemon.pid], grace, self._hurry)
            await self._daemon.close(_DAEMON_S)
        survivors = await child_processes.end_descendants([], 0.0, self._hurry)
        for daemon in (*self._retired, *([self._daemon] if self._daemon is not None else ())):
            daemon.remove_files()
        try:
            await asyncio.wait_for(self._tasks.settle(), DRAIN_S)
        except asyncio.TimeoutError:
            pass  # the other end does not read: the launcher is gone, or as good as
        else:
            if survivors:
                await self._tasks.refuse(
                    f"processes {survivors} do not end although they were killed; the kernel lets them wait"
                )
        if self._root and self._workers.server is not None:
            self._workers.server.close()


async def in_thread(wait: Callable[[], _T]) -> _T:
    """Runs a function in a thread of its own; returns its result, or raises its exception.

    The end of an agent does not wait for the thread: a name server may take minutes. (Those of `asyncio.to_thread` are
    joined at the end of the loop.) Where no thread can be started, the loop waits.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def set_result(found: _T | None, error: BaseException | None) -> None:
        if result.done():  # it was cancelled meanwhile
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(found)  # type: ignore[arg-type]

    def run() -> None:
        found, error = None, None
        try:
            found = wait()
        except Exception as failure:  # raised where the result is awaited
            error = failure
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_result, found, error)

    try:
        threading.Thread(target=run, name="waiting", daemon=True).start()
    except RuntimeError:  # the limit of processes
        return wait()
    return await result


async def reach_all(endpoints: Sequence[Endpoint]) -> None:
    """Returns when there have been connections to all ports of these daemons; tries again until then."""
    ports = {
        (endpoint.address, port) for endpoint in endpoints for port in (endpoint.control_port, endpoint.payload_port)
    }
    await asyncio.gather(*(_reach(address, port) for address, port in ports))


async def _reach(address: str, port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), _TRY_S)
        except (OSError, asyncio.TimeoutError):
            await asyncio.sleep(_PAUSE_S)
        else:
            writer.close()
            return
