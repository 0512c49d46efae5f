"""The daemon of a host as a child of its agent, which configures it over its standard input."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from fusion_rt.host.bootstrap import (
    DAEMON_COMMAND,
    DaemonConfig,
    Endpoint,
    PeerTable,
    StartError,
    decode_line,
    job_directory,
)
from fusion_rt.runner.agent.worker_variables import absolute_path_list
from fusion_rt.runner.protocol.agent_messages import DaemonLog, DaemonReport
from fusion_rt.runner.protocol.child_processes import Child, Children, signal_tree
from fusion_rt.runner.protocol.pipes import Channel, Pump

_ANSWER: Any = Endpoint | StartError
_LAST_WORD_S = 1.0  # seconds a daemon that could not start has to end by itself


class Daemon:
    """A running daemon.

    Attributes:
        log: carry its standard error, and what follows on its standard output, to the launcher.
        directory: of its files.
        is_unwanted: it was told to end.
        is_killed: it was made to.
    """

    def __init__(self, child: Child, stdin: Channel, channel: Channel, directory: str, epoch: int) -> None:
        self._child = child
        self._stdin = stdin
        self.log = (
            Pump(child.stderr, channel, DaemonLog),
            Pump(child.stdout, channel, partial(DaemonReport, epoch=epoch)),
        )
        self.directory = directory
        self.is_unwanted = False
        self.is_killed = False

    @classmethod
    async def start(
        cls,
        config: DaemonConfig,
        environment: Mapping[bytes, bytes],
        directory: bytes,
        children: Children,
        channel: Channel,
        runtime_root: str,
        epoch: int,
    ) -> Daemon:
        """Starts the daemon and tells it its configuration.

        It runs in `/`: files of the working directory might shadow Python's own modules.

        Args:
            config: what it has to know.
            environment: the job's on this host.
            directory: the job's working directory, from which relative entries of PYTHONPATH are taken.
            children: starts it.
            channel: where its log goes.
            runtime_root: absolute path of the directory that holds its own.
            epoch: number of the membership epoch that it is for.

        Raises:
            OSError: it cannot be run.
        """
        env = {**environment, b"PYTHONSAFEPATH": b"1"}
        if b"PYTHONPATH" in environment:
            env[b"PYTHONPATH"] = absolute_path_list(environment[b"PYTHONPATH"], directory)
        child = await children.start(DAEMON_COMMAND, env, b"/", has_input=True)
        assert child.stdin is not None
        child.stdin.send_now(config)
        return cls(child, child.stdin, channel, job_directory(runtime_root, config.job, config.node), epoch)

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

    def introduce(self, peers: PeerTable) -> None:
        """Tells it where its peers listen."""
        self._stdin.send_now(peers)

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
            shutil.rmtree(self.directory)
