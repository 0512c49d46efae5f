"""The launcher's connection to the agent of one host: a child process, messages to it, and events from it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from fusion_rt.core.errors import WireError
from fusion_rt.runner.decisions.outcome import ending
from fusion_rt.runner.protocol.agent_messages import LINE_START, MAX_AGENT_LINE, FromAgent, Job, Ping, decode_from_agent
from fusion_rt.runner.protocol.child_processes import Child, Children
from fusion_rt.runner.protocol.pipes import Silence

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


class AgentLink:
    """One host's agent.

    Args:
        node: index of the host.
        argv: runs the agent.
        environment: of that command.
        directory: working directory of that command.
        on_event: is given the node and each event, and may raise WireError for one that makes no sense.
        room: is awaited before the next message is read; so who cannot keep up slows the agent down.
        silence_limit: seconds without a message after which the agent is killed; 0: never.
    """

    def __init__(
        self,
        node: int,
        argv: Sequence[str],
        environment: Mapping[bytes, bytes],
        directory: bytes,
        on_event: Callable[[int, Event], None],
        room: Callable[[], Awaitable[None]],
        silence_limit: float = 0.0,
    ) -> None:
        self.node = node
        self._argv = argv
        self._environment = environment
        self._directory = directory
        self._on_event = on_event
        self._room = room
        self._silence = Silence(silence_limit)
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
        problem, silence = "", 0.0
        reading = asyncio.ensure_future(self._read(child))
        watching = asyncio.ensure_future(self._silence.wait())
        await asyncio.wait([reading, watching], return_when=asyncio.FIRST_COMPLETED)
        watching.cancel()
        if not reading.done():
            silence = self._silence.limit
            reading.cancel()
            child.signal(signal.SIGTERM)
            child.signal(signal.SIGCONT)  # a stopped agent goes on, and can end what the kernel would leave
        elif isinstance(reading.exception(), WireError):
            problem = str(reading.exception())
            self.kill()
        else:
            reading.result()
        await asyncio.wait([child.exit], timeout=_EXIT_S)
        self.kill()
        status = await child.exit
        # ssh may leave a process behind that holds the pipe open, for the connections that follow (ControlPersist).
        await asyncio.wait([stderr], timeout=_LAST_WORDS_S)
        child.close()
        last_words = self._stderr if self._stderr.strip() else self._banner
        self._on_event(self.node, Lost(status, last_words.decode(errors="replace"), problem, silence))

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

    async def _read(self, child: Child) -> None:
        """Reports messages until the end of the agent's output."""
        banner_lines = _BANNER_LINES
        while line := await child.stdout.line():
            self._silence.heard()
            if banner_lines > 0 and not line.startswith(LINE_START):
                banner_lines -= 1
                self._banner = (self._banner + line)[-_STDERR_TAIL:]
                continue
            banner_lines, self._banner = 0, b""
            message = decode_from_agent(line)
            if not isinstance(message, Ping):
                self._on_event(self.node, message)
            self._silence.listening = False
            await self._room()
            self._silence.listening = True  # from the first message on; before it, --start-timeout is the limit

    async def _keep_stderr(self, child: Child) -> None:
        while data := await child.stderr.read():
            self._stderr = (self._stderr + data)[-_STDERR_TAIL:]
