"""Transport of the local channel: messages and file descriptors over a Unix SEQPACKET socket, one message a packet.

A packet is at most `wire.MAX_PACKET` bytes. A longer message (the plan of a model with thousands of tensors) travels
in a sealed memfd of its own, attached to an empty packet, so that no message is ever split and none is too long.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterable

from fusion_rt import wire
from fusion_rt.core.errors import ArenaError, FusionError, WireError
from fusion_rt.host.arena import Segment
from fusion_rt.host.bootstrap import check_private_directory

# As plain integers: an operation on enumeration members costs a microsecond, in the path of every message.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_TRUNC)
_CUT_SHORT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_FD_SPACE = socket.CMSG_SPACE(4)
_CREDENTIALS = struct.Struct("3i")


def peer_credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Returns (pid, uid, gid) of the process at the other end, as the kernel recorded them when it connected."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def connect(sock: socket.socket, path: str) -> int:
    """Connects to a socket of this user; returns the pid of the process that listens there.

    A worker trusts its daemon and unpickles messages that come through it. So the socket has to be in a directory of
    this user alone, and the kernel has to confirm that this user, or root, listens.

    Raises:
        FusionError: the directory, or the process that listens, is not this user's.
        OSError: there is no listener.
    """
    check_private_directory(os.path.dirname(path))
    sock.connect(path)
    pid, uid, _ = peer_credentials(sock)
    if uid not in (os.getuid(), 0):
        raise FusionError(f"user {uid} listens at {path}, and not a daemon of user {os.getuid()}; set "
                          "FUSION_RUNTIME_DIR to a directory that belongs to this user alone")  # fmt: skip
    return pid


class Packet:
    """An encoded message ready to be sent, with the descriptor that goes along, if any.

    The packet owns that descriptor: call `close` if the packet is not sent.
    """

    __slots__ = ("data", "fd")

    def __init__(self, data: bytes, fd: int = -1) -> None:
        self.data = data
        self.fd = fd
        if len(data) > wire.MAX_PACKET:
            if fd >= 0:
                self.close()
                raise WireError("a message with a descriptor has to fit into a packet")
            carrier = Segment.create(len(data))
            carrier.view[:] = data
            self.data, self.fd = b"", os.dup(carrier.fd)
            carrier.close()

    def send(self, sock: socket.socket) -> None:
        """Sends the packet and closes it. Raises BlockingIOError, and stays open, if a non-blocking socket is full."""
        if self.fd < 0:
            sock.send(self.data)
            return
        # An empty packet would read as end of file, hence the marker byte for a message that is all in its memfd.
        sock.sendmsg([self.data or b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.fd]))])
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def receive(sock: socket.socket, flags: int = 0) -> tuple[bytes, int]:
    """Receives one message and the descriptor attached to it (-1 when there is none); empty bytes at end of file.

    `flags` are those of recvmsg(2), such as MSG_DONTWAIT.

    Raises:
        WireError: the packet was truncated, carries more than one descriptor (or one too many for this process), or
            its memfd is not a valid carrier.
        BlockingIOError: the socket is non-blocking and there is nothing to read.
        ConnectionError: the other end is gone.
    """
    data, ancillary, got, _ = sock.recvmsg(wire.MAX_PACKET, _FD_SPACE, flags | _CLOEXEC)
    truncated = bool(got & _CUT_SHORT)
    if not ancillary and not truncated:
        return data, -1
    return _with_descriptor(data, ancillary, truncated)


def _with_descriptor(data: bytes, ancillary: Iterable[tuple[int, int, bytes]], truncated: bool) -> tuple[bytes, int]:
    """Returns the message and descriptor of a packet that came with something else; see `receive`."""
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if len(descriptors) > 1 or truncated:
        for fd in descriptors:
            os.close(fd)
        raise WireError(
            "a local packet was longer than its limit, or carried more than one descriptor, or one for which this "
            "process has no room (ulimit -n)"
        )
    if not descriptors:
        return data, -1
    fd = descriptors[0]
    if not data:  # the caller would take it for an end of file, and not close the descriptor
        os.close(fd)
        raise WireError("a local packet had a descriptor and no message")
    if data != b"\0":
        return data, fd
    nbytes = os.fstat(fd).st_size
    if nbytes > wire.MAX_MESSAGE:
        os.close(fd)
        raise WireError(f"a message of {nbytes} bytes is longer than the limit of {wire.MAX_MESSAGE}")
    try:
        carrier = Segment.open(fd, nbytes)
    except ArenaError as error:
        raise WireError(f"a long message came in something unfit: {error}") from error
    try:
        return bytes(carrier.view), -1
    finally:
        carrier.close()
