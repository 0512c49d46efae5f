"""Target: what comes over the local socket, with descriptors of all kinds; the daemon's side is the real one."""

from __future__ import annotations

import array
import atexit
import fcntl
import os
import shutil
import socket
import tempfile
from functools import cache
from typing import get_args

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.host.arena import Segment
from fusion_rt.local import packets
from fusiond.host.loop import EventLoop
from fusiond.host.runtime_directory import listen
from fusiond.workers.connections import WorkerLink, Workers
from tests.fuzz.engine import Target

_PAGE = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_BETWEEN = b"<|>"  # packets of one input; each begins with a byte that says which descriptor goes along


class _Handler:
    """Accepts every worker, and looks at what it was told where the daemon would."""

    def __init__(self) -> None:
        self.handlers = dict.fromkeys(get_args(wire.WorkerMessage), self.take)

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        link.rank = hello.rank

    def take(self, link: WorkerLink, message: wire.WorkerMessage) -> None:
        if isinstance(message, wire.Submit) and message.place is not None:
            link.at(message.place, 64).sum()
        elif isinstance(message, wire.LoadState):
            link.at(message.place, message.nbytes).sum()

    def worker_left(self, rank: int, bye: wire.Bye) -> None:
        pass

    def worker_lost(self, rank: int, pid: int, why: str) -> None:
        assert why

    def connection_ended(self) -> None:
        pass


@cache
def _daemon() -> tuple[EventLoop, Workers, str]:
    directory = tempfile.mkdtemp(prefix="fuzz")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    loop = EventLoop()
    path = os.path.join(directory, "sock")
    return loop, Workers(loop, listen(path), _Handler()), path


def _memfd(nbytes: int, seals: int = _SEALS, data: bytes = b"") -> int:
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@cache
def _descriptors() -> list[int]:
    """What may go along: nothing; arenas that are whole, empty, or not sealed; carriers; and what is no memfd."""
    long = wire.encode(wire.StopRequest("x" * (wire.MAX_PACKET + 1)))
    return [
        -1,
        _memfd(_PAGE),
        _memfd(_PAGE, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL),
        _memfd(0),
        _memfd(1 << 40),
        _memfd(len(long), data=long),
        os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC),
        os.eventfd(0, os.EFD_CLOEXEC),
    ]


def _run(data: bytes) -> bool:
    """Sends packets on a new connection; whether the daemon still listens to it afterwards."""
    loop, workers, path = _daemon()
    descriptors = _descriptors()
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        for packet in data.split(_BETWEEN)[:20]:
            fd = descriptors[packet[0] % len(descriptors)] if packet else -1
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
            try:
                sock.sendmsg([packet[1 : 1 + wire.MAX_PACKET]], rights)
            except OSError:
                break
            _turn(loop)
            if not workers.statistics()["connections"]:
                break
        _turn(loop)
        listens = workers.statistics()["connections"] == 1
    _turn(loop)
    assert workers.statistics()["connections"] == 0
    assert workers.statistics()["arenas"] == 0
    left = len(os.listdir("/proc/self/fd")) - before
    assert left == 0, f"{left} descriptors were left open"
    return listens


def _turn(loop: EventLoop) -> None:
    for _ in range(2):  # a connection is accepted in one turn, and read in the next
        loop.call_soon(lambda: None)  # so that a turn does not wait
        loop.turn()


def _seeds() -> list[bytes]:
    hello = b"\0" + wire.encode(wire.Hello(1, "job", 0, 1))
    arena = b"\x01" + wire.encode(wire.AddSegment(1, _PAGE))
    submit = wire.Submit(1, "x", 0, wire.Signature("allreduce", "float32", (16,)), wire.Place(1, 64))
    load = wire.LoadState(2, 0, "group", wire.Place(1, 128), 256)
    conversation = [hello, arena, b"\0" + wire.encode(submit), b"\0" + wire.encode(load)]
    leaving = [b"\0" + wire.encode(wire.DropSegment(1)), b"\0" + wire.encode(wire.Bye()), hello]
    return [
        _BETWEEN.join([*conversation, *leaving]),
        _BETWEEN.join([hello, *(bytes([kind]) + wire.encode(wire.AddSegment(kind, _PAGE)) for kind in range(2, 8))]),
        _BETWEEN.join([b"\x05\0", b"\x01\0", b"\0" + wire.encode(wire.StatusRequest())]),
        b"\0" + wire.encode(wire.StopRequest("x")),
        b"\0",
    ]


def _receive(data: bytes) -> bool:
    """What `packets.receive` makes of a packet, for a worker."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        fd = -1
        if data and data[0] % 2:
            segment = Segment.create(max(1, len(data)))
            segment.view[: len(data)] = data
            fd = os.dup(segment.fd)
            segment.close()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        theirs.sendmsg([b"\0" if fd >= 0 else data[: wire.MAX_PACKET]], rights)
        if fd >= 0:
            os.close(fd)
        received, attached = packets.receive(ours)
        assert attached == -1
        assert received == (data[: wire.MAX_PACKET] if fd < 0 else data)
        if received:
            wire.decode_daemon_message(received)
    return True


def targets() -> list[Target]:
    """The daemon's socket, and the worker's end."""
    words = (_BETWEEN, *(bytes([kind]) for kind in range(8)), wire.encode(wire.Bye()), wire.encode(wire.DropSegment(1)))
    return [
        Target("local socket", _seeds(), _run, (), words=words, cost=12),
        Target("local packet", [wire.encode(wire.Failed(1, "why")), wire.encode(wire.JobFailed("why"))], _receive,
               (FusionError,), cost=5),
    ]  # fmt: skip
