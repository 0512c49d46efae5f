"""Starts and ends the process that writes a timeline, and passes on to it what happens."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable

import msgspec

from fusion_rt.settings import Settings
from fusion_rt.topology import Topology
from fusiond.host.loop import EventLoop
from fusiond.timeline.events import Order
from fusiond.timeline.instrument import Tee

_EVERY = 0.05  # seconds between looks at what has happened
_LAST = 5.0  # seconds for the process to write what is left when the daemon ends
_LENGTH = 4  # bytes in front of each message
Then = Callable[[str], None]


class Desk:
    """The timeline of one daemon: at most one at a time.

    Args:
        loop: the daemon's.
        tee: tells what happens.
        settings: what is recorded.
        topology, node: of the job, and this daemon's.
        warn: is told of a timeline that is not written any more.
    """

    def __init__(
        self, loop: EventLoop, tee: Tee, settings: Settings, topology: Topology, node: int, warn: Then
    ) -> None:
        self._loop = loop
        self._tee = tee
        self._settings = settings
        self._topology = topology
        self._node = node
        self._warn = warn
        self._scribe: _Scribe | None = None

    def start(self, rank: int, path: str, mark_cycles: bool, then: Then) -> None:
        """A worker asks for a timeline; `then` is told why there is none, or nothing."""
        if not os.path.isabs(path) or "\0" in path:
            then(f"{path!r} cannot be the path of a timeline")
        elif self._is_for((rank,)):
            self._begin(path, mark_cycles, then)
        else:
            then("")

    def stop(self, rank: int, then: Then) -> None:
        """A worker asks for the end of the timeline; `then` is called when the file is complete."""
        if self._scribe is None or not self._is_for((rank,)):
            then("")
        else:
            self._end(then)

    def close(self) -> None:
        """The daemon ends: writes what is left. The loop does not run any more."""
        if self._scribe is not None:
            self._tee.end()
            self._scribe.finish_now(self._tee)
            self._scribe = None

    def _is_for(self, ranks: tuple[int, ...]) -> bool:
        """Horovod's is rank 0's."""
        return bool(ranks) and (self._settings.timeline_all_ranks or 0 in ranks)

    def _begin(self, path: str, mark_cycles: bool, then: Then) -> None:
        path = os.path.abspath(path)
        if self._scribe is not None:
            if self._scribe.path == path and not self._scribe.ending:  # another rank of this node has asked
                self._scribe.when_open(then)
            else:
                self._end(lambda _: self._begin(path, mark_cycles, then))
            return
        settings = self._settings
        first, last = settings.timeline_range()
        order = Order(
            path,
            self._topology.ranks[self._node] if settings.timeline_all_ranks else (),
            self._topology.ranks,
            mark_cycles,
            first,
            last,
            settings.timeline_max_bytes,
        )
        try:
            self._scribe = _Scribe(self._loop, order, self._gone)
        except OSError as error:
            then(f"the timeline {path} cannot be written: {error}")
            return
        self._scribe.when_open(then)
        self._tee.begin()
        self._loop.call_later(_EVERY, lambda scribe=self._scribe: self._pass_on(scribe))  # type: ignore[misc]

    def _end(self, then: Then) -> None:
        assert self._scribe is not None
        scribe = self._scribe
        self._tee.end()
        scribe.finish(self._tee, then)

    def _pass_on(self, scribe: _Scribe) -> None:
        if scribe is self._scribe and not scribe.ending:
            scribe.pass_on(self._tee)
            self._loop.call_later(_EVERY, lambda: self._pass_on(scribe))

    def _gone(self, why: str) -> None:
        """The process has ended; if nobody asked for it, `why` is not empty."""
        self._scribe = None
        if self._tee.collects:
            self._tee.end()
            if why:
                self._warn(why)


class _Scribe:
    """The process, and a socket to it.

    Args:
        loop: the daemon's.
        order: what it is to write.
        gone: called when it has ended, with the reason if nobody has asked for that.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, loop: EventLoop, order: Order, gone: Then) -> None:
        self.path = order.path
        self.ending = False
        self._loop = loop
        self._gone = gone
        self._open = False
        self._openers: list[Then] = []
        self._enders: list[Then] = []
        self._unsent: deque[memoryview] = deque()
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "fusiond.timeline.writer_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # what ends the daemon's group must not cut the file
                )
            except OSError:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        loop.add_reader(self._socket.fileno(), self._heard)
        self._add(msgspec.json.encode(order))
        self._send()

    def when_open(self, then: Then) -> None:
        """Calls back once it is known whether the file can be written."""
        if self._open:
            then("")
        else:
            self._openers.append(then)

    def pass_on(self, tee: Tee) -> None:
        """Sends what has happened, unless what was sent before has not all been taken yet."""
        if not self._unsent:
            for packet in tee.packets():
                self._add(packet)
            self._send()

    def finish(self, tee: Tee, then: Then) -> None:
        """Sends what is left and ends the process; then calls back."""
        self._enders.append(then)
        if self.ending:
            return
        self.ending = True
        for packet in tee.packets():
            self._add(packet)
        self._send()

    def finish_now(self, tee: Tee) -> None:
        """As `finish`, and waits for it."""
        self._loop.remove(self._socket.fileno())
        self._socket.settimeout(_LAST)
        with contextlib.suppress(OSError):  # it has ended already, or hangs
            for data in self._unsent:
                self._socket.sendall(data)
            for packet in () if self.ending else tee.packets():
                self._socket.sendall(len(packet).to_bytes(_LENGTH, "big") + packet)
        self._socket.close()
        try:
            self._process.wait(_LAST)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _add(self, message: bytes) -> None:
        self._unsent.append(memoryview(len(message).to_bytes(_LENGTH, "big") + message))

    def _send(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._socket.fileno(), self._send)
            return
        except OSError:  # it has ended, which `_heard` hears
            self._unsent.clear()
        self._loop.remove_writer(self._socket.fileno())
        if self.ending:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def _heard(self) -> None:
        """Its first line says whether it can write; the end of the stream, that it has ended."""
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        why = data.decode(errors="replace").strip()
        if data and not why:
            self._open = True
            self._tell(self._openers, "")
            return
        why = why or f"the timeline {self.path} is not written any more: its process has ended"
        self._loop.remove(self._socket.fileno())
        self._socket.close()
        self._process.wait()
        self._gone("" if self._enders or not self._open else why)
        self._tell(self._openers, why)
        self._tell(self._enders, "")

    def _tell(self, whom: list[Then], why: str) -> None:
        waiting, whom[:] = whom[:], []
        for then in waiting:
            then(why)
