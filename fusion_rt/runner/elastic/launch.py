"""Launches an elastic job: the hands and ears of `Epochs`, which decides."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from fusion_rt.bootstrap import Endpoint, PeerTable
from fusion_rt.errors import WireError
from fusion_rt.runner import messages, reach
from fusion_rt.runner.base import END_S, TERM_GRACE, BaseLaunch, DaemonLogs
from fusion_rt.runner.elastic.agent import REMOVED_S
from fusion_rt.runner.elastic.blacklist import Blacklist
from fusion_rt.runner.elastic.discovery import Discovery
from fusion_rt.runner.elastic.epochs import LEAVE_S, Epochs, Limits
from fusion_rt.runner.elastic.places import Place, Places
from fusion_rt.runner.hosts import Host
from fusion_rt.runner.link import AgentLink, Event, Lost
from fusion_rt.runner.outcome import DaemonFailure, Failure, HostFailure, WorkerFailure
from fusion_rt.runner.plan import ElasticPlan, LaunchPlan
from fusion_rt.runner.printer import Printer
from fusion_rt.runner.supervise import Children
from fusion_rt.topology import Topology

_TICK_S = 0.25
_DROP_S = 2.0  # seconds that an agent has to end that was given up


class ElasticLaunch(BaseLaunch):
    """One run of a plan whose hosts and workers come and go."""

    def __init__(self, plan: LaunchPlan, elastic: ElasticPlan, printer: Printer, gone: float = 0.0) -> None:
        super().__init__(plan, printer, gone)
        self._elastic = elastic
        settings = plan.settings
        limits = Limits(
            elastic.wanted,
            elastic.least,
            elastic.most,
            elastic.timeout,
            elastic.resets,
            settings.heartbeat_timeout + LEAVE_S,
            settings.start_timeout,
        )
        # Seeded by the job, so that what happened can be told from its logs.
        blacklist = Blacklist(*elastic.cooldown, time.monotonic, random.Random(plan.job))
        self._epochs = Epochs(limits, blacklist, self, time.monotonic)
        self._links: dict[int, AgentLink] = {}  # by number of the agent: those that may not have ended
        self._hosts: dict[int, Host] = {}  # by number, of all agents that there were
        self._current: dict[str, int] = {}  # by host: the number of the agent that the decisions are about
        self._ready: set[int] = set()  # numbers of agents that passed their checks
        self._logs: dict[int, DaemonLogs] = {}  # by number, of the present epoch's daemon
        self._starting: Places  # of the epoch that was started last
        self._told_at = 0.0
        self._over = asyncio.Event()
        self._crash: BaseException | None = None
        self._running: set[asyncio.Task[None]] = set()  # one for each link

    async def _carry_out(self, children: Children) -> None:
        self._children = children
        self._tasks.append(self._watch(self._tick()))
        if self._elastic.script:
            timeout = self._plan.settings.start_timeout
            script, slots = self._elastic.script, self._elastic.slots
            discovery = Discovery(script, slots, timeout, children, self._epochs.found, self._warn)
            self._tasks.append(self._watch(discovery.run()))
        self._epochs.found(self._plan.hosts)
        await self._over.wait()
        while self._running and self._crash is None:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        if self._crash is not None:
            raise self._crash

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

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._epochs.tick()

    def _warn(self, text: str) -> None:
        self._say(f"fusionrun: warning: {text}")

    def _all_links(self) -> Iterable[AgentLink]:
        return list(self._links.values())

    # What agents say

    def _on_event(self, number: int, event: Event) -> None:
        name = self._hosts[number].name
        if isinstance(event, messages.Output):
            self._print(event)
        elif isinstance(event, messages.DaemonLog):
            self._logs[number].feed(event.data)
        elif isinstance(event, messages.Result):
            self.results.setdefault(event.rank, bytearray()).extend(event.data)
        elif isinstance(event, Lost):
            self._on_lost(number, name, event)
        elif isinstance(event, messages.Refused) and self._current.get(name) != number:
            for reason in event.reasons:  # too late to matter, but somebody may have to clean up
                self._say(f"fusionrun: host {name}: {reason}")
        elif self._current.get(name) == number:
            self._on_news(number, name, event)

    def _on_news(self, number: int, name: str, event: Event) -> None:
        """Hears what an agent says that takes part."""
        match event:
            case messages.Ready():
                self._ready.add(number)
                self._tasks.append(self._watch(self._make_ready(number, name)))
            case messages.Refused(reasons):
                self.drop(name)
                self._epochs.lost(HostFailure(name, reasons))
            case messages.DaemonUp(endpoint, epoch):
                if epoch == self._epochs.number and endpoint.node != self._starting.node_of(name):
                    raise WireError(f"an endpoint of node {endpoint.node} came from host {name}")
                self._epochs.daemon_up(name, epoch, endpoint)
            case messages.DaemonDown():
                self._on_daemon_down(number, name, event)
            case messages.DaemonReport(data, epoch):
                if epoch == self._epochs.number:
                    self._logs[number].feed_report(data)
            case messages.Asked(slot, epoch, error):
                self._epochs.asked(name, slot, epoch, error.strip())
            case messages.Ended(slot, unused=True):
                self._epochs.unused(name, slot)
            case messages.Ended(slot, status, killed):
                self._on_ended(name, slot, status, killed)

    async def _make_ready(self, number: int, name: str) -> None:
        """Sends the workers' function before anything else that has to do with workers."""
        await self._send_function(self._links[number])
        if self._current.get(name) == number:
            self._epochs.ready(name)

    def _on_daemon_down(self, number: int, name: str, event: messages.DaemonDown) -> None:
        if event.epoch != self._epochs.number:
            return
        # What it logged before somebody else killed it says nothing about why.
        reason = event.reason or ("" if event.status == -signal.SIGKILL else self._logs[number].last)
        who = self._starting.topology.describe_node(self._starting.node_of(name))
        self._epochs.daemon_down(name, event.epoch, DaemonFailure(name, event.status, reason, who))

    def _on_ended(self, name: str, slot: int, status: int, killed: str) -> None:
        places = self._epochs.places
        rank = places.ranks.get((name, slot)) if places is not None else None
        if rank is not None:
            stderr = self._output.tail(rank)
            failure = WorkerFailure(name, rank, status, stderr, killed) if status != 0 else None
            self._epochs.ended(name, slot, failure)

    def _on_lost(self, number: int, name: str, event: Lost) -> None:
        del self._links[number]
        words = event.last_words.strip()
        if self._current.get(name) != number:
            if event.status > 0 and number in self._ready and words:
                self._say(f"fusionrun: the agent of host {name} failed: {words}")
            return
        del self._current[name]
        if event.protocol_error or number in self._ready:
            why = event.reason
        else:
            why = reach.explain(self._plan, self._hosts[number], event.status, event.last_words)
        self._epochs.lost(HostFailure(name, (why,)))

    # What `Epochs` has done

    def connect(self, host: Host) -> None:
        number = len(self._hosts) + 1
        self._hosts[number] = host
        self._current[host.name] = number
        self._logs[number] = DaemonLogs(host.name, self._printer, lambda phase: None)
        link = self._links[number] = self._make_link(number, host)
        slots = min(host.slots, self._elastic.most or host.slots)
        topology = Topology((host.name,), (tuple(range(slots)),))  # what the host has to be fit for
        job = self._make_job(host, 0, topology, elastic=number)
        self._running.add(self._watch(link.run(job, self._children)))

    def release(self, host: str, reason: str) -> None:
        number = self._current.pop(host)
        self._links[number].send(messages.Release(reason))
        self._let_go(number, REMOVED_S + TERM_GRACE + END_S)

    def drop(self, host: str) -> None:
        number = self._current.pop(host, None)
        if number is not None and number in self._links:
            self._links[number].send(messages.Stop(0.0))
            self._let_go(number, _DROP_S)

    def start(self, number: int, places: Places) -> None:
        self._starting = places
        loopback = self._plan.are_loopback(places.hosts)
        for node, host in enumerate(places.hosts):
            agent = self._current[host.name]
            on_phase = partial(self._on_phase, host.name, number)
            self._logs[agent] = DaemonLogs(host.name, self._printer, on_phase)
            self._links[agent].send(messages.Epoch(number, node, places.topology, places.slots[node], loopback))

    def begin(self, number: int, places: Places, endpoints: Sequence[Endpoint], survivors: Collection[Place]) -> None:
        self.topology = places.topology
        self._output.change(places.size)
        table = PeerTable(tuple(endpoints)) if len(endpoints) > 1 else None
        for host in places.topology.hosts:
            slots = tuple(slot for name, slot in survivors if name == host)
            self._tell(host, messages.Begin(number, slots, table))
        self._note(f"epoch {number} begins with {places.size} workers on {len(places.hosts)} hosts")

    def abandon(self, number: int) -> None:
        for host in self._current:
            self._tell(host, messages.Abandon(number))

    def remove(self, host: str, slots: Sequence[int], reason: str) -> None:
        self._tell(host, messages.Remove(tuple(slots), reason))

    def kill(self, host: str, slots: Sequence[int]) -> None:
        self._tell(host, messages.Kill(tuple(slots)))

    def tell_change(self, added: bool, removed: bool) -> None:
        self._told_at = max(time.time(), self._told_at + 1e-3)
        for host in self._current:
            self._tell(host, messages.Changed(self._told_at, added, removed))

    def say(self, line: str) -> None:
        self._say(line)

    def end(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        self._stop(TERM_GRACE)

    # Ending

    def _stop(self, grace: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._note("stopping")
        self._epochs.close()
        self._current.clear()
        self._over.set()
        self._set_timer(grace + END_S, self._give_up)
        self._send(messages.Stop(grace))
        for number, link in self._links.items():
            if number not in self._ready:
                link.interrupt()

    def _kill(self) -> None:
        self._send(messages.Stop(0.0))

    def _give_up(self) -> None:
        """Drops the agents that did not end in time."""
        for number, link in self._links.items():
            self._say(f"fusionrun: host {self._hosts[number].name} did not confirm that the job is over there")
            link.kill()
        self._printer.wait_no_more()

    def _let_go(self, number: int, seconds: float) -> None:
        """Sees to it that an agent which has been told to end does."""
        link = self._links[number]
        if number not in self._ready:
            link.interrupt()
        self._loop.call_later(seconds, link.kill)

    # Small things

    def _tell(self, host: str, message: msgspec.Struct) -> None:
        self._links[self._current[host]].send(message)

    def _on_phase(self, host: str, number: int, phase: str) -> None:
        self._note(f"epoch {number}: {phase} on host {host}")
        if phase == "started":
            self._epochs.started(host, number)
