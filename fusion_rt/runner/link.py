"""The launcher's connection to the agent of one host: a child process, messages to it, and events from it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from fusion_rt.errors import WireError
from fusion_rt.runner.messages import LINE_START, MAX_AGENT_LINE, FromAgent, Job, decode_from_agent
from fusion_rt.runner.supervise import Child, Children

_STDERR_TAIL = 8 * 1024  # bytes
_LAST_WORDS_S = 0.25  # for the rest of what the agent's command says when it has ended
_EXIT_S = 5.0  # for the agent's command to end when it has closed its output
_BANNER_LINES = 1000  # that a login shell may print in front of the agent's first message


@dataclass(frozen=True)
class Lost:
    """The agent, or the connection to it, ended. No more events come from it.

    Attributes:
        status: exit status of the command that ran the agent, or minus the signal that ended it.
        last_words: the end of its standard error, or if that was silent, of what was said before the first message.
        protocol_error: what it sent that is not a message; then it was killed for that.
    """

    status: int
    last_words: str
    protocol_error: str = ""


Event: TypeAlias = "FromAgent | Lost"


class AgentLink:
    """One host's agent.

    Args:
        node: index of the host.
        argv: runs the agent.
        environment: of that command.
        directory: working directory of that command.
        on_event: is given the node and each event, and may raise WireError for one that makes no sense.
        room: is awaited before the next message is read; so who cannot keep up slows the agent down.
    """

    def __init__(
        self,
        node: int,
        argv: Sequence[str],
        environment: Mapping[bytes, bytes],
        directory: bytes,
        on_event: Callable[[int, Event], None],
        room: Callable[[], Awaitable[None]],
    ) -> None:
        self.node = node
        self._argv = argv
        self._environment = environment
        self._directory = directory
        self._on_event = on_event
        self._room = room
        self._child: Child | None = None
        self._stderr = b""
        self._banner = b""
        self._unwanted = False

    async def run(self, job: Job, children: Children) -> None:
        """Starts the agent, sends it its job, and reports what it says until it ends."""
        try:
            # It finds out by itself when this process ends, and then ends what it has started.
            child = await children.start(
                self._argv,
                self._environment,
                self._directory,
                has_input=True,
                dies_with_parent=False,
                line_limit=MAX_AGENT_LINE,
            )
        except OSError as error:
            self._on_event(self.node, Lost(127, f"{self._argv[0]}: {error.strerror}"))
            return
        self._child = child
        stderr = asyncio.create_task(self._keep_stderr(child))
        self.send(job)
        if self._unwanted:
            self.interrupt()
        problem = ""
        try:
            await self._read(child)
        except WireError as error:
            problem = str(error)
            self.kill()
        await asyncio.wait([child.exit], timeout=_EXIT_S)
        self.kill()
        status = await child.exit
        # ssh may leave a process behind that holds the pipe open, for the connections that follow (ControlPersist).
        await asyncio.wait([stderr], timeout=_LAST_WORDS_S)
        child.close()
        last_words = self._stderr if self._stderr.strip() else self._banner
        self._on_event(self.node, Lost(status, last_words.decode(errors="replace"), problem))

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

    async def _read(self, child: Child) -> None:
        """Reports messages until the end of the agent's output."""
        banner_lines = _BANNER_LINES
        while line := await child.stdout.line():
            if banner_lines > 0 and not line.startswith(LINE_START):
                banner_lines -= 1
                self._banner = (self._banner + line)[-_STDERR_TAIL:]
                continue
            banner_lines, self._banner = 0, b""
            self._on_event(self.node, decode_from_agent(line))
            await self._room()

    async def _keep_stderr(self, child: Child) -> None:
        while data := await child.stderr.read():
            self._stderr = (self._stderr + data)[-_STDERR_TAIL:]
