"""Connecting to the node's daemon, and waiting for its welcome."""

from __future__ import annotations

import os
import selectors
import socket
import time

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.local import packets

_DAEMONS_FIRST = 1.2  # of the time-out: daemons, which know the late ones, speak first


class DaemonGone(FusionError):
    """The daemon ended before it had answered this worker, and has not said why."""


def connect(path: str, timeout: float, listened: bool) -> socket.socket:
    """Connects to the daemon's socket, which may be about to appear unless the daemon has listened already.

    Raises:
        FusionError: it did not within `timeout` seconds, or belongs to another user.
    """
    deadline = time.monotonic() + timeout
    wait = 0.002
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            packets.connect(sock, path)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            sock.close()
            if listened:
                raise FusionError(f"the daemon that listened at {path} is gone ({error.strerror}): it has ended "
                                  "with its job, was killed or has crashed; see its log") from None  # fmt: skip
            if time.monotonic() + wait > deadline:
                raise FusionError(f"no daemon listens at {path} after {timeout:g} s ({error.strerror}); was it "
                                  "started, and did it come up? See its log (`fusiond logs`)") from None  # fmt: skip
            time.sleep(wait)
            wait = min(2 * wait, 0.05)
        except BaseException:
            sock.close()
            raise
        else:
            return sock


def await_welcome(
    sock: socket.socket, rank: int, timeout: float, skip_answers: bool, formation: int = 0
) -> wire.Welcome:
    """Waits for the answer to `Hello`, which comes when every process of the job is up.

    Args:
        sock: connected to the daemon.
        rank: this worker's.
        timeout: of the daemons, for the start (s).
        skip_answers: answers to a previous client may still come first.
        formation: in an elastic job, the membership epoch that is joined; earlier ones may have failed.

    Raises:
        DaemonGone: the daemon ends without an answer.
        FusionError: the daemon refuses this worker, or the job does not come up in time.
    """
    timeout *= _DAEMONS_FIRST
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise FusionError(f"rank {rank} waited {timeout:g} s for the other processes of the job; "
                                  "raise --start-timeout if they need longer to start")  # fmt: skip
            try:
                data, fd = packets.receive(sock)
            except ConnectionError:  # the daemon ended without having read Hello
                data, fd = b"", -1
            if not data:
                raise DaemonGone(lost(rank))
            message = wire.decode_daemon_message(data)
            if isinstance(message, wire.JobFailed) and message.formation >= formation:
                raise FusionError(message.message)
            if isinstance(message, wire.Welcome):
                return message
            if fd >= 0:
                os.close(fd)
            if not skip_answers:
                raise FusionError(f"the daemon answered Hello with {type(message).__name__}")


def silent(rank: int, pid: int, seconds: float) -> str:
    """Returns the error text for a daemon that has not answered for `seconds`."""
    host = socket.gethostname()
    return (f"the daemon of rank {rank}'s node (host {host}, pid {pid}) has not answered for {seconds:g} s: it is "
            "stopped (SIGSTOP, a debugger) or stuck; see its log (`fusiond logs`)")  # fmt: skip


def lost(rank: int) -> str:
    """Returns the error text for a connection that has ended."""
    host = socket.gethostname()
    return (f"the daemon of rank {rank}'s node (host {host}) is gone: it was killed or has crashed; "
            "see its log (`fusiond logs`)")  # fmt: skip
