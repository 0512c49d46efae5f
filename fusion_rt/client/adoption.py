"""Tensors that a script keeps, moved into the arena under their own addresses.

A tensor that is used again is *adopted*: the pages that it has to itself are copied into a segment of the arena, which
is mapped in their place. From then on the daemon finds it as it finds all that is in the arena, without a copy. What
the tensor has in the pages at its edges, which it shares with other memory, is copied to the segment and back with each
operation.

What makes that safe:

- Memory is adopted only where malloc may do with it what it does with its own (`_is_ordinary`), and the allocation is
  held, so that it is not freed meanwhile. When nobody else holds it, its pages become ordinary ones again.
- A script may free the memory of a storage that it keeps (`resize_`), and get other memory at the same address. So the
  kernel is asked before each use whether it still is the segment's.
- A forked child has to get a copy of what its parent has, and not to share it. So before a fork all that is adopted is
  mapped privately, which changes no contents, and loses nothing that another thread writes meanwhile. What the daemon
  is about to write a result into stays as it is; there the child does so.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from fusion_rt.core.errors import ArenaError
from fusion_rt.host.arena import Arena, Segment

LEAST = 64 * 1024  # bytes; of fewer, a copy costs no more than what is done here
_MOST = 128  # adopted tensors; each has a descriptor and a segment
_REMEMBERED = 1024  # tensors that were used once
_PAGE = mmap.PAGESIZE
_FILE_PAGE, _PRESENT = 1 << 61, 1 << 63  # in an entry of /proc/self/pagemap
_SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE
_FIXED = 0x10  # MAP_FIXED, as in <linux/mman.h>
_FAILED = ctypes.c_size_t(-1).value
_HEADER = 16  # bytes in front of what malloc returns
_NOT_MAIN = 4  # in a header's size: of an arena that gives pages back without unmapping them
_FLAGS = 7
_SLACK = 2 * _PAGE + 64  # bytes that an allocation may have more than was asked for

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


class Allocation(Protocol):
    """An allocation that a tensor is in, which is not freed as long as this object is there."""

    def where(self) -> tuple[int, int]:
        """Returns its address and its bytes."""

    def is_unused(self) -> bool:
        """Returns whether nobody else holds it."""


@dataclass(eq=False)
class _Adopted:
    """A tensor's memory that is in the arena.

    Attributes:
        address, nbytes: of the tensor.
        first, last: addresses between which pages are the segment's.
        start: address to which the beginning of the segment belongs.
        segment: its id.
        view: address of all of the segment, once more.
        descriptor, inode: of the segment.
        allocation: holds the memory; `place`: where that was.
        reads, writes: operations under way that only read it, or that also write it.
        is_dropped: it is not adopted any more, and its segment is dropped once no operation uses it.
    """

    address: int
    nbytes: int
    first: int
    last: int
    start: int
    segment: int
    view: int
    descriptor: int
    inode: int
    allocation: Allocation
    place: tuple[int, int]
    reads: int = 0
    writes: int = 0
    is_dropped: bool = False

    @property
    def is_busy(self) -> bool:
        return bool(self.reads or self.writes)


class Use:
    """An operation's use of an adopted tensor, or of a part of one.

    Attributes:
        place: segment and offset in the arena.
    """

    __slots__ = ("_adopted", "_edges", "_ended", "_written", "place")

    def __init__(
        self, adopted: _Adopted, address: int, nbytes: int, written: bool, ended: Callable[[_Adopted, bool], None]
    ) -> None:
        self.place = adopted.segment, address - adopted.start
        self._adopted, self._written, self._ended = adopted, written, ended
        end, there = address + nbytes, adopted.view - adopted.start
        edges = (address, min(end, adopted.first)), (max(address, adopted.last), end)
        self._edges = [(low, low + there, high - low) for low, high in edges if low < high]
        for here, copied, count in self._edges:
            ctypes.memmove(copied, here, count)

    def end(self, is_complete: bool) -> None:
        """The operation has ended; if it is complete, its result is to be seen."""
        if is_complete and self._written:
            for here, copied, count in self._edges:
                ctypes.memmove(here, copied, count)
        self._ended(self._adopted, self._written)


class Adoptions:
    """The tensors of this process that are adopted.

    Args:
        arena: has their segments.
        wanted: there may be any.
    """

    def __init__(self, arena: Arena, wanted: bool) -> None:
        self._arena = arena
        self._lock = threading.RLock()  # a fork in a signal's handler may find it held by its own thread
        self._adopted: list[_Adopted] = []  # by address; they do not overlap
        self._retired: deque[int] = deque()  # segments that nobody uses any more
        self._seen: OrderedDict[tuple[int, int], tuple[Hashable, object]] = OrderedDict()
        self._pages = -1
        self._wanted = wanted and _malloc_is_known()
        if self._wanted:
            try:
                self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._wanted = False
        _all.add(self)

    def use(self, address: int, nbytes: int, written: bool) -> Use | None:
        """Begins an operation's use of a tensor; None if it is not adopted.

        Args:
            written: the result goes there, too.
        """
        if not self._adopted:
            return None
        with self._lock:
            at = bisect.bisect_right(self._adopted, address, key=lambda each: each.address) - 1
            if at < 0:
                return None
            found = self._adopted[at]
            if address + nbytes > found.address + found.nbytes:
                return None
            if not self._is_there(found):
                if found.is_busy:
                    return None
                self._privatise([found])
                return None
            if written:
                found.writes += 1
            else:
                found.reads += 1
        return Use(found, address, nbytes, written, self._ended)

    def lasts(self, address: int, nbytes: int, identity: Hashable, hold: Callable[[], object]) -> bool:
        """Returns whether a tensor that is not adopted was used before, and may be adopted now.

        Args:
            address, nbytes: of the tensor.
            identity: of the allocation that it is in, as long as the object exists that `hold` makes.
        """
        if not self._wanted or nbytes < LEAST:
            return False
        found = self._seen.pop((address, nbytes), None)
        if found is not None and found[0] == identity:
            return True
        self._seen[address, nbytes] = identity, hold()
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return False

    def adopt(self, address: int, nbytes: int, allocation: Allocation) -> bool:
        """Adopts a tensor, or part of one; returns whether it could. To be called by one thread at a time."""
        self.sweep()
        first, last = -(-address // _PAGE) * _PAGE, (address + nbytes) // _PAGE * _PAGE
        place = allocation.where()
        with self._lock:
            others = [each for each in self._adopted if _overlaps(each, address, nbytes)]
            if (
                last <= first
                or len(self._adopted) >= _MOST
                or any(each.is_busy for each in others)
                or not place[0] <= address <= address + nbytes <= sum(place)
                or not self._is_ordinary(*place)
            ):
                return False
            self._privatise(others)
            start = address // _PAGE * _PAGE
            try:
                segment = Segment.create(-(-(address + nbytes) // _PAGE) * _PAGE - start)
            except ArenaError:
                return False
            descriptor = os.dup(segment.fd)
            number = self._arena.add(segment)
            ctypes.memmove(segment.address + first - start, first, last - first)
            made = _Adopted(
                address, nbytes, first, last, start, number, segment.address, descriptor,
                os.fstat(descriptor).st_ino, allocation, place,
            )  # fmt: skip
            if not _map(first, last - first, _SHARED, descriptor, first - start):
                self._retire(made)
                return False
            bisect.insort(self._adopted, made, key=lambda each: each.address)
        return True

    def sweep(self) -> None:
        """Gives back what nobody uses any more. To be called by one thread at a time."""
        with self._lock:
            for each in self._adopted[:]:
                if each.is_busy or not each.allocation.is_unused():
                    continue
                if each.allocation.where() == each.place:
                    _map(each.first, each.last - each.first, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
                    self._drop(each)
                else:
                    self._privatise([each])
        while self._retired:
            self._arena.drop_segment(self._retired.popleft())

    def close(self) -> None:
        """Nothing is adopted any more, and nothing will be; to be called before the arena is closed."""
        with self._lock:
            self._wanted = False
            self._privatise(self._adopted[:])
            self._retired.clear()
            if self._pages >= 0:
                os.close(self._pages)
            self._pages = -1

    # --- forks --------------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Makes all that is adopted ordinary memory of this process, as far as no result is to come there."""
        self._lock.acquire()
        self._privatise([each for each in self._adopted if not each.writes])

    def after_fork(self, in_child: bool) -> None:
        """A fork is over; to be called where `before_fork` was."""
        if in_child:
            self._wanted = False
            self._privatise(self._adopted[:])
            self._retired.clear()  # the connection is the parent's
        self._lock.release()

    # --- what they share ----------------------------------------------------------------------------------------------

    def _is_there(self, adopted: _Adopted) -> bool:
        """Returns whether the segment still is where the tensor is, whose memory is there."""
        for address in (adopted.first, adopted.last - _PAGE):
            ctypes.string_at(address, 1)  # a page that is nowhere says nothing
            if not self._page(address) & _FILE_PAGE:
                return False
        return True

    def _is_ordinary(self, address: int, nbytes: int) -> bool:
        """Returns whether memory was allocated by malloc, from an arena that unmaps the pages that it gives back.

        Others take such pages for zeros when they use them again, which those of a file are not.
        """
        if address % _PAGE < _HEADER and not self._page(address - _HEADER) & _PRESENT:  # there may be nothing
            return False
        size = ctypes.c_size_t.from_address(address - 8).value
        return not size & _NOT_MAIN and nbytes + 8 <= size & ~_FLAGS <= nbytes + _SLACK

    def _page(self, address: int) -> int:
        """Returns what the kernel tells of a page."""
        return int.from_bytes(os.pread(self._pages, 8, address // _PAGE * 8), "little")

    def _privatise(self, chosen: list[_Adopted]) -> None:
        """Maps adopted memory privately: it has the contents that it had, and is this process's alone from now on."""
        by_inode = {each.inode: each for each in chosen}
        if not by_inode:
            return
        for inode, low, high, offset in list(_mappings(by_inode)):
            each = by_inode[inode]
            if low != each.view:
                _map(low, high - low, mmap.MAP_PRIVATE, each.descriptor, offset)
        for each in chosen:
            self._drop(each)

    def _drop(self, adopted: _Adopted) -> None:
        self._adopted.remove(adopted)
        self._retire(adopted)

    def _retire(self, adopted: _Adopted) -> None:
        os.close(adopted.descriptor)
        adopted.is_dropped = True
        if not adopted.is_busy:
            self._retired.append(adopted.segment)

    def _ended(self, adopted: _Adopted, written: bool) -> None:
        """An operation does not use it any more."""
        with self._lock:
            if written:
                adopted.writes -= 1
            else:
                adopted.reads -= 1
            if adopted.is_dropped and not adopted.is_busy and self._wanted:
                self._retired.append(adopted.segment)


def _overlaps(adopted: _Adopted, address: int, nbytes: int) -> bool:
    return adopted.address < address + nbytes and address < adopted.address + adopted.nbytes


def _map(address: int, nbytes: int, flags: int, descriptor: int, offset: int) -> bool:
    """Replaces the pages at an address, at once; returns whether that was possible."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return int(_libc.mmap(address, nbytes, protection, flags | _FIXED, descriptor, offset)) == address


def _mappings(inodes: Iterable[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yields inode, first and last address, and offset of each mapping of these memfds in this process."""
    wanted = {str(inode): inode for inode in inodes}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) > 5 and fields[4] in wanted and fields[5].startswith("/memfd:"):
                low, high = fields[0].split("-")
                yield wanted[fields[4]], int(low, 16), int(high, 16), int(fields[2], 16)


def _malloc_is_known() -> bool:
    """Returns whether tensors are allocated by glibc's malloc, whose ways are known."""
    if not hasattr(_libc, "gnu_get_libc_version"):
        return False
    try:
        own = ctypes.CDLL("libc.so.6").posix_memalign
    except (OSError, AttributeError):
        return False
    return ctypes.cast(_libc.posix_memalign, ctypes.c_void_p).value == ctypes.cast(own, ctypes.c_void_p).value


_all: weakref.WeakSet[Adoptions] = weakref.WeakSet()
_forking: list[Adoptions] = []


def _before_fork() -> None:
    _forking[:] = _all
    for each in _forking:
        each.before_fork()


def _after_fork(in_child: bool) -> None:
    for each in reversed(_forking):
        each.after_fork(in_child)
    _forking.clear()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=lambda: _after_fork(in_child=False),
    after_in_child=lambda: _after_fork(in_child=True),
)
