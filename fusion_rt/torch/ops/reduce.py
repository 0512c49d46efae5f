"""All-reduce: every rank gets the elementwise combination of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion_rt import wire
from fusion_rt.torch.core.compressors import Compression, codec_of
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.ops.fused import FusedReduction, fuse
from fusion_rt.torch.ops.gradients import differentiable
from fusion_rt.torch.ops.handles import Group, hold
from fusion_rt.torch.ops.signatures import How, as_real, check_tensor, id_of, listed, resolve, signature_of, tensor_name
from fusion_rt.torch.ops.transfers import Complex, Transfer


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
    """Combines all ranks' tensors element by element, into a new tensor. Differentiable.

    Args:
        tensor: this rank's; any shape, the same on all ranks, and any dtype that `fusion_rt` carries.
        average: deprecated, use `op`: True for `Average`, False for `Sum`.
        name: pairs the ranks' operations.
        compression: `Compression.none`, `.fp16`, `.bf16`, `.topk(0.01)` and its like, or a class with `compress` and
            `decompress`. There is no error feedback: values that a lossy codec leaves out are lost here, while a
            distributed optimizer sends them later. `fusionrun --compression` does not apply.
        op: `Average` (the default; of integers it is that of their sum in 64 bits, truncated toward zero; halves are
            divided before they are added up, so that it is finite where they are; not for bool), `Sum` (wraps around
            where integers overflow, as torch does; infinite where a partial sum of halves is), `Min`, `Max`, `Product`,
            or `Adasum` (for floating-point tensors). Complex tensors have `Average` and `Sum`, part by part.
        prescale_factor, postscale_factor: multiply the tensor before and the result after the combination.
        process_set: the ranks that take part.

    Raises:
        ValueError: before `init`, an argument that cannot be used (such as topk for integers, or with `Max`), or this
            rank is not in the process set.
        HorovodInternalError: the operation failed, on all ranks.
    """
    codec = codec_of(compression)
    if codec is None:
        check_tensor(tensor, "allreduce")
        compressed, context = compression.compress(tensor)
        op = resolve(op, average)
        reduced = allreduce(
            compressed, None, name, Compression.none, op, prescale_factor, postscale_factor, process_set
        )
        return torch.as_tensor(compression.decompress(reduced, context))
    how = How(resolve(op, average), prescale_factor, postscale_factor, process_set, codec)

    def run(tensor: torch.Tensor) -> torch.Tensor:
        here = runtime()
        return _reduce(here, tensor, name, how, in_place=False).result(here)

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:  # as Horovod defines it: the same all-reduce
        return [allreduce(gradient, None, None, Compression.none, *how[:4])]

    return differentiable("allreduce", run, back, tensor)


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
    how = How(resolve(op, average), prescale_factor, postscale_factor, process_set)
    here = runtime()
    return hold(here, _reduce(here, tensor, name, how, in_place=False))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Does an `allreduce` with the result in the tensor's place; returns the tensor."""
    how = How(resolve(op, average), prescale_factor, postscale_factor, process_set)
    here = runtime()
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
    how = How(resolve(op, average), prescale_factor, postscale_factor, process_set)
    here = runtime()
    return hold(here, _reduce(here, tensor, name, how, in_place=True))


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
    """Does an `allreduce` of several tensors, which may differ in shape and dtype, in one operation for each dtype.

    `name` is a common base. Differentiable. Raises as `allreduce` does.
    """
    tensors, codec = listed(tensors, "allreduce"), codec_of(compression)
    if codec is None:
        pairs = [compression.compress(tensor) for tensor in tensors]
        op = resolve(op, average)
        reduced = grouped_allreduce(
            [pair[0] for pair in pairs], None, name, Compression.none, op,
            prescale_factor, postscale_factor, process_set,
        )  # fmt: skip
        return [compression.decompress(tensor, pair[1]) for tensor, pair in zip(reduced, pairs, strict=True)]
    how = How(resolve(op, average), prescale_factor, postscale_factor, process_set, codec)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = runtime()
        return _reduce_group(here, tensors, name, how, in_place=False).result(here)

    def back(*gradients: torch.Tensor) -> list[torch.Tensor]:
        return grouped_allreduce(gradients, None, None, Compression.none, *how[:4])

    return list(differentiable("allreduce", run, back, *tensors))


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
    how = How(resolve(op, average), prescale_factor, postscale_factor, process_set)
    here = runtime()
    return hold(here, _reduce_group(here, tensors, name, how, in_place=False))


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: wire.Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Does a `grouped_allreduce` with the results in the tensors' places; returns the tensors."""
    how = How(resolve(op, average), prescale_factor, postscale_factor, process_set)
    here = runtime()
    return _reduce_group(here, tensors, name, how, in_place=True).result(here)


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
    how = How(resolve(op, average), prescale_factor, postscale_factor, process_set)
    here = runtime()
    return hold(here, _reduce_group(here, tensors, name, how, in_place=True))


def _reduce(here: Runtime, tensor: torch.Tensor, name: str | None, how: How, in_place: bool) -> Transfer | Complex:
    op, prescale, postscale, process_set, codec = how
    real = as_real(tensor, "allreduce", op)
    signature = signature_of(
        "allreduce", real.dtype, real.shape, op, prescale, postscale, 0,
        id_of(here, process_set, "allreduce"), codec,
    )  # fmt: skip
    transfer = Transfer(here, tensor_name("allreduce", name), signature, real, in_place)
    return transfer if real is tensor else Complex(transfer, tensor, in_place)


def _reduce_group(
    here: Runtime, tensors: Sequence[torch.Tensor], name: str | None, how: How, in_place: bool
) -> Group[FusedReduction]:
    process_set = id_of(here, how.process_set, "allreduce")

    def make(own_name: str | None, chosen: list[torch.Tensor]) -> FusedReduction:
        return FusedReduction(here, own_name, chosen, how, process_set, in_place)

    return fuse("allreduce", name, tensors, how.op, make, in_place)
