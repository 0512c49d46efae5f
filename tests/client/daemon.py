"""A daemon that says what the test wants it to say."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from fusion_rt import wire
from fusion_rt.client import Client, Operation
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.core.topology import Topology
from fusion_rt.local import packets

SUM = wire.Signature("allreduce", "float32", (2,))
WELCOME = wire.Welcome(Topology(("a",), ((0, 1),)), 0, 1 << 20, "allreduce", "dense")
TIMEOUT_S = 10.0


class Daemon:
    """Listens, and is then one end of the channel, in the test's own thread."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._listener.settimeout(TIMEOUT_S)
        self.sock: socket.socket
        self.hello: wire.WorkerMessage
        self.stacks: os.stat_result  # of what came with it

    def connect(self, answer: wire.DaemonMessage | None = WELCOME, timeout: float = TIMEOUT_S) -> Client:
        """A client that this daemon welcomes, or answers otherwise; None closes the connection."""

        def greet() -> None:
            self.sock, _ = self._listener.accept()
            self.sock.settimeout(TIMEOUT_S)
            self.hello, fd = self.receive_with_descriptor()
            self.stacks = os.fstat(fd)
            os.close(fd)
            if answer is None:
                self.sock.close()
            else:
                self.send(answer)

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            return Client(self.path, "job", 1, timeout)
        finally:
            thread.join()

    def receive(self) -> wire.WorkerMessage:
        return self.receive_with_descriptor()[0]

    def receive_with_descriptor(self) -> tuple[wire.WorkerMessage, int]:
        data, fd = packets.receive(self.sock)
        return wire.decode_worker_message(data), fd

    def send(self, message: wire.DaemonMessage, fd: int = -1) -> None:
        packets.Packet(wire.encode(message), fd).send(self.sock)

    def close(self) -> None:
        self._listener.close()
        if hasattr(self, "sock"):
            self.sock.close()


def failure(client: Client, operation: Operation) -> str:
    with pytest.raises(HorovodInternalError) as raised:
        client.wait(operation)
    return str(raised.value)
