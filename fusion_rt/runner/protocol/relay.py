"""Processes of other hosts that a host in between starts: the launcher's end (`Relay`), and that host's (`serve`).

Where a job has many hosts, the launcher reaches some of them only. Each of these starts the agents of a few others, by
the command that the launcher would have used, and carries their input, output and errors, so that the launcher has a
`RelayedChild` in the place of a `Child`. One connection carries all of them, line by line. A relay ends when its input
does, and with it the input of all that it has started, which tells agents that the launcher is gone.

Source: the fan-out of Slurm (`TreeWidth`) and Open MPI's `plm_rsh`, here with two levels, of sqrt(N) hosts each.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

import msgspec

from fusion_rt.core.errors import WireError
from fusion_rt.host.bootstrap import encode_line
from fusion_rt.runner.protocol.agent_messages import LINE_START, MAX_AGENT_LINE, OUTPUT_CHUNK, Stream
from fusion_rt.runner.protocol.child_processes import Child, Children
from fusion_rt.runner.protocol.pipes import LineWriter, Pump, Reader, settle

_END_S = 8.0  # seconds that agents have to end when the launcher is gone
_KILL_S = 2.0  # seconds that a relay has to end, or to confirm that a process is killed
_LAST_WORDS_S = 0.25  # for the rest of what its command says when it has ended
_KEPT = 8 * 1024  # bytes of what a relay says besides messages


class BeRelay(msgspec.Struct, frozen=True, tag="relay"):
    """The first message to a relay, in the place of a `Job`. Attributes as there."""

    python: str
    package: str


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Start a process, in the root directory, with the relay's own environment. `number`: its name in what follows."""

    number: int
    argv: tuple[str, ...]


class Feed(msgspec.Struct, frozen=True, tag="feed"):
    """The next input of a process; no data: its end."""

    number: int
    data: bytes


class SendSignal(msgspec.Struct, frozen=True, tag="signal"):
    """Send a signal to a process."""

    number: int
    signal: int


class Said(msgspec.Struct, frozen=True, tag="said"):
    """Bytes that a process wrote."""

    number: int
    stream: Stream
    data: bytes


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """A process has ended, or could not be started: then `error` says why. Its output was sent before."""

    number: int
    status: int
    error: str = ""


_Order: TypeAlias = Spawn | Feed | SendSignal
_Report: TypeAlias = Said | Gone

_ORDER = msgspec.json.Decoder(_Order)
_REPORT = msgspec.json.Decoder(_Report)


# --- the launcher's end -----------------------------------------------------------------------------------------------


