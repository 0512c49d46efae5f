"""Memory that is moved into the arena under its own address, and what becomes of it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fusion_rt import wire
from fusion_rt.client import adoption
from fusion_rt.client.adoption import Adoptions, Use
from fusion_rt.host.arena import Arena, Segment
from tests import forks
from tests.client.daemon import Daemon

PAGE = mmap.PAGESIZE
BIG = 40 * 1024 * 1024  # bytes: more than malloc ever takes from a heap, so that it maps them
_libc = adoption._libc
_libc.posix_memalign.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)
_libc.free.argtypes = (ctypes.c_void_p,)


class Other:
    """The other end of the arena.

    Attributes:
        segments: as it has them, by id.
        dropped: ids of those that it had.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.dropped: list[int] = []

    def offered(self, number: int, segment: Segment, plan: int) -> None:
        self.segments[number] = Segment.open(os.dup(segment.fd), segment.nbytes)

    def bytes_at(self, use: Use, nbytes: int) -> memoryview:
        number, offset = use.place
        return self.segments[number].view[offset : offset + nbytes]


class Memory:
    """Memory of malloc's, as the allocation of a tensor that takes all of it."""

    def __init__(self, nbytes: int) -> None:
        self.address, self.nbytes = with_an_edge(nbytes), nbytes
        self.view = memoryview((ctypes.c_ubyte * nbytes).from_address(self.address)).cast("B")
        self.unused = self.is_freed = False
        self.fill(0)

    def where(self) -> tuple[int, int]:
        return (0, 0) if self.is_freed else (self.address, self.nbytes)

    def free(self) -> None:
        """Frees it, as `resize_(0)` does with the memory of a storage."""
        self.is_freed = True
        _libc.free(self.address)

    def is_unused(self) -> bool:
        return self.unused

    def fill(self, first: int) -> None:
        self.view[:] = pattern(first, self.nbytes)

    def has(self, first: int) -> bool:
        return self.view == pattern(first, self.nbytes)


def allocated(nbytes: int) -> int:
    found = ctypes.c_void_p()
    assert _libc.posix_memalign(ctypes.byref(found), 64, nbytes) == 0
    assert found.value is not None
    return found.value


def with_an_edge(nbytes: int) -> int:
    """Returns the address of new memory that does not begin with a page, as one allocation in 64 does by chance."""
    others = []
    while (address := allocated(nbytes)) % PAGE == 0:
        others.append(address)
    for each in others:
        _libc.free(each)
    return address


