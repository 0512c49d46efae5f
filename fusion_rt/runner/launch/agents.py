"""The agents of a job's hosts: starts them, tells them decisions, and sees to it that they end."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import msgspec

from fusion_rt.core.errors import WireError
from fusion_rt.host.bootstrap import Abandon, Endpoint, PeerTable, Reform
from fusion_rt.runner.agent.preflight import versions
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.outcome import Failure, ending
from fusion_rt.runner.decisions.places import Place, Places
from fusion_rt.runner.launch import remote_shell
from fusion_rt.runner.launch.console import Console
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.runner.launch.worker_output import DaemonLogs
from fusion_rt.runner.protocol import agent_messages
from fusion_rt.runner.protocol.agent_messages import (
    LINE_START,
    MAX_AGENT_LINE,
    FromAgent,
    Job,
    SignOfLife,
    decode_from_agent,
)
from fusion_rt.runner.protocol.child_processes import Child, Children
from fusion_rt.runner.protocol.pipes import Silence
from fusion_rt.runner.protocol.relay import BeRelay, Relay, RelayedChild

WIDTH = 32  # hosts up to which all are reached from here
TERM_GRACE = 5.0  # seconds between TERM and KILL when a worker failed, as Horovod has it
END_S = 3.0  # seconds an agent has, beyond the grace, to end
_DROP_S = 2.0  # seconds that an agent has to end which is no longer waited for
_STDERR_TAIL = 8 * 1024  # bytes
_LAST_WORDS_S = 0.25  # for the rest of the output of the agent's command when it has ended
_EXIT_S = 5.0  # for the agent's command to end when it has closed its output
_BANNER_LINES = 1000  # that a login shell may print in front of the agent's first message


@dataclass(frozen=True)
class Lost:
    """The agent, or the connection to it, ended. No more events come from it.

    Attributes:
        status: exit status of the command that ran the agent, or minus the signal that ended it.
        last_words: the end of its standard error, or if that was silent, of its output before the first message.
        protocol_error: bytes from it that are no message; then it was killed for that.
        silence: seconds for which it had said nothing, when it was killed for that; else 0.
    """

    status: int
    last_words: str
    protocol_error: str = ""
    silence: float = 0.0

    @property
    def reason(self) -> str:
        """The reason why an agent is lost that had passed its checks."""
        if self.protocol_error:
            return f"its agent broke the protocol ({self.protocol_error}); is the same fusion_rt installed there?"
        if self.silence:
            return (
                f"its agent has been silent for {self.silence:g} s: it was stopped or hangs, or the host, or the "
                "network to it, is gone"
            )
        words = self.last_words.strip().splitlines()
        why = f": {words[-1]}" if words else ""
        return f"the connection to it was lost; its agent {ending(self.status)}{why}"


Event: TypeAlias = "FromAgent | Lost"


class Hearer(Protocol):
    """The job that the agents are of; `launcher.Launch`."""

    def hear(self, number: int, event: Event) -> None:
        """Takes an event of the agent of this number.

        Raises:
            WireError: it makes no sense.
        """

    async def room(self) -> None:
        """Waits until there may be more to hear: an agent whose job cannot keep up is slowed down."""

    def watch(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine beside everything else, and ends the job if it fails, which it must not."""


@dataclass(frozen=True)
class RelayedWay:
    """The way to an agent through another host: the relay there, and the command line that it runs."""

    relay: Relay
    argv: Sequence[str]


