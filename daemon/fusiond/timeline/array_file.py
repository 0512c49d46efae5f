"""A file that holds a JSON array, and holds a valid one after every append."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from fusion_rt.host.private_files import open_private

_OPENING = b"[\n"
_BETWEEN = b",\n"
_CLOSING = b"]"


class ArrayFile:
    """Appends elements to an array in a file.

    Each append is one write that begins where the closing bracket was and ends with the new one, so that whoever reads
    the file, also after a crash, reads an array. What cannot be written whole, on a full disk, is taken back.

    Args:
        path: of the file, which only this user can read (`open_private`). One that is there and not empty is kept, as
            `path` with ".1" behind it.

    Attributes:
        elements: in the file.
        nbytes: of the file.

    Raises:
        OSError: it cannot be opened or written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.elements = 0
        self.nbytes = 0
        self._fd = -1
        self._open()

    def append(self, elements: Sequence[bytes]) -> None:
        """Appends JSON texts.

        Raises:
            OSError: they cannot be written; the file is as it was.
        """
        if not elements:
            return
        data = (_BETWEEN if self.elements else b"") + _BETWEEN.join(elements) + _CLOSING
        place = self.nbytes - len(_CLOSING)
        self._write(data, place)
        self.nbytes = place + len(data)
        self.elements += len(elements)

    def rotate(self) -> None:
        """Keeps the file as `path` with ".1" behind it, in place of what was kept before, and begins it anew.

        Raises:
            OSError: it cannot be done.
        """
        self.close()
        self._open()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = os.lstat(self.path)
            if found.st_size and stat.S_ISREG(found.st_mode):
                os.replace(self.path, f"{self.path}.1")
        self._fd = open_private(self.path)
        self.elements = 0
        try:
            self._write(_OPENING + _CLOSING, 0)
        except OSError:
            self.close()
            raise
        self.nbytes = len(_OPENING + _CLOSING)

    def _write(self, data: bytes, place: int) -> None:
        try:
            written = os.pwrite(self._fd, data, place)
            while written < len(data):  # the disk has just become full, which the next write says
                written += os.pwrite(self._fd, data[written:], place + written)
        except OSError:
            if self.nbytes:
                os.pwrite(self._fd, _CLOSING, place)  # on a page that is there: needs no room
                os.ftruncate(self._fd, self.nbytes)
            raise
