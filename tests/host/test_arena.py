"""The arena: memory that cannot be pulled away, that leaves no trace, and that is used again."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import ArenaError, ArenaShortage
from fusion_rt.host import arena
from fusion_rt.host.arena import ALIGNMENT, Arena, Region, Segment
from tests.for_each import for_each

MIB = 1 << 20


def descriptors() -> set[str]:
    """What this process has open; the anonymous inode or path of each."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue  # the one that listed the directory
    return found


@pytest.fixture(autouse=True)
def no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    assert descriptors() - before == set()


@contextmanager
def limited(kind: int, soft: int) -> Iterator[None]:
    """A lower limit of this process for a while."""
    old = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, old)


def lowest_free_descriptor() -> int:
    fd = os.dup(0)
    os.close(fd)
    return fd


class Daemon:
    """Records what an arena offers and drops."""

    def __init__(self) -> None:
        self.offered: list[tuple[int, int, int]] = []
        self.dropped: list[int] = []
        self.arena = Arena(self._offer, self.dropped.append)

    def _offer(self, segment_id: int, segment: Segment, plan: int) -> None:
        self.offered.append((segment_id, segment.nbytes, plan))
        segment.close_fd()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.arena.close()


# --- segments ---------------------------------------------------------------------------------------------------------


def test_both_ends_see_the_same_bytes() -> None:
    ours = Segment.create(8192)
    theirs = Segment.open(os.dup(ours.fd), 8192)
    assert bytes(theirs.view) == bytes(8192)
    ours.view[5000:5003] = b"abc"
    theirs.view[0] = 7
    assert bytes(theirs.view[5000:5003]) == b"abc"
    assert ours.view[0] == 7
    theirs.close()
    ours.close()


@for_each("nbytes", [0, 4096, 16384])
def test_the_other_side_cannot_resize_a_segment(nbytes: int) -> None:
    segment = Segment.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(segment.fd).st_size == 8192
    segment.close()


def test_all_of_a_segment_is_allocated_when_it_is_made() -> None:
    segment = Segment.create(3 * MIB)
    assert os.fstat(segment.fd).st_blocks * 512 >= 3 * MIB
    segment.close()


def test_a_segment_leaves_nothing_in_dev_shm() -> None:
    before = set(os.listdir("/dev/shm"))
    segment = Segment.create(MIB)
    assert set(os.listdir("/dev/shm")) == before
    segment.close()


def test_a_view_outlives_the_segment() -> None:
    segment = Segment.create(8192)
    segment.view[:3] = b"abc"
    view = segment.view[:3]
    segment.close()
    assert bytes(view) == b"abc"
    view[0] = ord("x")
    assert bytes(view) == b"xbc"


def test_changes_to_a_private_mapping_stay_private() -> None:
    ours = Segment.create(8192)
    ours.view[:] = b"a" * 8192
    theirs = Segment.open(os.dup(ours.fd), 8192, private=True)
    theirs.view[0] = ord("x")
    assert bytes(ours.view[:2]) == b"aa"
    assert bytes(theirs.view[:2]) == b"xa"
    theirs.close()
    ours.close()


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


ALL_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
REFUSED = {
    "no seals": (lambda: memfd(8192, 0), "not sealed"),
    "it can shrink": (lambda: memfd(8192, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL), "not sealed"),
    "it can grow": (lambda: memfd(8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL), "not sealed"),
    "it is shorter": (lambda: memfd(4096, ALL_SEALS), "4096 bytes long, not the 8192 declared"),
    "it is longer": (lambda: memfd(8193, ALL_SEALS), "8193 bytes long, not the 8192 declared"),
    "a file": (lambda: os.open(__file__, os.O_RDONLY), "not a memfd"),
    "a pipe": (lambda: _one_end_of_a_pipe(), "not a memfd"),
}


def _one_end_of_a_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


