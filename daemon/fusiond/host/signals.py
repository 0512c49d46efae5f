"""Signals and standard input, which tell a daemon from outside that something is to be done; and its answers."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any, Protocol

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.host import bootstrap
from fusiond.host.loop import EventLoop


class ProcessEvents(Protocol):
    """The part of a daemon that signals and standard input are for."""

    def signalled(self, name: str) -> None:
        """The daemon is told to stop."""

    def ordered(self, order: bootstrap.Order) -> None:
        """The starter says something. Raises FusionError when it cannot be done."""

    def starter_gone(self) -> None:
        """Standard input has ended: so has whoever started the daemon."""


def watch_signals(loop: EventLoop, events: ProcessEvents) -> None:
    """Tells of SIGTERM, SIGINT and SIGHUP in the event loop."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    loop.add_reader(reader, lambda: events.signalled(signal.Signals(os.read(reader, 1)[0]).name))


class StandardInput:
    """Lines of standard input, after the configuration.

    Args:
        loop: watches it.
        fd: its descriptor.
        start: the bytes already read from it.
        kind: type of the lines.
        events: hears of it.

    Raises:
        FusionError: it is not a pipe.
    """

    def __init__(self, loop: EventLoop, fd: int, start: bytes, kind: Any, events: ProcessEvents) -> None:
        self._loop = loop
        self._kind = kind
        self._fd = fd
        self._data = start
        self._events = events
        os.set_blocking(fd, False)
        try:
            loop.add_reader(fd, self._read)
        except PermissionError:
            raise FusionError("standard input has to be a pipe, from which the peers' table and the end of the job "
                              "are read") from None  # fmt: skip
        self._take_lines()

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return
        self._data += data
        if len(self._data) > bootstrap.MAX_LINE:
            raise WireError(f"more than {bootstrap.MAX_LINE} bytes without a line's end on standard input")
        self._take_lines()
        if not data:
            self._loop.remove(self._fd)
            self._loop.call_soon(self._events.starter_gone)  # after events ready now: workers may have said `Bye`

    def _take_lines(self) -> None:
        while b"\n" in self._data:
            line, self._data = self._data.split(b"\n", 1)
            self._events.ordered(bootstrap.decode_line(line, self._kind))


def tell_starter(message: bootstrap.Report) -> None:
    """Writes a line for whoever has started the daemon, on standard output."""
    with suppress(BrokenPipeError):  # not every process that starts a daemon wants to know
        os.write(1, bootstrap.encode_line(message))
