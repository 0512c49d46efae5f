"""What launching a job of fixed membership and an elastic one have in common: signals, output, links, the last word."""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import msgspec

from fusion_rt.bootstrap import Phase, decode_line
from fusion_rt.errors import WireError
from fusion_rt.runner import messages, phases, reach
from fusion_rt.runner.hosts import Host
from fusion_rt.runner.link import AgentLink, Event
from fusion_rt.runner.outcome import Failure, WorkerFailure, first_cause, tell
from fusion_rt.runner.output import Lines, WorkerOutput
from fusion_rt.runner.pipes import BEATS
from fusion_rt.runner.plan import LaunchPlan
from fusion_rt.runner.preflight import versions
from fusion_rt.runner.printer import Printer
from fusion_rt.runner.supervise import Children
from fusion_rt.topology import Topology

TERM_GRACE = 5.0  # seconds between TERM and KILL when a worker failed, as Horovod has it
INTERRUPT_GRACE = 3.0  # seconds when a person or a batch system interrupts: with the rest, all is over within 5
END_S = 3.0  # seconds an agent has, beyond the grace, to end
_SILENCE = 6.0  # times FUSION_HEARTBEAT_TIMEOUT, after which launcher and agent take each other for gone
_FLUSH_S = 5.0  # seconds the reader of our own output has to take the rest of it
_FLUSH_INTERRUPTED_S = 0.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DaemonLogs:
    """What the daemon of one host prints.

    Args:
        host: its name.
        printer: passes lines of the log on.
        on_phase: is told how far the start of the job has come there.

    Attributes:
        last: the last line of its log.
    """

    def __init__(self, host: str, printer: Printer, on_phase: Callable[[str], None]) -> None:
        self._mark = f"[{host}]<fusiond>:".encode()
        self._printer = printer
        self._on_phase = on_phase
        self._log = Lines()
        self._reports = Lines()
        self.last = ""

    def feed(self, data: bytes) -> None:
        """Takes what it logged."""
        lines = self._log.feed(data)
        if lines:
            self.last = lines[-1].decode(errors="replace").strip()
            self._printer.write(2, b"".join(self._mark + line for line in lines))

    def feed_report(self, data: bytes) -> None:
        """Takes what it said to whoever started it."""
        for line in self._reports.feed(data):
            try:
                phase = decode_line(line, Phase).phase
            except WireError:  # somebody has printed something there
                self.feed(line)
            else:
                self._on_phase(phase)


