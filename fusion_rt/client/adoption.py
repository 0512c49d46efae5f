"""Tensors that a script keeps, moved into the arena under their own addresses (`FUSION_MEMORY=adopt`).

A tensor that is used a third time is *adopted*: the pages that it has to itself are copied into a segment of the arena,
which is mapped in their place. From then on the daemon finds it as it finds all that is in the arena, without a copy.
The parts of the tensor in the pages at its edges, which it shares with other memory, are copied to the segment and back
with each operation.

This is safe for these reasons:

- Memory is adopted only where malloc may treat it as its own (`_is_ordinary`), and the allocation is
  held, so that it is not freed meanwhile. When it has no other holder, its pages become ordinary ones again.
- A script may free the memory of a storage that it keeps (`resize_`), and other mappings may take its place. So before
  each use the storage is asked where it is, and then the kernel, whether the segment still is there.
- A forked child has to get a copy of its parent's memory, and not to share it. So before a fork all that is adopted is
  mapped privately, which changes no contents, and loses nothing that another thread writes meanwhile. Pages that the
  daemon is about to write a result into stay as they are; there the child does so, and the parent at the next occasion.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Protocol

from fusion_rt.core.errors import ArenaError
from fusion_rt.host.arena import Arena, Segment

LEAST = 64 * 1024  # bytes; of fewer, a copy costs no more than adoption
_MOST = 128  # adopted tensors; each has a descriptor and a segment
_REMEMBERED = 1024  # tensors that were used, and are not adopted
_USES = 2  # of a tensor before it is adopted: one that is freed soon, or forked with in each step, is only copied
_PAGE = mmap.PAGESIZE
_FILE_PAGE, _PRESENT = 1 << 61, 1 << 63  # in an entry of /proc/self/pagemap
_SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE
_FIXED = 0x10  # MAP_FIXED, as in <linux/mman.h>
_FAILED = ctypes.c_size_t(-1).value
_HEADER = 16  # bytes in front of an address that malloc returns
_NOT_MAIN = 4  # in a header's size: of an arena that gives pages back without unmapping them
_FLAGS = 7
_SLACK = 2 * _PAGE + 64  # bytes that an allocation may have more than was asked for

_log = logging.getLogger(__name__)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


Span = tuple[int, int]  # from an address to another


class Allocation(Protocol):
    """An allocation that a tensor is in, which is not freed as long as this object is there."""

    def where(self) -> tuple[int, int]:
        """Returns its address and its bytes."""

    def is_unused(self) -> bool:
        """Returns whether it has no other holder."""


@dataclass(eq=False)
class _Adopted:
    """A tensor's memory that is in the arena.

    Attributes:
        address, nbytes: of the tensor.
        first, last: addresses between which its whole pages are.
        start: address to which the beginning of the segment belongs.
        shared: addresses from and to which pages are the segment's, and where they begin in it. Less than from first to
            last only after a fork while the daemon writes into a part of it; then it is used no more.
        segment: its id.
        view: address of all of the segment, once more.
        descriptor, inode: of the segment.
        allocation: holds the memory; `place`: where that was.
        reads: number of the operations under way that only read it.
        writes: the others' writes.
        is_dropped: it is not adopted any more, and its segment is dropped once no operation uses it.
    """

    address: int
    nbytes: int
    first: int
    last: int
    start: int
    shared: list[tuple[int, int, int]]
    segment: int
    view: int
    descriptor: int
    inode: int
    allocation: Allocation
    place: tuple[int, int]
    reads: int = 0
    writes: list[Span] = field(default_factory=list)
    is_dropped: bool = False

    @property
    def is_busy(self) -> bool:
        return bool(self.reads or self.writes)

    @property
    def is_whole(self) -> bool:
        return self.shared == [(self.first, self.last, self.first - self.start)]


class Use:
    """An operation's use of an adopted tensor, or of a part of one.

    Attributes:
        place: segment and offset in the arena.
    """

    __slots__ = ("_adopted", "_edges", "_ended", "_written", "place")

    def __init__(
        self, adopted: _Adopted, span: Span, written: bool, ended: Callable[[_Adopted, Span | None], None]
    ) -> None:
        address, end = span
        self.place = adopted.segment, address - adopted.start
        self._adopted, self._written, self._ended = adopted, span if written else None, ended
        there = adopted.view - adopted.start
        edges = (address, min(end, adopted.first)), (max(address, adopted.last), end)
        self._edges = [(low, low + there, high - low) for low, high in edges if low < high]
        for here, copied, count in self._edges:
            ctypes.memmove(copied, here, count)

    def end(self, is_complete: bool) -> None:
        """The operation has ended; if it is complete, its result is to be seen."""
        if is_complete and self._written is not None:
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
        self._retired: deque[int] = deque()  # segments that are not used any more
        self._seen: OrderedDict[tuple[int, int], tuple[Hashable, object, int]] = OrderedDict()
        # From the first adoption on, since later there may be no descriptors left.
        self._pages = self._maps = -1
        self._wanted = wanted and _malloc_is_known() and os.access("/proc/self/pagemap", os.R_OK)
        _all.add(self)

    def use(self, address: int, nbytes: int, written: bool) -> Use | None:
        """Begins an operation's use of a tensor; None if it is not adopted.

        Args:
            written: the result goes there, too.
        """
        if not self._adopted:
            return None
        with self._lock:
            at = bisect.bisect_right(self._adopted, address, key=attrgetter("address")) - 1
            if at < 0:
                return None
            found = self._adopted[at]
            if address + nbytes > found.address + found.nbytes:
                return None
            if not self._is_there(found):
                if not found.is_busy:
                    self._privatise([found])
                return None
            span = address, address + nbytes
            if written:
                found.writes.append(span)
            else:
                found.reads += 1
            if found.is_dropped or not found.is_whole:  # after it was counted: a signal's handler may have forked
                self._count_out(found, span if written else None)
                return None
        return Use(found, span, written, self._ended)

    def lasts(self, address: int, nbytes: int, identity: Hashable, hold: Callable[[], object]) -> bool:
        """Returns whether a tensor that is not adopted was used twice before, and may be adopted now.

        Args:
            address, nbytes: of the tensor.
            identity: of the allocation that it is in, as long as the object exists that `hold` makes.
        """
        if not self._wanted or nbytes < LEAST:
            return False
        found = self._seen.pop((address, nbytes), None)
        if found is None or found[0] != identity:
            found = identity, hold(), 0
        if found[2] >= _USES:
            return True
        self._seen[address, nbytes] = (*found[:2], found[2] + 1)
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
                not self._has_opened()
                or last <= first
                or len(self._adopted) >= _MOST
                or any(each.is_busy for each in others)
                or not place[0] <= address <= address + nbytes <= sum(place)
                or not self._is_ordinary(*place)
            ):
                return False
            if not self._privatise(others):
                return False
            start = address // _PAGE * _PAGE
            try:
                segment = Segment.create(-(-(address + nbytes) // _PAGE) * _PAGE - start)
            except ArenaError:
                return False
            try:
                descriptor = os.dup(segment.fd)
            except OSError:
                segment.close()
                return False
            try:
                number = self._arena.add(segment)
            except BaseException:
                os.close(descriptor)
                raise
            ctypes.memmove(segment.address + first - start, first, last - first)
            made = _Adopted(
                address, nbytes, first, last, start, [(first, last, first - start)], number, segment.address,
                descriptor, os.fstat(descriptor).st_ino, allocation, place,
            )  # fmt: skip
            bisect.insort(self._adopted, made, key=attrgetter("address"))
            if not _map(first, last - first, _SHARED, descriptor, first - start):
                self._drop(made)
                return False
        return True

    def sweep(self) -> None:
        """Gives back memory without a user. To be called by one thread at a time."""
        with self._lock:
            for each in self._adopted[:]:
                if each.is_busy or not each.allocation.is_unused():
                    continue
                unmapped = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                if self._is_there(each) and _map(each.first, each.last - each.first, unmapped, -1, 0):
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
            for each in self._adopted[:]:  # memory that the kernel refused to map is not shared from now on
                self._drop(each)
            self._retired.clear()
            for descriptor in (self._pages, self._maps):
                if descriptor >= 0:
                    os.close(descriptor)
            self._pages = self._maps = -1

    # --- forks --------------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Makes all that is adopted ordinary memory of this process, as far as no result is to come there."""
        self._lock.acquire()
        self._privatise(self._adopted[:], keeps_written=True)

    def after_fork(self, in_child: bool) -> None:
        """A fork is over; to be called where `before_fork` was."""
        if in_child:
            self._wanted = False
            self._privatise_in_child()
            self._retired.clear()  # the connection is the parent's
        self._lock.release()

    # --- shared parts -------------------------------------------------------------------------------------------------

    def _is_there(self, adopted: _Adopted) -> bool:
        """Returns whether the storage still is where it was, and the segment's pages are there."""
        if adopted.allocation.where() != adopted.place:  # other mappings may have taken its place, or none
            return False
        for low, high, _ in adopted.shared:
            for address in (low, high - _PAGE):
                ctypes.string_at(address, 1)  # a page that is nowhere says nothing
                if not self._page(address) & _FILE_PAGE:
                    return False
        return True

    def _has_opened(self) -> bool:
        """Opens the kernel's report about memory; returns whether it could."""
        try:
            if self._pages < 0:
                self._pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
            if self._maps < 0:
                self._maps = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
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
        """Returns the kernel's report of a page."""
        return int.from_bytes(os.pread(self._pages, 8, address // _PAGE * 8), "little")

    def _privatise(self, chosen: Sequence[_Adopted], keeps_written: bool = False) -> bool:
        """Maps adopted memory privately: it has the contents that it had, and is this process's alone from now on.

        Ends the adoption; the kernel may refuse it.

        Args:
            keeps_written: pages stay as they are that an operation under way writes.

        Returns: whether all of it could be mapped.
        """
        for each in chosen:
            kept = []
            if self._is_there(each):
                kept = [_pages_of(span) for span in each.writes] if keeps_written else []
            else:  # the storage's memory was freed, and parts of it may be malloc's
                each.shared = self._remains(each)
            _make_private(each, kept)
            if not each.shared:
                self._drop(each)
        return all(each.is_dropped for each in chosen)

    def _privatise_in_child(self) -> None:
        """Does so after a fork, with the parent's leavings; its view of memory is the parent's."""
        for each in self._adopted[:]:
            _make_private(each, ())
            if each.shared:
                _log.warning(
                    "a forked child shares a tensor of %d bytes with its parent, because the kernel maps no more "
                    "memory; give it more, or set FUSION_MEMORY=auto, which leaves tensors where they are",
                    each.nbytes,
                )
            self._drop(each)

    def _remains(self, adopted: _Adopted) -> list[tuple[int, int, int]]:
        """Returns where a segment is mapped besides as a whole."""
        end = adopted.view + _pages_of((adopted.start, adopted.address + adopted.nbytes))[1] - adopted.start
        return [found for found in _mappings(self._maps, adopted.inode) if not adopted.view <= found[0] < end]

    def _drop(self, adopted: _Adopted) -> None:
        """It is not adopted any more."""
        if adopted.is_dropped:
            return
        adopted.is_dropped = True
        self._adopted.remove(adopted)
        os.close(adopted.descriptor)
        if not adopted.is_busy:
            self._retired.append(adopted.segment)

    def _ended(self, adopted: _Adopted, written: Span | None) -> None:
        """An operation does not use it any more."""
        with self._lock:
            self._count_out(adopted, written)
            if adopted.is_dropped and not adopted.is_busy and self._wanted:
                self._retired.append(adopted.segment)

    def _count_out(self, adopted: _Adopted, written: Span | None) -> None:
        if written is None:
            adopted.reads -= 1
        else:
            adopted.writes.remove(written)


def _overlaps(adopted: _Adopted, address: int, nbytes: int) -> bool:
    return adopted.address < address + nbytes and address < adopted.address + adopted.nbytes


def _map(address: int, nbytes: int, flags: int, descriptor: int, offset: int) -> bool:
    """Replaces the pages at an address, at once; returns whether that was possible."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return int(_libc.mmap(address, nbytes, protection, flags | _FIXED, descriptor, offset)) == address


def _make_private(adopted: _Adopted, kept: Sequence[Span]) -> None:
    """Maps the shared part of an adopted tensor, except for some pages, and leaves the rest shared."""
    left = []
    for low, high, offset in adopted.shared:
        bounds = sorted({low, high, *(min(max(at, low), high) for span in kept for at in span)})
        for start, end in itertools.pairwise(bounds):
            there = offset + start - low
            stays = any(first <= start < last for first, last in kept)
            if stays or not _map(start, end - start, mmap.MAP_PRIVATE, adopted.descriptor, there):
                left.append((start, end, there))
    adopted.shared = left


def _pages_of(span: Span) -> Span:
    return span[0] // _PAGE * _PAGE, -(-span[1] // _PAGE) * _PAGE


def _mappings(maps: int, inode: int) -> Iterator[tuple[int, int, int]]:
    """Yields from and to which address a memfd is mapped and shared, and where that begins in it.

    Args:
        maps: descriptor of /proc/self/maps.
    """
    text = b""
    while read := os.pread(maps, 1 << 16, len(text)):
        text += read
    for line in text.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) > 5 and fields[4] == b"%d" % inode and fields[5].startswith(b"/memfd:") and b"s" in fields[1]:
            low, high = fields[0].split(b"-")
            yield int(low, 16), int(high, 16), int(fields[2], 16)


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
    after_in_parent=partial(_after_fork, in_child=False),
    after_in_child=partial(_after_fork, in_child=True),
)
