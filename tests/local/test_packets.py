"""The local channel: one message a packet, long ones in a memfd, and at most one descriptor."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from fusion_rt import wire
from fusion_rt.core.errors import WireError
from fusion_rt.host.arena import Segment
from fusion_rt.local import packets


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a local channel; whatever a test does with it, no descriptor may be left."""
    before = open_descriptors()
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with first, second:
        yield first, second
    assert open_descriptors() == before


Pair = tuple[socket.socket, socket.socket]


def send_raw(sock: socket.socket, data: bytes, descriptors: list[int]) -> None:
    """Sends with descriptors, and closes them here."""
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
    for fd in descriptors:
        os.close(fd)


@pytest.mark.parametrize("length", [1, 100, wire.MAX_PACKET])
def test_messages_come_one_by_one(pair: Pair, length: int) -> None:
    for letter in (b"a", b"b"):
        packets.Packet(letter * length).send(pair[0])
    assert packets.receive(pair[1]) == (b"a" * length, -1)
    assert packets.receive(pair[1]) == (b"b" * length, -1)


@pytest.mark.parametrize("length", [wire.MAX_PACKET + 1, 5_000_000])
def test_a_long_message_travels_in_a_memfd(pair: Pair, length: int) -> None:
    message = os.urandom(1000) * (length // 1000) + bytes(length % 1000)
    packets.Packet(message).send(pair[0])
    packets.Packet(b"next").send(pair[0])
    assert packets.receive(pair[1]) == (message, -1)
    assert packets.receive(pair[1]) == (b"next", -1)


def test_a_descriptor_goes_along(pair: Pair) -> None:
    segment = Segment.create(4096)
    packets.Packet(b"here", os.dup(segment.fd)).send(pair[0])
    data, fd = packets.receive(pair[1])
    assert data == b"here"
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    assert os.fstat(fd).st_ino == os.fstat(segment.fd).st_ino
    os.close(fd)
    segment.close()


def test_a_packet_that_is_given_up_closes_its_descriptor(pair: Pair) -> None:
    packet = packets.Packet(b"here", os.dup(0))
    packet.close()
    packet.close()
    long = packets.Packet(bytes(wire.MAX_PACKET + 1))
    long.close()


def test_a_long_message_cannot_carry_a_descriptor(pair: Pair) -> None:
    with pytest.raises(WireError, match="fit into a packet"):
        packets.Packet(bytes(wire.MAX_PACKET + 1), os.dup(0))


def test_a_full_socket_keeps_the_packet_for_later(pair: Pair) -> None:
    pair[0].setblocking(False)
    packet = packets.Packet(bytes(wire.MAX_PACKET), os.dup(0))
    with contextlib.suppress(BlockingIOError):
        while True:
            packets.Packet(bytes(wire.MAX_PACKET)).send(pair[0])
    with pytest.raises(BlockingIOError):
        packet.send(pair[0])
    with contextlib.suppress(BlockingIOError):
        while packets.receive(pair[1], socket.MSG_DONTWAIT):
            pass
    packet.send(pair[0])
    data, fd = packets.receive(pair[1])
    assert len(data) == wire.MAX_PACKET
    os.close(fd)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_more_than_one_descriptor_is_refused(pair: Pair, count: int) -> None:
    send_raw(pair[0], b"here", [os.dup(0) for _ in range(count)])
    with pytest.raises(WireError, match="more than one descriptor"):
        packets.receive(pair[1])
    packets.Packet(b"next").send(pair[0])
    assert packets.receive(pair[1]) == (b"next", -1)


@pytest.mark.parametrize("descriptors", [0, 1])
def test_a_packet_longer_than_the_limit_is_refused(pair: Pair, descriptors: int) -> None:
    send_raw(pair[0], bytes(wire.MAX_PACKET + 1), [os.dup(0) for _ in range(descriptors)])
    with pytest.raises(WireError, match="longer than its limit"):
        packets.receive(pair[1])


def unsealed() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 100)
    return fd


def empty() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def too_long() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, wire.MAX_MESSAGE + 1)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


@pytest.mark.parametrize("carrier", [unsealed, empty, too_long, lambda: os.dup(0)])
def test_a_long_message_in_anything_but_a_sealed_memfd_is_refused(pair: Pair, carrier: object) -> None:
    send_raw(pair[0], b"\0", [carrier()])  # type: ignore[operator]
    with pytest.raises(WireError):
        packets.receive(pair[1])


def test_a_descriptor_that_could_not_be_received_is_an_error(pair: Pair) -> None:
    send_raw(pair[0], b"here", [os.dup(0)])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest_free := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(WireError, match="descriptor"):
            packets.receive(pair[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_end_of_the_channel_reads_as_nothing(pair: Pair) -> None:
    packets.Packet(b"last").send(pair[0])
    pair[0].close()
    assert packets.receive(pair[1]) == (b"last", -1)
    assert packets.receive(pair[1]) == (b"", -1)
    with pytest.raises(BrokenPipeError):
        packets.Packet(b"answer").send(pair[1])


def test_the_kernel_says_who_is_at_the_other_end(pair: Pair) -> None:
    assert packets.peer_credentials(pair[0]) == (os.getpid(), os.getuid(), os.getgid())
