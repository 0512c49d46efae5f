"""Pipes to and from other processes: lines in and out with back pressure, and a child's output on its way onward.

asyncio can read and write pipes, but has no public class that writes with back pressure; `LineWriter` is that.
`Reader` is asyncio's reader, which in addition can be closed while the other end is still held open.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from fusion_rt.core.errors import WireError
from fusion_rt.host.bootstrap import MAX_LINE, encode_line
from fusion_rt.runner.protocol.agent_messages import OUTPUT_CHUNK

_IDLE_S = 0.25  # of silence after which the output of a process that has ended is taken for complete
_POLL_S = 0.002
BEATS = 12  # signs of life in the time after which silence means that the other end is gone


class Silence:
    """Tells that the other end of a connection has been silent for too long.

    The time is counted in steps, so that time in which this process stood still itself (a suspended job) is one step.

    Args:
        limit: seconds.

    Attributes:
        listening: whether anything could be heard now; time in which nobody reads does not count.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.listening = False
        self._steps = 0
        self._heard_at = math.inf

    def heard(self) -> None:
        """Begins to count anew."""
        self._steps = 0
        self._heard_at = time.monotonic()

    @property
    def overdue(self) -> float:
        """Seconds since the other end should have given a sign of life; 0 if it is not yet time to."""
        step = self.limit / BEATS
        return max(0.0, min(time.monotonic() - self._heard_at, self._steps * step) - step)

    async def wait(self) -> None:
        """Returns when it has been silent for too long; never if there is no limit."""
        while self._steps < BEATS:
            await asyncio.sleep(self.limit / BEATS or math.inf)
            self._steps += self.listening


class LineWriter(asyncio.BaseProtocol):
    """Sends messages as lines, as fast as the other end reads them."""

    def __init__(self) -> None:
        self._room = asyncio.Event()
        self._room.set()
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(cls, pipe: IO[bytes]) -> LineWriter:
        """Takes over the writing end of a pipe, a socket or a terminal, unbuffered."""
        transport, channel = await asyncio.get_running_loop().connect_write_pipe(cls, pipe)
        channel._transport = transport
        return channel

    @property
    def has_room(self) -> bool:
        """Tells whether `send` would not wait."""
        return self._room.is_set()

    async def send(self, message: msgspec.Struct) -> None:
        """Sends a message; waits while the other end does not read, and does nothing when it is gone."""
        await self._room.wait()
        self.send_now(message)

    def send_now(self, message: msgspec.Struct) -> None:
        """Sends a message of a kind of which there are few: what the other end does not read is kept."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_line(message))

    def pass_on(self, data: bytes) -> None:
        """Sends bytes of lines as they are; what the other end does not read is kept."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def close(self, timeout: float) -> None:
        """Closes, after sending what waits for at most `timeout` seconds."""
        if self._transport is not None:
            self._transport.close()
            await asyncio.wait([self._gone], timeout=timeout)
            self.abort()

    def abort(self) -> None:
        """Closes at once."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self._gone.done():
            self._gone.set_result(None)
        self._room.set()


class Reader:
    """Reads bytes or lines from a pipe."""

    def __init__(self, stream: asyncio.StreamReader, transport: asyncio.ReadTransport, limit: int) -> None:
        self._stream = stream
        self._transport = transport
        self._limit = limit

    @classmethod
    async def open(cls, pipe: IO[bytes], limit: int = MAX_LINE) -> Reader:
        """Takes over the reading end of a pipe, a socket or a terminal, unbuffered; `limit`: bytes of a line."""
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader(limit=limit)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        return cls(stream, transport, limit)

    async def read(self) -> bytes:
        """Some bytes, as soon as there are any; none at the end."""
        return await self._stream.read(OUTPUT_CHUNK)

    async def line(self) -> bytes:
        """A line with its end; what is left, or nothing, at the end.

        Raises:
            WireError: it is too long.
        """
        try:
            return await self._stream.readline()
        except ValueError:
            raise WireError(f"a line is longer than {self._limit} bytes") from None

    def abort(self) -> None:
        """Closes at once."""
        self._transport.close()


class Pump:
    """Carries one stream of a child to the launcher.

    Args:
        source: the child's end.
        channel: the launcher's.
        wrap: makes a message of a piece of output.
    """

    def __init__(self, source: Reader, channel: LineWriter, wrap: Callable[[bytes], msgspec.Struct]) -> None:
        self._source = source
        self._channel = channel
        self._wrap = wrap
        self.passed = 0  # bytes
        self.done = False

    async def run(self) -> None:
        """Runs until the stream ends."""
        while data := await self._source.read():
            await self._channel.send(self._wrap(data))
            self.passed += len(data)
        self.done = True


async def settle(pumps: Sequence[Pump], channel: LineWriter) -> None:
    """Waits, once a child has ended, until all it printed is sent.

    What the child left running may hold its streams open for longer, so a short silence counts as the end, unless it is
    the launcher that is slow to read.
    """
    quiet = 0.0
    while not all(pump.done for pump in pumps) and quiet < _IDLE_S:
        before = sum(pump.passed for pump in pumps)
        await asyncio.sleep(_POLL_S)
        moved = sum(pump.passed for pump in pumps) != before or not channel.has_room
        quiet = 0.0 if moved else quiet + _POLL_S
