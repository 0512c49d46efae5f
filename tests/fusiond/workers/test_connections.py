"""The local workers' connections, in one thread: this test is both the worker and whoever decides for the daemon."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from fusion_rt import wire
from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.host import stacks
from fusion_rt.host.arena import Segment
from fusion_rt.local import packets
from fusiond.host.loop import EventLoop
from fusiond.host.runtime_directory import listen
from fusiond.workers import connections as workers_module
from fusiond.workers.connections import WorkerLink, Workers

HELLO = wire.Hello(1, "job", 0, 1)


class Handler:
    """Records what happened."""

    def __init__(self) -> None:
        self.links: list[WorkerLink] = []
        self.messages: list[wire.WorkerMessage] = []
        self.left: list[tuple[int, str]] = []
        self.ended = 0
        self.handlers = dict.fromkeys(get_args(wire.WorkerMessage), self.take)

    def worker_joined(self, link: WorkerLink, hello: wire.Hello) -> None:
        link.rank = hello.rank
        self.links.append(link)

    def take(self, link: WorkerLink, message: wire.WorkerMessage) -> None:
        if isinstance(message, wire.Ready):
            raise FusionError("not now")
        self.messages.append(message)

    def worker_left(self, rank: int, bye: wire.Bye) -> None:
        self.messages.append(bye)

    def worker_lost(self, rank: int, pid: int, why: str) -> None:
        assert pid == os.getpid()
        self.left.append((rank, why))

    def connection_ended(self) -> None:
        self.ended += 1


class Channel:
    """A worker's end, and the daemon's."""

    def __init__(self, path: Path) -> None:
        self.loop = EventLoop()
        self.handler = Handler()
        self.path = path
        self.workers = Workers(self.loop, listen(str(path)), self.handler)
        self.sock = self.connect()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(self.path))
        self.turn()
        return sock

    def turn(self) -> None:
        """Lets the daemon handle all there is."""
        while True:
            before = self.loop.statistics()["turns"], self.workers.statistics()
            self.loop.call_soon(lambda: None)  # so that a turn does not wait
            self.loop.turn()
            if self.workers.statistics() == before[1]:
                return

    def send(self, message: wire.WorkerMessage | bytes, fd: int = -1, sock: socket.socket | None = None) -> None:
        data = message if isinstance(message, bytes) else wire.encode(message)
        packets.Packet(data, fd).send(sock or self.sock)
        self.turn()

    def join(self) -> WorkerLink:
        self.send(HELLO)
        return self.handler.links[-1]

    def is_closed(self) -> bool:
        try:
            return packets.receive(self.sock, socket.MSG_DONTWAIT) == (b"", -1)
        except ConnectionResetError:
            return True
        except BlockingIOError:
            return False


@pytest.fixture
def channel(runtime_dir: Path) -> Iterator[Channel]:
    before = set(os.listdir("/proc/self/fd"))
    channel = Channel(runtime_dir / "sock")
    yield channel
    channel.sock.close()
    channel.workers.close()
    channel.loop.close()
    assert not channel.path.exists()
    assert set(os.listdir("/proc/self/fd")) == before


def offer(channel: Channel, segment_id: int, nbytes: int = 4096, declared: int = 4096) -> Segment:
    segment = Segment.create(nbytes)
    channel.send(wire.AddSegment(segment_id, declared), os.dup(segment.fd))
    segment.close_fd()
    return segment


def test_only_this_user_may_connect(channel: Channel) -> None:
    assert channel.path.stat().st_mode & 0o777 == 0o600


def test_messages_of_a_worker_are_handed_on_once_it_has_joined(channel: Channel) -> None:
    channel.join()
    channel.send(wire.Submit(1, "x", 0, wire.Signature("barrier")))
    channel.send(wire.Bye())
    assert channel.handler.messages == [wire.Submit(1, "x", 0, wire.Signature("barrier")), wire.Bye()]
    channel.sock.close()
    channel.turn()
    assert channel.handler.left == []  # it has said goodbye
    assert channel.handler.ended == 1
    assert channel.workers.statistics()["connections"] == 0


def test_a_worker_that_dies_is_reported(channel: Channel) -> None:
    channel.join()
    channel.sock.close()
    channel.turn()
    assert channel.handler.left == [(0, "died (killed, or crashed) without leaving the job")]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"garbage", "not a message of this protocol"),
        (HELLO, "a second Hello"),
        (wire.AddSegment(1, 4096), "a segment was offered without a descriptor"),
        (wire.Ready(1, 1, 0, 0), "not now"),
    ],
)
def test_nonsense_ends_the_connection_and_is_reported(channel: Channel, message: object, why: str) -> None:
    channel.join()
    channel.send(message)  # type: ignore[arg-type]
    ((rank, reported),) = channel.handler.left
    assert rank == 0
    assert reported.startswith("sent a message that makes no sense: ")
    assert why in reported
    assert channel.is_closed()


@pytest.mark.parametrize("message", [b"garbage", wire.Bye(), wire.Submit(1, "x", 0, wire.Signature("barrier"))])
def test_nonsense_of_a_stranger_is_only_counted(channel: Channel, message: object) -> None:
    channel.send(message)  # type: ignore[arg-type]
    assert channel.handler.left == []
    assert channel.handler.messages == []
    assert channel.workers.statistics()["refused"] == 1
    assert channel.is_closed()


def test_a_message_after_the_goodbye_is_not_handed_on(channel: Channel) -> None:
    channel.join()
    channel.send(wire.Bye())
    channel.send(wire.Bye())
    assert channel.handler.messages == [wire.Bye()]
    assert channel.handler.left == []
    assert channel.is_closed()


def test_a_worker_that_has_left_may_come_back_and_finds_nothing_of_its_arena(channel: Channel) -> None:
    channel.join()
    offer(channel, 1, 4096)
    assert channel.workers.statistics()["arenas"] == 4096
    channel.send(wire.Bye())
    assert channel.workers.may_return
    assert channel.workers.statistics()["arenas"] == 0
    channel.send(HELLO)
    assert not channel.workers.may_return
    assert [link.rank for link in channel.handler.links] == [0, 0]
    channel.send(wire.Submit(1, "x", 0, wire.Signature("barrier")))
    assert isinstance(channel.handler.messages[-1], wire.Submit)


def shows(channel: Channel, message: wire.WorkerMessage, fd: int = -1) -> bool:
    """Whether the worker's stacks can be seen after this message."""
    channel.send(message, fd)
    return channel.handler.links[-1].stacks is not None


