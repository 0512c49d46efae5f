"""The collective operations on tensors, with Horovod's names, arguments and meaning.

The variants of an operation differ in two things. `..._async` returns a handle (an int) at once, for `poll` and
`synchronize`; the others wait. A trailing underscore puts the result in the tensor's place; the others return a new
tensor, leave their input alone, and are differentiable (the ones that wait).

Names pair the operations of different ranks. A named operation may be under way once at a time; unnamed ones are paired
in the order in which each rank submits them. Ranks that do not agree about shape, dtype, op or root all get a
`HorovodInternalError` that says who submitted what.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch

from fusion_rt import wire
from fusion_rt.torch.basics import ProcessSet, Runtime, global_process_set, runtime
from fusion_rt.torch.compression import Compression, codec_of
from fusion_rt.torch.tensors import Gather, Transfer, dtype_name

Average: Final = "average"
Sum: Final = "sum"
Min: Final = "min"
Max: Final = "max"
Product: Final = "product"
_OPS = (Average, Sum, Min, Max, Product)
_HALVED = (torch.float32, torch.float64)  # what the fp16 and bf16 codecs are for


# --- all-reduce -------------------------------------------------------------------------------------------------------


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The elementwise combination of all ranks' tensors, as a new tensor. Differentiable.

    Args:
        tensor: this rank's; any shape, the same on all ranks, and any dtype that `fusion_rt` carries.
        average: deprecated, use `op`: True for `Average`, False for `Sum`.
        name: pairs the ranks' operations.
        compression: `Compression.none`, `.fp16`, `.bf16`, or a class with `compress` and `decompress`.
        op: `Average` (the default; truncates integers, and is not for bool), `Sum`, `Min`, `Max` or `Product`.
        prescale_factor, postscale_factor: multiply the tensor before and the result after the combination.
        process_set: the ranks that take part.

    Raises:
        ValueError: before `init`, or an argument that cannot be used.
        HorovodInternalError: the operation failed, on all ranks.
    """
    codec = codec_of(compression)
    if codec is None:
        compressed, context = compression.compress(tensor)
        reduced = allreduce(
            compressed, average, name, Compression.none, op, prescale_factor, postscale_factor, process_set
        )
        return torch.as_tensor(compression.decompress(reduced, context))
    op = resolve(op, average)
    how = (op, prescale_factor, postscale_factor, process_set, codec)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _AllReduce.apply(tensor, name, how)  # type: ignore[no-any-return, no-untyped-call]
    here = runtime()
    return _reduce(here, tensor, name, how, in_place=False).result(here)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an `allreduce`; `synchronize` returns the new tensor."""
    how = (resolve(op, average), prescale_factor, postscale_factor, process_set, "dense")
    return _hold(_reduce(runtime(), tensor, name, how, in_place=False))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `allreduce`, with the result in the tensor's place; returns the tensor."""
    here = runtime()
    how = (resolve(op, average), prescale_factor, postscale_factor, process_set, "dense")
    return _reduce(here, tensor, name, how, in_place=True).result(here)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an `allreduce_`; the tensor must be left alone until `synchronize`, which returns it."""
    how = (resolve(op, average), prescale_factor, postscale_factor, process_set, "dense")
    return _hold(_reduce(runtime(), tensor, name, how, in_place=True))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors, which may differ in shape and dtype; `name` is a common base. Differentiable."""
    codec = codec_of(compression)
    if codec is None:
        pairs = [compression.compress(tensor) for tensor in tensors]
        reduced = grouped_allreduce(
            [pair[0] for pair in pairs], average, name, Compression.none, op,
            prescale_factor, postscale_factor, process_set,
        )  # fmt: skip
        return [compression.decompress(tensor, pair[1]) for tensor, pair in zip(reduced, pairs, strict=True)]
    how = (resolve(op, average), prescale_factor, postscale_factor, process_set, codec)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_GroupedAllReduce.apply(name, how, *tensors))  # type: ignore[no-untyped-call]
    here = runtime()
    return [transfer.result(here) for transfer in _reduce_group(here, tensors, name, how, in_place=False)]


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a `grouped_allreduce`; `synchronize` returns a tuple of new tensors."""
    how = (resolve(op, average), prescale_factor, postscale_factor, process_set, "dense")
    return _hold_group(_reduce_group(runtime(), tensors, name, how, in_place=False))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """As `grouped_allreduce`, with the results in the tensors' places; returns the tensors."""
    here = runtime()
    how = (resolve(op, average), prescale_factor, postscale_factor, process_set, "dense")
    return [transfer.result(here) for transfer in _reduce_group(here, tensors, name, how, in_place=True)]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a `grouped_allreduce_`; `synchronize` returns a tuple of the tensors."""
    how = (resolve(op, average), prescale_factor, postscale_factor, process_set, "dense")
    return _hold_group(_reduce_group(runtime(), tensors, name, how, in_place=True))


# --- all-gather, broadcast, barrier -----------------------------------------------------------------------------------


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """All ranks' tensors, concatenated along the first dimension in the order of ranks. Differentiable.

    Args:
        tensor: this rank's, of at least one dimension; ranks may differ in the first one.
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Raises:
        ValueError: before `init`, or the tensor is a scalar.
        HorovodInternalError: the operation failed, on all ranks.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        return _AllGather.apply(tensor, name, process_set)  # type: ignore[no-any-return, no-untyped-call]
    here = runtime()
    return gather(here, tensor, name, process_set).result(here)


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an `allgather`; `synchronize` returns the new tensor."""
    return _hold(gather(runtime(), tensor, name, process_set))


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of rank `root_rank`, as a new tensor. Differentiable.

    Args:
        tensor: this rank's; on ranks other than the root only its shape and dtype count.
        root_rank: whose tensor is broadcast (its rank among all ranks of the job).
        name: pairs the ranks' operations.
        process_set: the ranks that take part.

    Raises:
        ValueError: before `init`, or there is no such root.
        HorovodInternalError: the operation failed, on all ranks.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Broadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return, no-untyped-call]
    here = runtime()
    return _cast(here, tensor, root_rank, name, process_set, in_place=False).result(here)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a `broadcast`; `synchronize` returns the new tensor."""
    return _hold(_cast(runtime(), tensor, root_rank, name, process_set, in_place=False))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `broadcast`, with the result in the tensor's place; returns the tensor."""
    here = runtime()
    return _cast(here, tensor, root_rank, name, process_set, in_place=True).result(here)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a `broadcast_`; the tensor must be left alone until `synchronize`, which returns it."""
    return _hold(_cast(runtime(), tensor, root_rank, name, process_set, in_place=True))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the process set has called it."""
    client = runtime().client
    client.wait(client.submit(None, wire.Signature("barrier", process_set=process_set.process_set_id)))


