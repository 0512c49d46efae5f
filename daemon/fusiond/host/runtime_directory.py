"""The directory of one daemon, which holds its socket, its log and a lock."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import shutil
import socket
import time
from contextlib import suppress

from fusion_rt.core.errors import FusionError
from fusion_rt.host import bootstrap
from fusion_rt.host.private_files import is_at, open_private
from fusion_rt.host.stacks import STACK_SIGNAL
from fusion_rt.local.daemons import OWN_STACKS
from fusiond.host import leftovers, log_writer

_BACKLOG = 256
_CLEANING = 5.0  # seconds that it may take a daemon to end, or to remove the files of a dead one


class Directory:
    """The locked directory of this daemon: one runs for each job and node, and the kernel frees a dead one's lock.

    Args:
        root: FUSION_RUNTIME_DIR.
        config: of the daemon.

    Raises:
        FusionError: another daemon of the job and node runs, or the directory is not this user's alone.
    """

    def __init__(self, root: str, config: bootstrap.DaemonConfig) -> None:
        self._path = bootstrap.job_directory(root, config.job, config.node, config.serial)
        self._lock_path = os.path.join(self._path, "lock")
        self.socket_path = bootstrap.socket_path(root, config.job, config.node, config.serial)
        bootstrap.make_private_directory(root)
        self._lock = self._take(config)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        leftovers.remove_dead(root, keep=self._path)

    def show_stacks(self) -> None:
        """Has this process write the stack of its main thread into a file here on STACK_SIGNAL, until it ends."""
        path = os.path.join(self._path, OWN_STACKS)
        file = open_private(path, flags=os.O_WRONLY | os.O_TRUNC | os.O_APPEND)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=False, chain=False)

    def _take(self, config: bootstrap.DaemonConfig) -> int:
        """Takes the lock for this process; returns its descriptor."""
        deadline = time.monotonic() + _CLEANING
        while True:
            bootstrap.make_private_directory(self._path)
            try:
                fd = open_private(self._lock_path, flags=os.O_RDWR)
            except FileNotFoundError:
                continue  # another process has just removed the files of a dead daemon
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(fd, self._lock_path):
                    return fd
                os.close(fd)
            except BlockingIOError:
                pid = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                serves = os.path.exists(f"/proc/{pid}") and os.path.exists(self.socket_path)
                if serves or time.monotonic() > deadline:
                    raise FusionError(
                        f"a daemon of job {config.job!r} runs on this host already (pid {pid}); stop it with "
                        f"`fusiond stop --job {config.job}`, or give the new job another name"
                    ) from None
                time.sleep(0.01)  # it is about to end, or a process that removes files of a dead one has the lock

    def release(self) -> None:
        """Removes the daemon's files; a log that is not empty stays, for `fusiond logs`."""
        log = os.path.join(self._path, "log")
        log_writer.flush()  # else a log whose first line waits to be written would be taken for an empty one
        if os.path.exists(log) and os.path.getsize(log) == 0:
            os.unlink(log)
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self._path, OWN_STACKS))
        shutil.rmtree(os.path.join(self._path, bootstrap.RANKS_DIRECTORY), ignore_errors=True)
        os.unlink(self._lock_path)
        if not os.listdir(self._path):
            os.rmdir(self._path)
        os.close(self._lock)  # last: a process that waits for it finds no files


def listen(path: str) -> socket.socket:
    """Makes a socket at this path, to which workers may connect from now on.

    Args:
        path: in an existing directory that this daemon has locked.
    """
    if os.path.exists(path):
        os.unlink(path)  # of a daemon that died
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(_BACKLOG)
    return listener