def test_where_a_worker_shows_its_stacks_is_known_until_it_leaves(channel: Channel) -> None:
    fd, number = stacks.offer()
    hello = wire.Hello(1, "job", 0, os.getpid(), number)
    channel.send(hello, os.dup(fd))
    link = channel.handler.links[-1]
    assert link.stacks is not None
    assert (link.stacks.pid, link.stacks.number) == (os.getpid(), number)
    assert [shows(channel, wire.Bye()), shows(channel, hello, fd)] == [False, True]  # it leaves, and comes back
    assert not shows(channel, hello, stacks.offer().fd)
    assert "a second Hello" in channel.handler.left[0][1]


def test_a_hello_with_something_else_attached_is_refused(channel: Channel) -> None:
    channel.send(wire.Hello(1, "job", 0, os.getpid(), stacks.STACK_SIGNAL), os.open("/dev/null", os.O_RDWR))
    assert channel.handler.links == []
    assert channel.workers.statistics()["refused"] == 1
    assert channel.is_closed()


def test_tools_need_not_join(channel: Channel) -> None:
    channel.send(wire.StatusRequest())
    channel.send(wire.StopRequest("x"))
    channel.send(wire.HangRequest())
    assert channel.handler.messages == [wire.StatusRequest(), wire.StopRequest("x"), wire.HangRequest()]


def test_the_arena_of_a_worker_is_mapped_until_it_is_dropped(channel: Channel) -> None:
    link = channel.join()
    segment = offer(channel, 3)
    memory = link.at(wire.Place(3, 64), 128)
    segment.view[64:67] = b"abc"
    assert memory[:3].tobytes() == b"abc"
    assert len(link.at(wire.Place(3, 0), 4096)) == 4096
    for place, nbytes in [(wire.Place(3, 0), 4097), (wire.Place(3, 4096), 1), (wire.Place(4, 0), 1)]:
        with pytest.raises(WireError, match="are not in the arena of rank 0"):
            link.at(place, nbytes)
    assert channel.workers.statistics()["arenas"] == 4096
    channel.send(wire.DropSegment(3))
    assert channel.workers.statistics()["arenas"] == 0
    with pytest.raises(WireError):
        link.at(wire.Place(3, 0), 1)
    np.testing.assert_array_equal(memory[:3], np.frombuffer(b"abc", np.uint8))  # an operation may still be in it
    channel.send(wire.DropSegment(3))  # nothing, twice, is nothing
    segment.close()


