"""Arrays in other processes are reduced and copied as those of this one are, and wrong addresses are refused."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.host import process_memory
from fusion_rt.host.process_memory import OfferedText, Process, ProcessMemoryError
from fusion_rt.kernels import cpu, ordinary
from fusion_rt.kernels.cpu import Array
from fusion_rt.kernels.ordinary import Operand, Remote

pytestmark = pytest.mark.multiprocess
_PAGE = mmap.PAGESIZE
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Owner:
    """A child process that waits for its end, with the memory that this process had when it forked."""

    def __init__(self) -> None:
        self.pid = os.fork()
        if not self.pid:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.pause()
            os._exit(1)
        self.process = Process(self.pid, "the child")

    def remote(self, array: Array) -> Remote:
        """The child's copy of an array that was here when it was forked."""
        return Remote(self.process, array.ctypes.data, array.dtype, len(array))

    def values(self, array: Array) -> Array:
        """What the child's copy of an array has now."""
        found = np.empty_like(array)
        ordinary.copy(self.remote(array), [found])
        return found

    def close(self) -> None:
        """Ends it, unless somebody has."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.process.end()


@pytest.fixture
def fork() -> Iterator[Callable[[], Owner]]:
    owners: list[Owner] = []

    def make() -> Owner:
        owners.append(Owner())
        return owners[-1]

    yield make
    for owner in owners:
        owner.close()


def _random(dtype: DType, size: int, seed: int) -> Array:
    random_numbers = np.random.default_rng(seed)
    if not dtype.is_floating:
        return random_numbers.integers(0, 2 if dtype.name == "bool" else 100, size).astype(dtype.storage)
    values = random_numbers.standard_normal(size)
    if not dtype.is_half:
        return values.astype(dtype.storage)
    words = values.astype(np.float16).view(np.uint16)
    return words if dtype.name == "float16" else (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("divisor", [1, 3])
def test_three_processes_get_the_bits_that_a_reduction_in_one_gives(
    name: str, divisor: int, fork: Callable[[], Owner]
) -> None:
    dtype = DTYPES[name]
    if dtype.name == "bool" and divisor != 1:
        pytest.skip("bool elements cannot be averaged")
    size = 300_001  # more than a block, and no multiple of anything
    arrays = [_random(dtype, size, seed) for seed in range(3)]
    first, second = fork(), fork()
    expected = np.empty_like(arrays[0])
    scales = {} if dtype.name == "bool" else {"prescale": 0.5, "postscale": 3.0}
    cpu.reduce("sum", dtype, arrays, [expected], divisor=divisor, **scales)
    operands: list[Operand] = [first.remote(arrays[0]), arrays[1], second.remote(arrays[2])]
    ordinary.reduce("sum", dtype, operands, operands, divisor=divisor, **scales)
    for found in (first.values(arrays[0]), arrays[1], second.values(arrays[2])):
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(first.values(arrays[2]), _random(dtype, size, 2))  # what was not named is as it was


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "band", "bor", "bxor"])
def test_every_op_and_every_split_of_a_range_gives_the_same_bits(op: str, fork: Callable[[], Owner]) -> None:
    dtype, size = DTYPES["int32" if op.startswith("b") else "float32"], 200_000
    arrays = [_random(dtype, size, seed) for seed in range(4)]
    owners = [fork() for _ in range(4)]
    expected = np.empty_like(arrays[0])
    cpu.reduce(op, dtype, arrays, [expected])
    operands = [owner.remote(array) for owner, array in zip(owners, arrays, strict=True)]
    for low, high in cpu.split(size, 3, 4):
        parts = [operand[low:high] for operand in operands]
        ordinary.reduce(op, dtype, parts, parts)
    for owner, array in zip(owners, arrays, strict=True):
        np.testing.assert_array_equal(owner.values(array), expected)


def test_an_array_goes_from_one_process_to_others(fork: Callable[[], Owner]) -> None:
    source, target, here = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    first, second = fork(), fork()
    source_values = source.copy()
    source[:] = 0
    ordinary.copy(first.remote(source), [first.remote(target), second.remote(target), here])
    for found in (first.values(target), second.values(target), here):
        np.testing.assert_array_equal(found, source_values)
    ordinary.copy(first.remote(source), [second.remote(source)[:]])
    ordinary.copy(np.full(100, 7, np.uint8), [second.remote(target)[50:150]])
    assert second.values(target)[49] == 49
    assert set(second.values(target)[50:150]) == {7}
    assert second.values(target)[150] == 150


def _with_hole(length: int) -> tuple[mmap.mmap, int]:
    """Memory, and its address, with a hole of `length` bytes after its first page, where no other memory gets."""
    memory = mmap.mmap(-1, length + 2 * _PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert _libc.mprotect(ctypes.c_void_p(address + _PAGE), ctypes.c_size_t(length), 0) == 0
    return memory, address


def test_wrong_addresses_fail_by_a_sentence_and_nothing_else(fork: Callable[[], Owner]) -> None:
    memory, address = _with_hole(64 * _PAGE)
    good = np.ones(1 << 16, np.float32)
    child = fork()
    dtype = DTYPES["float32"]
    random_numbers = random.Random(5)
    wrong = [0, 1, 4096, 2**47 - 4096, 2**48 - 1, address, address + _PAGE - 4]
    wrong += [address + random_numbers.randrange(_PAGE - good.nbytes, 65 * _PAGE) for _ in range(40)]
    for there in wrong:
        bad = Remote(child.process, there, good.dtype, len(good))
        operands = [child.remote(good), bad]
        random_numbers.shuffle(operands)
        said = "of the child cannot be read: not all of them are memory of its process"
        with pytest.raises(ProcessMemoryError, match=said):
            ordinary.reduce("sum", dtype, operands, [np.empty_like(good)])
    bad = Remote(child.process, address + _PAGE, good.dtype, 16)
    with pytest.raises(ProcessMemoryError, match="of the child cannot be written"):
        ordinary.copy(np.zeros(16, np.float32), [bad])
    with pytest.raises(ProcessMemoryError, match="of the child cannot be written"):
        ordinary.reduce("sum", dtype, [good[:16]], [bad])
    assert child.values(good)[0] == 1
    gc.collect()
    del memory


def test_a_process_that_has_ended_is_refused_before_its_number_is_somebody_elses(fork: Callable[[], Owner]) -> None:
    array = np.ones(100_000, np.float32)
    child = fork()
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ProcessMemoryError, match="of the child cannot be read: its process has ended"):
        child.values(array)
    os.waitpid(child.pid, 0)
    with pytest.raises(ProcessMemoryError, match="of the child is gone: its process has ended"):
        child.values(array)


def test_memory_is_offered_found_and_answered(fork: Callable[[], Owner]) -> None:
    offer = OfferedText(os.getpid())
    child = fork()
    assert not offer.is_answered()
    assert child.process.accepts(offer.address, offer.text)
    assert not offer.is_answered()  # the child's copy is
    assert not child.process.accepts(offer.address, offer.text)  # which has the answer now
    assert not child.process.accepts(0, offer.text)
    myself = Process(os.getpid(), "this one")
    answered = myself.accepts(offer.address, offer.text) and offer.is_answered()
    myself.end()
    assert answered
    offer.withdraw()


def test_a_kernel_that_refuses_is_noticed(fork: Callable[[], Owner], monkeypatch: pytest.MonkeyPatch) -> None:
    offer, array = OfferedText(os.getpid()), np.ones(100, np.float32)
    child = fork()

    def refuses(*arguments: Any) -> int:
        ctypes.set_errno(1)
        return -1

    stand_in = process_memory.TRANSFER(refuses)
    monkeypatch.setattr(process_memory.CALLS, "reads", ctypes.cast(stand_in, ctypes.c_void_p).value)
    assert not child.process.accepts(offer.address, offer.text)
    with pytest.raises(ProcessMemoryError, match="cannot be read: Operation not permitted"):
        ordinary.reduce("sum", DTYPES["float32"], [child.remote(array)], [array])
    monkeypatch.setattr(process_memory.CALLS, "reads", 0)
    assert not child.process.accepts(offer.address, offer.text)


def test_a_process_that_is_not_there_cannot_be_opened() -> None:
    with pytest.raises(ProcessMemoryError, match="cannot be seen here"):
        Process(2**22 + 1, "nobody")
