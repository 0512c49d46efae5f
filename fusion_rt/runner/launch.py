"""Carries out a plan: starts an agent per host, follows their messages, and ends the job everywhere if a part fails.

The agents do the work; this only decides. A job is first starting (until every daemon listens), then running; after
the first failure it is settling (the other ranks have a moment to say what they saw), then stopping (every agent was
told to stop). All events and timers come from one event loop, so nothing here is locked. Jobs whose membership changes
are launched by `elastic.launch`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from functools import partial

from fusion_rt.bootstrap import Endpoint, PeerTable
from fusion_rt.errors import WireError
from fusion_rt.runner import messages, phases, reach
from fusion_rt.runner.base import END_S, TERM_GRACE, BaseLaunch, DaemonLogs
from fusion_rt.runner.link import AgentLink, Event, Lost
from fusion_rt.runner.outcome import DaemonFailure, Failure, HostFailure, WorkerFailure, ending
from fusion_rt.runner.plan import LaunchPlan
from fusion_rt.runner.printer import Printer
from fusion_rt.runner.supervise import Children

SETTLE_S = 1.5  # seconds from the first failure until the others are stopped
_QUOTED_S = 5.0  # the same while all that is known quotes the failure of another, which is still on its way out


async def launch(plan: LaunchPlan, gone: float = 0.0) -> int:
    """Runs a job to its end.

    Args:
        plan: the job.
        gone: seconds since the person asked for it.

    Returns:
        The exit status: 0 when all workers succeeded, 1 when anything failed, 128 + n when signal n ended the job.

    Raises:
        OSError: the files for the output cannot be made.
    """
    return await make_launch(plan, gone).run()


def make_launch(plan: LaunchPlan, gone: float = 0.0) -> BaseLaunch:
    """What carries out a plan; arguments as those of `launch`."""
    if plan.elastic is not None:
        from fusion_rt.runner.elastic.launch import ElasticLaunch

        return ElasticLaunch(plan, plan.elastic, Printer(), gone)
    return Launch(plan, Printer(), gone)


class Launch(BaseLaunch):
    """One run of a plan whose hosts and ranks stay as they are."""

    def __init__(self, plan: LaunchPlan, printer: Printer, gone: float = 0.0) -> None:
        super().__init__(plan, printer, gone)
        self._logs = [
            DaemonLogs(host.name, printer, partial(self._on_phase, node)) for node, host in enumerate(plan.hosts)
        ]
        self._links = [self._make_link(node, host) for node, host in enumerate(plan.hosts)]
        self._connected = set(range(len(plan.hosts)))  # nodes whose agent has not ended
        self._ready: set[int] = set()  # nodes that passed their checks
        self._endpoints: dict[int, Endpoint] = {}  # of the nodes whose daemon listens
        self._running = set(range(plan.topology.size))  # ranks that may still run
        self._losses: list[Failure] = []  # failures that the job has gone on after
        self._ended_well = False  # a worker has
        self._told: set[int] = set()  # nodes that were told to stop

    async def _carry_out(self, children: Children) -> None:
        self._set_timer(self._plan.settings.start_timeout, self._on_start_timeout)
        jobs = [self._make_job(host, node, self._plan.topology) for node, host in enumerate(self._plan.hosts)]
        await asyncio.gather(*(link.run(job, children) for link, job in zip(self._links, jobs, strict=True)))

    def _all_links(self) -> Iterable[AgentLink]:
        return [link for link in self._links if link.node in self._connected]

    # Events

    def _on_event(self, node: int, event: Event) -> None:
        match event:
            case messages.Output():
                self._on_output(node, event)
            case messages.DaemonLog():
                self._logs[node].feed(event.data)
            case messages.Ready():
                self._ready.add(node)
                self._reach(phases.AGENTS, node)
                feed = self._send_function(self._links[node], self._has_workers(node))
                self._tasks.append(asyncio.create_task(feed))
            case messages.DaemonReport():
                self._logs[node].feed_report(event.data)
            case messages.Refused(reasons) if self._stopping:
                for reason in reasons:  # too late to be the cause of anything, but somebody may have to clean up
                    self._say(f"fusionrun: host {self._host(node)}: {reason}")
            case messages.Refused(reasons):
                self._fail_host(node, *reasons)
            case messages.DaemonUp():
                self._on_daemon_up(node, event.endpoint)
            case messages.DaemonDown():
                self._on_daemon_down(node, event)
            case messages.WorkersUp():
                self._reach(phases.WORKERS, node)
            case messages.Result(rank, data):
                self._check_rank(node, rank)
                self.results.setdefault(rank, bytearray()).extend(data)
            case messages.Exited():
                self._on_exited(node, event)
            case Lost():
                self._on_lost(node, event)
            case messages.Stopped():
                pass  # `Lost` follows, and until then the host counts as connected

    def _on_output(self, node: int, output: messages.Output) -> None:
        self._check_rank(node, output.rank)
        self._print(output)

    def _on_phase(self, node: int, phase: str) -> None:
        self._reach(phases.OF_DAEMON[phase], node)

    def _on_daemon_up(self, node: int, endpoint: Endpoint) -> None:
        if endpoint.node != node or node in self._endpoints:
            raise WireError(f"an endpoint of node {endpoint.node} came from node {node}")
        self._endpoints[node] = endpoint
        self._reach(phases.DAEMONS, node)
        if len(self._endpoints) == len(self._links) and not self.failures and not self._stopping:
            self._set_timer(None)
            if len(self._links) > 1:
                table = PeerTable(tuple(self._endpoints[n] for n in range(len(self._links))))
                self._send(messages.Peers(table))

    def _on_daemon_down(self, node: int, event: messages.DaemonDown) -> None:
        # What it logged before somebody else killed it says nothing about why.
        reason = event.reason or ("" if event.status == -signal.SIGKILL else self._logs[node].last)
        if node in self._endpoints:
            who = self._plan.topology.describe_node(node)
            self._fail(DaemonFailure(self._host(node), event.status, reason, who))
        elif event.reason:
            self._fail_host(node, f"its daemon cannot start: {reason}")
        else:
            self._fail_host(node, f"its daemon {ending(event.status)} before it listened: {reason or 'no word of it'}")

    def _on_exited(self, node: int, event: messages.Exited) -> None:
        self._check_rank(node, event.rank)
        self._running.discard(event.rank)
        self._ended_well |= event.status == 0
        if event.status != 0:
            stderr = self._output.tail(event.rank)
            self._fail(WorkerFailure(self._host(node), event.rank, event.status, stderr, event.killed))
        if not self._running and not self.failures:
            self._stop(TERM_GRACE)

    def _on_lost(self, node: int, event: Lost) -> None:
        self._connected.discard(node)
        if self._stopping:
            self._stop_the_rest()
            if event.status > 0 and node in self._ready and event.last_words:
                self._say(f"fusionrun: the agent of host {self._host(node)} failed: {event.last_words.strip()}")
            return
        if event.protocol_error or node in self._ready:
            self._fail_host(node, event.reason)
        elif not any(isinstance(f, HostFailure) and f.host == self._host(node) for f in self.failures):
            host = self._plan.hosts[node]
            self._fail_host(node, reach.explain(self._plan, host, event.status, event.last_words))

    # Decisions

    def _fail_host(self, node: int, *reasons: str) -> None:
        """Notes that a host is of no use; whatever ran there is over."""
        self._running.difference_update(self._plan.topology.ranks[node])
        self._fail(HostFailure(self._host(node), reasons))

    def _fail(self, failure: Failure) -> None:
        """Notes a failure; the job is stopped when the others had time to tell theirs, or have ended."""
        if self._stopping:
            return  # a consequence of our own doing
        if self._goes_on():
            self._losses.append(failure)
            self._say(f"{failure.tell()[-1]}; the job goes on without it")
            if not self._running:
                self._stop(TERM_GRACE)
            return
        if not self.failures:
            self._set_timer(_QUOTED_S if failure.echo == 2 else SETTLE_S, self._stop, TERM_GRACE)
        elif failure.echo == 0 and all(before.echo == 2 for before in self.failures):
            self._set_timer(SETTLE_S, self._stop, TERM_GRACE)
        self.failures += [*self._losses, failure]
        self._losses.clear()
        if not self._running:
            self._stop(TERM_GRACE)

    def _goes_on(self) -> bool:
        """Whether the job goes on after a failure, as far as the launcher can tell: the daemons end it if it cannot."""
        started = len(self._endpoints) == len(self._links)
        return self._plan.settings.tolerate_losses and started and bool(self._running or self._ended_well)

    def _stop(self, grace: float) -> None:
        if self._stopping:
            return
        self._stopping = True
        self._note("stopping" if self._running else "all workers ended")
        self._tell_to_stop({node for node in self._connected if self._has_workers(node)}, grace)
        self._stop_the_rest()

    def _stop_the_rest(self) -> None:
        """Ends the nodes without workers once all others have ended: until then, workers may need their shards."""
        if self._connected and not any(self._has_workers(node) for node in self._connected):
            self._tell_to_stop(self._connected - self._told, 0.0)

    def _tell_to_stop(self, nodes: set[int], grace: float) -> None:
        if not nodes:
            return
        self._told |= nodes
        self._set_timer(grace + END_S, self._give_up)
        for node in sorted(nodes):
            self._links[node].send(messages.Stop(grace))
            if node not in self._ready:
                self._links[node].interrupt()

    def _kill(self) -> None:
        self._told.update(self._connected)
        self._send(messages.Stop(0.0))

    def _on_start_timeout(self) -> None:
        limit = f"within {self._plan.settings.start_timeout:g} s (--start-timeout)"
        for node in range(len(self._links)):
            if node in self._endpoints:
                continue
            if node in self._ready:
                self._fail_host(node, f"its daemon did not listen {limit}")
            else:
                self._fail_host(node, f"it did not answer {limit}")
        self._stop(TERM_GRACE)

    def _give_up(self) -> None:
        """Drops the agents that did not end in time."""
        for node in sorted(self._connected & self._told):  # nodes without workers are told when these have ended
            self._say(f"fusionrun: host {self._host(node)} did not confirm that the job is over there")
            self._links[node].kill()
        self._printer.wait_no_more()

    # Small things

    def _check_rank(self, node: int, rank: int) -> None:
        if rank not in self._plan.topology.ranks[node]:
            raise WireError(f"a message about rank {rank} came from node {node}")

    def _has_workers(self, node: int) -> bool:
        return bool(self._plan.topology.ranks[node])

    def _host(self, node: int) -> str:
        return self._plan.hosts[node].name
