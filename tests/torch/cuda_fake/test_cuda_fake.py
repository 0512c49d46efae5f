"""The made-up GPU finds what it is for: races of streams, and memory that is used by two."""

from __future__ import annotations

import torch

from fusion_rt.host.arena import Arena
from tests.torch.cuda_fake.streams import FakeEvent, FakeStream
from tests.torch.cuda_fake.tensors import POISON, fake_cuda, on_gpu, value_of

SCHEDULES = range(30)


def found(seed: int, waits: bool) -> float:
    """What a stream reads of a sum that another one computes."""
    with fake_cuda(seed) as gpus:
        x = on_gpu(torch.ones(3))
        side = FakeStream()
        y = x + x
        if waits:
            side.wait_stream(gpus.current_stream())
        with gpus.stream(side):
            return float((y * 1).sum())


def test_a_stream_that_does_not_wait_reads_too_early_in_some_schedules() -> None:
    assert {found(seed, waits=True) for seed in SCHEDULES} == {6.0}
    assert {found(seed, waits=False) for seed in SCHEDULES} == {6.0, 3.0 * POISON}


def read_after_it_is_freed(seed: int, recorded: bool) -> float:
    with fake_cuda(seed) as gpus:
        x = on_gpu(torch.ones(3))
        side = FakeStream()
        side.wait_stream(gpus.current_stream())
        with gpus.stream(side):
            y = x + x
        if recorded:
            x.record_stream(side)
        del x
        gpus.current_stream().synchronize()
        return float(value_of(y).sum())


def test_freed_memory_is_used_again_but_for_the_streams_that_are_recorded() -> None:
    assert {read_after_it_is_freed(seed, recorded=True) for seed in SCHEDULES} == {6.0}
    assert {read_after_it_is_freed(seed, recorded=False) for seed in SCHEDULES} == {6.0, 6.0 * POISON}


def test_copies_of_registered_memory_are_late_and_others_are_not() -> None:
    arena = Arena(lambda segment_id, segment, plan: segment.close_fd(), lambda segment_id: None)
    _, segment = arena.new_segment(4096)
    values = set()
    for seed in SCHEDULES:
        for registered in (True, False):
            with fake_cuda(seed) as gpus:
                host = torch.frombuffer(segment.view, dtype=torch.float32)
                host.fill_(1)
                if registered:
                    gpus.cudaHostRegister(segment.address, segment.nbytes, 0)
                there = on_gpu(torch.zeros(len(host)))
                there.copy_(host, non_blocking=True)
                event = FakeEvent()
                event.record()
                host.fill_(2)
                event.synchronize()
                values.add((registered, float(value_of(there)[0])))
    assert values == {(True, 1.0), (True, 2.0), (False, 1.0)}
    arena.close()


def test_unregistering_memory_under_a_copy_is_a_fault() -> None:
    arena = Arena(lambda segment_id, segment, plan: segment.close_fd(), lambda segment_id: None)
    _, segment = arena.new_segment(4096)
    with fake_cuda(1) as gpus:
        gpus.cudaHostRegister(segment.address, segment.nbytes, 0)
        on_gpu(torch.zeros(1024)).copy_(torch.frombuffer(segment.view, dtype=torch.float32), non_blocking=True)
        gpus.cudaHostUnregister(segment.address)
        assert gpus.faults == ["memory of the host was unregistered under 1 copies"]
        gpus.faults.clear()
    arena.close()
