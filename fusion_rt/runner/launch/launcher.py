"""Carries out a plan: starts the agents of hosts, follows their messages, and ends the job everywhere.

The agents do the work, and `fixed.Fixed` or `epochs.Epochs` decides: what happens is told to it, and it calls the
methods of `Launch` that `job_control.JobControl` names. All events and timers come from one event loop, so nothing here
is locked.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import Abandon, Endpoint, PeerTable
from fusion_rt.runner.agent.preflight import versions
from fusion_rt.runner.decisions.blacklist import Blacklist
from fusion_rt.runner.decisions.fixed import Fixed
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.outcome import (
    DaemonFailure,
    Failure,
    HostFailure,
    WorkerFailure,
    ending,
    first_cause,
    tell,
)
from fusion_rt.runner.decisions.places import Place, Places
from fusion_rt.runner.launch import phases, remote_shell
from fusion_rt.runner.launch.agent_link import AgentLink, Event, Lost
from fusion_rt.runner.launch.daemon_logs import DaemonLogs
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.runner.launch.printer import Printer
from fusion_rt.runner.launch.worker_output import WorkerOutput
from fusion_rt.runner.protocol import agent_messages
from fusion_rt.runner.protocol.child_processes import Children
from fusion_rt.runner.protocol.pipes import BEATS

if TYPE_CHECKING:
    from fusion_rt.runner.decisions.epochs import Epochs

TERM_GRACE = 5.0  # seconds between TERM and KILL when a worker failed, as Horovod has it
INTERRUPT_GRACE = 3.0  # seconds when a person or a batch system interrupts: with the rest, all is over within 5
END_S = 3.0  # seconds an agent has, beyond the grace, to end
_DROP_S = 2.0  # seconds that an agent has to end which is no longer waited for
_SILENCE = 6.0  # times FUSION_HEARTBEAT_TIMEOUT, after which launcher and agent take each other for gone
_FLUSH_S = 5.0  # seconds the reader of our own output has to take the rest of it
_FLUSH_INTERRUPTED_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Agent:
    """The launcher's record of one agent.

    Attributes:
        host: where it is.
        slots: workers that the host must be fit for; 0: the host only keeps parameter shards.
        link: the connection to it.
        logs: of its present daemon.
        is_ready: it has passed its checks.
        is_told: it was told to stop with the job.
        places: slots and ranks that its workers have had.
    """

    def __init__(self, host: Host, slots: int, link: AgentLink, logs: DaemonLogs) -> None:
        self.host = host
        self.slots = slots
        self.link = link
        self.logs = logs
        self.is_ready = False
        self.is_told = False
        self.places: set[tuple[int, int]] = set()


async def launch(plan: LaunchPlan, gone: float = 0.0) -> int:
    """Runs a job to its end; arguments, result and errors as those of `Launch`."""
    return await Launch(plan, gone).run()


class Launch:
    """One run of a plan.

    Args:
        plan: the job.
        gone: seconds since the person asked for it.

    Attributes:
        failures: what has gone wrong, in the order in which it did.
        results: what the workers' function returned, pickled, by rank; whole when the job has succeeded.
        topology: who was where, at last.

    Raises:
        OSError: the files for the output cannot be made.
    """

    def __init__(self, plan: LaunchPlan, gone: float = 0.0) -> None:
        self._plan = plan
        self._printer = Printer()
        self.topology: Topology = plan.places.topology
        self._output = WorkerOutput(self._printer, self.topology.size, plan.output_directory, plan.timestamps)
        self._silence_limit = _SILENCE * plan.settings.heartbeat_timeout
        self._phases = phases.Phases(len(plan.places.hosts), gone)
        self.failures: list[Failure] = []
        self.results: dict[int, bytearray] = {}
        self._decisions = self._make_decisions()
        self._agents: dict[int, _Agent] = {}  # by number: those that may not have ended
        self._children: Children
        self._count = 0  # of agents that there were
        self._current: dict[str, int] = {}  # by host: the number of the agent that the decisions are about
        self._starting: Places  # of the epoch that was started last
        self._number = 0  # of that epoch
        self._listening: set[str] = set()  # hosts whose daemon of that epoch listens
        self._told_at = 0.0
        self._interrupt = 0  # the signal that ended the job
        self._stopping = False
        self._has_output = False
        self._over = asyncio.Event()
        self._crash: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []  # that end with the job
        self._running: set[asyncio.Task[None]] = set()  # one for each agent
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # for the next decision, or the end of the grace
        self._due = math.inf  # when the next decision is

    def _make_decisions(self) -> Fixed | Epochs:
        plan, settings = self._plan, self._plan.settings
        if plan.elastic is None:
            return Fixed(plan.places, self, time.monotonic, settings.start_timeout, settings.tolerate_losses)
        from fusion_rt.runner.decisions.epochs import Epochs  # takes time, for which other jobs need not wait

        # Seeded by the job, so that what happened can be told from its logs.
        blacklist = Blacklist(*plan.elastic.cooldown, time.monotonic, random.Random(plan.job))
        return Epochs(plan.elastic.limits, blacklist, self, time.monotonic)

    async def run(self) -> int:
        """Runs the job to its end.

        Returns:
            The exit status: 0 when all workers succeeded, 1 when anything failed, 128 + n when signal n ended the job.
        """
        for warning in self._plan.warnings:
            self._warn(warning)
        self._reach(phases.LAUNCHER)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job, wants it ignored
                self._loop.add_signal_handler(number, self._on_signal, number)
        self._children = children = Children()
        self._tasks.append(self._watch(self._ping()))
        elastic = self._plan.elastic
        if elastic is not None and elastic.script is not None:
            self._tasks.append(self._watch(elastic.script.follow(children, self._on_hosts, self._warn)))
        try:
            self._on_hosts(self._plan.places.hosts)
            await self._over.wait()
            while self._running and self._crash is None:
                await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            if self._crash is not None:
                raise self._crash
        finally:
            for task in self._tasks:
                task.cancel()
            for agent in self._agents.values():
                agent.link.kill()
        self._set_timer(None)
        return await self._finish()

    def _watch(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something beside everything else, and ends the job if it fails, which it must not."""
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._over.set()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._silence_limit / BEATS)
            for agent in self._agents.values():
                agent.link.send(agent_messages.Ping())

    # What happens

    def _on_hosts(self, hosts: tuple[Host, ...]) -> None:
        self._decisions.found(hosts)
        self._await_decision()

    def _tick(self) -> None:
        self._decisions.tick()
        self._await_decision()

    def _await_decision(self) -> None:
        """Sets the timer for what is decided when nothing happens."""
        due = self._decisions.due
        if not self._stopping and due != self._due:
            self._due = due
            self._set_timer(None if due == math.inf else max(0.0, due - time.monotonic()), self._tick)

    def _on_event(self, number: int, event: Event) -> None:
        """Hears of an agent."""
        agent = self._agents[number]
        name = agent.host.name
        is_current = self._current.get(name) == number
        match event:
            case agent_messages.Output(rank, stream, data):
                self._check(agent, rank=rank)
                self._print(rank, stream, data)
            case agent_messages.Result(rank, data):
                self._check(agent, rank=rank)
                self.results.setdefault(rank, bytearray()).extend(data)
            case agent_messages.DaemonLog(data):
                agent.logs.feed(data)
            case agent_messages.DaemonReport(data, epoch):
                if epoch == self._number:
                    agent.logs.feed_report(data)
            case Lost():
                self._on_lost(number, agent, is_current, event)
            case agent_messages.Refused(reasons) if not is_current:
                for reason in reasons:  # too late to matter, but somebody may have to clean up
                    self._say(f"fusionrun: host {name}: {reason}")
            case _ if is_current:
                self._on_news(agent, name, event)
        self._await_decision()

    def _on_news(self, agent: _Agent, name: str, event: Event) -> None:
        """Hears of an agent that takes part."""
        match event:
            case agent_messages.Ready():
                agent.is_ready = True
                self._reach(phases.AGENTS, name)
                self._tasks.append(self._watch(self._make_ready(agent)))
            case agent_messages.Refused(reasons):
                self._decisions.refused(HostFailure(name, reasons))
            case agent_messages.DaemonUp(endpoint, epoch):
                if epoch == self._number:
                    if endpoint.node != self._starting.node_of(name) or name in self._listening:
                        raise WireError(f"an endpoint of node {endpoint.node} came from host {name}")
                    self._listening.add(name)
                    self._reach(phases.DAEMONS, name)
                    self._decisions.daemon_up(name, epoch, endpoint)
            case agent_messages.DaemonDown(epoch, status, reason):
                if epoch == self._number:
                    # What it logged before somebody else killed it says nothing about why.
                    reason = reason or ("" if status == -signal.SIGKILL else agent.logs.last)
                    self._decisions.daemon_down(name, epoch, self._daemon_failure(name, status, reason, event.reason))
            case agent_messages.WorkersUp():
                self._reach(phases.WORKERS, name)
            case agent_messages.Asked(slot, epoch, error):
                self._decisions.asked(name, slot, epoch, error.strip())
            case agent_messages.Exited(slot, unused=True):
                self._decisions.unused(name, slot)
            case agent_messages.Exited(slot, status, killed):
                self._check(agent, slot=slot)
                rank = self._decisions.rank_of(name, slot)
                if rank is not None:
                    failure = WorkerFailure(name, rank, status, self._output.tail(rank), killed) if status else None
                    self._decisions.ended(name, slot, failure)

    async def _make_ready(self, agent: _Agent) -> None:
        """Sends the workers' function before anything else that has to do with workers."""
        whole = memoryview(self._plan.function if agent.slots else b"")
        starts = range(0, len(whole), agent_messages.FUNCTION_CHUNK)
        await agent.link.feed(
            agent_messages.Function(bytes(whole[at : at + agent_messages.FUNCTION_CHUNK])) for at in starts
        )
        if self._agents.get(self._current.get(agent.host.name, 0)) is agent:
            self._decisions.ready(agent.host.name)
            self._await_decision()

    def _daemon_failure(self, name: str, status: int, reason: str, own: str) -> Failure:
        """The failure of a daemon, whose own words are `own`."""
        if name in self._listening:
            who = self._starting.topology.describe_node(self._starting.node_of(name))
            return DaemonFailure(name, status, reason, who)
        if own:
            return HostFailure(name, (f"its daemon cannot start: {own}",))
        words = reason or "no word of it"
        return HostFailure(name, (f"its daemon {ending(status)} before it listened: {words}",))

    def _on_lost(self, number: int, agent: _Agent, is_current: bool, event: Lost) -> None:
        del self._agents[number]
        name, words = agent.host.name, event.last_words.strip()
        if not is_current:
            if event.status > 0 and agent.is_ready and words:
                self._say(f"fusionrun: the agent of host {name} failed: {words}")
            if self._stopping:
                self._stop_the_rest()
            return
        del self._current[name]
        if event.protocol_error or agent.is_ready:
            why = event.reason
        else:
            why = remote_shell.explain(self._plan, agent.host, event.status, event.last_words)
        self._decisions.lost(HostFailure(name, (why,)))

    def _check(self, agent: _Agent, slot: int = -1, rank: int = -1) -> None:
        """Makes sure that a message is about a worker of the host that it comes from."""
        if not any(slot == its_slot or rank == its_rank for its_slot, its_rank in agent.places):
            what = f"rank {rank}" if rank >= 0 else f"slot {slot}"
            raise WireError(f"a message about {what} came from host {agent.host.name}")

    # What was decided (`job_control.JobControl`)

    def connect(self, host: Host) -> None:
        plan, elastic, own = self._plan, self._plan.elastic, versions()
        self._count = number = self._count + 1
        self._current[host.name] = number
        argv, environment = remote_shell.agent_argv(plan, host), remote_shell.agent_environment(plan)
        # A local agent has no business among the files of the working directory, which might shadow Python's modules.
        directory = plan.directory if remote_shell.is_remote(plan, host) else b"/"
        link = AgentLink(number, argv, environment, directory, self._on_event, self._room, self._silence_limit)
        epoch, slots = None, min(host.slots, (elastic.limits.most if elastic else None) or host.slots)
        if elastic is None:  # its only one, which has been started
            epoch = self._epoch_of(host)
            slots = len(epoch.slots)
        agent = self._agents[number] = _Agent(host, slots, link, self._make_logs(host))
        if epoch is not None:
            self._note_places(agent, epoch)
        job = agent_messages.Job(
            python=own.python,
            package=own.package,
            job=plan.job,
            slots=slots,
            command=plan.command,
            environment=tuple(plan.environment.items()),
            directory=plan.directory,
            interfaces=plan.interfaces,
            silence_limit=self._silence_limit,
            as_horovod=plan.as_horovod,
            function_bytes=len(plan.function) if slots else 0,
            elastic=number if elastic is not None else 0,
            epoch=epoch,
        )
        self._running.add(self._watch(link.run(job, self._children)))

    def release(self, host: str, reason: str) -> None:
        agent = self._agents[self._current.pop(host)]
        agent.link.send(agent_messages.Release(reason))
        self._let_go(agent, agent_messages.REMOVED_S + TERM_GRACE + END_S)

    def drop(self, host: str) -> None:
        agent = self._agents.get(self._current.pop(host, 0))
        if agent is not None:
            agent.link.send(agent_messages.Stop(0.0))
            self._let_go(agent, _DROP_S)

    def start(self, number: int, places: Places) -> None:
        self._starting, self._number = places, number
        self._listening.clear()
        for host in places.hosts:
            if host.name in self._current:
                agent = self._agents[self._current[host.name]]
                agent.logs = self._make_logs(host)
                epoch = self._epoch_of(host)
                self._note_places(agent, epoch)
                agent.link.send(epoch)

    def begin(self, number: int, places: Places, endpoints: Sequence[Endpoint], survivors: Collection[Place]) -> None:
        self.topology = places.topology
        if self._plan.elastic is not None:
            self._output.change(places.size)
            self._note(f"epoch {number} begins with {places.size} workers on {len(places.hosts)} hosts")
        table = PeerTable(tuple(endpoints)) if len(endpoints) > 1 else None
        for host in places.topology.hosts:
            slots = tuple(slot for name, slot in survivors if name == host)
            self._tell([host], agent_messages.Begin(number, slots, table))

    def abandon(self, number: int) -> None:
        self._tell(self._current, Abandon(number, "the epoch cannot come up"))

    def remove(self, host: str, slots: Sequence[int], reason: str) -> None:
        self._tell([host], agent_messages.Remove(tuple(slots), reason))

    def kill(self, host: str, slots: Sequence[int]) -> None:
        self._tell([host], agent_messages.Kill(tuple(slots)))

    def tell_change(self, added: bool, removed: bool) -> None:
        self._told_at = max(time.time(), self._told_at + 1e-3)
        self._tell(self._current, agent_messages.Changed(self._told_at, added, removed))

    def say(self, line: str) -> None:
        self._say(line)

    def end(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        self._stop(TERM_GRACE)

    def _epoch_of(self, host: Host) -> agent_messages.Epoch:
        """The message that starts the epoch on a host."""
        places, plan, node = self._starting, self._plan, self._starting.node_of(host.name)
        job = plan.job if plan.elastic is None else f"{plan.job}-{self._number}"
        loopback = plan.are_loopback(places.hosts)
        return agent_messages.Epoch(self._number, job, node, places.topology, places.slots[node], loopback)

    def _note_places(self, agent: _Agent, epoch: agent_messages.Epoch) -> None:
        agent.places.update(zip(epoch.slots, epoch.topology.ranks[epoch.node], strict=True))

    def _make_logs(self, host: Host) -> DaemonLogs:
        return DaemonLogs(host.name, self._printer, lambda phase: self._on_phase(host.name, phase))

    def _tell(self, hosts: Iterable[str], message: msgspec.Struct) -> None:
        for host in hosts:
            self._agents[self._current[host]].link.send(message)

    # The end

    def _stop(self, grace: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._note("stopping" if self.failures or self._interrupt else "all workers ended")
        self._decisions.close()
        self._current.clear()
        self._over.set()
        self._tell_to_stop([agent for agent in self._agents.values() if agent.slots], grace)
        self._stop_the_rest()

    def _stop_the_rest(self) -> None:
        """Ends the nodes without workers once all others have ended: until then, workers may need their shards."""
        if not any(agent.slots for agent in self._agents.values()):
            self._tell_to_stop([agent for agent in self._agents.values() if not agent.is_told], 0.0)

    def _tell_to_stop(self, agents: Sequence[_Agent], grace: float) -> None:
        if agents:
            self._set_timer(grace + END_S, self._give_up)
        for agent in agents:
            agent.is_told = True
            agent.link.send(agent_messages.Stop(grace))
            if not agent.is_ready:
                agent.link.interrupt()

    def _kill(self) -> None:
        """Ends the job on all hosts at once, after `_stop`."""
        for agent in self._agents.values():
            agent.is_told = True
            agent.link.send(agent_messages.Stop(0.0))

    def _give_up(self) -> None:
        """Drops the agents that did not end in time."""
        for agent in self._agents.values():
            if agent.is_told:  # nodes without workers are told when the others have ended
                self._say(f"fusionrun: host {agent.host.name} did not confirm that the job is over there")
                agent.link.kill()
        self._printer.wait_no_more()

    def _let_go(self, agent: _Agent, seconds: float) -> None:
        """Sees to it that an agent which has been told to end does."""
        if not agent.is_ready:
            agent.link.interrupt()
        self._loop.call_later(seconds, agent.link.kill)

    def _on_signal(self, number: int) -> None:
        """The first signal stops the job, a second one kills it."""
        if self._stopping:
            self._kill()
        else:
            self._interrupt = number
            self._say(f"fusionrun: {signal.Signals(number).name}: stopping the job; once more kills it")
            self._printer.wait_no_more()  # perhaps nobody reads, and the person stops the job for that very reason
            self._stop(INTERRUPT_GRACE)

    async def _finish(self) -> int:
        """Prints what is left to be said, the cause of a failure last."""
        self._output.flush()
        for fd, error in self._printer.failures.items():
            name = {1: "standard output", 2: "standard error"}.get(fd, "a file of --output-filename")
            self._say(f"fusionrun: some output was lost: {name}: {error.strerror}")
        if self.failures and not self._interrupt:
            cause = first_cause(self.failures)
            if isinstance(cause, WorkerFailure):
                self._printer.write(1, f"{cause.exit_line}\n".encode())
            for line in tell(self.failures):
                self._say(line)
        self._note("over")
        if await self._printer.close(_FLUSH_S if not self._interrupt else _FLUSH_INTERRUPTED_S):
            self._output.close()
        if self._interrupt:
            return 128 + self._interrupt
        return 1 if self.failures else 0

    # Output

    def _print(self, rank: int, stream: agent_messages.Stream, data: bytes) -> None:
        """Passes on what a rank printed."""
        if not self._has_output:
            self._has_output = True
            self._note(f"first output, of rank {rank}")
        self._output.feed(rank, stream, data)

    async def _room(self) -> None:
        """Waits until our own output can take more."""
        await self._printer.room()
        if isinstance(self._printer.failures.get(1), BrokenPipeError) and not self._stopping:
            self._interrupt = signal.SIGPIPE
            self._stop(TERM_GRACE)

    def _on_phase(self, host: str, phase: str) -> None:
        if phase == "started":
            self._decisions.started(host, self._number)
        if self._plan.elastic is None:
            self._reach(phases.OF_DAEMON[phase], host)
        else:
            self._note(f"epoch {self._number}: {phase} on host {host}")

    def _reach(self, phase: str, host: str = "") -> None:
        """Reports a phase of the start; an elastic job has as many starts as epochs."""
        for line in self._phases.reach(phase, host) if self._plan.elastic is None or not host else ():
            if self._plan.verbose:
                self._say(f"fusionrun: {line}")

    def _set_timer(self, delay: float | None, then: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay is None or then is None else self._loop.call_later(delay, then)

    def _note(self, what: str) -> None:
        if self._plan.verbose:
            self._say(f"fusionrun: {self._phases.seconds:.2f} s: {what}")

    def _warn(self, text: str) -> None:
        self._say(f"fusionrun: warning: {text}")

    def _say(self, line: str) -> None:
        self._printer.write(2, os.fsencode(line) + b"\n")
