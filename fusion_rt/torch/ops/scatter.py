"""Reduce-scatter: every rank gets its rows of the combination of all ranks' tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion_rt import wire
from fusion_rt.core.errors import HorovodInternalError
from fusion_rt.torch.core.compressors import Compression, codec_of
from fusion_rt.torch.core.process_sets import ProcessSet, global_process_set
from fusion_rt.torch.core.runtime import Runtime, runtime
from fusion_rt.torch.ops.fused import FusedScatter, fuse, shares
from fusion_rt.torch.ops.gather import allgather, grouped_allgather
from fusion_rt.torch.ops.gradients import differentiable
from fusion_rt.torch.ops.handles import Group, hold
from fusion_rt.torch.ops.signatures import (
    Average,
    How,
    Sum,
    as_real,
    check_tensor,
    id_of,
    listed,
    signature_of,
    tensor_name,
)
from fusion_rt.torch.ops.transfers import Complex, Rows


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: wire.Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combines all ranks' tensors element by element; returns this rank's rows as a new tensor. Differentiable.

    Args:
        tensor: this rank's, of at least one dimension, of the same shape on all ranks. The first dimension is dealt out
            as evenly as possible; the first ranks get a row more where it does not divide.
        name: pairs the ranks' operations.
        compression: `Compression.none`, `.fp16`, `.bf16`, or a class with `compress` and `decompress`.
        op: `Average` or `Sum`, as for `allreduce`.
        process_set: the ranks that take part.
        prescale_factor, postscale_factor: multiply the tensor before and the result after the combination.

    Raises:
        ValueError: before `init`, the tensor is a scalar, or this rank is not in the process set.
        HorovodInternalError: another op; or the operation failed, on all ranks.
    """
    codec = codec_of(compression)
    if codec is None:
        check_tensor(tensor, "reducescatter")
        compressed, context = compression.compress(tensor)
        scattered = reducescatter(
            compressed, name, Compression.none, op, process_set, prescale_factor, postscale_factor
        )
        return torch.as_tensor(compression.decompress(scattered, context))
    how = How(op, prescale_factor, postscale_factor, process_set, codec)

    def run(tensor: torch.Tensor) -> torch.Tensor:
        here = runtime()
        return _scatter(here, tensor, name, how).result(here)

    def back(gradient: torch.Tensor) -> list[torch.Tensor]:
        return [allgather(gradient * _factor(how), process_set=process_set)]

    return differentiable("reducescatter", run, back, tensor)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: wire.Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a `reducescatter`; `synchronize` returns the new tensor."""
    here = runtime()
    return hold(here, _scatter(here, tensor, name, How(op, prescale_factor, postscale_factor, process_set)))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: wire.Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Does a `reducescatter` of several tensors, which may differ in shape and dtype, in one operation for each dtype.

    `name` is a common base. Differentiable. Raises as `reducescatter` does.
    """
    tensors, codec = listed(tensors, "reducescatter"), codec_of(compression)
    if codec is None:
        pairs = [compression.compress(tensor) for tensor in tensors]
        scattered = grouped_reducescatter(
            [pair[0] for pair in pairs], name, Compression.none, op, process_set, prescale_factor, postscale_factor
        )
        return [compression.decompress(tensor, pair[1]) for tensor, pair in zip(scattered, pairs, strict=True)]
    how = How(op, prescale_factor, postscale_factor, process_set, codec)

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        here = runtime()
        return _scatter_group(here, tensors, name, how).result(here)

    def back(*gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        factor = _factor(how)
        return grouped_allgather([gradient * factor for gradient in gradients], process_set=process_set)

    return list(differentiable("reducescatter", run, back, *tensors))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: wire.Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a `grouped_reducescatter`; `synchronize` returns a tuple of new tensors."""
    here = runtime()
    return hold(here, _scatter_group(here, tensors, name, How(op, prescale_factor, postscale_factor, process_set)))


def _check(op: wire.Op) -> None:
    if op not in (Average, Sum):
        # Horovod raises this error, and scripts may catch it; only this rank knows of the call.
        raise HorovodInternalError(f"Reducescatter currently only supports Average and Sum, not {op!r}")


def _scatter(here: Runtime, tensor: torch.Tensor, name: str | None, how: How) -> Rows | Complex:
    op, prescale, postscale, process_set, codec = how
    _check(op)
    process_set_id = id_of(here, process_set, "reducescatter")
    real = as_real(tensor, "reducescatter", op)
    signature = signature_of("reducescatter", real.dtype, real.shape, op, prescale, postscale, 0, process_set_id, codec)
    ranks = here.client.process_sets[process_set_id].ranks
    rows = shares(len(tensor), len(ranks))[ranks.index(here.rank)][1]
    scattered = Rows(here, tensor_name("reducescatter", name), signature, real, rows=rows)
    return scattered if real is tensor else Complex(scattered, tensor)


def _scatter_group(here: Runtime, tensors: Sequence[torch.Tensor], name: str | None, how: How) -> Group[FusedScatter]:
    _check(how.op)
    process_set_id = id_of(here, how.process_set, "reducescatter")
    ranks = here.client.process_sets[process_set_id].ranks

    def make(own_name: str | None, chosen: list[torch.Tensor]) -> FusedScatter:
        return FusedScatter(here, own_name, chosen, how, process_set_id, len(ranks), ranks.index(here.rank))

    return fuse("reducescatter", name, tensors, how.op, make)


def _factor(how: How) -> float:
    """Returns the factor of the gradient as Horovod defines it: all ranks' gradients, gathered and scaled."""
    members = how.process_set.size() if how.op == Sum else 1
    assert members is not None
    return members * how.prescale * how.postscale