# --- handles ----------------------------------------------------------------------------------------------------------


def poll(handle: int) -> bool:
    """Whether an asynchronous operation has ended, so that `synchronize` will not wait.

    Raises:
        ValueError: the handle belongs to no operation under way.
    """
    here = runtime()
    try:
        held = here.pending[handle]
    except KeyError:
        raise ValueError(f"handle {handle} was not created, or has been synchronized already") from None
    transfers = held if isinstance(held, list) else [held]
    return all(here.client.poll(transfer.operation) for transfer in transfers)


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result: a tensor, a tuple of them for a group, None for a
    handle that has been synchronized before.

    Raises:
        HorovodInternalError: the operation failed, on all ranks.
    """
    here = runtime()
    held = here.pending.pop(handle, None)
    if isinstance(held, list):
        return tuple(transfer.result(here) for transfer in held)
    return None if held is None else held.result(here)


# --- what they are made of --------------------------------------------------------------------------------------------

_How = tuple[wire.Op, float, float, ProcessSet, str]  # op, prescale, postscale, process set, codec


def gather(here: Runtime, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Gather:
    """Starts gathering; its operation's `sizes` are the rows that came from each rank."""
    signature = _signature("allgather", tensor.dtype, tensor.shape, process_set=process_set.process_set_id)
    return Gather(here, f"allgather.{name}" if name else None, signature, tensor)


def _reduce(here: Runtime, tensor: torch.Tensor, name: str | None, how: _How, in_place: bool) -> Transfer:
    op, prescale, postscale, process_set, codec = how
    signature = _signature(
        "allreduce", tensor.dtype, tensor.shape, op, prescale, postscale, 0, process_set.process_set_id, codec
    )
    return Transfer(here, f"allreduce.{name}" if name else None, signature, tensor, in_place)


