"""Starts and ends the process that writes a timeline of what the daemon records."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from fusion_rt import wire
from fusion_rt.core.topology import Topology
from fusion_rt.host import python_children
from fusion_rt.settings import Settings
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import Recorder
from fusiond.core.tracing import Trace, record_tensor
from fusiond.host.loop import EventLoop
from fusiond.timeline.writer import Order

_MOST_TENSORS = 4096
_LAST = 5.0  # seconds for the process to write the rest when the daemon ends
Then = Callable[[str], None]


class TimelineController:
    """The timeline of one daemon: at most one at a time.

    Args:
        loop: the daemon's.
        trace: what happens is recorded there.
        settings: what is written.
        topology, node: of the job, and this daemon's.
        describe: records the active plans.
        warn: is told of a timeline that is not written any more.
    """

    def __init__(
        self,
        loop: EventLoop,
        trace: Trace,
        settings: Settings,
        topology: Topology,
        node: int,
        describe: Callable[[], None],
        warn: Then,
    ) -> None:
        self._loop = loop
        self._trace = trace
        self._settings = settings
        self._topology = topology
        self._node = node
        self._describe = describe
        self._warn = warn
        self._process: _WriterProcess | None = None
        self._tensors: dict[str, wire.Signature] = {}  # those that are recorded, by name; not all

    @property
    def is_written(self) -> bool:
        """Tells whether there is a timeline, and nobody has asked for its end."""
        return self._process is not None and not self._process.ending

    def start(self, rank: int, path: str, mark_cycles: bool, then: Then) -> None:
        """A worker asks for a timeline; `then` is told why there is none, or nothing."""
        if not os.path.isabs(path) or "\0" in path:
            then(f"{path!r} cannot be the path of a timeline")
        elif self._is_for(rank):
            self._begin(path, mark_cycles, then)
        else:
            then("")

    def stop(self, rank: int, then: Then) -> None:
        """A worker asks for the end of the timeline; `then` is called when the file is complete."""
        if self._process is None or not self._is_for(rank):
            then("")
        else:
            self._end(then)

    def submitted(self, submit: wire.Submit) -> None:
        """A worker has submitted an operation, of which the engine will hear next."""
        if self.is_written and self._tensors.get(submit.name) != submit.signature:
            if len(self._tensors) >= _MOST_TENSORS:  # each has a name of its own, or they are recorded again
                self._tensors.clear()
            self._tensors[submit.name] = submit.signature
            record_tensor(self._trace, submit.name, submit.signature)

    def reform(self, topology: Topology) -> None:
        """Ends the timeline, since ranks are others from now on; a worker asks for the next one."""
        self._topology = topology
        if self._process is not None:
            self._end(lambda why: None)

    def close(self) -> None:
        """The daemon ends: writes what is left. The loop does not run any more."""
        if self._process is not None:
            self._record_end()
            self._process.finish_now()
            self._process = None

    def _is_for(self, rank: int) -> bool:
        """Tells whether the timeline is a rank's business: Horovod's is rank 0's."""
        return self._settings.timeline_all_ranks or rank == 0

    def _begin(self, path: str, mark_cycles: bool, then: Then) -> None:
        path = os.path.abspath(path)
        if self._process is not None:
            if self._process.path == path and self.is_written:  # another rank of this node has asked
                self._process.when_open(then)
            else:
                self._end(lambda _: self._begin(path, mark_cycles, then))
            return
        settings = self._settings
        first, last = settings.timeline_range()
        try:
            recorder = self._trace.recorder()
            order = Order(
                path,
                recorder.written,
                self._topology.ranks[self._node] if settings.timeline_all_ranks else (),
                self._topology.ranks,
                mark_cycles,
                first,
                last,
                settings.timeline_max_bytes,
            )
            self._process = _WriterProcess(self._loop, order, recorder, self._gone)
        except OSError as error:
            then(f"the timeline {path} cannot be written: {error}")
            return
        self._process.when_open(then)
        self._trace.record(Kind.TIMELINE, path, 1)
        self._describe()

    def _end(self, then: Then) -> None:
        assert self._process is not None
        self._record_end()
        self._process.finish(then)

    def _record_end(self) -> None:
        if self.is_written:
            assert self._process is not None
            self._trace.record(Kind.TIMELINE, self._process.path, 0)
        self._tensors.clear()

    def _gone(self, why: str) -> None:
        """The process has ended; if nobody asked for it, `why` is not empty."""
        self._process = None
        self._tensors.clear()
        if why:
            self._warn(why)


class _WriterProcess:
    """The process, and a socket to it.

    Args:
        loop: the daemon's.
        order: what it is to write.
        ring: what it is made of.
        gone: called when it has ended, with the reason if nobody has asked for that.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, loop: EventLoop, order: Order, ring: Recorder, gone: Then) -> None:
        self.path = order.path
        self._loop = loop
        self._gone = gone
        self._open = False
        self._openers: list[Then] = []
        self._enders: list[Then] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno(), ring.fileno()]
        with theirs:
            try:
                self._socket.send(msgspec.json.encode(order))
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "fusiond.timeline.writer_process", *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    cwd=python_children.DIRECTORY,
                    env=python_children.environment(os.environ),
                    start_new_session=True,  # a signal to the daemon's group must not cut the file
                )
            except OSError:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        loop.add_reader(self._socket.fileno(), self._heard)

    @property
    def ending(self) -> bool:
        """Tells whether its end has been asked for."""
        return bool(self._enders)

    def when_open(self, then: Then) -> None:
        """Calls back once it is known whether the file can be written."""
        if self._open:
            then("")
        else:
            self._openers.append(then)

    def finish(self, then: Then) -> None:
        """Has it write what is left and end; then calls back."""
        if not self.ending:
            self._socket.shutdown(socket.SHUT_WR)
        self._enders.append(then)

    def finish_now(self) -> None:
        """Does as `finish`, and waits for it."""
        self._loop.remove(self._socket.fileno())
        self._socket.close()
        try:
            self._process.wait(_LAST)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _heard(self) -> None:
        """Its first packet says whether it can write; the end, that it has ended."""
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