class BaseLaunch(ABC):
    """One run of a plan.

    Attributes:
        failures: what has gone wrong, in the order in which it did.
        results: what the workers' function returned, pickled, by rank; whole when the job has succeeded.
        topology: who was where, at last.
    """

    def __init__(self, plan: LaunchPlan, printer: Printer, gone: float = 0.0) -> None:
        self._plan = plan
        self._printer = printer
        self._output = WorkerOutput(printer, plan.topology.size, plan.output_directory, plan.timestamps)
        self._silence_limit = _SILENCE * plan.settings.heartbeat_timeout
        self._phases = phases.Phases(len(plan.hosts), gone)
        self.failures: list[Failure] = []
        self.results: dict[int, bytearray] = {}
        self.topology: Topology = plan.topology
        self._interrupt = 0  # the signal that ended the job
        self._stopping = False
        self._has_output = False
        self._tasks: list[asyncio.Task[None]] = []  # that end with the job
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None  # of the phase the job is in

    async def run(self) -> int:
        """Runs the job to its end.

        Returns:
            The exit status: 0 when all workers succeeded, 1 when anything failed, 128 + n when signal n ended the job.
        """
        for warning in self._plan.warnings:
            self._say(f"fusionrun: warning: {warning}")
        self._reach(phases.LAUNCHER)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell's background job, wants it ignored
                self._loop.add_signal_handler(number, self._on_signal, number)
        self._tasks.append(asyncio.create_task(self._ping()))
        try:
            await self._carry_out(Children())
        finally:
            for task in self._tasks:
                task.cancel()
            for link in self._all_links():
                link.kill()
        self._set_timer(None)
        return await self._finish()

    @abstractmethod
    async def _carry_out(self, children: Children) -> None:
        """Runs the job until no agent is left."""

    @abstractmethod
    def _all_links(self) -> Iterable[AgentLink]:
        """To every agent that may not have ended."""

    @abstractmethod
    def _on_event(self, number: int, event: Event) -> None:
        """Hears of the link of this number."""

    @abstractmethod
    def _stop(self, grace: float) -> None:
        """Ends the job on all hosts."""

    @abstractmethod
    def _kill(self) -> None:
        """Ends the job on all hosts at once, after `_stop`."""

    # Agents

    def _make_link(self, number: int, host: Host) -> AgentLink:
        plan = self._plan
        argv, environment = reach.agent_argv(plan, host), reach.agent_environment(plan)
        # A local agent has no business among the files of the working directory, which might shadow Python's modules.
        directory = plan.directory if reach.is_remote(plan, host) else b"/"
        return AgentLink(number, argv, environment, directory, self._on_event, self._room, self._silence_limit)

    def _make_job(self, host: Host, node: int, topology: Topology, elastic: int = 0) -> messages.Job:
        plan, own = self._plan, versions()
        return messages.Job(
            python=own.python,
            package=own.package,
            job=plan.job,
            node=node,
            topology=topology,
            command=plan.command,
            environment=tuple(plan.environment.items()),
            directory=plan.directory,
            interfaces=plan.interfaces,
            loopback=plan.is_loopback,
            silence_limit=self._silence_limit,
            as_horovod=plan.as_horovod,
            function_bytes=len(plan.function) if topology.ranks[node] else 0,
            elastic=elastic,
        )

    async def _send_function(self, link: AgentLink, has_workers: bool = True) -> None:
        whole = memoryview(self._plan.function if has_workers else b"")
        pieces = (
            messages.Function(bytes(whole[start : start + messages.FUNCTION_CHUNK]))
            for start in range(0, len(whole), messages.FUNCTION_CHUNK)
        )
        await link.feed(pieces)

    def _send(self, message: msgspec.Struct) -> None:
        """Tells every agent."""
        for link in self._all_links():
            link.send(message)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._silence_limit / BEATS)
            self._send(messages.Ping())

    # Output

    def _print(self, output: messages.Output) -> None:
        """Passes on what a rank printed."""
        if not self._has_output:
            self._has_output = True
            self._note(f"first output, of rank {output.rank}")
        self._output.feed(output.rank, output.stream, output.data)

    async def _room(self) -> None:
        """Waits until our own output can take more."""
        await self._printer.room()
        if isinstance(self._printer.failures.get(1), BrokenPipeError) and not self._stopping:
            self._interrupt = signal.SIGPIPE
            self._stop(TERM_GRACE)

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

    def _on_signal(self, number: int) -> None:
        """The first signal stops the job, a second one kills it."""
        if self._stopping:
            self._kill()
        else:
            self._interrupt = number
            self._say(f"fusionrun: {signal.Signals(number).name}: stopping the job; once more kills it")
            self._printer.wait_no_more()  # perhaps nobody reads, and the person stops the job for that very reason
            self._stop(INTERRUPT_GRACE)

    def _set_timer(self, delay: float | None, then: Callable[..., None] | None = None, *args: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if delay is None or then is None else self._loop.call_later(delay, then, *args)

    def _reach(self, phase: str, node: int | None = None) -> None:
        for line in self._phases.reach(phase, node):
            if self._plan.verbose:
                self._say(f"fusionrun: {line}")

    def _note(self, what: str) -> None:
        if self._plan.verbose:
            self._say(f"fusionrun: {self._phases.seconds:.2f} s: {what}")

    def _say(self, line: str) -> None:
        self._printer.write(2, os.fsencode(line) + b"\n")