class _Tap(asyncio.ReadTransport):
    """The way of a process's output through the relay: where the output is not read, the relay is not."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def pause_reading(self) -> None:
        self._relay.pause(self)

    def resume_reading(self) -> None:
        self._relay.resume(self)

    def close(self) -> None:
        self._relay.resume(self)


class RelayedInput:
    """The input of a relayed process; as `LineWriter`."""

    def __init__(self, relay: Relay, number: int) -> None:
        self._relay, self._number = relay, number

    async def send(self, message: msgspec.Struct) -> None:
        """Sends a message; waits while the relay does not read."""
        line = memoryview(encode_line(message))
        for start in range(0, len(line), OUTPUT_CHUNK):
            await self._relay.send(Feed(self._number, bytes(line[start : start + OUTPUT_CHUNK])))

    def send_now(self, message: msgspec.Struct) -> None:
        """Sends a message of a kind of which there are few."""
        line = memoryview(encode_line(message))
        for start in range(0, len(line), OUTPUT_CHUNK):
            self._relay.send_now(Feed(self._number, bytes(line[start : start + OUTPUT_CHUNK])))

    def abort(self) -> None:
        """Ends the input."""
        self._relay.send_now(Feed(self._number, b""))


class RelayedChild:
    """A process that a relay has started; as `Child`."""

    def __init__(self, relay: Relay, number: int, line_limit: int) -> None:
        loop = asyncio.get_running_loop()
        self._relay, self._number = relay, number
        self.stdin = RelayedInput(relay, number)
        self._streams = {name: asyncio.StreamReader(limit=line_limit) for name in ("stdout", "stderr")}
        taps = {name: _Tap(relay) for name in self._streams}
        for name, stream in self._streams.items():
            stream.set_transport(taps[name])
        self.stdout = Reader(self._streams["stdout"], taps["stdout"], line_limit)
        self.stderr = Reader(self._streams["stderr"], taps["stderr"], line_limit)
        self.exit: asyncio.Future[int] = loop.create_future()

    def signal(self, number: int) -> None:
        """Sends a signal to it, if it still runs."""
        if not self.exit.done():
            self._relay.send_now(SendSignal(self._number, number))
            if number == signal.SIGKILL:  # the relay may be gone, too
                asyncio.get_running_loop().call_later(_KILL_S, self.end, -number)

    def close(self) -> None:
        """Hears no more of it."""
        self.stdout.abort()
        self.stderr.abort()

    def say(self, stream: Stream, data: bytes) -> None:
        """Takes what it wrote."""
        if not self.exit.done():
            self._streams[stream].feed_data(data)

    def end(self, status: int, error: str = "") -> None:
        """It has ended, or cannot be heard any more."""
        if not self.exit.done():
            if error:
                self._streams["stderr"].feed_data(error.encode())
            for stream in self._streams.values():
                stream.feed_eof()
            self.exit.set_result(status)


class Relay:
    """A host that starts processes for the launcher.

    Args:
        name: of the host.
        argv, environment, directory: run the relay.
        hello: its first message.
    """

    def __init__(
        self, name: str, argv: Sequence[str], environment: Mapping[bytes, bytes], directory: bytes, hello: BeRelay
    ) -> None:
        self._name = name
        self._command = argv, environment, directory
        self._hello = hello
        self._child: Child | None = None
        self._started: list[RelayedChild] = []  # by number
        self._waiting: list[_Order] = []  # until the relay runs
        self._paused: set[_Tap] = set()
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._is_gone = False

    async def start(self, argv: Sequence[str], line_limit: int) -> RelayedChild:
        """Has the relay start a process. Where the relay cannot be reached any more, it ends at once."""
        child = RelayedChild(self, len(self._started), line_limit)
        self._started.append(child)
        self.send_now(Spawn(len(self._started) - 1, tuple(argv)))
        if self._is_gone:
            child.end(255, f"host {self._name}, through which it was to be reached, is gone")
        return child

    async def run(self, children: Children) -> None:
        """Starts the relay and passes on its reports, until it ends."""
        argv, environment, directory = self._command
        words = b""
        try:
            child = self._child = await children.start(
                argv, environment, directory, has_input=True, dies_with_parent=False, line_limit=2 * MAX_AGENT_LINE
            )
        except OSError as error:
            words = f"{argv[0]}: {error.strerror}".encode()
        else:
            errors = asyncio.create_task(self._last_words(child))
            self.send_now(self._hello)
            for order in self._waiting:
                self.send_now(order)
            self._waiting.clear()
            try:
                await self._read(child)
            except (WireError, msgspec.MsgspecError) as error:
                words = f"its relay broke the protocol ({error})".encode()
            child.signal(signal.SIGTERM)
            await asyncio.wait([child.exit], timeout=_KILL_S)
            child.signal(signal.SIGKILL)
            await child.exit
            await asyncio.wait([errors], timeout=_LAST_WORDS_S)
            words = words or (errors.result() if errors.done() else b"")
            child.close()
        self._is_gone = True
        last = words.decode(errors="replace").strip().splitlines()
        for one in self._started:
            one.end(255, f"host {self._name}, through which it is reached, is gone" + (f": {last[-1]}" if last else ""))

    def close(self) -> None:
        """Ends the relay, and the input of all that it has started."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.abort()

    def kill(self) -> None:
        """Kills the command that runs the relay."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)

    async def send(self, message: msgspec.Struct) -> None:
        """Sends an order; waits while the relay does not read."""
        if self._child is None or self._child.stdin is None:
            self.send_now(message)
        else:
            await self._child.stdin.send(message)

    def send_now(self, message: msgspec.Struct) -> None:
        """Sends an order, or keeps it until the relay runs."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.send_now(message)
        elif isinstance(message, Spawn | Feed | SendSignal) and not self._is_gone:
            self._waiting.append(message)

    def pause(self, tap: _Tap) -> None:
        """The output of a process is not read."""
        self._paused.add(tap)
        self._may_read.clear()

    def resume(self, tap: _Tap) -> None:
        """The output of a process is read again, or wanted no more."""
        self._paused.discard(tap)
        if not self._paused:
            self._may_read.set()

    async def _read(self, child: Child) -> None:
        banner = True
        while line := await child.stdout.line():
            if banner and not line.startswith(LINE_START):
                continue
            banner = False
            match _REPORT.decode(line):
                case Said(number, stream, data):
                    self._of(number).say(stream, data)
                case Gone(number, status, error):
                    self._of(number).end(status, error)
            await self._may_read.wait()

    def _of(self, number: int) -> RelayedChild:
        if not 0 <= number < len(self._started):
            raise WireError(f"the relay on host {self._name} speaks of a process {number} that it was not to start")
        return self._started[number]

    @staticmethod
    async def _last_words(child: Child) -> bytes:
        words = b""
        while data := await child.stderr.read():
            words = (words + data)[-_KEPT:]
        return words


