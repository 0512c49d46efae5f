"""The arena: shared memory between a worker and its daemon, as sealed memfds passed by file descriptor.

A memfd has no name, so nothing is left in /dev/shm whatever dies; sealed against resizing, it cannot be truncated
under the process that reads it; and `posix_fallocate` turns "no memory left" into an `ArenaError` here instead of a
SIGBUS later. An arena is made of *segments* (one memfd each); a *region* is an allocated part of a segment.

Rejected: `multiprocessing.shared_memory`, which fails on all three points.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fusion_rt.errors import ArenaError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
ALIGNMENT = 64  # bytes; a cache line, so that no two regions share one
_SLAB = 4 * 1024 * 1024  # bytes of a segment that holds many small regions
_HUGE_PAGE = 2 * 1024 * 1024  # bytes; larger regions have a segment of their own
_PATIENCE = 100  # small regions asked for in a row, after which large ones are out of use


class Segment:
    """One sealed memfd, mapped.

    Attributes:
        nbytes: its length.
        view: writable view of all of it.
        address: address at which it is mapped in this process.
        on_close: called before it is unmapped, by whoever has made its pages known to a device.
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
    def create(cls, nbytes: int) -> Segment:
        """A new segment of `nbytes` zero bytes, all of it allocated.

        Raises:
            ArenaError: there is not enough memory (or room in the memory control group, or descriptors).
        """
        try:
            fd = os.memfd_create("fusion_rt-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ArenaError(f"no shared memory segment can be made: {error.strerror}") from error
        try:
            os.ftruncate(fd, nbytes)
            segment = cls(fd, nbytes)  # mapped first: its advice decides the size of the pages allocated next
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise ArenaError(
                f"{nbytes} bytes of shared memory are not to be had on this host ({error}); "
                "use a smaller model or fusion threshold, or raise the limit that was met"
            ) from error
        return segment

    @classmethod
    def open(cls, fd: int, nbytes: int, *, private: bool = False) -> Segment:
        """Maps a segment that another process created; takes the descriptor over, also on failure.

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
        """Closes the descriptor; the mapping stays. Done by whoever has passed it on."""
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
        drop: called with a segment id when a segment is given up.
        spare_nbytes: how many bytes of large segments to keep that are out of use: that were not wanted when the latest
            large region was, or have not been for long.
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
        self._segments: dict[int, Segment] = {}
        self._next_id = 1
        self._free: dict[int, list[Region]] = {}  # by class size: regions ready for use
        self._returned: deque[Region] = deque()
        self._since_large = 0  # how many small regions have been asked for since
        self._slab_tail: tuple[int, int] | None = None  # segment id and offset of the unused end of the last slab

    def new_segment(self, nbytes: int, plan: int = 0) -> tuple[int, Segment]:
        """A segment of its own; `plan` is the id of the plan whose buckets it is for, or 0.

        Raises:
            ArenaError: no memory.
        """
        segment_id, self._next_id = self._next_id, self._next_id + 1
        segment = Segment.create(nbytes)
        self._segments[segment_id] = segment
        self._offer(segment_id, segment, plan)
        return segment_id, segment

    def allocate(self, nbytes: int) -> Region:
        """A region of at least `nbytes` bytes, aligned to a cache line, with undefined contents.

        Raises:
            ArenaError: no memory.
        """
        self._collect()
        size = _size_class(nbytes)
        ready = self._free.get(size)
        found = ready.pop() if ready else None
        self._since_large = 0 if size > _HUGE_PAGE else self._since_large + 1
        if self._since_large in (0, _PATIENCE):  # only now: what an operation takes again is not spare
            self._trim()
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
        """Gives a region back. Safe in a finalizer and from any thread."""
        self._returned.append(region)

    def drop_segment(self, segment_id: int) -> None:
        """Gives a segment up, here and at the daemon."""
        self._segments.pop(segment_id).close()
        self._drop(segment_id)

    def segment(self, segment_id: int) -> Segment:
        """One of its segments."""
        return self._segments[segment_id]

    def locate(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Segment id and offset of memory that lies in the arena as a whole, else None."""
        for segment_id, segment in self._segments.items():
            offset = address - segment.address
            if 0 <= offset <= segment.nbytes - nbytes:
                return segment_id, offset
        return None

    def statistics(self) -> dict[str, int]:
        """`segments` and their `nbytes`, and `spare_nbytes` in regions that wait for use."""
        return {
            "segments": len(self._segments),
            "nbytes": sum(segment.nbytes for segment in self._segments.values()),
            "spare_nbytes": sum(size * len(regions) for size, regions in self._free.items()),
        }

    def close(self) -> None:
        """Forgets everything, without telling the daemon (which is being left)."""
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

    def _trim(self) -> None:
        """Gives up unused large segments beyond the limit, the largest first."""
        large = [size for size in self._free if size > _HUGE_PAGE and self._free[size]]
        spare = sum(size * len(self._free[size]) for size in large)
        for size in sorted(large, reverse=True):
            while spare > self._spare_limit and self._free[size]:
                self.drop_segment(self._free[size].pop().segment)
                spare -= size


def _size_class(nbytes: int) -> int:
    """The allocated size for a request: eight classes to each power of two, so at most an eighth is wasted."""
    size = max(nbytes, ALIGNMENT)
    step = max(ALIGNMENT, 1 << (size.bit_length() - 4))
    return -(-size // step) * step
