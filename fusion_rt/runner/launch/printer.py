"""The thread that writes, so that a full pipe or a slow disk stops neither Ctrl-C nor the time-outs of the launcher.

What is written leaves in the order it was given, over all descriptors. Whoever produces output awaits `room`, so that a
reader that is slow slows the workers down (as without a launcher) instead of filling the memory.
"""

from __future__ import annotations

import asyncio
import os
import queue
import select
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace

ROOM = 4 * 1024 * 1024  # bytes that may wait


@dataclass
class PrinterStatistics:
    """Counters of a `Printer`, in bytes.

    Attributes:
        written: by its thread.
        waiting: changed by the event loop's thread only.
        dropped: because writing failed, or since there was no room and the producers had to be heard to the end.
    """

    written: int = 0
    waiting: int = 0
    dropped: int = 0


class Printer:
    """Writes bytes to file descriptors from its own thread. To be made inside the event loop that awaits `room`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._room = asyncio.Event()
        self._room.set()
        self._waits = True
        self._finished = 0  # bytes of which the event loop has not been told
        self._telling = threading.Lock()
        self._counted = PrinterStatistics()
        self.failures: dict[int, OSError] = {}  # by descriptor: why nothing more is written to it
        self._thread = threading.Thread(target=self._run, name="printer", daemon=True)
        self._thread.start()

    def write(self, fd: int, data: bytes) -> None:
        """Queues `data` for a descriptor; never blocks."""
        if self._counted.waiting > ROOM and not self._waits:
            self._counted.dropped += len(data)
            return
        self._counted.waiting += len(data)
        if self._counted.waiting > ROOM and self._waits:
            self._room.clear()
        self._queue.put((fd, data))

    async def room(self) -> None:
        """Waits until less than `ROOM` bytes wait."""
        await self._room.wait()

    def wait_no_more(self) -> None:
        """From now on, drops what there is no room for, because the producers have to be heard to the end soon."""
        self._waits = False
        self._room.set()

    async def close(self, timeout: float) -> bool:
        """Writes what waits, for at most `timeout` seconds. Returns whether all was written (or dropped)."""
        self._queue.put(None)
        deadline = time.monotonic() + timeout
        while self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        return not self._thread.is_alive()

    def statistics(self) -> PrinterStatistics:
        """Returns the counters as they are now."""
        return replace(self._counted)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            fd, data = item
            try:
                if fd not in self.failures:
                    self._write_all(fd, data)
            except OSError as error:
                self.failures[fd] = error
            if fd in self.failures:
                self._counted.dropped += len(data)
            self._tell(len(data))

    def _tell(self, count: int) -> None:
        """Has the event loop told of so many more bytes.

        Once for many: each telling writes to the socket that also wakes the loop for signals, and a signal that finds
        it full is lost, of which SIGCHLD is the one that nobody sends again.
        """
        with self._telling:
            told, self._finished = self._finished > 0, self._finished + count
        if not told:
            with suppress(RuntimeError):  # the loop was closed because `close` ran out of time
                self._loop.call_soon_threadsafe(self._done)

    def _write_all(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                count = os.write(fd, view)
            except BlockingIOError:  # whoever started the launcher left this descriptor non-blocking
                select.select([], [fd], [])
                continue
            self._counted.written += count
            view = view[count:]

    def _done(self) -> None:
        with self._telling:
            count, self._finished = self._finished, 0
        self._counted.waiting -= count
        if self._counted.waiting <= ROOM:
            self._room.set()