@for_each(("make", "why"), REFUSED.values())
def test_what_is_no_sealed_memfd_is_refused_and_closed(make: object, why: str) -> None:
    with pytest.raises(ArenaError, match=why):
        Segment.open(make(), 8192)  # type: ignore[operator]


def test_an_empty_segment_is_refused() -> None:
    with pytest.raises(ArenaError, match="0 bytes long"):
        Segment.open(memfd(0, ALL_SEALS), 0)


@for_each("nbytes", [1 << 48, (1 << 63) - 4096, 1 << 63, 1 << 70])
def test_more_memory_than_there_is_is_an_arena_error(nbytes: int) -> None:
    with pytest.raises(ArenaError, match=f"{nbytes} bytes of shared memory cannot be allocated"):
        Segment.create(nbytes)


def test_memory_that_runs_out_while_it_is_allocated_is_an_arena_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArenaError, match="No space left"):
        Segment.create(MIB)


def test_memory_that_others_take_meanwhile_is_given_back_and_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def available() -> tuple[int, str]:
        nonlocal looks
        looks += 1
        return (256 * MIB if looks < 4 else 64 * MIB), "/sys/fs/cgroup/job"

    monkeypatch.setattr(arena, "available_memory", available)
    with pytest.raises(ArenaShortage, match=r"134217728 bytes .* \(106 MiB of memory are left within the limit of the "
                                            r"control group /sys/fs/cgroup/job\)"):  # fmt: skip
        Segment.create(128 * MIB)  # 14 MiB, a sixteenth of what may be taken, between two looks
    assert looks == 4
    Segment.create(MIB).close()  # so little is not looked at


def test_memory_is_left_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available_memory", lambda: (48 * MIB, ""))
    Segment.create(8 * MIB).close()
    with pytest.raises(ArenaShortage, match=r"\(48 MiB of memory are left\); use a smaller model"):
        Segment.create(18 * MIB)
    with pytest.raises(ArenaShortage):
        Segment.create(8 * MIB, 44 * MIB)


def test_memory_beyond_a_limit_of_the_process_is_an_arena_error(daemon: Daemon) -> None:
    with limited(resource.RLIMIT_FSIZE, 16 * MIB), pytest.raises(ArenaError):
        daemon.arena.allocate(17 * MIB)
    assert daemon.offered == []
    daemon.arena.allocate(17 * MIB)  # and nothing is broken afterwards


def test_having_no_descriptor_left_is_an_arena_error() -> None:
    ours = Segment.create(4096)
    fd = os.dup(ours.fd)
    with limited(resource.RLIMIT_NOFILE, lowest_free_descriptor()):
        with pytest.raises(ArenaError):
            Segment.create(4096)
        with pytest.raises(ArenaError):
            Segment.open(fd, 4096)
    ours.close()


# --- arenas -----------------------------------------------------------------------------------------------------------


