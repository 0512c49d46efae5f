"""Finds the daemons of this user on this host, and sends them the requests of tools."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

from fusion_rt import wire
from fusion_rt.core.errors import FusionError
from fusion_rt.local import packets

OWN_STACKS = "stacks"  # file in a daemon's directory into which it writes its own stacks on stacks.STACK_SIGNAL


class FoundDaemon(NamedTuple):
    """A daemon's directory; the daemon itself may be dead."""

    job: str
    node: int
    directory: str

    @property
    def socket_path(self) -> str:
        return os.path.join(self.directory, "sock")


class NoAnswer(FusionError):
    """A daemon does not answer. `pid`: its process, or 0 if there is no listener."""

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


def find(root: str, job: str = "", node: int = -1) -> Iterator[FoundDaemon]:
    """Finds the daemons' directories in `root`, sorted by job and node; of one job, or one node, if these are given."""
    found = []
    for name in os.listdir(root) if os.path.isdir(root) else []:
        its_job, _, number = name.rpartition(".")
        its_node = int(number) if number.isascii() and number.isdigit() else -1
        if its_node >= 0 and job in ("", its_job) and node in (-1, its_node):
            found.append(FoundDaemon(its_job, its_node, os.path.join(root, name)))
    return iter(sorted(found))


def ask(found: FoundDaemon, request: wire.ToolMessage, timeout: float) -> tuple[int, dict[str, Any]]:
    """Sends a request to a daemon; returns its pid, and its answer.

    Raises:
        NoAnswer: it is dead, or does not answer within `timeout` seconds.
        FusionError: the directory is not this user's alone, or another user's process listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(timeout)
        pid = 0
        try:
            pid = packets.connect(sock, found.socket_path)
            packets.Packet(wire.encode(request)).send(sock)
            answer = wire.decode_daemon_message(packets.receive(sock)[0])
        except TimeoutError:
            raise NoAnswer(f"it does not answer within {timeout:g} s", pid) from None
        except OSError as error:
            raise NoAnswer(f"it does not answer: {error.strerror}", 0) from None
    if not isinstance(answer, wire.Status):
        raise FusionError(f"the daemon at {found.socket_path} answered with {type(answer).__name__}")
    told: dict[str, Any] = json.loads(answer.json)
    return pid, told
