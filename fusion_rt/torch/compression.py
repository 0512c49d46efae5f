"""What is halved on its way between nodes, and the interface by which a script brings a compressor of its own.

`Compression.fp16` and `.bf16` name a codec of the daemon: tensors stay exact in shared memory, where casting them would
cost more than it saves, and only what travels between nodes is halved. Their `compress` and `decompress` cast as
Horovod's do, for scripts that call or subclass them. A compressor that a script brings runs in the worker.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion_rt import codecs
from fusion_rt.codecs import Codec


class Compressor:
    """Interface of a compressor: `compress` before the reduction, `decompress` after it."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to reduce instead (dense, of one shape and dtype on all ranks), and what `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The reduced tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Casts floating-point tensors to float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class BF16Compressor(Compressor):
    """Casts floating-point tensors to bfloat16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(torch.bfloat16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors that come with fusion_rt."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


# By the class itself, not by an attribute: a subclass that overrides `compress` is a compressor of the script's own.
_CODECS: dict[Any, str] = {NoneCompressor: "dense", FP16Compressor: "fp16", BF16Compressor: "bf16"}


def codec_of(compression: Any) -> str | None:
    """The text of the codec that is meant; None for a compressor that a script brings.

    Args:
        compression: a compressor of ours; a codec, or its text; or anything with `compress` and `decompress`.

    Raises:
        CodecError: there is no such codec.
        ValueError: it is nothing of that.
    """
    for compressor, codec in _CODECS.items():
        if compression is compressor:
            return codec
    if isinstance(compression, str | Codec):
        return str(codecs.parse(compression) if isinstance(compression, str) else compression)
    if not hasattr(compression, "compress") or not hasattr(compression, "decompress"):
        raise ValueError(f"{compression!r} is no compression: it needs the functions compress and decompress")
    return None
