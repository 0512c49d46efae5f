"""The arena: shared memory between a worker and its daemon, as sealed memfds passed by file descriptor.

A memfd has no name, so nothing is left in /dev/shm whatever dies; sealed against resizing, it cannot be truncated
under the process that reads it; and `posix_fallocate` turns "no memory left" into an `ArenaError` here instead of a
SIGBUS later. Where memory is short, the kernel may kill a process before that call fails. So the memory that is left
is read before, and again after each sixteenth of it, since other workers of the host may allocate at the same time.
An arena is made of *segments* (one memfd each); a *region* is an allocated part of a segment.

Rejected: `multiprocessing.shared_memory`, which fails on all three points.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fusion_rt.core.errors import ArenaError, ArenaShortage
from fusion_rt.host.system_memory import available_memory

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ALIGNMENT = 64  # bytes; a cache line, so that no two regions share one
_SLAB = 4 * 1024 * 1024  # bytes of a segment that holds many small regions
_HUGE_PAGE = 2 * 1024 * 1024  # bytes; larger regions have a segment of their own
_SHARES = 16  # workers of a host that may allocate at the same time, without taking more together than there is
LEAST_LEFT = _SHARES * _HUGE_PAGE  # bytes that are left to the host after an allocation, so that nothing is killed
_PATIENCE = 100  # small regions allocated in a row, after which large ones count as unused


class Segment:
    """One sealed memfd, mapped.

    Attributes:
        nbytes: its length.
        view: writable view of all of it.
        address: address at which it is mapped in this process.
        on_close: called before it is unmapped; set by code that has registered its pages with a device.
    """

    def __init__(self, fd: int, nbytes: int, *, private: bool = False) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.on_close: Callable[[], None] | None = None
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        self._map = mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        if nbytes >= _HUGE_PAGE:
            self._map.madvise(mmap.MADV_HUGEPAGE)  # where the system allows it, faults in 2 MiB at a time
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, nbytes: int, left: int = LEAST_LEFT) -> Segment:
        """Makes a segment of `nbytes` zero bytes, all of it allocated, where `left` bytes are left to the host then.

        Raises:
            ArenaShortage: there is not enough memory now, on this host or in its control group.
            ArenaError: a limit of this process is met (bytes of a file, descriptors), or the number is no size.
        """
        try:
            fd = os.memfd_create("fusion_rt-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ArenaError(f"no shared memory segment can be made: {error.strerror}") from error
        try:
            os.ftruncate(fd, nbytes)
            segment = cls(fd, nbytes)  # mapped first: its advice decides the size of the pages allocated next
            _allocate(fd, nbytes, left)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except ArenaShortage:
            os.close(fd)
            raise
        except (OSError, OverflowError) as error:
            os.close(fd)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise _short(nbytes, str(error)) from error
            raise ArenaError(
                f"{nbytes} bytes of shared memory cannot be allocated on this host ({error}); "
                "use a smaller model or fusion threshold, or raise the limit that was met"
            ) from error
        return segment

    @classmethod
    def open(cls, fd: int, nbytes: int, *, private: bool = False) -> Segment:
        """Maps a segment that another process created; takes ownership of the descriptor, also on failure.

        Args:
            fd: the descriptor received.
            nbytes: the length that the sender declared.
            private: changes stay in this process (copy on write).

        Raises:
            ArenaError: it is not a memfd, not sealed against resizing, or of another length than declared; or there
                is no room to map it.
        """
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise ArenaError("the descriptor offered as an arena segment is not a memfd") from error
            if seals & _SEALS != _SEALS:
                raise ArenaError("the memfd offered as an arena segment is not sealed against resizing")
            actual = os.fstat(fd).st_size
            if actual != nbytes or nbytes == 0:
                raise ArenaError(f"the arena segment is {actual} bytes long, not the {nbytes} declared")
            try:
                return cls(fd, nbytes, private=private)
            except OSError as error:
                raise ArenaError(f"an arena segment of {nbytes} bytes cannot be mapped ({error.strerror})") from error
        except BaseException:
            os.close(fd)
            raise

    def close_fd(self) -> None:
        """Closes the descriptor, once it has been passed on; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmaps the segment now, or when the last view of it (a tensor, an array) goes away."""
        # Neither the view nor the map is closed by force: a tensor may still look into it, which would raise.
        if self.on_close is not None:
            self.on_close()
            self.on_close = None
        self.close_fd()
        self.view = memoryview(b"")
        del self._map


def _allocate(fd: int, nbytes: int, least: int) -> None:
    """Allocates all bytes of a memfd, if `least` are left then. Raises `ArenaShortage`, and `OSError` of the kernel."""
    done = 0
    while done < nbytes:
        rest = nbytes - done
        if rest > _HUGE_PAGE:
            left, group = available_memory()
            part = max((left - least) // _SHARES // _HUGE_PAGE, 1) * _HUGE_PAGE
            if rest > left - least:
                limited = f" within the limit of the control group {group}" if group else ""
                raise _short(nbytes, f"{(left + done) / 2**20:.0f} MiB of memory are left{limited}")
            rest = min(part, rest)
        os.posix_fallocate(fd, done, rest)
        done += rest


def _short(nbytes: int, why: str) -> ArenaShortage:
    return ArenaShortage(
        f"{nbytes} bytes of shared memory cannot be allocated on this host ({why}); use a smaller model or fusion "
        "threshold, run fewer workers on this host, or raise the limit that was met"
    )


@dataclass(frozen=True, slots=True)
class Region:
    """An allocated part of a segment, `nbytes` long from `offset` (both in bytes)."""

    segment: int
    offset: int
    nbytes: int
    view: memoryview
    address: int


class Arena:
    """A worker's segments and the regions allocated in them.

    Small regions share slabs, by size class; a large one has a segment of its own, kept for the next region of its
    size. Not thread-safe, but `free` may be called from anywhere, finalizers included: it only notes the region.

    Args:
        offer: called with (segment id, segment, plan id or 0) when a segment is made; passes it to the daemon.
        drop: called with a segment id when a segment is dropped.
        spare_nbytes: bytes of unused large segments to keep. A segment is unused if it was free when the latest large
            region was allocated, or if none has been allocated for long.

    Attributes:
        left: returns the bytes that are left to the host after an allocation.
    """

    def __init__(
        self,
        offer: Callable[[int, Segment, int], None],
        drop: Callable[[int], None],
        spare_nbytes: int = 1 << 30,
    ) -> None:
        self._offer = offer
        self._drop = drop
        self._spare_limit = spare_nbytes
        self.left: Callable[[], int] = partial(int, LEAST_LEFT)
        self._segments: dict[int, Segment] = {}
        self._next_id = 1
        self._free: dict[int, list[Region]] = {}  # by class size: regions ready for use
        self._returned: deque[Region] = deque()
        self._since_large = 0  # how many small regions have been asked for since
        self._slab_tail: tuple[int, int] | None = None  # segment id and offset of the unused end of the last slab

    def new_segment(self, nbytes: int, plan: int = 0) -> tuple[int, Segment]:
        """Makes a segment and offers it to the daemon; `plan` is the id of the plan whose buckets it is for, or 0.

        Returns: its id, and the segment.

        Raises:
            ArenaError: as `Segment.create`.
        """
        self._collect()
        segment = Segment.create(nbytes, self.left())
        return self.add(segment, plan), segment

    def add(self, segment: Segment, plan: int = 0) -> int:
        """Offers a segment to the daemon as `new_segment` does, and returns its id."""
        segment_id, self._next_id = self._next_id, self._next_id + 1
        self._segments[segment_id] = segment
        self._offer(segment_id, segment, plan)
        return segment_id

    def allocate(self, nbytes: int) -> Region:
        """Allocates a region of at least `nbytes` bytes, aligned to a cache line, with undefined contents.

        Raises:
            ArenaError: as `Segment.create`.
        """
        self._collect()
        size = _size_class(nbytes)
        ready = self._free.get(size)
        found = ready.pop() if ready else None
        self._since_large = 0 if size > _HUGE_PAGE else self._since_large + 1
        if self._since_large in (0, _PATIENCE):  # only now: a region that an operation takes again is not spare
            self._trim(self._spare_limit)
        return found or self._make(size)

    def _make(self, size: int) -> Region:
        if size > _HUGE_PAGE:
            segment_id, segment = self.new_segment(size)
            return Region(segment_id, 0, size, segment.view, segment.address)
        if self._slab_tail is None or self._slab_tail[1] + size > _SLAB:
            self._slab_tail = (self.new_segment(_SLAB)[0], 0)
        segment_id, offset = self._slab_tail
        self._slab_tail = (segment_id, offset + size)
        segment = self._segments[segment_id]
        return Region(segment_id, offset, size, segment.view[offset : offset + size], segment.address + offset)

    def free(self, region: Region) -> None:
        """Returns a region to the arena. Safe in a finalizer and from any thread."""
        self._returned.append(region)

    def drop_segment(self, segment_id: int) -> None:
        """Unmaps a segment, here and at the daemon."""
        self._segments.pop(segment_id).close()
        self._drop(segment_id)

    def drop_spare(self) -> bool:
        """Drops all unused large segments; returns whether there were any."""
        self._collect()
        before = len(self._segments)
        self._trim(0)
        return len(self._segments) < before

    @property
    def has_returned(self) -> bool:
        """True if regions have come back since the last allocation."""
        return bool(self._returned)

    def segment(self, segment_id: int) -> Segment:
        """Returns a segment by its id."""
        return self._segments[segment_id]

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Returns segment id and offset of memory that is wholly inside the arena, else None."""
        for segment_id, segment in self._segments.items():
            offset = address - segment.address
            if 0 <= offset <= segment.nbytes - nbytes:
                return segment_id, offset
        return None

    def statistics(self) -> dict[str, int]:
        """Returns the number of `segments`, their `nbytes`, and `spare_nbytes` in free regions."""
        return {
            "segments": len(self._segments),
            "nbytes": sum(segment.nbytes for segment in self._segments.values()),
            "spare_nbytes": sum(size * len(regions) for size, regions in self._free.items()),
        }

    def close(self) -> None:
        """Unmaps all segments, without telling the daemon (this worker leaves it)."""
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._free.clear()
        self._returned.clear()
        self._slab_tail = None

    def _collect(self) -> None:
        while self._returned:
            region = self._returned.popleft()
            if region.segment in self._segments:  # else the arena was closed in between
                self._free.setdefault(region.nbytes, []).append(region)

    def _trim(self, spare_limit: int) -> None:
        """Drops unused large segments beyond so many bytes, the largest first."""
        large = [size for size in self._free if size > _HUGE_PAGE and self._free[size]]
        spare = sum(size * len(self._free[size]) for size in large)
        for size in sorted(large, reverse=True):
            while spare > spare_limit and self._free[size]:
                self.drop_segment(self._free[size].pop().segment)
                spare -= size


def _size_class(nbytes: int) -> int:
    """Returns the allocated size for a request: eight classes to each power of two, so at most an eighth is wasted."""
    size = max(nbytes, ALIGNMENT)
    step = max(ALIGNMENT, 1 << (size.bit_length() - 4))
    return -(-size // step) * step
