"""The agents of a job's hosts: starts them, tells them what was decided, and sees to it that they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from fusion_rt.core.errors import WireError
from fusion_rt.host.bootstrap import Abandon, Endpoint, PeerTable, Reform
from fusion_rt.runner.agent.preflight import versions
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.outcome import Failure
from fusion_rt.runner.decisions.places import Place, Places
from fusion_rt.runner.launch import remote_shell
from fusion_rt.runner.launch.agent_link import AgentLink, Event
from fusion_rt.runner.launch.daemon_logs import DaemonLogs
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.runner.launch.printer import Printer
from fusion_rt.runner.protocol import agent_messages
from fusion_rt.runner.protocol.child_processes import Children

TERM_GRACE = 5.0  # seconds between TERM and KILL when a worker failed, as Horovod has it
END_S = 3.0  # seconds an agent has, beyond the grace, to end
_DROP_S = 2.0  # seconds that an agent has to end which is no longer waited for


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
    """All agents; the `JobControl` of what decides about the job.

    Args:
        plan: the job.
        silence_limit: seconds after which launcher and agent take each other for gone.
        printer: passes on what daemons log.
        watch: runs the connection to an agent beside everything else.
        on_event: is given the number of an agent, and what it says.
        room: is awaited before more is read from an agent.
        on_begin: is told the number and the places of an epoch that begins, and of others (0) that are spoken of.
        say: tells the person.
        end: ends the job, for these failures.

    Attributes:
        present: by number, those that may not have ended.
        children: starts them; to be set before there is any.
        topology: of the last epoch that has begun.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        silence_limit: float,
        printer: Printer,
        watch: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_event: Callable[[int, Event], None],
        room: Callable[[], Awaitable[None]],
        on_begin: Callable[[int, Places], None],
        say: Callable[[str], None],
        end: Callable[[Sequence[Failure]], None],
    ) -> None:
        self._plan = plan
        self._silence_limit = silence_limit
        self._printer = printer
        self._watch = watch
        self._on_event = on_event
        self._room = room
        self._on_begin = on_begin
        self.say = say
        self.end = end
        self.present: dict[int, HostAgent] = {}
        self.children: Children
        self.running: set[asyncio.Task[None]] = set()  # one for each agent
        self._count = 0  # of agents that there were
        self._current: dict[str, int] = {}  # by host: the number of the agent that the decisions are about
        self._only: Places | None = None  # where membership is fixed
        self._told_at = 0.0

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

    # What was decided (`job_control.JobControl`)

    def connect(self, host: Host) -> None:
        plan, elastic, own = self._plan, self._plan.elastic, versions()
        self._count = number = self._count + 1
        self._current[host.name] = number
        argv, environment = remote_shell.agent_argv(plan, host), remote_shell.agent_environment(plan)
        # A local agent has no business among the files of the working directory, which might shadow Python's modules.
        directory = plan.directory if remote_shell.is_remote(plan, host) else b"/"
        link = AgentLink(number, argv, environment, directory, self._on_event, self._room, self._silence_limit)
        slots = min(host.slots, (elastic.limits.most if elastic else None) or host.slots)
        epoch = None if self._only is None else self._epoch(1, self._only, host.name)
        agent = self.present[number] = HostAgent(
            host, slots if epoch is None else len(epoch.slots), link, DaemonLogs(host.name, self._printer)
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
        task = self._watch(link.run(job, self.children))
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
        self._on_begin(number, places)
        if self._only is not None:
            if len(endpoints) > 1:
                self._tell(places.names, agent_messages.Introduce(PeerTable(tuple(endpoints))))
            return
        reform = Reform(number, places.topology, places.absent, tuple(endpoints))
        for host in places.names:
            epoch = self._epoch(number, places, host)
            self.present[self._current[host]].note_places(epoch)
            slots = tuple(slot for name, slot in waiting if name == host)
            self._tell([host], agent_messages.Begin(reform, epoch, slots))

    def recruit(self, number: int, place: Place, would: Places) -> None:
        self._on_begin(0, would)
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
                self.say(f"fusionrun: host {agent.host.name} did not confirm that the job is over there")
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