def test_a_segment_that_is_not_what_it_is_said_to_be_ends_the_connection(channel: Channel) -> None:
    channel.join()
    offer(channel, 1, 4096, 8192).close()
    assert "4096 bytes long, not the 8192 declared" in channel.handler.left[0][1]


def test_a_segment_is_offered_once(channel: Channel) -> None:
    channel.join()
    offer(channel, 1).close()
    offer(channel, 1).close()
    assert "segment 1 was offered before Hello, twice, or as one too many" in channel.handler.left[0][1]


def test_a_segment_before_hello_is_refused(channel: Channel) -> None:
    offer(channel, 1).close()
    assert channel.workers.statistics()["refused"] == 1


def test_a_worker_has_a_limited_number_of_segments(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_MAX_SEGMENTS", 3)
    channel.join()
    for segment_id in range(3):
        offer(channel, segment_id).close()
    assert channel.handler.left == []
    offer(channel, 3).close()
    assert len(channel.handler.left) == 1
    assert channel.workers.statistics()["arenas"] == 0


def test_answers_wait_for_room_and_keep_their_order(channel: Channel) -> None:
    link = channel.join()
    sent = []
    for handle in range(2000):
        fd = os.dup(0) if handle % 10 == 0 else -1
        inline = bytes(8000) if handle % 3 == 0 else None
        sent.append((handle, fd >= 0))
        channel.workers.send(link, wire.Done(handle, inline), fd)
    assert link.outgoing  # more than a socket takes
    received: list[tuple[int, bool]] = []
    for _ in range(2 * len(sent)):
        channel.turn()
        try:
            data, fd = packets.receive(channel.sock, socket.MSG_DONTWAIT)
        except BlockingIOError:
            continue
        message = wire.decode_daemon_message(data)
        assert isinstance(message, wire.Done)
        received.append((message.handle, fd >= 0))
        if fd >= 0:
            os.close(fd)
    assert received == sent
    assert not link.outgoing


def test_what_waits_for_a_worker_that_dies_is_given_up(channel: Channel) -> None:
    link = channel.join()
    for handle in range(500):
        channel.workers.send(link, wire.Done(handle, bytes(8000)), os.dup(0))
    assert link.outgoing
    channel.sock.close()
    channel.turn()
    assert len(channel.handler.left) == 1
    channel.workers.send(link, wire.Done(1), os.dup(0))  # and what comes too late


def test_a_long_answer_arrives_whole(channel: Channel) -> None:
    link = channel.join()
    status = wire.Status("x" * 200_000)
    channel.workers.send(link, status)
    assert wire.decode_daemon_message(packets.receive(channel.sock)[0]) == status


def test_a_stale_socket_is_replaced(runtime_dir: Path) -> None:
    path = runtime_dir / "sock"
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(str(path))
    stale.close()
    channel = Channel(path)
    assert channel.workers.statistics()["connections"] == 1
    channel.sock.close()
    channel.workers.close()
    channel.loop.close()


@pytest.mark.multiprocess
def test_a_worker_that_is_killed_is_lost_though_a_child_of_it_has_its_socket(channel: Channel) -> None:
    """A library in C may fork without Python's knowledge. What the worker had said before still counts."""
    lost: list[tuple[int, int, str]] = []
    channel.handler.worker_lost = lambda rank, pid, why: lost.append((rank, pid, why))  # type: ignore[method-assign]
    ready, told = os.pipe()
    ends, keeps = os.pipe()  # the child of the worker lives until this end of the test closes
    worker = os.fork()
    if worker == 0:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(str(channel.path))
        os.close(keeps)
        if os.fork() == 0:
            os.write(told, b"x")
            os.read(ends, 1)
            os._exit(0)
        packets.Packet(wire.encode(HELLO), -1).send(sock)
        packets.Packet(wire.encode(wire.StatisticsRequest(7, "staleness")), -1).send(sock)
        os.write(told, b"x")
        os.read(ends, 1)
        os._exit(0)
    seen = b""
    while len(seen) < 2:
        seen += os.read(ready, 2)
    channel.turn()
    channel.send(HELLO, sock=channel.sock)  # another worker, which stays
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    while not lost:
        channel.loop.turn()
    assert [(rank, pid) for rank, pid, _ in lost] == [(0, worker)]
    assert "died" in lost[0][2]
    assert wire.StatisticsRequest(7, "staleness") in channel.handler.messages
    for fd in (ready, told, ends, keeps):
        os.close(fd)
