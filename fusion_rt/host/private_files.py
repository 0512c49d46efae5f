"""Files of this user in places where other users can write as well, such as /tmp.

All files that this project writes are opened here (`tests/test_writers.py` finds the rest), so that no other module
has to think of links that were planted under their names.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from fusion_rt.core.errors import FusionError

_LONGEST_SECRET = 4096  # bytes
_SHORTEST_SECRET = 16


def open_private(
    path: str, directory: int | None = None, flags: int = os.O_WRONLY | os.O_TRUNC, mode: int = 0o600
) -> int:
    """Opens a file for writing and returns its descriptor, which no child inherits.

    An existing file is used, and keeps its mode, if it belongs to this user and has no other name; a device of root's,
    such as /dev/null, is used, too. Links are not followed: any user with write access to the directory could have made
    one to another file of this user.

    Args:
        path: of the file.
        directory: descriptor of the directory that `path` is relative to; None: the working directory.
        flags: of open(2); with `O_TRUNC` the file is empty then.
        mode: of a new file.

    Raises:
        OSError: the file cannot be made, or is another user's; `strerror` says so.
    """
    truncated, flags = flags & os.O_TRUNC, flags & ~os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        with suppress(FileExistsError):
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, mode, dir_fd=directory)
        try:
            fd = os.open(path, flags | os.O_NONBLOCK, dir_fd=directory)  # a pipe without a reader is an error
            break
        except FileNotFoundError:  # it has just been removed
            continue
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "it is a symbolic link, and is not followed", path) from None
            raise
    try:
        found = os.fstat(fd)
        regular = stat.S_ISREG(found.st_mode)
        if found.st_uid != os.getuid() and (regular or found.st_uid != 0):
            raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}", path)
        if regular and found.st_nlink > 1:
            raise PermissionError(errno.EPERM, "it has a second name (a hard link)", path)
        if regular and truncated:
            os.ftruncate(fd, 0)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextmanager
def replacing(path: str, part: str = "", mode: int = 0o600) -> Iterator[IO[bytes]]:
    """Writes a file that has its contents wholly, or does not change: what is yielded becomes the file at the end of
    the block, and is removed if that raises.

    Args:
        path: of the file. A file or link that is there is replaced.
        part: where it is until then, in the same directory; by default, a new name for each call. What is there is
            removed: the part of a process that was killed, or a link.
        mode: of the file.

    Raises:
        OSError: it cannot be written.
    """
    if part:
        with suppress(FileNotFoundError):
            os.unlink(part)
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    else:
        fd, part = tempfile.mkstemp(prefix=".", dir=os.path.dirname(os.path.abspath(path)))
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            os.fchmod(file.fileno(), mode)
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise


def open_private_directory(path: str) -> int:
    """Makes a directory that only this user can enter, with its parents, or opens one that belongs to this user.

    Returns:
        Its descriptor, through which files are made in it even if the path is renamed.

    Raises:
        OSError: it cannot be made, is a link, or belongs to another user.
    """
    with suppress(FileExistsError):
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        os.mkdir(path, 0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    owner = os.fstat(fd).st_uid
    if owner != os.getuid():
        os.close(fd)
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}", path)
    return fd


def is_at(fd: int, path: str) -> bool:
    """Returns whether an open file is still the one at that path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def read_secret(path: str, variable: str) -> bytes:
    """Reads a secret from a file that only this user can read, without white space around it.

    Args:
        path: of the file; `~` is the home directory.
        variable: the environment variable or flag that names it, for errors.

    Raises:
        FusionError: the file cannot be read, is another user's, may be read by others, or has no such secret.
    """
    name = f"{variable}={path}"
    try:
        with open(
            os.path.expanduser(path), "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
        ) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o077:
                raise FusionError(f"{name} is not a file that only user {os.getuid()} can read: make it yours, with "
                                  f"mode 0600 (it belongs to user {found.st_uid} and has mode "
                                  f"{stat.S_IMODE(found.st_mode):04o})")  # fmt: skip
            secret = file.read(_LONGEST_SECRET + 1).strip()
    except OSError as error:
        raise FusionError(f"{name} cannot be read: {error.strerror}") from None
    if not _SHORTEST_SECRET <= len(secret) <= _LONGEST_SECRET:
        raise FusionError(f"{name} has to hold a secret of {_SHORTEST_SECRET} to {_LONGEST_SECRET} bytes, such as "
                          "`openssl rand -hex 32` prints")  # fmt: skip
    return secret
