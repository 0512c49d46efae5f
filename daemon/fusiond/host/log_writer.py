"""A logging handler whose lines are written by a thread, so that the event loop never waits for the log's reader.

The log of a daemon is a pipe to its agent, which reads no faster than the launcher, which reads no faster than its own
output is read. A loop that waited for all of them would send no heartbeats, and its peers would declare it dead.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque

_FLUSH_S = 1.0  # seconds that the end of the process waits for the reader


def flush() -> None:
    """Waits until all that was logged in this process is written, or for a second."""
    for handler in logging.getLogger().handlers:
        handler.flush()


class LogWriter(logging.Handler):
    """Writes each record as a line. Lines for which there is no room are dropped; a later line gives their number.

    Args:
        fd: descriptor of the log.
        room: bytes that may wait to be written.
    """

    def __init__(self, fd: int, room: int = 1024 * 1024) -> None:
        super().__init__()
        self._fd = fd
        self._room = room
        self._lines: deque[bytes] = deque()
        self._waiting = 0  # bytes of lines that are not yet written
        self._dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Passes a line to the thread; never waits for the log's reader."""
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        with self._changed:
            if self._waiting + len(line) > self._room:
                self._dropped += 1
            else:
                self._put(line)

    def flush(self) -> None:
        """Waits until all lines are written, or for a second."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, _FLUSH_S)

    def _put(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting += len(line)
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            is_written = self._write(line)
            with self._changed:
                self._waiting -= len(line)
                if not is_written:
                    self._dropped += 1
                elif self._dropped and not self._lines:
                    self._put(b"fusiond[%d] WARNING: %d lines of this log were dropped, because it was not read, or it "
                              b"could not be written\n" % (os.getpid(), self._dropped))  # fmt: skip
                    self._dropped = 0
                self._changed.notify_all()

    def _write(self, line: bytes) -> bool:
        """Writes a whole line, however long that takes; returns whether it could (the disk may be full)."""
        view = memoryview(line)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # another process has made the descriptor non-blocking
                select.select([], [self._fd], [])
            except OSError:
                return False
        return True
