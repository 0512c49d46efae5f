"""Tensors of a GPU, with a GPU that is made up: its memory can be touched through `device.layer` only, which copies
when it is waited for and not before."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

import fusion_rt.torch as hvd
from fusion_rt.host.arena import Arena, Segment
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import runtime
from tests.harness import on_ranks
from tests.torch.cuda_fake.tensors import fake_cuda, on_gpu, value_of
from tests.torch.ops.reference import combined, everybodys, mine, rows_of


class FakeGpuTensor(torch.Tensor):
    """A tensor whose memory this process cannot touch: only `copy` below, and torch's own `cpu`, get at it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch._foreach_copy_, torch.Tensor.data_ptr, torch.Tensor.numpy):
            raise AssertionError(f"{func} on memory of the GPU")
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else result


def gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().as_subclass(FakeGpuTensor)


class FakeCopying(device.Copying):
    def __init__(self, layer: FakeLayer, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__((), tensors)
        self._layer = layer
        self._number = layer.started

    def done(self) -> bool:
        return self._layer.made >= self._number

    def wait(self) -> None:
        self._layer.make(self._number)


class FakeLayer(device.Layer):
    """A GPU with one stream.

    Attributes:
        started, made: copies.
        pinned: addresses of the segments known to it, with their length.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started = self.made = 0
        self.pinned: dict[int, int] = {}
        self._stream: list[Callable[[], object]] = []

    def is_host(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, FakeGpuTensor)

    def empty(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        return torch.full(shape, 77, dtype=like.dtype).as_subclass(FakeGpuTensor)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.empty(tensor.shape, tensor) if not self.is_host(tensor) else super().empty_like(tensor)

    def pin(self, segment: Segment, tensors: Iterable[torch.Tensor]) -> None:
        self.pinned[segment.address] = segment.nbytes

    def start(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> FakeCopying:
        sources = [tensor.as_subclass(torch.Tensor).contiguous() for tensor in source]
        for a, b in zip(to, sources, strict=True):
            self._stream.append(functools.partial(copy_from, b.data_ptr(), b.nbytes, a.as_subclass(torch.Tensor)))
            self.started += 1
        return FakeCopying(self, sources)

    def make(self, number: int) -> None:
        """Makes the copies up to one."""
        while self.made < number:
            self._stream.pop(0)()
            self.made += 1


def copy_from(address: int, nbytes: int, to: torch.Tensor) -> None:
    """What a GPU does: it keeps no memory alive, and takes what is there now."""
    data = bytearray(ctypes.string_at(address, nbytes))
    to.copy_(torch.frombuffer(data, dtype=to.dtype).view(to.shape))


@contextlib.contextmanager
def fake_gpu() -> Iterator[FakeLayer]:
    real, device.layer = device.layer, FakeLayer()
    try:
        yield device.layer
        device.layer.make(device.layer.started)
    finally:
        device.layer = real


NUMEL = 6000  # elements: too many for a message


def results_on(gpu: Callable[[torch.Tensor], torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every operation on tensors that `gpu` moves there: the result, and what it has to be."""
    rank, size = hvd.rank(), hvd.size()
    parts = everybodys(NUMEL)
    total, own = combined(hvd.Sum, parts), rows_of(rank, NUMEL, size)
    dealt = torch.cat([part[own] for part in parts])
    in_place = [gpu(mine(NUMEL)) for _ in range(4)]
    return [
        (hvd.allreduce(gpu(mine(NUMEL)), op=hvd.Sum), total),
        (hvd.allreduce_(in_place[0], op=hvd.Sum), total),
        (in_place[0], total),
        (hvd.grouped_allreduce([gpu(mine(NUMEL)), mine(3)], op=hvd.Sum)[0], total),
        (hvd.grouped_allreduce_([mine(3), in_place[1]], op=hvd.Sum)[1], total),
        (in_place[1], total),
        (hvd.allgather(gpu(mine(NUMEL))), torch.cat(parts)),
        (hvd.grouped_allgather([gpu(mine(NUMEL))])[0], torch.cat(parts)),
        (hvd.broadcast(gpu(mine(NUMEL)), 1), parts[1]),
        (hvd.broadcast_(in_place[2], 1), parts[1]),
        (in_place[2], parts[1]),
        (hvd.alltoall(gpu(mine(NUMEL))), dealt),
        (hvd.reducescatter(gpu(mine(NUMEL)), op=hvd.Sum), total[own]),
        (hvd.grouped_reducescatter([gpu(mine(NUMEL))], op=hvd.Sum)[0], total[own]),
        (hvd.synchronize(hvd.allreduce_async_(in_place[3][::2], op=hvd.Sum)), total[::2]),
    ]


@on_ranks
def test_every_operation() -> None:
    with fake_gpu() as layer:
        results = results_on(gpu)
        assert layer.pinned
    for number, (result, expected) in enumerate(results):
        assert isinstance(result, FakeGpuTensor), number
        assert torch.equal(result.cpu(), expected), number


@on_ranks
def test_small_tensors_travel_in_messages() -> None:
    with fake_gpu() as layer:
        total = combined(hvd.Sum, everybodys(5))
        tensor = gpu(mine(5))
        result = hvd.allreduce(tensor, op=hvd.Sum)
        assert isinstance(result, FakeGpuTensor)
        assert torch.equal(result.cpu(), total)
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert torch.equal(tensor.cpu(), total)
        assert not layer.pinned
        _, received = hvd.alltoall(gpu(mine(4)), splits=[2] * 2)
        assert received.tolist() == [2, 2]


@on_ranks
def test_memory_is_not_used_again_before_the_gpu_has_copied_from_it() -> None:
    arena = runtime().client.arena
    with fake_gpu() as layer:
        results = [hvd.allreduce(gpu(torch.full((NUMEL,), float(n)))) for n in range(10)]
        layer.make(layer.started)
        for n, result in enumerate(results):
            assert result.cpu().eq(n).all()
        gc.collect()

        def reduce_again(times: int) -> int:
            for _ in range(times):
                hvd.allreduce(gpu(torch.ones(NUMEL)))
                layer.make(layer.started)
            return int(arena.statistics()["nbytes"])

        held = reduce_again(2)  # the first ones may begin another slab
        assert reduce_again(10) == held, "what was copied has not come back"


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(lambda segment_id, segment, plan: segment.close_fd(), lambda segment_id: None)
    yield arena
    arena.close()


def test_a_segment_is_pinned_once_and_until_it_is_closed_by_the_device_that_copies(arena: Arena) -> None:
    with fake_cuda(0, count=2) as gpus:
        segment_id, segment = arena.new_segment(8192)
        there, address = on_gpu(torch.zeros(3), 1), segment.address
        device.layer.pin(segment, [torch.zeros(3), there])
        device.layer.pin(arena.segment(segment_id), [there])
        assert gpus.registered == {address: 8192}
        arena.drop_segment(segment_id)
        assert not gpus.registered
        assert gpus.calls == [("cudaHostRegister", address, 1), ("cudaHostUnregister", address, 1)]


@on_ranks
def test_operations_and_gradients_leave_the_current_device_alone_where_it_is_not_theirs() -> None:
    with fake_cuda(0, count=2) as gpus:
        assert value_of(hvd.allreduce(on_gpu(mine(NUMEL), 1), op=hvd.Sum)).equal(combined(hvd.Sum, everybodys(NUMEL)))
        parameter = torch.nn.Parameter(on_gpu(torch.zeros(NUMEL), 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        parameter.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert value_of(parameter).eq(-1).all()
        assert {name for name, _, _ in gpus.calls} == {"cudaHostRegister"}
        assert {index for _, _, index in gpus.calls} == {1}


def test_memory_that_cannot_be_pinned_is_warned_about_once(arena: Arena) -> None:
    with fake_cuda(0) as gpus, warnings.catch_warnings(record=True) as caught:
        gpus.code = 2
        warnings.simplefilter("always")
        for _ in range(2):
            device.layer.pin(arena.new_segment(4096)[1], [on_gpu(torch.zeros(3))])
    assert [str(warning.message)[:42] for warning in caught] == ["CUDA could not pin 4096 bytes of shared me"]


def test_memory_is_not_pinned_for_tensors_of_the_host(arena: Arena) -> None:
    segment = arena.new_segment(4096)[1]
    device.Layer().pin(segment, [torch.zeros(3)])
    assert segment.on_close is None


def test_copies_within_this_process_are_made_at_once() -> None:
    to = [torch.zeros(3), torch.zeros(2, 2)]
    copying = device.Layer().copy(to, [torch.ones(3), torch.ones(2, 2)])
    assert copying.done()
    copying.wait()
    assert all(tensor.eq(1).all() for tensor in to)
