"""The tensors of this process that are not in the arena: how they get to the daemon.

A daemon that can read and write this process takes large and lasting ones where they lie (`wire.Address`). All others
are copied into the arena and back. The kernel goes through another process's memory page by page: with pages of 4 KiB
that costs more than the copies, with pages of 2 MiB half of them. So a tensor is given by its address once its memory
has huge pages, which are asked for when it is used again.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from fusion_rt import wire
from fusion_rt.host.process_memory import OfferedText
from fusion_rt.settings import Settings

LEAST_BY_ADDRESS = 4 * 1024 * 1024  # bytes; of fewer, too many are in pages that are not huge
HUGE_PAGE = 2 * 1024 * 1024  # bytes
_AT_ONCE = 0.02  # seconds that an operation may wait for huge pages; each takes about 0.5 ms
_REMEMBERED = 1024  # tensors
_MADV_COLLAPSE = 25  # since Linux 6.1; as in <linux/mman.h>

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)


class OwnMemory:
    """This process's memory, as its daemon may use it.

    Args:
        daemon: the pid of the daemon.

    Attributes:
        offer: what the daemon is asked to find; None where addresses are not wanted (`FUSION_MEMORY=copy`).
        by_address: the daemon has found it.
    """

    def __init__(self, daemon: int) -> None:
        self.offer = OfferedText(daemon) if Settings.from_env().memory != "copy" else None
        self.by_address = False
        self._known: OrderedDict[tuple[int, int], _Lasting] = OrderedDict()

    def welcome(self, by_address: bool) -> None:
        """The daemon says whether it has found the offer."""
        self.by_address = self.offer is not None and by_address and self.offer.is_answered()
        if self.offer is not None and not self.by_address:
            self.offer.withdraw()

    def may_take(self, nbytes: int) -> bool:
        """Returns whether the daemon may be given the address of a tensor of this size."""
        return nbytes >= LEAST_BY_ADDRESS and self.by_address

    def address(self, address: int, nbytes: int, identity: Hashable, hold: Callable[[], object]) -> wire.Address | None:
        """Returns the address by which the daemon is told of a tensor; None if it is to be copied into the arena.

        Args:
            address, nbytes: of the tensor, which is large enough (`may_take`).
            identity: of the allocation that it is in, as long as the object exists that `hold` makes.
        """
        found = self._known.pop((address, nbytes), None)
        if found is None or found.identity != identity:
            found = _Lasting(identity, hold(), *_edges(address, nbytes))
        elif not found.has_huge_pages:
            found.ask_for_huge_pages()
        self._known[address, nbytes] = found
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return wire.Address(address) if found.has_huge_pages else None


@dataclass
class _Lasting:
    """The memory of a tensor that has been used, and may be again.

    Attributes:
        identity, held: of the allocation, and a reference that keeps the identity from being another's.
        low, high: between these addresses it can have huge pages.
        next: up to this address it has them.
        refused: the kernel has none for it.
    """

    identity: Hashable
    held: object
    low: int
    high: int
    next: int = 0
    refused: bool = False

    @property
    def has_huge_pages(self) -> bool:
        return self.next >= self.high and not self.refused

    def ask_for_huge_pages(self) -> None:
        """Has pages that are there copied to huge ones, as many as a few milliseconds allow."""
        if self.refused:
            return
        if not self.next:
            # The pages at its edges may also have other memory of this process, or none: then they stay as they are.
            outer = self.low - HUGE_PAGE, self.high + HUGE_PAGE
            _libc.madvise(outer[0], outer[1] - outer[0], mmap.MADV_HUGEPAGE)
            _libc.madvise(outer[0], HUGE_PAGE, _MADV_COLLAPSE)
            _libc.madvise(self.high, HUGE_PAGE, _MADV_COLLAPSE)
            self.next = self.low
        until = time.perf_counter() + _AT_ONCE
        while self.next < self.high and time.perf_counter() < until:
            if _libc.madvise(self.next, HUGE_PAGE, _MADV_COLLAPSE):
                self.refused = True
                return
            self.next += HUGE_PAGE


def _edges(address: int, nbytes: int) -> tuple[int, int]:
    """Returns the addresses of the first whole huge page in a range of memory, and behind the last one."""
    return -(-address // HUGE_PAGE) * HUGE_PAGE, (address + nbytes) // HUGE_PAGE * HUGE_PAGE
