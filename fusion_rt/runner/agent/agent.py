"""The agent of one host: it checks the host, starts daemons and workers, and passes on what they print.

It reads an `agent_messages.Job` and commands from standard input and writes `agent_messages.FromAgent` to standard
output. The end of input means that the launcher, or the connection to it, is gone; it then ends everything, as it does
on TERM, INT and HUP. When the agent itself is killed, the kernel kills its children (`child_processes`).

Each membership epoch has a daemon of its own, while workers go from one epoch to the next. A job whose membership is
fixed has one epoch.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.host.address import listen_address
from fusion_rt.host.bootstrap import Abandon, DaemonConfig, StartError
from fusion_rt.local import elastic
from fusion_rt.runner.agent import preflight, worker_variables
from fusion_rt.runner.agent.daemon_process import Daemon
from fusion_rt.runner.agent.function_call import FunctionFile, ResultFile
from fusion_rt.runner.agent.oom import OomKills
from fusion_rt.runner.agent.worker_server import WorkerServer
from fusion_rt.runner.protocol import agent_messages, child_processes
from fusion_rt.runner.protocol.agent_messages import OUTPUT_CHUNK, REMOVED_S, Begin, Epoch, Job
from fusion_rt.runner.protocol.pipes import BEATS, Channel, Pump, Reader, Silence, settle
from fusion_rt.settings import Settings

LOST_GRACE = 3.0  # seconds between TERM and KILL when the launcher is gone: with the rest, nothing is left after 5
TERM_GRACE = 5.0  # seconds between TERM and KILL then
_DAEMON_S = 1.0  # seconds the daemon has to end by itself
_OLD_DAEMON_S = 2.0  # the same for the daemon of an epoch that is over
DRAIN_S = 5.0  # seconds the launcher has to take the last output


@dataclass(eq=False)
class _Worker:
    child: child_processes.Child
    rank: int  # in the epoch that it has a place in
    born: int  # number of the epoch that it was started for
    is_unused: bool = False
    is_removed: bool = False


class Agent:
    """One job on one host."""

    def __init__(self, job: Job, channel: Channel) -> None:
        self._job = job
        self._channel = channel
        self._environ: dict[bytes, bytes] = {}  # of the job on this host
        self._root = ""  # absolute path of the directory that holds the job's
        self._server: WorkerServer | None = None  # in an elastic job
        self._epoch: Epoch | None = None
        self._daemon: Daemon | None = None
        self._retired: set[Daemon] = set()  # of epochs that are over, which have not ended yet
        self._workers: dict[int, _Worker] = {}  # by slot
        self._children = child_processes.Children()
        self._oom_kills = OomKills()
        self._silence = Silence(job.silence_limit)
        self._silence.listening = True
        self._function = FunctionFile(job.function_bytes) if job.function_bytes else None
        self._grace: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumps: list[Pump] = []

    def stop(self, grace: float) -> None:
        """Ends the job here, with `grace` seconds between TERM and KILL. A second call matters only if it has none."""
        if not self._grace.done():
            self._grace.set_result(grace)
        if grace == 0:
            self._hurry.set()

    async def run(self, commands: Reader) -> None:
        """Runs the job until the launcher says stop or is gone; then nothing of it is left."""
        bring_up = self._spawn(self._bring_up())
        self._spawn(self._follow(commands))
        if self._job.silence_limit:
            self._spawn(self._beat())
            self._spawn(self._watch_launcher())
        grace = await self._grace
        bring_up.cancel()
        await self._end(grace)
        for task in self._tasks:
            task.cancel()
        self._channel.send_now(agent_messages.Stopped())  # perhaps nobody reads: `close` has a limit

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine beside the others."""
        task = asyncio.create_task(self._reporting(coroutine))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _reporting(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Tells the launcher what the coroutine fails with; the launcher then ends the job."""
        try:
            await coroutine
        except FusionError as error:
            await self._refuse(str(error))
        except Exception as error:
            await self._refuse(f"the agent failed: {type(error).__name__}: {error}")
            raise

    async def _refuse(self, *reasons: str) -> None:
        await self._channel.send(agent_messages.Refused(reasons))

    # The launcher

    async def _follow(self, commands: Reader) -> None:
        """Does what the launcher says, and ends the job when it cannot be followed any more."""
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
            case Epoch():
                if not self._root:
                    raise WireError("the launcher began an epoch before the agent was ready")
                await self._start_epoch(command)
            case Begin():
                await self._begin(command)
            case Abandon(number):
                if self._epoch is not None and self._epoch.number == number:
                    self._retire_daemon()
                    self._end_unused(number)
            case agent_messages.Remove(slots, reason):
                self._remove(slots, reason)
            case agent_messages.Release(reason):
                workers = list(self._workers.values())
                self._remove(tuple(self._workers), reason)
                self._spawn(self._stop_after(workers))
            case agent_messages.Kill(slots):
                for slot in slots:
                    if slot in self._workers:
                        child_processes.signal_tree(self._workers[slot].child.pid, signal.SIGKILL)
            case agent_messages.Changed(timestamp, added, removed):
                if self._server is not None:
                    self._server.tell_all(elastic.HostsChanged(timestamp, added, removed))

    async def _beat(self) -> None:
        """Tells the launcher again and again that this agent is there, unless there is more than that to be read."""
        while True:
            await asyncio.sleep(self._job.silence_limit / BEATS)
            if self._channel.has_room:
                self._channel.send_now(agent_messages.Ping())

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
            await self._refuse(*problems)
            return
        self._environ, self._root = environ, root
        if job.elastic:
            directory = os.path.join(root, f"{job.job}.agent{job.elastic}")
            self._server = WorkerServer(directory, self._workers.keys, self._on_rejoin)
        await self._channel.send(agent_messages.Ready())
        if job.epoch is not None:
            await self._start_epoch(job.epoch)
            # The workers need not wait until it listens: they import torch meanwhile, and try until it does.
            await self._start_workers(job.epoch)

    async def _start_epoch(self, epoch: Epoch) -> None:
        """Starts the daemon of a new epoch; the workers of the one before have all left it."""
        self._retire_daemon()
        self._epoch = epoch
        hosts, address = epoch.topology.hosts, "127.0.0.1"
        if len(hosts) > 1:
            address = listen_address(hosts[epoch.node], self._job.interfaces, epoch.loopback)
        config = DaemonConfig(epoch.job, epoch.node, epoch.topology, address)
        self._daemon = await Daemon.start(
            config, self._environ, self._job.directory, self._children, self._channel, self._root, epoch.number
        )
        self._spawn(self._watch_daemon(self._daemon, epoch.number))

    async def _begin(self, begin: Begin) -> None:
        """Tells the daemon its peers, and gives places to the workers if they have none yet."""
        epoch = self._epoch
        if epoch is None or epoch.number != begin.number or self._daemon is None:
            raise WireError(f"the launcher began epoch {begin.number}, which was not started")
        if begin.table is not None:
            self._daemon.introduce(begin.table)
        if self._server is not None:
            self._server.begin_epoch()
            await self._start_workers(epoch, begin.survivors)

    # Daemons

    async def _watch_daemon(self, daemon: Daemon, epoch: int) -> None:
        """Tells the launcher where the daemon listens, or why it does not, and when it ends."""
        stderr, stdout = daemon.log
        self._pump(stderr)
        answer = await daemon.endpoint()
        if isinstance(answer, StartError):
            status = await daemon.last_status()
            await settle([stderr], self._channel)
            if not daemon.is_unwanted:
                await self._channel.send(agent_messages.DaemonDown(epoch, status, answer.error))
            return
        self._pump(stdout)
        await self._channel.send(agent_messages.DaemonUp(answer, epoch))
        status = await daemon.wait()
        if not self._grace.done() and (not daemon.is_unwanted or (status < 0 and not daemon.is_killed)):
            await settle(daemon.log, self._channel)
            await self._channel.send(agent_messages.DaemonDown(epoch, status, self._oom_kills.explain(status)))

    def _retire_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.is_unwanted = True
            self._retired.add(self._daemon)
            self._spawn(self._end_daemon(self._daemon))
            self._daemon = None

    async def _end_daemon(self, daemon: Daemon) -> None:
        await daemon.end(_OLD_DAEMON_S)
        self._retired.discard(daemon)

    # Workers

    async def _start_workers(self, epoch: Epoch, survivors: tuple[int, ...] = ()) -> None:
        """Tells the survivors their places in an epoch, and starts new workers in the other slots."""
        for slot, rank in zip(epoch.slots, epoch.topology.ranks[epoch.node], strict=True):
            place = self._place(epoch, slot, rank)
            if slot not in survivors:
                if not await self._start_worker(epoch, slot, rank, place):
                    return
            elif (
                slot in self._workers and self._server is not None
            ):  # if not, it has just ended: the launcher will hear
                self._workers[slot].rank = rank
                self._server.tell(slot, elastic.Assignment(epoch.number, place))
        await self._channel.send(agent_messages.WorkersUp())

    def _place(self, epoch: Epoch, slot: int, rank: int) -> dict[str, str]:
        """The variables that tell a worker its place."""
        place = worker_variables.place_of_worker(epoch, rank, self._root)
        if self._server is not None:
            place[elastic.SOCKET] = self._server.path
            place[elastic.SLOT] = str(slot)
            place[elastic.EPOCH] = str(epoch.number)
        return place

    async def _start_worker(self, epoch: Epoch, slot: int, rank: int, place: dict[str, str]) -> bool:
        """Starts a worker; tells the launcher, and returns false, if it cannot be run."""
        job = self._job
        env = worker_variables.of_worker(self._environ, place, job.as_horovod)
        result = await self._function.open_result() if self._function else None
        if result is not None:
            env.update(result.variables())
        try:
            inherits = result.descriptors if result else ()
            child = await self._children.start(job.command, env, job.directory, inherits=inherits)
        except OSError as error:
            await self._refuse(f"the command {os.fsdecode(job.command[0])!r} cannot be run: {error.strerror}")
            return False
        self._workers[slot] = worker = _Worker(child, rank, epoch.number)
        self._spawn(self._watch_worker(slot, worker, result))
        return True

    async def _watch_worker(self, slot: int, worker: _Worker, result: ResultFile | None) -> None:
        """Passes on what a worker prints and returns, as of the rank that it has, and tells of its end."""
        pumps = (
            Pump(worker.child.stdout, self._channel, lambda data: agent_messages.Output(worker.rank, "stdout", data)),
            Pump(worker.child.stderr, self._channel, lambda data: agent_messages.Output(worker.rank, "stderr", data)),
        )
        for pump in pumps:
            self._pump(pump)
        status = await worker.child.exit
        await settle(pumps, self._channel)
        if result is not None and status == 0:
            for data in result.pieces(OUTPUT_CHUNK):
                await self._channel.send(agent_messages.Result(worker.rank, data))
        if not worker.is_removed:
            self._free(slot)
            killed = "" if worker.is_unused else self._oom_kills.explain(status)
            await self._channel.send(agent_messages.Exited(slot, status, killed, worker.is_unused))

    def _on_rejoin(self, slot: int, message: elastic.Rejoin) -> None:
        self._channel.send_now(agent_messages.Asked(slot, message.epoch, message.error))

    def _remove(self, slots: tuple[int, ...], reason: str) -> None:
        for slot in slots:
            worker = self._workers.get(slot)
            if worker is not None:
                worker.is_removed = True
                if self._server is not None:
                    self._server.tell(slot, elastic.Removed(reason))
                self._free(slot)
                self._spawn(self._see_off(worker.child))

    def _end_unused(self, number: int) -> None:
        """Ends workers that would look for the daemon of an epoch that is over, when they have come so far."""
        for slot, worker in self._workers.items():
            if worker.born == number and self._server is not None and not self._server.knows(slot):
                worker.is_unused = True
                child_processes.signal_tree(worker.child.pid, signal.SIGKILL)

    def _free(self, slot: int) -> None:
        self._workers.pop(slot, None)
        if self._server is not None:
            self._server.forget(slot)

    async def _see_off(self, child: child_processes.Child) -> None:
        """Waits until a worker without a place has ended, and then helps."""
        for seconds, number in ((REMOVED_S, signal.SIGTERM), (TERM_GRACE, signal.SIGKILL)):
            await asyncio.wait([child.exit], timeout=seconds)
            if child.exit.done():
                return
            child_processes.signal_tree(child.pid, number)

    async def _stop_after(self, workers: list[_Worker]) -> None:
        if workers:
            await asyncio.wait([worker.child.exit for worker in workers], timeout=REMOVED_S)
        self.stop(TERM_GRACE)

    def _pump(self, pump: Pump) -> None:
        self._pumps.append(pump)
        self._spawn(pump.run())

    # The end

    async def _end(self, grace: float) -> None:
        """Ends the workers, then the daemon, then whatever else is left, files of killed daemons included."""
        if self._daemon is not None:
            await child_processes.end_descendants([self._daemon.pid], grace, self._hurry)
            await self._daemon.close(_DAEMON_S)
        survivors = await child_processes.end_descendants([], 0.0, self._hurry)
        for daemon in (*self._retired, *([self._daemon] if self._daemon is not None else ())):
            daemon.remove_files()
        try:
            await asyncio.wait_for(settle(self._pumps, self._channel), DRAIN_S)
        except asyncio.TimeoutError:
            pass  # nobody reads: the launcher is gone, or as good as
        else:
            if survivors:
                await self._refuse(
                    f"processes {survivors} do not end although they were killed; the kernel lets them wait"
                )
        if self._server is not None:
            self._server.close()