@given(nbytes=st.one_of(st.integers(1, 4096), st.integers(1, 64 * MIB)))
def test_at_most_an_eighth_of_a_region_is_wasted(nbytes: int) -> None:
    from fusion_rt.host.arena import _size_class

    size = _size_class(nbytes)
    assert size >= nbytes
    assert size % ALIGNMENT == 0
    assert size - nbytes <= max(nbytes // 8, ALIGNMENT)
    assert _size_class(size) == size


@given(sizes=st.lists(st.integers(1, 600_000), min_size=1, max_size=30), seed=st.integers(0, 9))
def test_no_two_regions_share_a_byte(sizes: list[int], seed: int) -> None:
    choose = random.Random(seed)
    daemon = Daemon()
    live: list[Region] = []
    for nbytes in sizes:
        region = daemon.arena.allocate(nbytes)
        assert len(region.view) >= nbytes
        assert region.address % ALIGNMENT == 0
        assert daemon.arena.locate(region.address, nbytes) == (region.segment, region.offset)
        for other in live:
            apart = region.address + region.nbytes <= other.address or other.address + other.nbytes <= region.address
            assert apart
        live.append(region)
        if choose.random() < 0.4:
            daemon.arena.free(live.pop(choose.randrange(len(live))))
    daemon.arena.close()


@pytest.mark.parametrize("nbytes", [100, 300_000, 5 * MIB])
def test_a_region_is_used_again(daemon: Daemon, nbytes: int) -> None:
    first = daemon.arena.allocate(nbytes)
    address = first.address
    daemon.arena.free(first)
    assert daemon.arena.allocate(nbytes).address == address
    assert daemon.arena.allocate(nbytes).address != address


def test_small_regions_share_a_segment_and_large_ones_have_their_own(daemon: Daemon) -> None:
    small = {daemon.arena.allocate(1000).segment for _ in range(100)}
    large = [daemon.arena.allocate(3 * MIB) for _ in range(2)]
    assert len(small) == 1
    assert len({region.segment for region in large} | small) == 3
    assert [offer[0] for offer in daemon.offered] == sorted({r.segment for r in large} | small)
    assert {region.offset for region in large} == {0}


def test_memory_elsewhere_is_not_located(daemon: Daemon) -> None:
    region = daemon.arena.allocate(5 * MIB)
    other = mmap.mmap(-1, 4096)
    assert daemon.arena.locate(region.address + 64, 100) == (region.segment, 64)
    assert daemon.arena.locate(region.address, region.nbytes) == (region.segment, 0)
    assert daemon.arena.locate(region.address, region.nbytes + 1) is None
    assert daemon.arena.locate(region.address - 1, 10) is None
    assert daemon.arena.locate(region.address + region.nbytes, 1) is None
    other.close()


def test_unused_large_segments_beyond_the_limit_are_dropped() -> None:
    daemon = Daemon()
    daemon.arena = arena = Arena(daemon._offer, daemon.dropped.append, spare_nbytes=20 * MIB)
    regions = [arena.allocate(8 * MIB) for _ in range(4)]
    kept = arena.allocate(100)
    views = [region.view for region in regions]
    for region in regions:
        region.view[0] = 1
        arena.free(region)
    arena.allocate(100)
    assert not daemon.dropped, "the next operation may want them"
    for _ in range(100):
        arena.allocate(100)
    assert len(daemon.dropped) == 2
    assert arena.statistics() == {"segments": 3, "nbytes": 2 * 8 * MIB + 4 * MIB, "spare_nbytes": 2 * 8 * MIB}
    assert [view[0] for view in views] == [1, 1, 1, 1]  # a tensor may still look into what was dropped
    assert arena.locate(kept.address, 100) is not None
    arena.close()


def test_large_segments_that_every_operation_takes_again_are_kept_beyond_the_limit() -> None:
    daemon = Daemon()
    daemon.arena = arena = Arena(daemon._offer, daemon.dropped.append, spare_nbytes=10 * MIB)
    for _ in range(5):
        for region in (arena.allocate(8 * MIB), arena.allocate(8 * MIB), arena.allocate(100)):
            arena.free(region)
    assert len(daemon.offered) == 3
    assert not daemon.dropped
    arena.allocate(5 * MIB)  # another size: what was taken before is out of use
    assert len(daemon.dropped) == 1
    arena.close()


def test_a_plan_has_a_segment_of_its_own_that_can_be_dropped(daemon: Daemon) -> None:
    segment_id, segment = daemon.arena.new_segment(12345, plan=7)
    assert daemon.offered == [(segment_id, 12345, 7)]
    view = segment.view
    daemon.arena.drop_segment(segment_id)
    assert daemon.dropped == [segment_id]
    view[0] = 1


def test_a_region_freed_after_the_arena_was_closed_is_forgotten(daemon: Daemon) -> None:
    region = daemon.arena.allocate(5 * MIB)
    daemon.arena.close()
    daemon.arena.free(region)
    region.view[0] = 1
    assert daemon.arena.allocate(5 * MIB).segment != region.segment
    assert daemon.dropped == []
