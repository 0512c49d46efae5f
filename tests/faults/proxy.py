"""A TCP proxy with faults: between two daemons, it is a bad network whose faults can be chosen."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any

TIMEOUT_S = 20.0
_BLOCK = 1 << 16


@dataclass(frozen=True)
class Fault:
    """The faults of bytes that are sent towards the target; by default, none.

    Attributes:
        delay: seconds before each block of bytes is forwarded.
        pieces: largest number of bytes forwarded at once, each piece in a packet of its own; sizes are random up to it.
        flip_after: bytes of a connection after which one random bit in each block is flipped; None: none.
        cut_after: bytes of a connection after which the rest is dropped and the connection is closed; None: never.
    """

    delay: float = 0.0
    pieces: int | None = None
    flip_after: int | None = None
    cut_after: int | None = None


class Proxy:
    """Listens on loopback and forwards everything to a port there. A context manager.

    Args:
        port: the target's.
        seed: of random sizes and bits.

    Attributes:
        port: of the proxy.
        fault: the faults of bytes from now on; may be replaced at any time.
        connections: number of connections that have been made.
        passed: bytes forwarded to the target.
        flipped: bits flipped.
        cut: connections cut short.
    """

    def __init__(self, port: int, seed: int) -> None:
        self._target = port
        self._random = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.fault = Fault()
        self.port = 0
        self.connections = 0
        self.passed = 0
        self.flipped = 0
        self.cut = 0

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        self._loop.close()

    def reset(self) -> int:
        """Resets every connection, at both ends. Returns their number."""
        count: int = self._call(self._reset())
        return count

    def reject(self) -> None:
        """Resets every connection, and refuses new ones, as a firewall does that rejects."""
        self._call(self._reject())

    def admit(self) -> None:
        """Takes connections again."""
        self._call(self._listen())

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _reject(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._reset()

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reset()

    async def _reset(self) -> int:
        count = len(self._writers) // 2
        for writer in list(self._writers):
            sock = writer.get_extra_info("socket")
            if sock is not None:  # closed with a linger of no time, a connection is reset
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()
        return count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        finally:
            self._tasks.discard(task)
        self.connections += 1
        self._writers |= {writer, back}
        pumps = [asyncio.ensure_future(self._forward(reader, back)), asyncio.ensure_future(self._copy(there, writer))]
        self._tasks |= set(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._tasks -= set(pumps)
            for end in (writer, back):
                end.close()
                self._writers.discard(end)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards bytes from the target unchanged."""
        while data := await reader.read(_BLOCK):
            writer.write(data)
            await writer.drain()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards bytes to the target, with the present faults."""
        position = 0
        while data := await reader.read(_BLOCK):
            fault = self.fault
            if fault.delay:
                await asyncio.sleep(fault.delay)
            if fault.flip_after is not None and position + len(data) > fault.flip_after:
                spoilt = bytearray(data)
                where = self._random.randrange(max(0, fault.flip_after - position), len(data))
                spoilt[where] ^= 1 << self._random.randrange(8)
                data = bytes(spoilt)
                self.flipped += 1
            over = fault.cut_after is not None and position + len(data) > fault.cut_after
            if fault.cut_after is not None and over:
                data = data[: max(0, fault.cut_after - position)]
            await self._write(writer, data, fault.pieces)
            position += len(data)
            if over:
                self.cut += 1
                return

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, pieces: int | None) -> None:
        start = 0
        while start < len(data):
            step = len(data) if pieces is None else self._random.randint(1, pieces)
            writer.write(data[start : start + step])
            await writer.drain()
            if pieces is not None:
                await asyncio.sleep(0)  # so that the next piece goes in a packet of its own
            self.passed += len(data[start : start + step])
            start += step
