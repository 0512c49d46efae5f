"""The daemon of a host as a child of its agent, which configures it over its standard input."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from fusion_rt.core.errors import WireError
from fusion_rt.host.bootstrap import (
    DAEMON_COMMAND,
    Awake,
    DaemonConfig,
    Endpoint,
    EpochOver,
    Knock,
    Order,
    Phase,
    Reformed,
    StartError,
    decode_line,
    job_directory,
    socket_path,
)
from fusion_rt.runner.agent.worker_variables import absolute_path_list
from fusion_rt.runner.protocol.agent_messages import DaemonLog, Reached
from fusion_rt.runner.protocol.child_processes import Child, Children, signal_tree
from fusion_rt.runner.protocol.pipes import LineWriter, Pump, Reader

_ANSWER: Any = Endpoint | StartError
_REPORT: Any = Phase | Reformed | Awake | EpochOver
_LAST_WORD_S = 1.0  # seconds a daemon that could not start has to end by itself


class DaemonReports(Pump):
    """Carries a daemon's standard output to the launcher.

    Args:
        source: its end.
        channel: the launcher's.
        epoch: of which phases are that come before it has said so.
        on_reformed: is told the number of an epoch whose workers the daemon takes.

    Attributes:
        awake: is set when the daemon says that it runs.
    """

    def __init__(self, source: Reader, channel: LineWriter, epoch: int, on_reformed: Callable[[int], None]) -> None:
        super().__init__(source, channel, DaemonLog)
        self._epoch = epoch
        self._on_reformed = on_reformed
        self.awake = asyncio.Event()

    async def run(self) -> None:
        """Runs until the stream ends."""
        while line := await self._source.line():
            try:
                report = decode_line(line, _REPORT)
            except WireError:  # something was printed there
                report = DaemonLog(line)
            if isinstance(report, Reformed):
                self._epoch = report.number
                self._on_reformed(report.number)
            elif isinstance(report, Awake):
                self.awake.set()
            else:
                is_phase = isinstance(report, Phase)
                await self._channel.send(Reached(self._epoch, report.phase) if is_phase else report)
            self.passed += len(line)
        self.done = True


class DaemonProcess:
    """A running daemon.

    Attributes:
        config: its own.
        log: carry its standard error, and the rest of its standard output, to the launcher.
        socket: path of the socket for its workers.
        is_unwanted: it was told to end.
        is_killed: it was made to.
        is_stuck: it was ended because it did not answer.
        is_told: the launcher has heard of its end, if it had to.
    """

    def __init__(
        self,
        child: Child,
        stdin: LineWriter,
        channel: LineWriter,
        config: DaemonConfig,
        runtime_root: str,
        path_of_socket: str,
        on_reformed: Callable[[int], None],
    ) -> None:
        self._child = child
        self._stdin = stdin
        epoch = 0 if config.elastic else 1
        self.config = config
        self._reports = DaemonReports(child.stdout, channel, epoch, on_reformed)
        self.log = (Pump(child.stderr, channel, DaemonLog), self._reports)
        self._directory = job_directory(runtime_root, config.job, config.node, config.serial)
        self.socket = path_of_socket
        self.is_unwanted = False
        self.is_killed = False
        self.is_stuck = False
        self.is_told = asyncio.Event()

    @classmethod
    async def start(
        cls,
        config: DaemonConfig,
        environment: Mapping[bytes, bytes],
        directory: bytes,
        children: Children,
        channel: LineWriter,
        runtime_root: str,
        on_reformed: Callable[[int], None],
    ) -> DaemonProcess:
        """Starts the daemon and tells it its configuration.

        It runs in `/`: files of the working directory might shadow Python's own modules.

        Args:
            config: of the daemon.
            environment: the job's on this host.
            directory: the job's working directory, from which relative entries of PYTHONPATH are taken.
            children: starts it.
            channel: where its log goes.
            runtime_root: absolute path of the directory that holds its own.
            on_reformed: is told the number of an epoch whose workers it takes.

        Raises:
            OSError: it cannot be run.
            FusionError: the path of its socket would be too long.
        """
        path_of_socket = socket_path(runtime_root, config.job, config.node, config.serial)
        env = {**environment, b"PYTHONSAFEPATH": b"1"}
        if b"PYTHONPATH" in environment:
            env[b"PYTHONPATH"] = absolute_path_list(environment[b"PYTHONPATH"], directory)
        child = await children.start(DAEMON_COMMAND, env, b"/", has_input=True)
        assert child.stdin is not None
        child.stdin.send_now(config)
        return cls(child, child.stdin, channel, config, runtime_root, path_of_socket, on_reformed)

    @property
    def pid(self) -> int:
        return self._child.pid

    async def endpoint(self) -> Endpoint | StartError:
        """Waits for its endpoint, or the reason why it has none. To be called once, before `log` is carried.

        Raises:
            WireError: it answered something else.
        """
        line = await self._child.stdout.line()
        if not line:
            return StartError("")
        answer: Endpoint | StartError = decode_line(line, _ANSWER)
        return answer

    @property
    def has_ended(self) -> bool:
        """Tells whether it has ended, or is about to, since it was stuck."""
        return self.is_stuck or self._child.exit.done()

    def tell(self, order: Order) -> None:
        """Tells it where its peers listen, into which epoch it goes, or that its workers are ended."""
        self._stdin.send_now(order)

    async def end_if_stuck(self, seconds: float) -> None:
        """Kills it if it does not say within so many seconds that it runs."""
        self._reports.awake.clear()
        self.tell(Knock())
        try:
            await asyncio.wait_for(self._reports.awake.wait(), seconds)
        except asyncio.TimeoutError:
            if not self._child.exit.done():
                self.is_stuck = True
                signal_tree(self.pid, signal.SIGKILL)

    async def last_status(self) -> int:
        """The exit status of a daemon that could not start (1 if it lingers)."""
        await asyncio.wait([self._child.exit], timeout=_LAST_WORD_S)
        return self._child.exit.result() if self._child.exit.done() else 1

    async def wait(self) -> int:
        """Its exit status, when it ends; minus the signal that ended it."""
        return await self._child.exit

    async def close(self, timeout: float) -> None:
        """Closes its input, which tells it to end, and waits for at most `timeout` seconds."""
        self.is_unwanted = True
        self._stdin.abort()
        await asyncio.wait([self._child.exit], timeout=timeout)

    async def end(self, timeout: float) -> None:
        """As `close`, and kills it if that was not enough; then nothing is left of it."""
        await self.close(timeout)
        if not self._child.exit.done():
            self.is_killed = True
            signal_tree(self.pid, signal.SIGKILL)
            await self._child.exit
        self.remove_files()

    def remove_files(self) -> None:
        """Removes the files of one that has ended."""
        with suppress(FileNotFoundError):  # a daemon that was not killed has removed them
            shutil.rmtree(self._directory)
