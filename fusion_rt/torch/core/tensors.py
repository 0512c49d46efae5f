"""Transfer of tensors to the daemon and back: their types, and the memory through which they go.

Small tensors travel inside messages, all others through the arena. A result that was reduced in the arena is a tensor
over that memory, which goes back to the arena when the last tensor that looks into it is gone. What is not dense memory
of this process (a strided view, a tensor of another device) is copied into such memory and back.
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fusion_rt import wire
from fusion_rt.client import Operation, adoption
from fusion_rt.client.adoption import Use
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.torch.core import device
from fusion_rt.torch.core.runtime import Runtime, runtime

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
_OURS = 2  # references to an object that only an attribute and the counter refer to
TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype on the wire.

    Raises:
        ValueError: tensors of that type cannot be communicated.
    """
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise ValueError(
            f"Tensor type {dtype} is not supported: it cannot be communicated; convert to one of {', '.join(DTYPES)}"
        ) from None


def empty(*shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Makes a tensor in the arena, with undefined contents: a communication buffer.

    `allreduce_` and `broadcast_` work on such a tensor in place, without the copies that any other tensor needs.
    An extension of Horovod's interface.

    Args:
        shape: its dimensions, as integers or as one sequence.
        dtype: element type; by default torch's.

    Raises:
        ValueError: before `init`, or for a type that cannot be communicated.
        ArenaError: there is not enough shared memory.
    """
    dimensions = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    chosen = torch.get_default_dtype() if dtype is None else dtype
    dtype_name(chosen)
    here = runtime()
    like = torch.empty(dimensions, dtype=chosen, device="meta")  # type: ignore[arg-type]
    return Memory(here, like.nbytes, small=False).tensor(chosen, like.shape)


def nbytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements. Raises `ValueError` when it is not dense."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"Tensor type {tensor.type()} is not supported: it is sparse; use sparse_allreduce_async, or "
                         "tensor.to_dense()")  # fmt: skip
    return tensor.nbytes


class Memory:
    """Memory that an operation's data is put into before it is submitted, and where a reduction leaves its result.

    It is a region of the arena, given back when nothing looks into it any more. A tensor that is small enough to travel
    in messages gets ordinary memory.

    Args:
        nbytes: how much.
        tensors: that are copied to it or from it, on the host or a device.
        small: it may be ordinary memory.

    Attributes:
        view: all of it.
        place: segment id and offset in the arena; None for ordinary memory.
    """

    __slots__ = ("place", "view")

    def __init__(self, here: Runtime, nbytes: int, *, tensors: Sequence[torch.Tensor] = (), small: bool = True) -> None:
        self.place: tuple[int, int] | None = None
        if nbytes == 0 or (small and nbytes <= wire.MAX_INLINE):
            self.view = memoryview(bytearray(nbytes))
            return
        with here.allocating:
            here.collect()
            region = here.client.allocate(nbytes)
        self.place = region.segment, region.offset
        self.view = region.view[:nbytes]  # kept alive by tensors over it
        weakref.finalize(self.view, here.client.arena.free, region).atexit = False
        if not all(map(device.layer.is_host, tensors)):
            device.layer.pin(here.client.arena.segment(region.segment), tensors)

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """Returns a tensor over a part of it that begins after `offset` bytes."""
        return over(self.view, dtype, shape, offset)

    def submit(
        self,
        here: Runtime,
        name: str | None,
        signature: wire.Signature,
        splits: tuple[int, ...] = (),
        keeps: Memory | None = None,
    ) -> Operation:
        """Submits an operation on its contents, which has to end before this is gone."""
        if self.place is None:
            return here.client.submit(name, signature, inline=bytes(self.view), splits=splits)
        return here.client.submit(name, signature, place=self.place, splits=splits, keeps=keeps)

    def lend(
        self, here: Runtime, name: str | None, signature: wire.Signature, splits: tuple[int, ...] = ()
    ) -> Operation:
        """Submits an operation that only reads its contents, and that keeps it until it has ended."""
        operation = self.submit(here, name, signature, splits, keeps=self)
        operation.lent = self.nbytes
        return operation

    @property
    def nbytes(self) -> int:
        """The bytes of the arena that it takes."""
        return 0 if self.place is None else self.view.nbytes


def place_of(
    here: Runtime, tensor: torch.Tensor, uses: list[Use] | None = None, written: bool = True
) -> tuple[int, int] | wire.Address | None:
    """Returns where the daemon finds and leaves the elements of a tensor too large for messages, without a copy.

    That is in the arena, or at its address as long as it is kept (`Client.submit`); None if it has to be copied.

    Args:
        uses: gets the use of a tensor that was adopted, which has to be ended with the operation; None: none is to be.
        written: the daemon leaves elements there.
    """
    if not is_plain(tensor):
        return None
    address, nbytes, client = tensor.data_ptr(), tensor.nbytes, here.client
    use = None if uses is None else client.adoptions.use(address, nbytes, written)
    if use is None:
        place = client.arena.locate(address, nbytes)
        if place is not None:
            return place
        use = None if uses is None else _adopted(here, tensor, address, nbytes, written)
    if use is not None:
        assert uses is not None
        uses.append(use)
        return use.place
    if not client.own_memory.may_take(nbytes):
        return None
    storage = tensor.untyped_storage()
    return client.own_memory.address(address, nbytes, storage._cdata, partial(StorageWeakRef, storage))


def _adopted(here: Runtime, tensor: torch.Tensor, address: int, nbytes: int, written: bool) -> Use | None:
    """Returns the use of a tensor that is adopted, now that it is used again."""
    adoptions = here.client.adoptions
    if nbytes < adoption.LEAST:
        return None
    storage = tensor.untyped_storage()
    if not adoptions.lasts(address, nbytes, storage._cdata, partial(StorageWeakRef, storage)):
        return None
    if not storage.resizable() or storage.is_shared() or storage.is_pinned():  # of another owner, or not of malloc
        return None
    with here.allocating:
        adopted = adoptions.adopt(address, nbytes, _Storage(storage))
    return adoptions.use(address, nbytes, written) if adopted else None


class _Storage:
    """A storage of this process, as `Allocation`."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage

    def where(self) -> tuple[int, int]:
        return self._storage.data_ptr(), self._storage.nbytes()

    def is_unused(self) -> bool:
        users: int = torch._C._storage_Use_Count(self._storage._cdata)
        return users == 1 and sys.getrefcount(self._storage) == _OURS


def over(buffer: memoryview, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
    """Returns a tensor over a part of a buffer that begins after `offset` bytes.

    It is a tensor of its own, no view of another: a view could not be changed in place under autograd.
    """
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=offset).resize_(shape)


def received(operation: Operation) -> memoryview:
    """Returns the bytes that came with an operation's end, as memory of this process alone, writable.

    The daemon's mapping is private (copied on write), and lives as long as a tensor looks into it.
    """
    return memoryview(bytearray(operation.inline or b"")) if operation.output is None else operation.output.view


# --- copies -----------------------------------------------------------------------------------------------------------


def is_plain(tensor: torch.Tensor) -> bool:
    """Tells whether the tensor is dense memory of this process, in order, whose bytes are its elements."""
    return device.layer.is_host(tensor) and tensor.is_contiguous() and not is_turned(tensor)


def is_turned(tensor: torch.Tensor) -> bool:
    """Tells whether reading the tensor negates or conjugates its memory, as it does in `t.conj().imag`."""
    return tensor.is_neg() or tensor.is_conj()


def contents(tensor: torch.Tensor) -> bytes:
    """Returns the tensor's elements in order."""
    if not is_plain(tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def fill(tensor: torch.Tensor, data: bytes) -> None:
    """Replaces the tensor's elements."""
    if is_plain(tensor):
        ctypes.memmove(tensor.data_ptr(), data, len(data))
    elif data:
        tensor.detach().copy_(over(memoryview(bytearray(data)), tensor.dtype, tensor.shape))


def copy_in(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copies tensors, at least one, from or to memory of this process, and returns when that is done."""
    with torch.no_grad():
        if all(map(device.layer.is_host, tensors)) and all(map(device.layer.is_host, places)):
            _copy(places, tensors)
        else:
            device.layer.copy([place.detach() for place in places], [tensor.detach() for tensor in tensors]).wait()


def copy_out(tensors: Sequence[torch.Tensor], places: Sequence[torch.Tensor]) -> None:
    """Copies results from memory of this process; to a device, that may go on when this returns."""
    with torch.no_grad():
        if all(map(device.layer.is_host, tensors)):
            _copy(tensors, places)
        else:
            device.layer.copy([tensor.detach() for tensor in tensors], places)


def _copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copies tensors of this process. Torch writes to turned ones singly only."""
    if any(map(is_turned, to)):
        for place, tensor in zip(to, source, strict=True):
            place.copy_(tensor)
    else:
        torch._foreach_copy_(list(to), list(source))


def on_device_of(like: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Returns a result on the device of the operation's input: itself, or a copy."""
    if device.layer.is_host(like):
        return result
    moved = device.layer.empty(result.shape, like)
    copy_out([moved], [result])
    return moved