def _reduce_group(
    here: Runtime, tensors: Sequence[torch.Tensor], name: str | None, how: _How, in_place: bool
) -> list[Transfer]:
    count = len(tensors)
    return [
        _reduce(here, tensor, f"{name}_{index}of{count}" if name else None, how, in_place)
        for index, tensor in enumerate(tensors, 1)
    ]


def _cast(
    here: Runtime, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> Transfer:
    if not 0 <= root < here.size:
        raise ValueError(f"there is no rank {root} to broadcast from; ranks are 0 to {here.size - 1}")
    signature = _signature("broadcast", tensor.dtype, tensor.shape, root=root, process_set=process_set.process_set_id)
    return Transfer(here, f"broadcast.{name}" if name else None, signature, tensor, in_place, send=root == here.rank)


@lru_cache(maxsize=4096)
def _signature(
    kind: wire.Kind,
    dtype: torch.dtype,
    shape: torch.Size,
    op: wire.Op = "sum",
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = 0,
    process_set: int = 0,
    codec: str = "dense",
) -> wire.Signature:
    """The signature of an operation, and every check of its arguments that the signature suffices for."""
    name = dtype_name(dtype)
    if kind == "allgather" and not shape:
        raise ValueError("allgather concatenates along the first dimension, which a scalar has not; use tensor.view(1)")
    if op == Average and dtype == torch.bool:
        raise ValueError("bool tensors have no average; use op=Sum (or), Product (and), Min or Max, or another dtype")
    chosen = codec if dtype in _HALVED else "dense"
    return wire.Signature(kind, name, tuple(shape), op, float(prescale), float(postscale), root, process_set, chosen)


def resolve(op: wire.Op | None, average: bool | None = None) -> wire.Op:
    """The op that is meant by Horovod's two arguments for it. Raises `ValueError` when they make no sense."""
    if op is None:
        if average is None:
            return Average
        warnings.warn(
            "Parameter `average` has been replaced with `op` and will be removed in v1.0",
            DeprecationWarning,
            stacklevel=3,
        )
        return Average if average else Sum
    if average is not None:
        raise ValueError("The op parameter supersedes average. Please provide only one of them.")
    if op not in _OPS:
        raise ValueError(f"{op!r} is not an op; use one of hvd.Average, Sum, Min, Max and Product")
    return op


def _hold(transfer: Transfer | Gather) -> int:
    handle = transfer.operation.handle
    runtime().pending[handle] = transfer
    return handle


def _hold_group(transfers: list[Transfer]) -> int:
    if not transfers:
        raise ValueError("a grouped operation needs at least one tensor")
    handle = transfers[-1].operation.handle
    runtime().pending[handle] = transfers
    return handle


# --- gradients: what an operation does to its input's gradient, as Horovod defines it ---------------------------------


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, how: _How) -> torch.Tensor:
        ctx.how = how
        here = runtime()
        return _reduce(here, tensor, name, how, in_place=False).result(here)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, prescale, postscale, process_set, _ = ctx.how
        reduced = allreduce(
            gradients[0], op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set
        )
        return reduced, None, None


class _GroupedAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, how: _How, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        here = runtime()
        return tuple(t.result(here) for t in _reduce_group(here, tensors, name, how, in_place=False))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        op, prescale, postscale, process_set, _ = ctx.how
        reduced = grouped_allreduce(
            gradients, op=op, prescale_factor=prescale, postscale_factor=postscale, process_set=process_set
        )
        return None, None, *reduced


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        here = runtime()
        gathering = gather(here, tensor, name, process_set)
        gathered = gathering.result(here)
        sizes = gathering.operation.sizes
        position = process_set.ranks.index(here.rank)
        ctx.process_set = process_set
        ctx.rows = sum(sizes[:position]), sizes[position]
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averaged = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        return averaged.narrow(0, *ctx.rows), None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        here = runtime()
        ctx.process_set = process_set
        ctx.is_root = root == here.rank
        return _cast(here, tensor, root, name, process_set, in_place=False).result(here)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        averaged = allreduce(gradients[0], op=Average, process_set=ctx.process_set)
        return (averaged if ctx.is_root else torch.zeros_like(averaged)), None, None, None