def pattern(first: int, nbytes: int) -> bytes:
    return (bytes((first + i) % 251 for i in range(251)) * (nbytes // 251 + 1))[:nbytes]


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def adoptions(other: Other) -> Iterator[Adoptions]:
    arena = Arena(other.offered, other.dropped.append)
    made = Adoptions(arena, True)
    if not made._wanted:
        pytest.skip("this system's malloc, or its kernel, is one under which nothing is adopted")
    yield made
    made.close()
    arena.close()


@pytest.fixture(params=[10 * PAGE + 100, BIG], ids=["heap", "mapped"])
def memory(request: pytest.FixtureRequest) -> Iterator[Memory]:
    made = Memory(request.param)
    yield made
    made.free()


def adopt(adoptions: Adoptions, memory: Memory) -> None:
    assert adoptions.adopt(*memory.where(), memory)


def begin(adoptions: Adoptions, memory: Memory, written: bool = True) -> Use:
    use = adoptions.use(*memory.where(), written)
    assert use is not None
    return use


def test_both_ends_see_all_of_it_with_its_edges(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    assert memory.has(0)
    for step in range(1, 3):
        memory.fill(step)
        use = begin(adoptions, memory)
        there = other.bytes_at(use, memory.nbytes)
        assert there == pattern(step, memory.nbytes)
        there[:] = pattern(step + 7, memory.nbytes)
        use.end(True)
        assert memory.has(step + 7)
    assert len(other.segments) == 1


def test_what_is_only_given_or_has_failed_keeps_its_edges(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    for written, complete in ((False, True), (True, False)):
        memory.fill(3)
        use = begin(adoptions, memory, written)
        other.bytes_at(use, 1)[0] = 99
        use.end(complete)
        assert memory.view[0] == 3


def test_neighbours_in_the_same_pages_stay_as_they_are(adoptions: Adoptions, other: Other) -> None:
    whole = Memory(20 * PAGE)
    try:
        low, high = 5 * PAGE + 64, 9 * PAGE + 128
        assert adoptions.adopt(whole.address + low, high - low, whole)
        use = adoptions.use(whole.address + low, high - low, True)
        assert use is not None
        number, _ = use.place
        segment = other.segments[number].view
        segment[:] = b"\xff" * len(segment)  # also what is beside the tensor
        whole.view[low - 1] = 17
        use.end(True)
        assert whole.view[low:high] == b"\xff" * (high - low)
        assert whole.view[: low - 1] == pattern(0, low - 1)
        assert whole.view[low - 1] == 17
        assert whole.view[high:] == pattern(0, whole.nbytes)[high:]
        assert adoptions.use(whole.address, high, True) is None
        assert adoptions.use(whole.address + low - 1, 8, True) is None
    finally:
        adoptions.close()
        _libc.free(whole.address)


def test_a_part_is_used_by_itself(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    for low, nbytes in ((0, 2 * PAGE), (3 * PAGE + 5, PAGE), (memory.nbytes - 300, 300), (0, 10)):
        use = adoptions.use(memory.address + low, nbytes, True)
        assert use is not None
        there = other.bytes_at(use, nbytes)
        assert there == pattern(0, memory.nbytes)[low : low + nbytes]
        there[:] = bytes(nbytes)
        use.end(True)
        assert memory.view[low : low + nbytes] == bytes(nbytes)
        memory.fill(0)


def test_the_whole_takes_the_place_of_a_part_that_nobody_uses(
    adoptions: Adoptions, memory: Memory, other: Other
) -> None:
    assert adoptions.adopt(memory.address, 5 * PAGE, memory)
    busy = adoptions.use(memory.address, 5 * PAGE, False)
    assert busy is not None
    assert not adoptions.adopt(*memory.where(), memory)
    busy.end(True)
    memory.fill(4)
    adopt(adoptions, memory)
    use = begin(adoptions, memory)
    assert other.bytes_at(use, memory.nbytes) == pattern(4, memory.nbytes)
    use.end(True)
    adoptions.sweep()
    assert other.dropped == [1]


def in_child(check: Callable[[], bool], ready: Callable[[], None] = lambda: None) -> bool:
    """Forks; calls `ready` here, and then `check` in the child, whose result it returns."""
    (heard, say), (hear, told) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.read(hear, 1)
            code = 0 if check() else 2
        finally:
            os._exit(code)
    ready()
    os.write(told, b"x")
    _, status = os.waitpid(pid, 0)
    for descriptor in (heard, say, hear, told):
        os.close(descriptor)
    return os.waitstatus_to_exitcode(status) == 0


def test_a_forked_child_has_a_copy(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    memory.fill(5)

    def looks() -> bool:
        same = memory.has(5)
        memory.fill(9)
        return same and memory.has(9)

    assert in_child(looks, lambda: memory.fill(6))
    assert memory.has(6)
    assert adoptions.use(*memory.where(), True) is None  # it is ordinary memory
    adopt(adoptions, memory)
    assert memory.has(6)
    use = begin(adoptions, memory)
    assert other.bytes_at(use, memory.nbytes) == pattern(6, memory.nbytes)
    use.end(True)
    assert other.dropped == [1]


def test_a_result_comes_after_a_fork(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    use = begin(adoptions, memory)

    def writes() -> bool:
        memory.fill(9)
        return memory.has(9)

    def result() -> None:
        other.bytes_at(use, memory.nbytes)[:] = pattern(8, memory.nbytes)

    assert in_child(writes, result)
    use.end(True)
    assert memory.has(8)


def test_a_segment_is_kept_until_who_reads_it_is_done(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    use = begin(adoptions, memory, written=False)
    assert in_child(lambda: memory.has(0), lambda: memory.fill(1))
    adoptions.sweep()
    assert not other.dropped
    assert other.bytes_at(use, memory.nbytes)[PAGE : 9 * PAGE] == pattern(0, memory.nbytes)[PAGE : 9 * PAGE]
    use.end(True)
    adoptions.sweep()
    assert other.dropped == [1]
    assert memory.has(1)


def test_other_memory_at_the_same_address_is_noticed(adoptions: Adoptions, other: Other) -> None:
    memory = Memory(BIG)
    adopt(adoptions, memory)
    # At once, as if freed and taken again: in between, another thread could get memory there, which would be lost.
    assert adoption._map(memory.address // PAGE * PAGE, BIG + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    memory.fill(2)
    assert adoptions.use(*memory.where(), True) is None
    adoptions.sweep()
    assert other.dropped == [1]
    assert memory.has(2)
    _libc.munmap(ctypes.c_void_p(memory.address // PAGE * PAGE), ctypes.c_size_t(BIG + PAGE))


def replace_pages(address: int, nbytes: int) -> None:
    """Other memory takes the place of pages."""
    assert adoption._map(address, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def whole_pages(memory: Memory) -> tuple[int, int]:
    """Returns the addresses of the first whole page, and of the last."""
    return -(-memory.address // PAGE) * PAGE, (memory.address + memory.nbytes) // PAGE * PAGE - PAGE


def test_memory_that_was_freed_may_be_nowhere(adoptions: Adoptions, other: Other) -> None:
    memory = Memory(BIG)
    adopt(adoptions, memory)
    memory.free()  # which unmaps it: whoever looks there is killed
    assert adoptions.use(memory.address, BIG, True) is None
    adoptions.sweep()
    assert other.dropped == [1]


def test_another_file_at_the_same_address_is_left_alone(adoptions: Adoptions, other: Other) -> None:
    memory = Memory(BIG)
    first, last = whole_pages(memory)
    file = Segment.create(last + PAGE - first)
    adopt(adoptions, memory)
    memory.is_freed = True  # and taken by the file at once, as above
    file.view[:3] = b"abc"
    assert adoption._map(first, last + PAGE - first, adoption._SHARED, file.fd, 0)
    assert adoptions.use(memory.address, BIG, True) is None
    ctypes.memmove(first, b"xyz", 3)
    assert bytes(file.view[:3]) == b"xyz", "it still is that file"
    _libc.munmap(ctypes.c_void_p(first), ctypes.c_size_t(last + PAGE - first))
    file.close()


@pytest.mark.parametrize("which", [0, 1], ids=["first", "last"])
def test_a_part_of_other_memory_at_the_same_address_is_noticed(
    adoptions: Adoptions, memory: Memory, other: Other, which: int
) -> None:
    adopt(adoptions, memory)
    replace_pages(whole_pages(memory)[which], PAGE)
    memory.fill(2)
    assert adoptions.use(*memory.where(), True) is None
    assert in_child(lambda: memory.fill(9) or memory.has(9))
    assert memory.has(2)
    adoptions.sweep()
    assert other.dropped == [1]


def test_the_result_of_an_operation_comes_where_other_memory_was_noticed(
    adoptions: Adoptions, memory: Memory, other: Other
) -> None:
    adopt(adoptions, memory)
    use = begin(adoptions, memory)
    replace_pages(whole_pages(memory)[1], PAGE)
    assert adoptions.use(*memory.where(), False) is None
    other.bytes_at(use, memory.nbytes)[:] = pattern(5, memory.nbytes)
    use.end(True)
    assert memory.view[: 8 * PAGE] == pattern(5, 8 * PAGE)


def test_a_segment_is_kept_until_all_who_read_it_are_done(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    uses = [begin(adoptions, memory, written=False) for _ in range(3)]
    assert in_child(lambda: memory.has(0))
    for use in uses:
        adoptions.sweep()
        assert not other.dropped
        use.end(True)
    adoptions.sweep()
    assert other.dropped == [1]


def test_a_child_shares_only_pages_that_a_result_comes_to(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    low, nbytes = 2 * PAGE + 10, 3 * PAGE
    use = adoptions.use(memory.address + low, nbytes, True)
    reads = begin(adoptions, memory, written=False)
    assert use is not None
    behind = 7 * PAGE

    def looks() -> bool:
        same = memory.view[behind : memory.nbytes] == pattern(0, memory.nbytes)[behind:]
        memory.fill(9)
        return same and memory.has(9)

    def goes_on() -> None:
        memory.view[behind] = 77
        other.bytes_at(use, nbytes)[:] = pattern(8, nbytes)

    assert in_child(looks, goes_on)
    assert adoptions.use(*memory.where(), False) is None
    assert not adoptions.adopt(*memory.where(), memory)
    assert in_child(lambda: memory.view[behind] == 77, lambda: memory.view.__setitem__(behind + 1, 78))
    use.end(True)
    assert memory.view[low : low + nbytes] == pattern(8, nbytes)
    assert list(memory.view[behind : behind + 2]) == [77, 78]
    assert memory.view[0] == 0
    assert in_child(lambda: memory.fill(9) or memory.has(9))
    assert memory.view[low : low + nbytes] == pattern(8, nbytes)
    adoptions.sweep()
    assert not other.dropped
    reads.end(True)
    adoptions.sweep()
    assert other.dropped == [1]


def test_a_fork_needs_no_descriptors(adoptions: Adoptions, memory: Memory) -> None:
    adopt(adoptions, memory)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        pid = os.fork()
        if pid == 0:
            memory.view[5 * PAGE] = 99
            os._exit(0)
        os.waitpid(pid, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert memory.has(0)


def test_what_the_kernel_refuses_to_map_stays_adopted_and_a_child_says_so(
    adoptions: Adoptions, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adopt(adoptions, memory)
    monkeypatch.setattr(adoption, "_map", lambda *_: False)
    adoptions.before_fork()
    adoptions.after_fork(in_child=False)
    begin(adoptions, memory).end(True)
    assert not adoptions.adopt(*memory.where(), memory), "it is shared still"
    adoptions.before_fork()
    adoptions.after_fork(in_child=True)
    assert "a forked child shares a tensor" in caplog.text


def test_a_fork_in_the_handler_of_a_signal_may_come_at_any_time(
    adoptions: Adoptions, memory: Memory, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopt(adoptions, memory)
    is_there = Adoptions._is_there

    def interrupted(self: Adoptions, adopted: Any) -> bool:
        found = is_there(self, adopted)
        with monkeypatch.context() as patch:
            patch.setattr(Adoptions, "_is_there", is_there)
            self.before_fork()
            self.after_fork(in_child=False)
        return found

    for written in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(Adoptions, "_is_there", interrupted)
            assert adoptions.use(*memory.where(), written) is None
        adopt(adoptions, memory)
    with monkeypatch.context() as patch:
        patch.setattr(Adoptions, "_is_there", interrupted)
        adoptions.close()
    assert other.dropped == [1, 2]
    assert memory.has(0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_are_opened_for_what_is_adopted_only(memory: Memory) -> None:
    def refuse(number: int, segment: Segment, plan: int) -> None:
        segment.close_fd()
        raise OSError("the daemon is gone")

    before = descriptors()
    arena = Arena(refuse, lambda number: None)
    made = Adoptions(arena, True)
    assert descriptors() == before
    with pytest.raises(OSError, match="gone"):
        made.adopt(*memory.where(), memory)
    made.close()
    arena.close()
    assert descriptors() == before


@pytest.mark.parametrize("seed", [1, 2])
def test_seeded_steps_of_a_script_change_no_values(adoptions: Adoptions, seed: int) -> None:
    """In a process of its own: it changes how malloc behaves."""
    command = [sys.executable, "-m", "tests.client.adoption_stress", str(seed), "250"]
    with forks.popen(command, forks.WORKER, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        told = run.communicate(timeout=300)[0]
    assert run.returncode == 0, told
    assert int(told) > 20, "hardly anything was adopted"


def test_memory_that_was_freed_is_not_shared_with_children(adoptions: Adoptions, memory: Memory) -> None:
    adopt(adoptions, memory)
    place = memory.where()
    memory.where = lambda: (place[0], 0)  # type: ignore[method-assign]

    def writes() -> bool:
        memory.fill(9)
        return memory.has(9)

    assert in_child(writes)
    assert memory.has(0)


def test_what_nobody_else_holds_becomes_ordinary_memory(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    use = begin(adoptions, memory)
    memory.unused = True
    adoptions.sweep()
    assert not other.dropped
    other.bytes_at(use, memory.nbytes)[:] = pattern(6, memory.nbytes)
    use.end(True)
    assert memory.has(6)
    adoptions.sweep()
    assert other.dropped == [1]
    assert adoptions.use(*memory.where(), True) is None
    memory.fill(3)  # whose contents nobody needed
    assert memory.has(3)


def third(adoptions: Adoptions, address: int, nbytes: int, identity: int = 1) -> list[bool]:
    """Returns after which of three uses a tensor lasts."""
    return [adoptions.lasts(address, nbytes, identity, object) for _ in range(3)]


def test_a_tensor_lasts_when_it_is_used_a_third_time(adoptions: Adoptions, monkeypatch: pytest.MonkeyPatch) -> None:
    big = adoption.LEAST
    assert third(adoptions, PAGE, big) == [False, False, True]
    assert third(adoptions, PAGE, big) == [False, False, True]  # a tensor that could not be adopted is tried again
    assert third(adoptions, 2 * PAGE, big)[:2] == [False, False]
    assert not adoptions.lasts(2 * PAGE, big, 1, object)
    assert not adoptions.lasts(2 * PAGE, big, 1, object)
    assert third(adoptions, 2 * PAGE, big, 2) == [False, False, True]  # another allocation at the same address
    assert third(adoptions, 3 * PAGE, big - 1) == [False, False, False]
    assert not adoptions.lasts(2 * PAGE, big, 2, object)
    monkeypatch.setattr(adoption, "_REMEMBERED", 1)
    assert not adoptions.lasts(4 * PAGE, big, 1, object)
    assert third(adoptions, 2 * PAGE, big, 2) == [False, False, True]  # forgotten


def test_memory_that_is_not_mallocs_is_left_alone(adoptions: Adoptions, other: Other) -> None:
    mapped = mmap.mmap(-1, 20 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    memory = Memory(PAGE)
    address = memory.address
    for memory.address in (start, start + PAGE + 64):
        memory.nbytes = 10 * PAGE
        assert not adoptions.adopt(*memory.where(), memory)
    _libc.free(address)
    assert not other.segments
    gc.collect()


def test_what_has_no_header_of_its_size_is_left_alone(adoptions: Adoptions, other: Other) -> None:
    whole = Memory(40 * PAGE)
    inner = Memory.__new__(Memory)
    inner.address, inner.nbytes, inner.unused, inner.is_freed = whole.address + 5 * PAGE + 16, 10 * PAGE, False, False
    header = ctypes.c_size_t.from_address(inner.address - 8)
    for size in (inner.nbytes, inner.nbytes + adoption._SLACK + 16):  # less than it takes, and of something larger
        header.value = size
        assert not adoptions.adopt(*inner.where(), inner)
    header.value = inner.nbytes + 16
    assert adoptions.adopt(*inner.where(), inner)
    adoptions.close()
    whole.free()


def test_memory_of_another_arena_of_mallocs_is_left_alone(adoptions: Adoptions, other: Other) -> None:
    made: list[Memory] = []
    thread = threading.Thread(target=lambda: made.append(Memory(20 * PAGE)))
    thread.start()
    thread.join()
    if not ctypes.c_size_t.from_address(made[0].address - 8).value & adoption._NOT_MAIN:
        pytest.skip("malloc has one arena here")
    assert not adoptions.adopt(*made[0].where(), made[0])
    _libc.free(made[0].address)
    assert not other.segments


def test_too_many_and_too_small(adoptions: Adoptions, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not adoptions.adopt(memory.address, 100, memory)
    monkeypatch.setattr(adoption, "_MOST", 0)
    assert not adoptions.adopt(*memory.where(), memory)


def test_nothing_is_adopted_any_more_after_the_end(adoptions: Adoptions, memory: Memory, other: Other) -> None:
    adopt(adoptions, memory)
    adoptions.close()
    other.segments[1].view[PAGE] = 77
    memory.view[2 * PAGE] = 78
    assert memory.view[PAGE] == pattern(0, PAGE + 1)[PAGE]
    assert other.segments[1].view[2 * PAGE] != 78
    assert third(adoptions, *memory.where()) == [False] * 3


@pytest.mark.parametrize("way", ["auto", "adopt", "copy"])
def test_a_client_adopts_only_where_that_is_asked_for(
    daemon: Daemon, adoptions: Adoptions, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_MEMORY", way)
    client = daemon.connect()
    assert isinstance(daemon.hello, wire.Hello)
    assert bool(daemon.hello.offer_address) == (way != "copy")
    assert third(client.adoptions, PAGE, BIG) == [False, False, way == "adopt"]
    client.close()


def test_where_nothing_is_wanted_nothing_is_adopted(other: Other) -> None:
    made = Adoptions(Arena(other.offered, other.dropped.append), False)
    assert third(made, PAGE, BIG) == [False] * 3
    assert made.use(PAGE, BIG, True) is None