# --- the relay's end --------------------------------------------------------------------------------------------------


async def serve(commands: Reader, channel: LineWriter, children: Children, stopping: asyncio.Event) -> None:
    """Starts and carries processes for the launcher, until it is gone or `stopping` is set; then their input ends, and
    after a while they do."""
    running: dict[int, Child] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def follow() -> None:
        while line := await commands.line():
            match _ORDER.decode(line):
                case Spawn(number, argv):
                    try:
                        child = await children.start(
                            argv,
                            dict(os.environb),
                            b"/",
                            has_input=True,
                            dies_with_parent=False,
                            line_limit=OUTPUT_CHUNK,
                        )
                    except OSError as error:
                        await channel.send(Gone(number, 127, f"{argv[0]}: {error.strerror}"))
                        continue
                    running[number] = child
                    tasks.add(asyncio.create_task(_carry(number, child, channel, running)))
                case Feed(number, data):
                    if number in running and (stdin := running[number].stdin) is not None:
                        if data:
                            stdin.pass_on(data)
                        else:
                            stdin.abort()
                case SendSignal(number, what):
                    if number in running:
                        running[number].signal(what)

    following = asyncio.ensure_future(follow())
    told = asyncio.ensure_future(stopping.wait())
    await asyncio.wait([following, told], return_when=asyncio.FIRST_COMPLETED)
    error = following.exception() if following.done() else None
    following.cancel()
    told.cancel()
    for child in running.values():
        if child.stdin is not None:
            child.stdin.abort()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S)
    for child in running.values():
        child.signal(signal.SIGKILL)
    if error is not None:
        raise error


async def _carry(number: int, child: Child, channel: LineWriter, running: dict[int, Child]) -> None:
    """Passes on what a process writes, and its end."""
    pumps = [
        Pump(child.stdout, channel, partial(Said, number, "stdout")),
        Pump(child.stderr, channel, partial(Said, number, "stderr")),
    ]
    carrying = [asyncio.create_task(pump.run()) for pump in pumps]
    status = await child.exit
    await settle(pumps, channel)
    for task in carrying:
        task.cancel()
    child.close()
    del running[number]
    await channel.send(Gone(number, status))
