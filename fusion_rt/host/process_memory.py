"""The memory of other processes of this host, read and written by system calls (process_vm_readv, process_vm_writev).

Linux allows that between processes of one user, unless Yama, a container's seccomp filter or the process itself forbids
it. So it is tried before anything relies on it: a process that wants its memory read and written has a random text in
it (`OfferedText`), which the other one has to find and to answer in its place (`Process.accepts`).

Memory is named by a pid, which the kernel gave for the other end of a socket, and an address. A pid may be given to
another process after its own has ended, so it is asked before each transfer whether its own is still there
(`Process.check`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import signal
import threading

from fusion_rt.core.errors import FusionError

OFFER_BYTES = 16
_PR_SET_PTRACER = 0x59616D61  # as in <linux/prctl.h>

_libc = ctypes.CDLL(None, use_errno=True)
TRANSFER = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t,
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    use_errno=True,
)


class ProcessMemoryError(FusionError):
    """Memory of another process cannot be read or written; the text names the process and the reason."""


class Calls:
    """The two system calls, as functions in C.

    Attributes:
        reads, writes: addresses of process_vm_readv and process_vm_writev, or of their substitutes; 0 where the
            C library has none.
    """

    def __init__(self) -> None:
        self.reads = _address("process_vm_readv")
        self.writes = _address("process_vm_writev")

    def move(self, function: int, pid: int, here: int, there: int, nbytes: int) -> int:
        """Moves bytes between this process and another by `reads` or `writes`; returns the error number, or 0."""
        done = 0
        while done < nbytes:
            near = (ctypes.c_uint64 * 2)(here + done, nbytes - done)
            far = (ctypes.c_uint64 * 2)(there + done, nbytes - done)
            if not function:
                return errno.ENOSYS
            moved = TRANSFER(function)(pid, ctypes.addressof(near), 1, ctypes.addressof(far), 1, 0)
            if moved <= 0:
                return ctypes.get_errno() or errno.EFAULT
            done += moved
        return 0


def _address(name: str) -> int:
    function = getattr(_libc, name, None)
    return 0 if function is None else int(ctypes.cast(function, ctypes.c_void_p).value or 0)


CALLS = Calls()


class Process:
    """Another process of this host, whose memory this one reads and writes. Any number of threads may use it.

    Args:
        pid: its number, as this process sees it.
        who: the process, in messages to people.

    Raises:
        ProcessMemoryError: there is no such process, or this one cannot see it.
    """

    def __init__(self, pid: int, who: str) -> None:
        self.pid = pid
        self.who = who
        self._lock = threading.Lock()
        try:
            self._descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError) as error:
            raise ProcessMemoryError(f"{who} is a process that cannot be seen here: {error}") from error

    def end(self) -> None:
        """Refuses its memory from now on, since its connection is over. Transfers under way go on."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._descriptor = -1

    def check(self) -> None:
        """Raises `ProcessMemoryError` when the process has ended, so that its number may be another's."""
        with self._lock:
            if self._descriptor >= 0:
                try:
                    signal.pidfd_send_signal(self._descriptor, 0)
                except PermissionError:  # it is there
                    return
                except ProcessLookupError:
                    pass
                else:
                    return
        raise ProcessMemoryError(f"the memory of {self.who} is gone: its process has ended")

    def read(self, there: int, here: int, nbytes: int) -> None:
        """Copies bytes at an address of the process to one of this process. Raises `ProcessMemoryError`."""
        self._move(CALLS.reads, "read", there, here, nbytes)

    def write(self, there: int, here: int, nbytes: int) -> None:
        """Copies bytes at an address of this process to one of the process. Raises `ProcessMemoryError`."""
        self._move(CALLS.writes, "written", there, here, nbytes)

    def accepts(self, address: int, text: bytes) -> bool:
        """Finds out whether the process's memory can be read and written, by its offer; answers that.

        Args:
            address, text: of its `OfferedText`.
        """
        found = ctypes.create_string_buffer(len(text))
        try:
            self.read(address, ctypes.addressof(found), len(text))
            if found.raw != text:
                return False
            found.raw = text[::-1]
            self.write(address, ctypes.addressof(found), len(text))
        except ProcessMemoryError:
            return False
        return True

    def refused(self, verb: str, there: int, nbytes: int, number: int) -> ProcessMemoryError:
        """Returns the error of a transfer that the kernel refused with this error number."""
        if number == errno.EFAULT:
            why = "not all of them are memory of its process"
        elif number == errno.ESRCH:
            why = "its process has ended"
        else:
            why = os.strerror(number)
        return ProcessMemoryError(f"{nbytes} bytes at {there:#x} of {self.who} cannot be {verb}: {why}")

    def _move(self, function: int, verb: str, there: int, here: int, nbytes: int) -> None:
        self.check()
        if number := CALLS.move(function, self.pid, here, there, nbytes):
            raise self.refused(verb, there, nbytes, number)


class OfferedText:
    """This process's offer of its memory to another one: a random text in it.

    Args:
        pid: of the process that may read and write all memory of this one from now on, as far as other rules allow it.

    Attributes:
        address: where the text is.
        text: the text.
    """

    def __init__(self, pid: int) -> None:
        self.text = secrets.token_bytes(OFFER_BYTES)
        self._buffer = ctypes.create_string_buffer(self.text, OFFER_BYTES)
        self.address = ctypes.addressof(self._buffer)
        _set_tracer(pid)

    def is_answered(self) -> bool:
        """Returns True once the other process has read the text and written its answer."""
        return self._buffer.raw == self.text[::-1]

    def withdraw(self) -> None:
        """Lets no process of this user's read this one's memory that could not before."""
        _set_tracer(0)


def _set_tracer(pid: int) -> None:
    """Names the process that Yama lets read and write this one's memory (scope 1); without Yama, nothing happens."""
    _libc.prctl(ctypes.c_int(_PR_SET_PTRACER), ctypes.c_ulong(pid), *(ctypes.c_ulong(0) for _ in range(3)))
