"""Carries out a plan: starts an agent per host, follows their messages, and ends the job everywhere if a part fails.

The agents do the work; this only decides. A job is first starting (until every daemon listens), then running; after
the first failure it is settling (the other ranks have a moment to say what they saw), then stopping (every agent was
told to stop). All events and timers come from one event loop, so nothing here is locked.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import msgspec

from fusion_rt.bootstrap import Endpoint, PeerTable, Phase, decode_line
from fusion_rt.errors import WireError
from fusion_rt.runner import messages, phases, reach
from fusion_rt.runner.link import AgentLink, Event, Lost
from fusion_rt.runner.outcome import (
    DaemonFailure,
    Failure,
    HostFailure,
    WorkerFailure,
    ending,
    first_cause,
    tell,
)
from fusion_rt.runner.output import Lines, WorkerOutput
from fusion_rt.runner.plan import LaunchPlan
from fusion_rt.runner.preflight import versions
from fusion_rt.runner.printer import Printer
from fusion_rt.runner.supervise import Children

TERM_GRACE = 5.0  # seconds between TERM and KILL when a worker failed, as Horovod has it
INTERRUPT_GRACE = 3.0  # seconds when a person or a batch system interrupts: with the rest, all is over within 5
SETTLE_S = 1.5  # seconds from the first failure until the others are stopped
_END_S = 3.0  # seconds an agent has, beyond the grace, to end
_PING_S = 5.0
_SILENCE_S = 60.0  # without a ping after which a remote agent takes the connection for lost
_FLUSH_S = 5.0  # seconds the reader of our own output has to take the rest of it
_FLUSH_INTERRUPTED_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    return await Launch(plan, Printer(), gone).run()


class Launch:
    """One run of a plan.

    Attributes:
        failures: what has gone wrong, in the order in which it did.
        results: what the workers' function returned, pickled, by rank; whole when the job has succeeded.
    """

    def __init__(self, plan: LaunchPlan, printer: Printer, gone: float = 0.0) -> None:
        self._plan = plan
        self._printer = printer
        self._output = WorkerOutput(printer, plan.topology.size, plan.output_directory, plan.timestamps)
        self._logs = [Lines() for _ in plan.hosts]
        self._last_log = [""] * len(plan.hosts)
        self._reports = [Lines() for _ in plan.hosts]
        self._phases = phases.Phases(len(plan.hosts), gone)
        self._links = [self._make_link(node) for node in range(len(plan.hosts))]
        self._connected = set(range(len(plan.hosts)))  # nodes whose agent has not ended
        self._ready: set[int] = set()  # nodes that passed their checks
        self._endpoints: dict[int, Endpoint] = {}  # of the nodes whose daemon listens
        self._running = set(range(plan.topology.size))  # ranks that may still run
        self.failures: list[Failure] = []
        self._losses: list[Failure] = []  # failures that the job has gone on after
        self._ended_well = False  # a worker has
        self._interrupt = 0  # the signal that ended the job
        self._stopping = False
        self._told: set[int] = set()  # nodes that were told to stop
        self._has_output = False
        self.results: dict[int, bytearray] = {}
        self._feeds: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # of the phase the job is in

    async def run(self) -> int:
        """See `launch`."""
        for warning in self._plan.warnings:
            self._say(f"fusionrun: warning: {warning}")
        self._reach(phases.LAUNCHER)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job, wants it ignored
                self._loop.add_signal_handler(number, self._on_signal, number)
        self._set_timer(self._plan.settings.start_timeout, self._on_start_timeout)
        pings = asyncio.create_task(self._ping())
        try:
            children = Children()
            await asyncio.gather(*(link.run(self._job(link.node), children) for link in self._links))
        finally:
            for task in (pings, *self._feeds):
                task.cancel()
            for link in self._links:
                link.kill()
        self._set_timer(None)
        return await self._finish()

    def _make_link(self, node: int) -> AgentLink:
        plan, host = self._plan, self._plan.hosts[node]
        argv, environment = reach.agent_argv(plan, host), reach.agent_environment(plan)
        # A local agent has no business among the files of the working directory, which might shadow Python's modules.
        directory = plan.directory if reach.is_remote(plan, host) else b"/"
        return AgentLink(node, argv, environment, directory, self._on_event, self._room)

    def _job(self, node: int) -> messages.Job:
        plan, own = self._plan, versions()
        return messages.Job(
            python=own.python,
            package=own.package,
            job=plan.job,
            node=node,
            topology=plan.topology,
            command=plan.command,
            environment=tuple(plan.environment.items()),
            directory=plan.directory,
            interfaces=plan.interfaces,
            loopback=plan.is_loopback,
            silence_limit=_SILENCE_S if reach.is_remote(plan, plan.hosts[node]) else 0.0,
            as_horovod=plan.as_horovod,
            function_bytes=len(plan.function) if self._has_workers(node) else 0,
        )

    # Events

    def _on_event(self, node: int, event: Event) -> None:
        match event:
            case messages.Output():
                self._on_output(node, event)
            case messages.DaemonLog():
                self._on_daemon_log(node, event.data)
            case messages.Ready():
                self._ready.add(node)
                self._reach(phases.AGENTS, node)
                self._send_function(node)
            case messages.DaemonReport():
                self._on_daemon_report(node, event.data)
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
        if not self._has_output:
            self._has_output = True
            self._note(f"first output, of rank {output.rank}")
        self._output.feed(output.rank, output.stream, output.data)

    def _on_daemon_log(self, node: int, data: bytes) -> None:
        mark = f"[{self._host(node)}]<fusiond>:".encode()
        lines = self._logs[node].feed(data)
        if lines:
            self._last_log[node] = lines[-1].decode(errors="replace").strip()
            self._printer.write(2, b"".join(mark + line for line in lines))

    def _on_daemon_report(self, node: int, data: bytes) -> None:
        for line in self._reports[node].feed(data):
            try:
                phase = decode_line(line, Phase).phase
            except WireError:  # somebody has printed something there
                self._on_daemon_log(node, line)
            else:
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
        reason = event.reason or ("" if event.status == -signal.SIGKILL else self._last_log[node])
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
            self._fail(WorkerFailure(self._host(node), event.rank, event.status, stderr))
        if not self._running and not self.failures:
            self._stop(TERM_GRACE)

    def _on_lost(self, node: int, event: Lost) -> None:
        self._connected.discard(node)
        if self._stopping:
            self._stop_the_rest()
            if event.status > 0 and node in self._ready and event.last_words:
                self._say(f"fusionrun: the agent of host {self._host(node)} failed: {event.last_words.strip()}")
            return
        if event.protocol_error:
            self._fail_host(
                node,
                f"its agent broke the protocol ({event.protocol_error}); is the same fusion_rt installed there?",
            )
        elif node in self._ready:
            words = event.last_words.strip().splitlines()
            why = f": {words[-1]}" if words else ""
            self._fail_host(node, f"the connection to it was lost; its agent {ending(event.status)}{why}")
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
        """Ends the job on all hosts."""
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
        self._set_timer(grace + _END_S, self._give_up)
        for node in sorted(nodes):
            self._links[node].send(messages.Stop(grace))
            if node not in self._ready:
                self._links[node].interrupt()

    def _on_signal(self, number: int) -> None:
        """The first signal stops the job, a second one kills it."""
        if self._stopping:
            self._told.update(self._connected)
            self._send(messages.Stop(0.0))
        else:
            self._interrupt = number
            self._say(f"fusionrun: {signal.Signals(number).name}: stopping the job; once more kills it")
            self._printer.wait_no_more()  # perhaps nobody reads, and the person stops the job for that very reason
            self._stop(INTERRUPT_GRACE)

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

    # Small things

    async def _room(self) -> None:
        """Waits until our own output can take more."""
        await self._printer.room()
        if isinstance(self._printer.failures.get(1), BrokenPipeError) and not self._stopping:
            self._interrupt = signal.SIGPIPE
            self._stop(TERM_GRACE)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(_PING_S)
            self._send(messages.Ping())

    def _send(self, message: msgspec.Struct) -> None:
        for link in self._links:
            if link.node in self._connected:
                link.send(message)

    def _send_function(self, node: int) -> None:
        whole = memoryview(self._plan.function if self._has_workers(node) else b"")
        pieces = (
            messages.Function(bytes(whole[start : start + messages.FUNCTION_CHUNK]))
            for start in range(0, len(whole), messages.FUNCTION_CHUNK)
        )
        self._feeds.append(asyncio.create_task(self._links[node].feed(pieces)))

    def _set_timer(self, delay: float | None, then: Callable[..., None] | None = None, *args: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay is None or then is None else self._loop.call_later(delay, then, *args)

    def _check_rank(self, node: int, rank: int) -> None:
        if rank not in self._plan.topology.ranks[node]:
            raise WireError(f"a message about rank {rank} came from node {node}")

    def _has_workers(self, node: int) -> bool:
        return bool(self._plan.topology.ranks[node])

    def _host(self, node: int) -> str:
        return self._plan.hosts[node].name

    def _reach(self, phase: str, node: int | None = None) -> None:
        for line in self._phases.reach(phase, node):
            if self._plan.verbose:
                self._say(f"fusionrun: {line}")

    def _note(self, what: str) -> None:
        if self._plan.verbose:
            self._say(f"fusionrun: {self._phases.seconds:.2f} s: {what}")

    def _say(self, line: str) -> None:
        self._printer.write(2, os.fsencode(line) + b"\n")