class AgentLink:
    """One host's agent.

    Args:
        node: index of the host.
        argv: runs the agent.
        environment: of that command.
        directory: working directory of that command.
        hearer: is given each event.
        silence_limit: seconds without a message after which the agent is killed; 0: never.
    """

    def __init__(
        self,
        node: int,
        argv: Sequence[str],
        environment: Mapping[bytes, bytes],
        directory: bytes,
        hearer: Hearer,
        silence_limit: float = 0.0,
    ) -> None:
        self.node = node
        self._argv = argv
        self._environment = environment
        self._directory = directory
        self._hearer = hearer
        self._silence = Silence(silence_limit)
        self._child: Child | RelayedChild | None = None
        self._stderr = b""
        self._banner: bytes | None = b""  # in front of the first message; None when that has come
        self._unwanted = False

    async def run(self, job: Job, children: Children, way: RelayedWay | None = None) -> None:
        """Starts the agent, sends it its job, and reports its messages until it ends. Where it cannot be reached on its
        way through another host, it is reached from here."""
        lost = None if way is None else await self._run(job, await way.relay.start(way.argv, MAX_AGENT_LINE))
        if lost is None or not (self._banner is None or self._unwanted):
            try:
                # It finds out by itself when this process ends, and then ends its own processes.
                child = await children.start(
                    self._argv,
                    self._environment,
                    self._directory,
                    has_input=True,
                    dies_with_parent=False,
                    line_limit=MAX_AGENT_LINE,
                )
            except OSError as error:
                lost = Lost(127, f"{self._argv[0]}: {error.strerror}")
            else:
                lost = await self._run(job, child)
        self._hearer.hear(self.node, lost)

    async def _run(self, job: Job, child: Child | RelayedChild) -> Lost:
        """Reports the messages of an agent until it ends."""
        self._child, self._stderr, self._banner = child, b"", b""
        stderr = asyncio.create_task(self._keep_stderr(child))
        self.send(job)
        if self._unwanted:
            self.interrupt()
        problem, silence = "", 0.0
        reading = asyncio.ensure_future(self._read(child))
        watching = asyncio.ensure_future(self._silence.wait())
        await asyncio.wait([reading, watching], return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if not reading.done():
            silence = self._silence.limit
            reading.cancel()
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # a stopped agent goes on, and can end processes that the kernel would leave
        elif isinstance(reading.exception(), WireError):
            problem = str(reading.exception())
            child.signal(signal.SIGKILL)
        else:
            reading.result()
        await asyncio.wait([child.exit], timeout=_EXIT_S)
        child.signal(signal.SIGKILL)
        status = await child.exit
        # ssh may leave a process behind that holds the pipe open, for the connections that follow (ControlPersist).
        await asyncio.wait([stderr], timeout=_LAST_WORDS_S)
        child.close()
        last_words = self._stderr if self._stderr.strip() else self._banner or b""
        return Lost(status, last_words.decode(errors="replace"), problem, silence)

    @property
    def overdue(self) -> float:
        """Seconds since the agent should have given a sign of life."""
        return self._silence.overdue

    def send(self, message: msgspec.Struct) -> None:
        """Sends a message, if the agent is still there."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.send_now(message)

    async def feed(self, messages: Iterable[msgspec.Struct]) -> None:
        """Sends many messages, no faster than the agent reads them, as long as it is there."""
        for message in messages:
            if self._child is None or self._child.stdin is None:
                return
            await self._child.stdin.send(message)

    def interrupt(self) -> None:
        """Ends an agent that may not be there yet to hear a message (ssh may still be trying to connect)."""
        self._unwanted = True
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.abort()
            self._child.signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kills the command that runs the agent; the agent itself, if it is elsewhere, then ends its children."""
        self._unwanted = True
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    async def _read(self, child: Child | RelayedChild) -> None:
        """Reports messages until the end of the agent's output."""
        banner_lines = _BANNER_LINES
        while line := await child.stdout.line():
            self._silence.heard()
            if banner_lines > 0 and not line.startswith(LINE_START):
                banner_lines -= 1
                self._banner = ((self._banner or b"") + line)[-_STDERR_TAIL:]
                continue
            banner_lines, self._banner = 0, None
            message = decode_from_agent(line)
            if not isinstance(message, SignOfLife):
                self._hearer.hear(self.node, message)
            self._silence.listening = False
            await self._hearer.room()
            self._silence.listening = True  # from the first message on; before it, --start-timeout is the limit

    async def _keep_stderr(self, child: Child | RelayedChild) -> None:
        while data := await child.stderr.read():
            self._stderr = (self._stderr + data)[-_STDERR_TAIL:]


class HostAgent:
    """The launcher's record of one agent.

    Attributes:
        host: where it is.
        slots: workers that the host must be fit for; 0: the host only keeps parameter shards.
        link: the connection to it.
        logs: of its daemon.
        is_ready: it has passed its checks.
        is_told: it was told to stop with the job.
        has_listened: its present daemon has.
        node: of the host.
        serial: of its present daemon.
    """

    def __init__(self, host: Host, slots: int, link: AgentLink, logs: DaemonLogs) -> None:
        self.host = host
        self.slots = slots
        self.link = link
        self.logs = logs
        self.is_ready = False
        self.is_told = False
        self.has_listened = False
        self.node = -1
        self.serial = 1
        self._places: set[tuple[int, int]] = set()  # slots and ranks that its workers have had

    def note_places(self, epoch: agent_messages.Epoch) -> None:
        """Its workers have these places, or are to have them."""
        self._places.update(zip(epoch.slots, epoch.topology.ranks[epoch.node], strict=True))

    def check(self, slot: int = -1, rank: int = -1) -> None:
        """Makes sure that a message is about a worker of its host.

        Raises:
            WireError: it is not.
        """
        if not any(slot in (-1, its_slot) and rank in (-1, its_rank) for its_slot, its_rank in self._places):
            what = f"rank {rank}" if rank >= 0 else f"slot {slot}"
            raise WireError(f"a message about {what} came from host {self.host.name}")


class Agents:
    """All agents; the `JobControl` of the decisions about the job.

    Args:
        plan: the job.
        silence_limit: seconds after which launcher and agent take each other for gone.
        console: is told of epochs, and passes on the daemons' log.
        hearer: hears the agents.

    Attributes:
        present: by number, those that may not have ended.
        children: starts them; to be set before there is any.
        running: a task for each agent.
        topology: of the last epoch that has begun.
        verdict: it was decided that the job ends, with these failures; None: it was not.
    """

    def __init__(self, plan: LaunchPlan, silence_limit: float, console: Console, hearer: Hearer) -> None:
        self._plan = plan
        self._silence_limit = silence_limit
        self._console = console
        self._hearer = hearer
        self.present: dict[int, HostAgent] = {}
        self.children: Children
        self.running: set[asyncio.Task[None]] = set()
        self.topology = plan.places.topology
        self.verdict: Sequence[Failure] | None = None
        self._count = 0  # of agents that there were
        self._current: dict[str, int] = {}  # by host: the number of the agent that the decisions are about
        self._only: Places | None = None  # where membership is fixed
        self._told_at = 0.0
        # By name, those of hosts that were not reached yet.
        self._ways = self._ways_through([host for host in plan.places.hosts if remote_shell.is_remote(plan, host)])
        self._relaying: dict[asyncio.Task[None], Relay] = {}

    def _ways_through(self, hosts: Sequence[Host]) -> dict[str, RelayedWay]:
        """Returns the ways to these hosts through some of them; none where there are few."""
        if len(hosts) <= WIDTH:
            return {}
        own, size = versions(), math.ceil(math.sqrt(len(hosts)))
        environment, ways = remote_shell.agent_environment(self._plan), {}
        for start in range(0, len(hosts), size):
            first, *others = hosts[start : start + size]
            argv = remote_shell.agent_argv(self._plan, first)
            relay = Relay(first.name, argv, environment, self._plan.directory, BeRelay(own.python, own.package))
            ways[first.name] = RelayedWay(relay, remote_shell.LOCAL_AGENT)
            for host in others:
                ways[host.name] = RelayedWay(relay, remote_shell.agent_argv(self._plan, host))
        return ways

    def open_relays(self) -> None:
        """Starts the relays. `children` has been set."""
        for relay in {way.relay: None for way in self._ways.values()}:
            self._relaying[self._hearer.watch(relay.run(self.children))] = relay

    async def close_relays(self) -> None:
        """Ends the relays, when no agent is left."""
        for relay in self._relaying.values():
            relay.close()
        if self._relaying:
            await asyncio.wait(self._relaying, timeout=END_S)
        for task, relay in self._relaying.items():
            if not task.done():
                relay.kill()

    def is_current(self, agent: HostAgent) -> bool:
        """Tells whether the decisions are about this agent."""
        return self.present.get(self._current.get(agent.host.name, 0)) is agent

    def forget(self, number: int) -> None:
        """An agent has ended."""
        agent = self.present.pop(number)
        if self._current.get(agent.host.name) == number:
            del self._current[agent.host.name]

    def tell_all(self, message: msgspec.Struct) -> None:
        """Sends a message to each agent that is there, whatever it is there for."""
        for agent in self.present.values():
            agent.link.send(message)

    # Decisions (`job_control.JobControl`)

    def connect(self, host: Host) -> None:
        plan, elastic, own = self._plan, self._plan.elastic, versions()
        self._count = number = self._count + 1
        self._current[host.name] = number
        argv, environment = remote_shell.agent_argv(plan, host), remote_shell.agent_environment(plan)
        # A local agent has no business among the files of the working directory, which might shadow Python's modules.
        directory = plan.directory if remote_shell.is_remote(plan, host) else b"/"
        link = AgentLink(number, argv, environment, directory, self._hearer, self._silence_limit)
        slots = min(host.slots, (elastic.limits.most if elastic else None) or host.slots)
        epoch = None if self._only is None else self._epoch(1, self._only, host.name)
        agent = self.present[number] = HostAgent(
            host, slots if epoch is None else len(epoch.slots), link, DaemonLogs(host.name, self._console.printer)
        )
        if epoch is not None:
            agent.node = epoch.node
            agent.note_places(epoch)
        job = agent_messages.Job(
            python=own.python,
            package=own.package,
            job=plan.job,
            slots=agent.slots,
            command=plan.command,
            environment=tuple(plan.environment.items()),
            directory=plan.directory,
            interfaces=plan.interfaces,
            silence_limit=self._silence_limit,
            as_horovod=plan.as_horovod,
            function_bytes=len(plan.function) if agent.slots else 0,
            elastic=number if elastic is not None else 0,
            loopback=self._loopback(),
            epoch=epoch,
        )
        task = self._hearer.watch(link.run(job, self.children, self._ways.pop(host.name, None)))
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    def release(self, host: str, reason: str) -> None:
        agent = self.present[self._current.pop(host)]
        agent.link.send(agent_messages.Release(reason))
        self._let_go(agent, agent_messages.REMOVED_S + TERM_GRACE + END_S)

    def drop(self, host: str) -> None:
        agent = self.present.get(self._current.pop(host, 0))
        if agent is not None:
            agent.link.send(agent_messages.Stop(0.0))
            self._let_go(agent, _DROP_S)

    def start(self, number: int, places: Places) -> None:
        self._only = places

    def start_daemon(self, host: str, node: int, serial: int, nodes: Sequence[str]) -> None:
        agent = self.present[self._current[host]]
        agent.node, agent.serial, agent.has_listened = node, serial, False
        agent.logs.begin()
        agent.link.send(agent_messages.StartDaemon(node, serial, tuple(nodes)))

    def reach(self, host: str, serial: int, endpoints: Sequence[Endpoint]) -> None:
        self._tell([host], agent_messages.Reach(serial, tuple(endpoints)))

    def begin(self, number: int, places: Places, endpoints: Sequence[Endpoint], waiting: Collection[Place]) -> None:
        self.topology = places.topology
        self._console.begin_epoch(number, places)
        if self._only is not None:
            if len(endpoints) > 1:
                self._tell(places.names, agent_messages.Introduce(PeerTable(tuple(endpoints))))
            return
        reform = Reform(number, places.topology, places.absent, tuple(endpoints))
        slots: dict[str, list[int]] = {host: [] for host in places.names}
        for host, slot in waiting:
            slots[host].append(slot)
        for host in places.names:
            epoch = self._epoch(number, places, host)
            self.present[self._current[host]].note_places(epoch)
            self._tell([host], agent_messages.Begin(reform, epoch, tuple(slots[host])))

    def recruit(self, number: int, place: Place, would: Places) -> None:
        self._console.expect(would.size)
        epoch = self._epoch(number, would, place[0])
        self.present[self._current[place[0]]].note_places(epoch)
        self._tell([place[0]], agent_messages.Recruit(place[1], epoch))

    def abandon(self, number: int, reason: str) -> None:
        self._tell(self._current, Abandon(number, reason))

    def probe(self, host: str) -> None:
        self._tell([host], agent_messages.Hail())

    def overdue(self, host: str) -> float:
        agent = self.present.get(self._current.get(host, 0))
        return 0.0 if agent is None else agent.link.overdue

    def check_daemon(self, host: str, serial: int) -> None:
        self._tell([host], agent_messages.CheckDaemon(serial))

    def remove(self, host: str, slots: Sequence[int], reason: str) -> None:
        self._tell([host], agent_messages.Remove(tuple(slots), reason))

    def kill(self, host: str, slots: Sequence[int]) -> None:
        self._tell([host], agent_messages.Kill(tuple(slots)))

    def tell_change(self, added: bool, removed: bool) -> None:
        self._told_at = max(time.time(), self._told_at + 1e-3)
        self._tell(self._current, agent_messages.Changed(self._told_at, added, removed))

    def say(self, line: str) -> None:
        self._console.say(line)

    def end(self, failures: Sequence[Failure]) -> None:
        self.verdict = tuple(failures)

    def _loopback(self) -> bool | None:
        """Tells whether no daemon has to be reached from outside; None if others may come."""
        plan = self._plan
        if not plan.are_loopback(plan.places.hosts):
            return False
        return None if plan.elastic is not None and plan.elastic.script is not None else True

    def _epoch(self, number: int, places: Places, host: str) -> agent_messages.Epoch:
        node = places.node_of(host)
        return agent_messages.Epoch(number, node, places.topology, places.slots[node])

    def _tell(self, hosts: Iterable[str], message: msgspec.Struct) -> None:
        for host in hosts:
            self.present[self._current[host]].link.send(message)

    # The end

    def stop_workers(self, grace: float) -> bool:
        """Ends the job on the hosts that have workers; whether there are any. Nothing is decided any more."""
        self._current.clear()
        return self._tell_to_stop([agent for agent in self.present.values() if agent.slots], grace)

    def stop_the_rest(self) -> bool:
        """Ends the nodes without workers once all others have ended: until then, workers may need their shards."""
        if any(agent.slots for agent in self.present.values()):
            return False
        return self._tell_to_stop([agent for agent in self.present.values() if not agent.is_told], 0.0)

    def kill_all(self) -> None:
        """Ends the job on all hosts at once, after `stop_workers`."""
        for agent in self.present.values():
            agent.is_told = True
            agent.link.send(agent_messages.Stop(0.0))

    def give_up(self) -> None:
        """Drops the agents that did not end in time."""
        for agent in self.present.values():
            if agent.is_told:  # nodes without workers are told when the others have ended
                self._console.say(f"fusionrun: host {agent.host.name} did not confirm that the job is over there")
                agent.link.kill()

    def _tell_to_stop(self, agents: Sequence[HostAgent], grace: float) -> bool:
        for agent in agents:
            agent.is_told = True
            agent.link.send(agent_messages.Stop(grace))
            if not agent.is_ready:
                agent.link.interrupt()
        return bool(agents)

    def _let_go(self, agent: HostAgent, seconds: float) -> None:
        """Sees to it that an agent which has been told to end does."""
        if not agent.is_ready:
            agent.link.interrupt()
        asyncio.get_running_loop().call_later(seconds, agent.link.kill)
