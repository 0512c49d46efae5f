"""An agent's connections to the workers of its host (`fusion_rt.local.elastic`), over a Unix SEQPACKET socket."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from fusion_rt.core.errors import FusionError, WireError
from fusion_rt.host.bootstrap import make_private_directory
from fusion_rt.host.private_files import open_private
from fusion_rt.local import elastic
from fusion_rt.local.packets import peer_credentials

_MOST_PATH = 107  # bytes of the path of a Unix socket
_WAITING = 64  # connections that wait to be accepted


class WorkerServer:
    """Listens to the workers of one host. To be made inside the event loop that serves it.

    Args:
        directory: is made, for this user alone, and holds the socket. Its lock is this process's as long as it lives:
            of an agent that was killed, the directory is removed by the next daemon that starts (see
            `fusiond.host.leftovers`).
        slots: is asked which slots have a worker now that may connect.
        on_rejoin: is told the slot of a worker that asks for a place, and its message.

    Attributes:
        path: of the socket.

    Raises:
        FusionError: the directory cannot be used, or its path is too long.
    """

    def __init__(
        self,
        directory: str,
        slots: Callable[[], Collection[int]],
        on_rejoin: Callable[[int, elastic.Rejoin], None],
    ) -> None:
        self._directory = directory
        self.path = os.path.join(directory, "workers")
        if len(os.fsencode(self.path)) > _MOST_PATH:
            raise FusionError(f"the socket path {self.path} is longer than the {_MOST_PATH} bytes a Unix socket's path "
                              "may have; set FUSION_RUNTIME_DIR to a shorter directory")  # fmt: skip
        make_private_directory(directory)
        self._lock = _locked(os.path.join(directory, "lock"))
        self._slots = slots
        self._on_rejoin = on_rejoin
        self._news: list[elastic.HostsChanged] = []
        self._connections: dict[int, socket.socket] = {}  # by slot
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        with suppress(FileNotFoundError):
            os.unlink(self.path)  # of an agent that was killed
        self._listener.bind(self.path)
        self._listener.listen(_WAITING)
        self._spawn(self._accept())

    def tell_all(self, news: elastic.HostsChanged) -> None:
        """Tells every worker, and those that connect later in this epoch, that hosts have changed."""
        self._news.append(news)
        for slot in list(self._connections):
            self.tell(slot, news)

    def knows(self, slot: int) -> bool:
        """Tells whether the worker of a slot is connected."""
        return slot in self._connections

    def begin_epoch(self) -> None:
        """Forgets earlier notices of hosts."""
        self._news.clear()

    def tell(self, slot: int, message: msgspec.Struct) -> None:
        """Sends a message to the worker of a slot, if it is connected.

        News that it has no room for are dropped: it has not looked at so many others. Whoever waits for a place has
        room.
        """
        connection = self._connections.get(slot)
        if connection is not None:
            with suppress(OSError):  # it is gone, which is noticed elsewhere; or see above
                connection.send(elastic.encode(message))

    def forget(self, slot: int) -> None:
        """The slot is free for another worker; the old one's connection stays as long as it likes."""
        self._connections.pop(slot, None)

    def close(self) -> None:
        """Ends all conversations, and removes the directory."""
        for task in self._tasks:
            task.cancel()
        self._listener.close()
        with suppress(FileNotFoundError):
            shutil.rmtree(self._directory)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        while True:
            connection, _ = await self._loop.sock_accept(self._listener)
            if peer_credentials(connection)[1] != os.getuid():
                connection.close()
            else:
                self._spawn(self._converse(connection))

    async def _converse(self, connection: socket.socket) -> None:
        """Serves one connection, and closes it when a message makes no sense."""
        slot = -1
        try:
            with connection, suppress(WireError, OSError):
                connection.setblocking(False)
                while data := await self._loop.sock_recv(connection, elastic.MAX_PACKET):
                    message = elastic.decode_from_worker(data)
                    if isinstance(message, elastic.Attach):
                        if slot >= 0 or message.slot in self._connections or message.slot not in self._slots():
                            return  # not a worker of ours, but perhaps a program that one has started
                        slot = message.slot
                        self._connections[slot] = connection
                        for news in self._news:
                            self.tell(slot, news)
                    elif self._connections.get(slot) is connection:
                        self._on_rejoin(slot, message)
        finally:
            if self._connections.get(slot) is connection:
                del self._connections[slot]


def _locked(path: str) -> int:
    """The descriptor of a lock that this process has taken."""
    lock = open_private(path, flags=os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        os.close(lock)
        raise FusionError(f"{path} cannot be locked: {error.strerror}; is another agent of this job there?") from None
    return lock
