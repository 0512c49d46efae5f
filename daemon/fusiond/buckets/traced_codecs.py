"""Codecs that record when they are at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fusion_rt.codecs import BucketCodec
from fusion_rt.tracing.format import Kind
from fusion_rt.tracing.recorder import Instrument
from fusiond.core.tracing import About

_ENCODE = Kind.ENCODE_BEGIN, Kind.ENCODE_END
_DECODE = Kind.DECODE_BEGIN, Kind.DECODE_END
_METHODS = {
    "encode": _ENCODE,
    "contribute": _ENCODE,
    "pack": _ENCODE,
    "conclude": _ENCODE,
    "start": _ENCODE,
    "second": _ENCODE,
    "decode": _DECODE,
    "decoded": _DECODE,
    "unpack": _DECODE,
    "write": _DECODE,
    "finish": _DECODE,
}
"""The methods of codecs in which their time goes."""


def record_codec(codec: BucketCodec, trace: Instrument, what: About) -> None:
    """Makes a bucket's codec record its work from now on, as being about this.

    Methods of the object are put before those of its class, because exchanges ask of which class a codec is.
    """
    nbytes = codec.layout.elements * codec.layout.dtype.itemsize
    inside: list[None] = []  # a codec is used by one thread at a time
    for name, kinds in _METHODS.items():
        method = getattr(type(codec), name, None)
        if method is not None:
            bound = method.__get__(codec)
            setattr(codec, name, partial(_call, bound, inside, trace, what, kinds, nbytes))


def release_codec(codec: BucketCodec) -> None:
    """Takes the references from a codec that is not used any more: its memory is freed with the last reference to
    it, and not when Python looks for cycles."""
    codec.go_back = None
    for name in _METHODS.keys() & vars(codec).keys():
        delattr(codec, name)


def _call(
    method: Callable[..., Any],
    inside: list[None],
    trace: Instrument,
    what: About,
    kinds: tuple[Kind, Kind],
    nbytes: int,
    *arguments: Any,
    **options: Any,
) -> Any:
    if inside:  # one part of a codec uses another
        return method(*arguments, **options)
    inside.append(None)
    trace.record(kinds[0], what.name, nbytes, what.clock, what.plan)
    try:
        result = method(*arguments, **options)
    finally:
        inside.clear()
    nbytes = result.nbytes if isinstance(result, memoryview) else _payload_nbytes(arguments) or nbytes
    trace.record(kinds[1], what.name, nbytes, what.clock, what.plan)
    return result


def _payload_nbytes(arguments: Sequence[Any]) -> int:
    """The length of the packed bytes among the arguments; 0 if there are none."""
    return next((len(given) for given in arguments if isinstance(given, (memoryview, bytes))), 0)
