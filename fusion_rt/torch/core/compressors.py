"""Compression between nodes, and the interface by which a script brings a compressor of its own.

`Compression.fp16` and `.bf16` name a codec of the daemon: tensors stay exact in shared memory, where casting them would
cost more than it saves, and only data between nodes is halved. Their `compress` and `decompress` cast as
Horovod's do, for scripts that call or subclass them. `Compression.topk(0.01)` and its like, one for each codec there
is, name one with arguments. A compressor that a script brings runs in the worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fusion_rt import codecs
from fusion_rt.codecs import CODECS, Codec, CodecError
from fusion_rt.torch.core.runtime import runtime


class Compressor:
    """Interface of a compressor: `compress` before the reduction, `decompress` after it."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor to reduce (dense, of one shape and dtype on all ranks), and context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the reduced tensor in its original form."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _Cast(Compressor):
    """Casts floating-point tensors to the type `half`."""

    half: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.half) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_Cast):
    """Casts floating-point tensors to float16."""

    half = torch.float16


class BF16Compressor(_Cast):
    """Casts floating-point tensors to bfloat16."""

    half = torch.bfloat16


class _EveryCodec(type):
    """Makes an attribute of each codec: a function of its arguments."""

    def __getattr__(cls, name: str) -> Callable[..., Codec]:
        try:
            return _maker(CODECS[name])
        except KeyError:
            raise AttributeError(f"there is no compression {name!r}") from None  # Python adds the nearest of `dir`

    def __dir__(cls) -> list[str]:
        return sorted({"none", *CODECS.names()})


class Compression(metaclass=_EveryCodec):
    """The compressors that come with fusion_rt: `none`, `fp16` and `bf16`; and a function for each codec that has
    arguments, `topk(0.01, value="fp16")`, `int8()`, `powersgd(rank=2)` (docs/compression.md has them all)."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _maker(kind: type[Codec]) -> Callable[..., Codec]:
    fields = [field.name for field in dataclasses.fields(kind)]

    def make(*args: Any, **arguments: Any) -> Codec:
        if len(args) > len(fields):
            raise CodecError(f"the codec {kind.name} has {len(fields)} arguments, and {len(args)} were given")
        for field, value in zip(fields, args, strict=False):
            if field in arguments:
                raise CodecError(f"the codec {kind.name} was given {field} twice")
            arguments[field] = value
        # A number of numpy or torch is not written as a number.
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in arguments.items()}
        return codecs.parse(f"{kind.name}({', '.join(f'{name}={value!r}' for name, value in plain.items())})")

    make.__name__ = make.__qualname__ = kind.name
    make.__doc__ = kind.__doc__
    return make


# By the class itself, not by an attribute: a subclass that overrides `compress` is a compressor of the script's own.
_CODECS: dict[Any, str] = {NoneCompressor: "dense", FP16Compressor: "fp16", BF16Compressor: "bf16"}


def codec_of(compression: Any) -> str | None:
    """Returns the text of the codec that is meant; None for a compressor that a script brings.

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


def network_stats() -> dict[str, int]:
    """Returns the bytes that this node's daemon has `sent` to other nodes so far, and `received`.

    They are the payload of all messages of this node's workers and shards, with any algorithm and codec, as it was
    sent. Neither headers of TCP and Ethernet nor the messages that measure links are counted. Both are 0 in a job of
    one node. In an elastic job bytes exchanged with lost nodes no longer count. Any rank of a node may ask.

    Raises:
        ValueError: before `init`.
    """
    return runtime().client.traffic()


def compression_stats() -> dict[str, dict[str, float]]:
    """Returns the savings and costs of compression on this node so far.

    Returns: for each distributed optimizer with a codec (`"optimizer.1"`, in the order in which they were made) and in
        `"total"`: `bytes_dense` that would have been sent to other nodes, `bytes_packed` that were sent, and the share
        that was `saved`; how many `elements` there were in all exchanges, and how many of them the codec has `encoded`
        (it sends small and excluded tensors whole); how many were `asked` for and `selected`, by codecs that select;
        the `seconds` spent on it; and `residual_norm`, the L2 norm of the unsent values.

    Raises:
        ValueError: before `init`.
    """
    return runtime().client.compression()
