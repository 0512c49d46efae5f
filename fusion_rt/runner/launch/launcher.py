"""Carries out a plan: follows the messages of the hosts' agents, and ends the job everywhere.

The agents do the work, and `fixed.Fixed` or `epochs.Epochs` decides: events are told to it, and `agents.Agents`
carries out its decisions. All events and timers come from one event loop, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar

from fusion_rt.core.errors import WireError
from fusion_rt.core.topology import Topology
from fusion_rt.host.bootstrap import EpochOver
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
from fusion_rt.runner.launch import console, remote_shell
from fusion_rt.runner.launch.agents import END_S, TERM_GRACE, Agents, Event, HostAgent, Lost
from fusion_rt.runner.launch.console import Console
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.runner.protocol import agent_messages
from fusion_rt.runner.protocol.child_processes import Children
from fusion_rt.runner.protocol.pipes import BEATS

if TYPE_CHECKING:
    from fusion_rt.runner.decisions.epochs import Epochs

INTERRUPT_GRACE = 3.0  # seconds when a person or a batch system interrupts: with the rest, all is over within 5
_SILENCE = 6.0  # times FUSION_HEARTBEAT_TIMEOUT, after which launcher and agent take each other for gone
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class PatientClock:
    """Seconds by which decisions judge whether something is late.

    They pass only while this process takes notice of the world: in a callback that lasts a minute, or while it is
    stopped, `STEP_S` pass. So a worker that has answered is not late because its answer waits behind thousands of
    others.
    """

    STEP_S: ClassVar[float] = 0.25

    def __init__(self) -> None:
        self._seen = time.monotonic()
        self._passed = 0.0

    def __call__(self) -> float:
        return self._passed + min(time.monotonic() - self._seen, self.STEP_S)

    async def run(self) -> None:
        """Goes on. In each step the event loop reads what has come from every agent."""
        while True:
            await asyncio.sleep(self.STEP_S / 2)
            self.notice()

    def notice(self) -> None:
        """The event loop has taken a turn."""
        self._passed, self._seen = self(), time.monotonic()


async def launch(plan: LaunchPlan, gone: float = 0.0) -> int:
    """Runs a job to its end; arguments, result and errors as those of `Launch`."""
    return await Launch(plan, gone).run()


class Launch:
    """One run of a plan.

    Args:
        plan: the job.
        gone: seconds since the person asked for it.

    Attributes:
        failures: in the order in which they happened.
        results: of the workers' function, pickled, by rank; whole when the job has succeeded.

    Raises:
        OSError: the files for the output cannot be made.
    """

    def __init__(self, plan: LaunchPlan, gone: float = 0.0) -> None:
        self._plan = plan
        self._console = Console(plan, gone)
        self._silence_limit = _SILENCE * plan.settings.heartbeat_timeout
        self.failures: list[Failure] = []
        self.results: dict[int, bytearray] = {}
        self._agents = Agents(plan, self._silence_limit, self._console, self)
        self._clock = PatientClock()
        self._decisions = self._make_decisions()
        self._interrupt = 0  # the signal that ended the job
        self._stopping = False
        self._has_joined = False
        self._over = asyncio.Event()
        self._crash: BaseException | None = None
        self._tasks: list[asyncio.Task[None]] = []  # that end with the job
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # for the next decision, or the end of the grace
        self._due = math.inf  # when the next decision is

    def _make_decisions(self) -> Fixed | Epochs:
        plan, settings = self._plan, self._plan.settings
        if plan.elastic is None:
            return Fixed(plan.places, self._agents, self._clock, settings.start_timeout, settings.tolerate_losses)
        from fusion_rt.runner.decisions.epochs import Epochs  # takes time, for which other jobs need not wait

        # Seeded by the job, so that a run can be told from its logs.
        blacklist = Blacklist(*plan.elastic.cooldown, self._clock, random.Random(plan.job))
        return Epochs(plan.elastic.limits, blacklist, self._agents, self._clock)

    async def run(self) -> int:
        """Runs the job to its end.

        Returns:
            The exit status: 0 when all workers succeeded, 1 when anything failed, 128 + n when signal n ended the job.
        """
        for warning in self._plan.warnings:
            self._console.warn(warning)
        self._console.reach(console.LAUNCHER)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job, wants it ignored
                self._loop.add_signal_handler(number, self._on_signal, number)
        self._agents.children = children = Children()
        self._agents.open_relays()
        self._tasks += [self.watch(self._ping()), self.watch(self._clock.run())]
        elastic = self._plan.elastic
        if elastic is not None and elastic.script is not None:
            self._tasks.append(self.watch(elastic.script.follow(children, self._on_hosts, self._console.warn)))
        try:
            self._on_hosts(self._plan.places.hosts)
            await self._over.wait()
            while self._agents.running and self._crash is None:
                await asyncio.wait(self._agents.running, return_when=asyncio.FIRST_COMPLETED)
            if self._crash is not None:
                raise self._crash
        finally:
            for task in self._tasks:
                task.cancel()
            for agent in self._agents.present.values():
                agent.link.kill()
            await self._agents.close_relays()
        self._set_timer(None)
        return await self._finish()

    def watch(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something beside everything else, and ends the job if it fails, which it must not."""
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._crash = task.exception()
            self._over.set()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._silence_limit / BEATS)
            self._agents.tell_all(agent_messages.SignOfLife())

    # Events

    def _on_hosts(self, hosts: tuple[Host, ...]) -> None:
        self._decisions.found(hosts)
        self._await_decision()

    def _tick(self) -> None:
        self._due = math.nan  # the timer is used up, and the clock may not have come as far
        self._decisions.tick()
        self._await_decision()

    def _await_decision(self) -> None:
        """Carries out the last decisions, and sets the timer for the next one."""
        if self._agents.verdict is not None and not self._stopping:
            self.failures = list(self._agents.verdict)
            self._stop(TERM_GRACE)
        due = self._decisions.due
        if not self._stopping and due != self._due:
            self._due = due
            self._set_timer(None if due == math.inf else max(0.0, due - self._clock()), self._tick)

    def hear(self, number: int, event: Event) -> None:
        """Takes an event of an agent."""
        agent = self._agents.present[number]
        name = agent.host.name
        match event:
            case agent_messages.Output(slot, rank, stream, data):
                agent.check(slot, rank)
                self._console.print((name, slot), rank, stream, data)
            case agent_messages.FunctionResult(rank, data):
                agent.check(rank=rank)
                self.results.setdefault(rank, bytearray()).extend(data)
            case agent_messages.DaemonLog(data):
                agent.logs.feed(data)
            case agent_messages.Reached(epoch, phase):
                # Also when the job is already ending: a short job can be over before a node without workers hears that
                # it has started.
                if phase == "started" and self._agents.is_current(agent):
                    self._decisions.started(name, epoch)
                self._has_joined = self._has_joined or phase == "joined"
                self._console.reach_in_epoch(name, epoch, phase)
            case Lost():
                self._on_lost(number, agent, event)
            case agent_messages.Refused(reasons) if not self._agents.is_current(agent):
                for reason in reasons:  # too late to matter, but there may be something to clean up
                    self._console.say(f"fusionrun: host {name}: {reason}")
            case _ if self._agents.is_current(agent):
                self._on_news(agent, name, event)
        self._await_decision()

    def _on_news(self, agent: HostAgent, name: str, event: Event) -> None:
        """Hears of an agent that takes part."""
        decisions = self._decisions
        match event:
            case agent_messages.Present():
                decisions.answered(name)
            case agent_messages.HostReady():
                agent.is_ready = True
                self._console.reach(console.AGENTS, name)
                self._tasks.append(self.watch(self._make_ready(agent)))
            case agent_messages.Refused(reasons):
                decisions.refused(HostFailure(name, reasons))
            case agent_messages.DaemonUp(endpoint, serial):
                if serial == agent.serial:
                    if endpoint.node != agent.node or agent.has_listened:
                        raise WireError(f"an endpoint of node {endpoint.node} came from host {name}")
                    agent.has_listened = True
                    self._console.reach(console.DAEMONS, name)
                    decisions.daemon_up(name, serial, endpoint)
            case agent_messages.InReach(serial):
                decisions.reached(name, serial)
            case agent_messages.DaemonDown(serial, status, reason):
                if serial == agent.serial:
                    # Its log from before another process killed it says nothing about the reason.
                    reason = reason or ("" if status == -signal.SIGKILL else agent.logs.last)
                    decisions.daemon_down(name, serial, self._daemon_failure(agent, status, reason, event.reason))
            case EpochOver(epoch, lost, reason):
                self._console.note(f"epoch {epoch} is over on host {name}: {reason}")
                decisions.missed(name, epoch, lost)
            case agent_messages.WorkersUp():
                self._console.reach(console.WORKERS, name)
            case agent_messages.Asked(slot, epoch, error, is_unfit):
                decisions.asked(name, slot, epoch, error.strip(), is_unfit)
            case agent_messages.Exited(slot, unused=True):
                decisions.unused(name, slot)
            case agent_messages.Exited(slot, status, killed):
                agent.check(slot)
                rank = decisions.rank_of(name, slot)
                if rank is not None:
                    tail = self._console.tail((name, slot))
                    decisions.ended(name, slot, WorkerFailure(name, rank, status, tail, killed) if status else None)

    async def _make_ready(self, agent: HostAgent) -> None:
        """Sends the workers' function before anything else that has to do with workers."""
        whole = memoryview(self._plan.function if agent.slots else b"")
        starts = range(0, len(whole), agent_messages.FUNCTION_CHUNK)
        await agent.link.feed(
            agent_messages.Function(bytes(whole[at : at + agent_messages.FUNCTION_CHUNK])) for at in starts
        )
        if self._agents.is_current(agent):
            self._decisions.ready(agent.host.name)
            self._await_decision()

    def _daemon_failure(self, agent: HostAgent, status: int, reason: str, own: str) -> Failure:
        """The failure of a daemon, whose own words are `own`."""
        name = agent.host.name
        if agent.has_listened:
            here = name in self.topology.hosts
            who = self.topology.describe_node(self.topology.hosts.index(name)) if here else f"host {name}"
            return DaemonFailure(name, status, reason, who)
        if own:
            return HostFailure(name, (f"its daemon cannot start: {own}",))
        words = reason or "no word of it"
        return HostFailure(name, (f"its daemon {ending(status)} before it listened: {words}",))

    def _on_lost(self, number: int, agent: HostAgent, event: Lost) -> None:
        is_current = self._agents.is_current(agent)
        self._agents.forget(number)
        name, words = agent.host.name, event.last_words.strip()
        if not is_current:
            if event.status > 0 and agent.is_ready and words:
                self._console.say(f"fusionrun: the agent of host {name} failed: {words}")
            if self._stopping:
                self._stop_the_rest()
            return
        if event.protocol_error or agent.is_ready:
            why = event.reason
        else:
            why = remote_shell.explain(self._plan, agent.host, event.status, event.last_words)
        self._decisions.lost(HostFailure(name, (why,)))

    # The end

    def _stop(self, grace: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._console.note("stopping" if self.failures or self._interrupt else "all workers ended")
        if not (self.failures or self._interrupt or self._has_joined) and self._is_of_several:
            self._console.warn(
                f'no worker has joined the job, by hvd.init() or init_process_group("fusion"): {self.topology.size} '
                "processes ran the script, each alone"
            )
        self._decisions.close()
        self._over.set()
        if self._agents.stop_workers(grace):
            self._set_timer(grace + END_S, self._give_up)
        self._stop_the_rest()

    @property
    def topology(self) -> Topology:
        """Hosts and ranks of the last epoch that has begun."""
        return self._agents.topology

    @property
    def _is_of_several(self) -> bool:
        """Tells whether several workers run a Python script; other commands, such as `hostname`, need not join."""
        program = os.path.basename(os.fsdecode(self._plan.command[0]))
        return self.topology.size > 1 and program.startswith("python") and not self._plan.function

    def _stop_the_rest(self) -> None:
        if self._agents.stop_the_rest():
            self._set_timer(END_S, self._give_up)

    def _give_up(self) -> None:
        self._agents.give_up()
        self._console.printer.wait_no_more()

    def _on_signal(self, number: int) -> None:
        """The first signal stops the job, a second one kills it."""
        if self._stopping:
            self._agents.kill_all()
        else:
            self._interrupt = number
            self._console.say(f"fusionrun: {signal.Signals(number).name}: stopping the job; once more kills it")
            self._console.printer.wait_no_more()  # perhaps the output is not read, and the person stops the job for it
            self._stop(INTERRUPT_GRACE)

    async def _finish(self) -> int:
        """Prints the last messages, the cause of a failure at the end."""
        self._console.flush()
        if self.failures and not self._interrupt:
            cause = first_cause(self.failures)
            if isinstance(cause, WorkerFailure):
                self._console.printer.write(1, f"{cause.exit_line}\n".encode())
            for line in tell(self.failures):
                self._console.say(line)
        self._console.note("over")
        await self._console.close(is_interrupted=bool(self._interrupt))
        if self._interrupt:
            return 128 + self._interrupt
        return 1 if self.failures else 0

    async def room(self) -> None:
        """Waits until our own output can take more."""
        await self._console.printer.room()
        if self._console.is_unread and not self._stopping:
            self._interrupt = signal.SIGPIPE
            self._stop(TERM_GRACE)

    def _set_timer(self, delay: float | None, then: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay is None or then is None else self._loop.call_later(delay, then)
