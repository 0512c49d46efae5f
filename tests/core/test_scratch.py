"""Scratch memory is used again when nothing refers to it, and there is an end to what is kept."""

from __future__ import annotations

import gc
import threading
import tracemalloc

import numpy as np
import pytest

from fusion_rt.core import scratch
from fusion_rt.core.scratch import Scratch
from tests.for_each import for_each

KIB = 1024


def test_an_array_is_used_again_when_no_view_of_it_is_left() -> None:
    pool = Scratch(kept=8 * KIB, least=KIB)
    first = pool.empty(512, np.float32)
    place, part, message = first.ctypes.data, first[100:], first.view(np.uint8).data
    assert (first.dtype, first.shape, first.flags.writeable) == (np.float32, (512,), True)
    for keeper in ("first", "part", "message"):
        assert pool.empty(512, np.float32).ctypes.data != place
        if keeper == "first":
            del first
        elif keeper == "part":
            del part
    del message
    held = [pool.empty(512, np.float32) for _ in range(2)]
    assert place in {array.ctypes.data for array in held}


@for_each(("count", "fits"), [(512, True), (400, True), (260, True), (250, False), (600, False)])
def test_a_block_serves_arrays_of_at_least_half_its_size(count: int, fits: bool) -> None:
    pool = Scratch(kept=8 * KIB, least=KIB // 2)
    place = pool.empty(512, np.float32).ctypes.data
    assert (pool.empty(count, np.float32).ctypes.data == place) == fits


def test_no_more_is_kept_than_it_may_keep_and_the_oldest_goes_first() -> None:
    pool = Scratch(kept=64 * KIB, least=KIB)
    arrays = [pool.empty(16 * KIB, np.uint8) for _ in range(8)]
    last = {array.ctypes.data for array in arrays[4:]}
    while arrays:
        arrays.pop(0)
        assert pool.statistics()["free"] <= 64 * KIB
    assert pool.empty(16 * KIB, np.uint8).ctypes.data in last
    assert pool.statistics() == {"free": 64 * KIB}
    pool.empty(65 * KIB, np.uint8)
    assert pool.statistics()["free"] <= 64 * KIB


def test_steps_of_many_buckets_allocate_nothing_after_the_first() -> None:
    pool = Scratch(kept=4096 * KIB, least=KIB)

    def step() -> None:
        under_way = []
        for bucket in range(32):
            under_way.append(pool.empty(500 * KIB + bucket, np.uint8))  # payloads differ a little
            del under_way[:-4]

    step()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(4):
            step()
        assert tracemalloc.get_traced_memory()[1] - before < 250 * KIB  # records, and no bucket
    finally:
        tracemalloc.stop()


def test_small_arrays_are_not_of_it() -> None:
    pool = Scratch(kept=8 * KIB, least=KIB)
    assert pool.empty(KIB - 1, np.uint8).flags.owndata
    assert not pool.empty(KIB, np.uint8).flags.owndata


def test_an_array_may_come_back_while_another_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the collector of garbage may have it, in the same thread."""
    pool = Scratch(kept=64 * KIB, least=KIB)
    cycle: list[object] = [pool.empty(2 * KIB, np.uint8)]
    cycle.append(cycle)
    del cycle
    with pool._changing:
        gc.collect()
    assert pool.statistics() == {"free": 2 * KIB}


def test_threads_share_it() -> None:
    pool = Scratch(kept=64 * KIB, least=KIB)
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            mine = pool.empty(4 * KIB, np.uint8)
            mine[:] = number
            if not (mine == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.statistics()["free"] <= 64 * KIB


def test_zeros_and_copies_are_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SCRATCH", Scratch(kept=8 * KIB, least=KIB))
    scratch.empty(KIB, np.float32)[:] = np.nan
    assert not scratch.zeros(KIB, np.float32).any()
    values = np.arange(KIB, dtype=np.float32)
    values.flags.writeable = False
    copy = scratch.copied(values)
    assert (copy == values).all()
    assert copy.flags.writeable
    assert not copy.flags.owndata
