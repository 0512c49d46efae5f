"""How a tensor gets to the daemon and back: inside a message when it is small, through the arena otherwise.

A result that was reduced in the arena is a tensor over that memory, which goes back to the arena when the last tensor
that shares it is gone. What is not dense memory of this process (a strided view, a tensor of another device) is copied
into the arena and back.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

import torch

from fusion_rt import wire
from fusion_rt.arena import Region
from fusion_rt.client import Operation
from fusion_rt.dtypes import DTYPES
from fusion_rt.torch.basics import Runtime, runtime

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
TORCH_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """What a dtype is called on the wire.

    Raises:
        ValueError: tensors of that type cannot be communicated.
    """
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise ValueError(
            f"tensors of type {dtype} cannot be communicated; convert to one of {', '.join(DTYPES)}"
        ) from None


def empty(*shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new tensor in the arena, with undefined contents: a communication buffer.

    `allreduce_` and `broadcast_` work on such a tensor where it lies, without the copies that any other tensor needs.
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
    like = torch.empty(dimensions, dtype=chosen, device="meta")  # type: ignore[arg-type]
    return in_region(runtime(), like)[0] if like.nbytes else torch.empty(like.shape, dtype=chosen)


def in_region(here: Runtime, like: torch.Tensor) -> tuple[torch.Tensor, Region]:
    """A contiguous tensor of `like`'s shape and dtype in a new region of the arena, which is freed with the tensor."""
    with here.allocating:
        here.collect()
        region = here.client.allocate(like.nbytes)
    owner = region.view[: like.nbytes]  # what the tensor's storage keeps alive, and with it whatever shares the storage
    weakref.finalize(owner, here.client.arena.free, region).atexit = False
    return _shaped(torch.frombuffer(owner, dtype=like.dtype), like.shape), region


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        raise ValueError("sparse tensors cannot be communicated; use tensor.to_dense()")
    return tensor.nbytes


def _shaped(flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The flat tensor itself, in another shape: a view would not let a result be changed in place under autograd."""
    return flat.resize_(shape)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is dense memory of this process, in order."""
    return tensor.is_cpu and tensor.is_contiguous()


def contents(tensor: torch.Tensor) -> bytes:
    """The tensor's elements as they lie in memory."""
    if not is_plain(tensor):
        tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def from_contents(data: bytes, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new tensor with these elements."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return _shaped(torch.frombuffer(bytearray(data), dtype=dtype), shape)


def fill(tensor: torch.Tensor, data: bytes) -> None:
    """Replaces the tensor's elements."""
    if is_plain(tensor):
        ctypes.memmove(tensor.data_ptr(), data, len(data))
    elif data:
        tensor.detach().copy_(from_contents(data, tensor.shape, tensor.dtype))


class Transfer:
    """A tensor that is being reduced or broadcast.

    Args:
        name: of the operation; None: unnamed.
        tensor: what goes in.
        in_place: whether the result replaces it.
        send: whether its contents matter to anybody (not for a broadcast's receivers).
    """

    __slots__ = ("_in_place", "_staging", "_tensor", "operation")

    def __init__(
        self,
        here: Runtime,
        name: str | None,
        signature: wire.Signature,
        tensor: torch.Tensor,
        in_place: bool,
        send: bool = True,
    ) -> None:
        self._tensor = tensor
        self._in_place = in_place
        self._staging: torch.Tensor | None = None
        client = here.client
        nbytes = _nbytes(tensor)
        if nbytes <= wire.MAX_INLINE:
            self.operation = client.submit(name, signature, inline=contents(tensor))
            return
        place = client.arena.locate(tensor.data_ptr(), nbytes) if in_place and is_plain(tensor) else None
        if place is None:
            self._staging, region = in_region(here, tensor)
            if send:
                self._staging.copy_(tensor.detach())
            place = region.segment, region.offset
        self.operation = client.submit(name, signature, place=place)

    def result(self, here: Runtime) -> torch.Tensor:
        """Waits; returns the result, the tensor itself or a new one. Raises `HorovodInternalError` if it failed."""
        data = here.client.wait(self.operation).inline
        tensor, staging = self._tensor, self._staging
        if data is not None:
            result = tensor if self._in_place else torch.empty_like(tensor)
            fill(result, data)
            return result
        if staging is None:
            return tensor
        if self._in_place:
            tensor.detach().copy_(staging)
            return tensor
        return staging if tensor.is_cpu else staging.to(tensor.device)


class Gather:
    """A tensor that is being gathered, with those of all ranks, along its first dimension."""

    __slots__ = ("_staging", "_tensor", "operation")

    def __init__(self, here: Runtime, name: str | None, signature: wire.Signature, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._staging: torch.Tensor | None = None  # has to stay until the operation is done
        if _nbytes(tensor) <= wire.MAX_INLINE:
            self.operation = here.client.submit(name, signature, inline=contents(tensor))
            return
        self._staging, region = in_region(here, tensor)
        self._staging.copy_(tensor.detach())
        self.operation = here.client.submit(name, signature, place=(region.segment, region.offset))

    def result(self, here: Runtime) -> torch.Tensor:
        """Waits, and returns the gathered tensor. Raises `HorovodInternalError` if it failed."""
        operation: Operation = here.client.wait(self.operation)
        self._staging = None
        shape = (sum(operation.sizes), *self._tensor.shape[1:])
        if operation.output is None:
            gathered = from_contents(operation.inline or b"", shape, self._tensor.dtype)
        else:  # a private mapping, which lives as long as a tensor looks into it
            gathered = _shaped(torch.frombuffer(operation.output.view, dtype=self._tensor.dtype), shape)
        return gathered if self._tensor.is_cpu else gathered.to(self._tensor.device)
