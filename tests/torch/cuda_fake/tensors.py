"""Tensors of the made-up GPU. What is done with them is queued on the current stream, and runs when its turn comes.

Their memory is as that of torch's caching allocator: it may be used anew as soon as the last tensor is gone, by work
that is queued from then on on the stream on which it was allocated. Other streams are waited for where `record_stream`
has named them. Such use is made up too: `POISON` is written there.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fusion_rt.torch.core import device, runtime
from fusion_rt.torch.sync import on_device
from tests.torch.cuda_fake.streams import FakeEvent, FakeGraph, FakeStream, Gpus, Transfer

POISON = 77  # what memory has that nobody has written to, or that belongs to somebody else
_aten = torch.ops.aten
_WAIT = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default, _aten.nonzero.default}


class Block:
    """Allocated memory of a device.

    Attributes:
        index: of the device.
        used_on: streams that `record_stream` named.
    """

    def __init__(self, memory: torch.Tensor, index: int) -> None:
        gpus = FakeStream.gpus
        self.index = index
        self.used_on: list[FakeStream] = []
        gpus.allocated += memory.nbytes
        weakref.finalize(self, _free, gpus, memory, gpus.current_stream(index), self.used_on).atexit = False


def _free(gpus: Gpus, memory: torch.Tensor, stream: FakeStream, used_on: Sequence[FakeStream]) -> None:
    gpus.allocated -= memory.nbytes
    if used_on:  # the allocator asks for events on these before it gives the memory away
        stream = FakeStream(stream.index)
        stream.queue.extend(other.mark() for other in used_on)
    stream.queue.append(partial(memory.fill_, POISON))


class CudaTensor(torch.Tensor):
    """A tensor whose elements this process gets at through the streams only.

    Args:
        inner: the elements, for what runs on a stream.
        block: the memory in which they are.
    """

    inner: torch.Tensor  # type: ignore[assignment]
    block: Block
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, block: Block) -> CudaTensor:
        made: CudaTensor = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )  # autograd needs a device that this build of torch has; Python is told of another one below
        made.inner, made.block = inner, block
        return made

    def __init__(self, inner: torch.Tensor, block: Block) -> None:
        pass

    is_cpu = property(lambda self: False)
    is_cuda = property(lambda self: True)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.block.index)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def cpu(self, *_: Any) -> torch.Tensor:
        made = torch.empty(self.shape, dtype=self.dtype)  # torch's own sees that it is on this build's device already
        _copy(made, self, non_blocking=False)
        return made

    def record_stream(self, stream: Any) -> None:
        self.block.used_on.append(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _dispatch(func, args, kwargs or {})


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, CudaTensor) else value


def _allocate(like: torch.Tensor, index: int) -> CudaTensor:
    memory = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype).fill_(POISON)
    return CudaTensor(memory, Block(memory, index))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same memory, which does not keep it alive."""
    span = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    buffer = (ctypes.c_char * (span * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(buffer, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Copies between host and device, or on the device."""
    gpus = FakeStream.gpus
    hosts = [tensor for tensor in (to, source) if not isinstance(tensor, CudaTensor)]
    inner, values = _inner(to), _inner(source)
    if not hosts:
        gpus.queue(partial(inner.copy_, values))
        return
    (host,) = hosts
    gpus.copied += 1
    where = next(tensor for tensor in (to, source) if isinstance(tensor, CudaTensor)).block.index
    asynchronous = non_blocking and bool(host.numel()) and gpus.is_registered(host.data_ptr(), host.nbytes)
    with gpus.device(where):
        if asynchronous:
            transfer = Transfer(host.data_ptr(), host.nbytes)
            gpus.announce(transfer)
            pair = (inner, _raw(values)) if host is source else (_raw(inner), values)
            gpus.queue(partial(_transfer, gpus, transfer, *pair))
        elif host is source:
            gpus.queue(partial(inner.copy_, values.clone()))
            if not non_blocking:  # torch waits
                gpus.current_stream().synchronize()
        else:
            gpus.queue(partial(inner.copy_, values))
            gpus.current_stream().synchronize()


def _transfer(gpus: Gpus, transfer: Transfer, to: torch.Tensor, source: torch.Tensor) -> None:
    if transfer in gpus.transfers:  # else this has been noted as a fault
        gpus.transfers.remove(transfer)
        to.copy_(source)


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    gpus, schema = FakeStream.gpus, func._schema
    given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, CudaTensor)]
    wanted = kwargs.get("device")
    if func is _aten._to_copy.default and (not given or (wanted is not None and torch.device(wanted).type != "cuda")):
        source = args[0]
        made = torch.empty(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        to = _allocate(made, gpus.index_of(wanted)) if not given else made
        _copy(to, source, kwargs.get("non_blocking", False))
        return to
    if func is _aten.copy_.default:
        _copy(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return args[0]
    if func is _aten._foreach_copy_.default:
        for to, source in zip(*args[:2], strict=True):
            _copy(to, source, args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return None
    index = given[0].block.index if given else gpus.index_of(wanted)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain, named = tree_map(_inner, args), tree_map(_inner, kwargs)
    returns = [answer.alias_info for answer in schema.returns]
    if returns and returns[0] is not None and not returns[0].is_write:
        return tree_map(lambda made: CudaTensor(made, given[0].block), func(*plain, **named))
    with gpus.device(index):
        if func in _WAIT:
            gpus.current_stream().synchronize()
            answer = func(*plain, **named)
            return _filled(answer, index) if isinstance(answer, torch.Tensor) else answer
        if schema.is_mutable:
            gpus.queue(partial(func, *plain, **named))
            return args[0] if schema.returns else None
        shapes = func(*tree_map(_cloned, plain), **tree_map(_cloned, named))  # with whatever is there: for the shapes
        made = tree_map(lambda like: _allocate(like, index) if isinstance(like, torch.Tensor) else like, shapes)
        gpus.queue(partial(_compute, func, plain, named, tree_map(_inner, made)))
        return made


def _filled(values: torch.Tensor, index: int) -> CudaTensor:
    made = _allocate(values, index)
    made.inner.copy_(values)
    return made


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _compute(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for place, value in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(place, torch.Tensor):
            place.copy_(value)


class Factories(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Has what is made on the device, and brought to it, made of `CudaTensor`s."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        wanted = kwargs.get("device")
        if any(isinstance(value, CudaTensor) for value in tree_leaves((args, kwargs))) or (
            wanted is not None and torch.device(wanted).type == "cuda"
        ):
            return _dispatch(func, args, kwargs)
        return func(*args, **kwargs)


def _as_here() -> Callable[[], None]:
    """Stands for `device.as_here`: the thread that calls what this returns has `Factories`, too, as long as it runs."""
    set_it = device.as_here()

    def enter() -> None:
        set_it()
        Factories().__enter__()  # type: ignore[no-untyped-call]

    return enter


@contextmanager
def fake_cuda(seed: int, count: int = 1) -> Iterator[Gpus]:
    """A context in which torch has GPUs, by a schedule of a seed, and the worker a new `device.Layer`. At its end
    nothing that CUDA forbids may have been done."""
    gpus = Gpus(seed, count)
    calls: dict[str, Any] = {
        "Stream": FakeStream, "Event": FakeEvent, "CUDAGraph": FakeGraph, "stream": gpus.stream, "device": gpus.device,
        "current_stream": gpus.current_stream, "set_stream": gpus.set_stream, "current_device": gpus.current_device,
        "is_available": lambda: True, "cudart": lambda: gpus, "_lazy_init": lambda: None,
        "get_device_capability": lambda _: (9, 0),
    }  # fmt: skip
    with (
        mock.patch.multiple(torch.cuda, **calls),
        mock.patch.object(device, "layer", device.Layer()),
        mock.patch.object(on_device, "as_here", _as_here),
        Factories(),  # type: ignore[no-untyped-call]
    ):
        yield gpus
        gpus.finish()
        if runtime.is_initialized():  # what stays of the arena is of no interest to the next GPU
            for segment in runtime.runtime().client.arena._segments.values():
                if segment.on_close is not None:
                    segment.on_close()
                    segment.on_close = None
        assert not gpus.faults, gpus.faults


def on_gpu(tensor: torch.Tensor, index: int = 0) -> CudaTensor:
    """Returns a copy of a tensor on a device, which is there already."""
    return _filled(tensor.detach(), index)


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns what a tensor of the device has when all that was queued is done."""
    FakeStream.gpus.finish()
    values: torch.Tensor = _inner(tensor.detach())
    return values.clone()
