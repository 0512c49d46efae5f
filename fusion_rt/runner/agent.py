"""The launcher's hands on one host: checks it, starts the daemon and the workers, passes on what they print.

Run as `python -m fusion_rt.runner.agent`, locally or through ssh. It reads a `messages.Job` and commands from standard
input and writes `messages.FromAgent` to standard output. The end of input means that the launcher, or the connection to
it, is gone; it then ends everything, as it does on TERM, INT and HUP. When the agent itself is killed, the kernel kills
its children (`supervise`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from fusion_rt.address import listen_address
from fusion_rt.bootstrap import DaemonConfig, StartError, decode_line
from fusion_rt.errors import FusionError, WireError
from fusion_rt.runner import environment, messages, preflight, supervise
from fusion_rt.runner.daemon import Daemon
from fusion_rt.runner.messages import (
    OUTPUT_CHUNK,
    DaemonDown,
    DaemonUp,
    Exited,
    Job,
    Output,
    Peers,
    Ready,
    Refused,
    Stop,
    Stopped,
    Versions,
    WorkersUp,
    decode_command,
)
from fusion_rt.runner.oom import OomKills
from fusion_rt.runner.pipes import BEATS, Channel, Pump, Reader, Silence, settle
from fusion_rt.runner.task import Function, Result
from fusion_rt.settings import Settings

LOST_GRACE = 3.0  # seconds between TERM and KILL when the launcher is gone: with the rest, nothing is left after 5
_DAEMON_S = 1.0  # seconds the daemon has to end by itself
_DRAIN_S = 5.0  # seconds the launcher has to take the last output


class Agent:
    """One job on one host."""

    def __init__(self, job: Job, channel: Channel) -> None:
        self._job = job
        self._channel = channel
        self._daemon: Daemon | None = None
        self._children = supervise.Children()
        self._oom_kills = OomKills()
        self._silence = Silence(job.silence_limit)
        self._silence.listening = True
        self._function = Function(job.function_bytes) if job.function_bytes else None
        self._root = ""  # absolute path of the directory that holds the job's
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
        self._channel.send_now(Stopped())  # perhaps nobody reads: `close` has a limit

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
        await self._channel.send(Refused(reasons))

    async def _follow(self, commands: Reader) -> None:
        """Does what the launcher says, and ends the job when it cannot be followed any more."""
        try:
            while line := await commands.line():
                self._silence.heard()
                command = decode_command(line)
                if isinstance(command, Stop):
                    self.stop(command.grace)
                elif isinstance(command, messages.Function):
                    if self._function is None:
                        raise WireError("the launcher sent a function, but the job has none")
                    self._function.feed(command.data)
                else:
                    await self._do(command)
        finally:
            self.stop(LOST_GRACE)

    async def _beat(self) -> None:
        """Tells the launcher again and again that this agent is there, unless there is more than that to be read."""
        while True:
            await asyncio.sleep(self._job.silence_limit / BEATS)
            if self._channel.has_room:
                self._channel.send_now(messages.Ping())

    async def _watch_launcher(self) -> None:
        """Ends the job when the launcher has been silent for too long: it is gone, or as good as."""
        await self._silence.wait()
        self.stop(LOST_GRACE)

    async def _do(self, command: messages.Command) -> None:
        """Does what only jobs of this kind are told."""
        if isinstance(command, Peers):
            if self._daemon is None:
                raise WireError("the launcher sent the table of peers before the daemon was up")
            self._daemon.introduce(command.table)

    async def _bring_up(self) -> None:
        """Checks the host, and starts the daemon and the workers."""
        environ = await self._check()
        if environ is None:
            return
        await self._channel.send(Ready())
        await self._start_daemon(self._job, environ)
        # The workers need not wait until it listens: they import torch meanwhile, and try until it does.
        await self._start_workers(environ)

    async def _check(self) -> dict[bytes, bytes] | None:
        """Checks the host; the environment of the job there, if it is fit."""
        environ = environment.on_host(self._job, os.environb)
        os.environb.clear()
        os.environb.update(environ)
        directory = os.fsdecode(self._job.directory)
        self._root = root = os.path.normpath(os.path.join(directory, Settings.from_env().runtime_root()))
        environ[b"FUSION_RUNTIME_DIR"] = os.fsencode(root)
        if problems := preflight.check(self._job, root):
            await self._refuse(*problems)
            return None
        return environ

    async def _start_daemon(self, job: Job, environ: dict[bytes, bytes], epoch: int = 0) -> None:
        address = "127.0.0.1"
        if len(job.topology.hosts) > 1:
            address = listen_address(job.topology.hosts[job.node], job.interfaces, job.loopback)
        config = DaemonConfig(job.job, job.node, job.topology, address)
        self._daemon = await Daemon.start(
            config, environ, job.directory, self._children, self._channel, self._root, epoch
        )
        self._spawn(self._watch_daemon(self._daemon, epoch))

    async def _watch_daemon(self, daemon: Daemon, epoch: int) -> None:
        """Tells the launcher where the daemon listens, or why it does not, and when it ends."""
        stderr, stdout = daemon.log
        self._pump(stderr)
        answer = await daemon.endpoint()
        if isinstance(answer, StartError):
            status = await daemon.last_status()
            await settle([stderr], self._channel)
            if not daemon.is_unwanted:
                await self._channel.send(DaemonDown(status, answer.error, epoch))
            return
        self._pump(stdout)
        await self._channel.send(DaemonUp(answer, epoch))
        status = await daemon.wait()
        if not self._grace.done() and (not daemon.is_unwanted or (status < 0 and not daemon.is_killed)):
            await settle(daemon.log, self._channel)
            await self._channel.send(DaemonDown(status, self._oom_kills.explain(status), epoch))

    async def _start_workers(self, environ: dict[bytes, bytes]) -> None:
        job = self._job
        for rank in job.topology.ranks[job.node]:
            started = await self._start_worker(environment.of_worker(environ, job, rank, self._root))
            if started is None:
                return
            self._spawn(self._watch_worker(rank, *started))
        await self._channel.send(WorkersUp())

    async def _start_worker(self, env: dict[bytes, bytes]) -> tuple[supervise.Child, Result | None] | None:
        """A new worker, and the place of its result if it calls a function; None if it cannot be had."""
        job = self._job
        result = await self._function.open_result() if self._function else None
        if result is not None:
            env.update(result.variables())
        try:
            inherits = result.descriptors if result else ()
            return await self._children.start(job.command, env, job.directory, inherits=inherits), result
        except OSError as error:
            await self._refuse(f"the command {os.fsdecode(job.command[0])!r} cannot be run: {error.strerror}")
            return None

    async def _watch_worker(self, rank: int, worker: supervise.Child, result: Result | None) -> None:
        status = await self._carry(worker, lambda: rank, result)
        await self._channel.send(Exited(rank, status, self._oom_kills.explain(status)))

    async def _carry(self, worker: supervise.Child, rank: Callable[[], int], result: Result | None) -> int:
        """Passes on what a worker prints and returns, as of the rank that it has; its exit status when all is sent."""
        pumps = (
            Pump(worker.stdout, self._channel, lambda data: Output(rank(), "stdout", data)),
            Pump(worker.stderr, self._channel, lambda data: Output(rank(), "stderr", data)),
        )
        for pump in pumps:
            self._pump(pump)
        status = await worker.exit
        await settle(pumps, self._channel)
        if result is not None and status == 0:
            for data in result.pieces(OUTPUT_CHUNK):
                await self._channel.send(messages.Result(rank(), data))
        return status

    def _pump(self, pump: Pump) -> None:
        self._pumps.append(pump)
        self._spawn(pump.run())

    async def _end(self, grace: float) -> None:
        """Ends the workers, then the daemon, then whatever else is left, files of a killed daemon included."""
        if self._daemon is not None:
            await supervise.end_descendants([self._daemon.pid], grace, self._hurry)
            await self._daemon.close(_DAEMON_S)
        survivors = await supervise.end_descendants([], 0.0, self._hurry)
        if self._daemon is not None:
            self._daemon.remove_files()
        try:
            await asyncio.wait_for(settle(self._pumps, self._channel), _DRAIN_S)
        except asyncio.TimeoutError:
            return  # nobody reads: the launcher is gone, or as good as
        if survivors:
            await self._refuse(f"processes {survivors} do not end although they were killed; the kernel lets them wait")


def _make_agent(job: Job, channel: Channel) -> Agent:
    if not job.elastic:
        return Agent(job, channel)
    from fusion_rt.runner.elastic.agent import ElasticAgent

    return ElasticAgent(job, channel)


async def _serve(fd: int) -> None:
    commands = await Reader.open(os.fdopen(0, "rb", buffering=0))
    channel = await Channel.open(os.fdopen(fd, "wb", buffering=0))
    line = await commands.line()
    if line:
        if problems := preflight.check_versions(decode_line(line, Versions)):
            await channel.send(Refused(tuple(problems)))
        else:
            agent = _make_agent(decode_line(line, Job), channel)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, agent.stop, LOST_GRACE)
            await agent.run(commands)
    await channel.close(_DRAIN_S)


def main() -> None:
    """Serves one job. What anything here prints goes to standard error: standard output is for messages."""
    supervise.adopt_orphans()
    fd = os.dup(1)
    os.dup2(2, 1)
    asyncio.run(_serve(fd))


if __name__ == "__main__":
    main()
