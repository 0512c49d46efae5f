"""Codecs by name. A codec is written as text, in a setting or a signature: `dense`, `fp16`, `name(field=value, ...)`.

A new codec is one file with a subclass of `Codec`, and an entry here.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, get_type_hints

from fusion_rt.codecs.base import BucketCodec, Codec, CodecError, Layout, Span
from fusion_rt.codecs.dense import Dense
from fusion_rt.codecs.gaussiank import GaussianK
from fusion_rt.codecs.half import Bf16, Fp16
from fusion_rt.codecs.int8 import Int8
from fusion_rt.codecs.onebit import OneBit
from fusion_rt.codecs.packing import Selection
from fusion_rt.codecs.powersgd import PowerSGD, PowerSGDBucket
from fusion_rt.codecs.quantising import QuantisingBucketCodec
from fusion_rt.codecs.randomk import RandomK
from fusion_rt.codecs.selecting import SelectingBucketCodec
from fusion_rt.codecs.thresholdk import ThresholdK
from fusion_rt.codecs.topk import TopK

__all__ = [
    "CODECS",
    "BucketCodec",
    "Codec",
    "CodecError",
    "Layout",
    "PowerSGDBucket",
    "QuantisingBucketCodec",
    "SelectingBucketCodec",
    "Selection",
    "Span",
    "parse",
]

_ALL: tuple[type[Codec], ...] = (Dense, Fp16, Bf16, TopK, GaussianK, ThresholdK, RandomK, Int8, OneBit, PowerSGD)
CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in _ALL}

_MAX_TEXT = 200  # characters; the text may come from another process


@lru_cache(maxsize=256)  # codecs are frozen, and a signature brings its text with every operation
def parse(text: str) -> Codec:
    """The codec that is written as `text`.

    Arguments are Python literals with their names: `topk(density=0.01, value="fp16")`. Those left out have defaults.

    Raises:
        CodecError: `text` is not written like this, or names a codec or an argument that does not exist (then the error
            has the nearest that does), or a value has the wrong type or is out of range.
    """
    name, arguments = _split(text)
    if name not in CODECS:
        raise CodecError(f"there is no codec {name!r}; did you mean {_nearest(name, CODECS)!r}?")
    codec = CODECS[name]
    hints = get_type_hints(codec)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(codec)}
    for argument, value in arguments.items():
        if not fields:
            raise CodecError(f"the codec {name} has no arguments; write {name!r} instead of {text!r}")
        if argument not in fields:
            raise CodecError(
                f"the codec {name} has no argument {argument!r}; did you mean {_nearest(argument, fields)!r}?"
            )
        arguments[argument] = _typed(name, argument, value, fields[argument])
    missing = [
        field.name
        for field in dataclasses.fields(codec)
        if field.name not in arguments
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise CodecError(f"the codec {name} needs {', '.join(missing)}; write {name}({missing[0]}=...)")
    return codec(**arguments)


def _split(text: str) -> tuple[str, dict[str, Any]]:
    """The name, and the arguments as values of any type."""
    wrong = f"a codec is written as 'name' or 'name(argument=value, ...)', not as {text[:_MAX_TEXT]!r}"
    if len(text) > _MAX_TEXT:
        raise CodecError(wrong)
    try:
        match ast.parse(text.strip(), mode="eval").body:
            case ast.Name(id=name):
                return name, {}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=keywords):
                arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
                if len(arguments) == len(keywords):  # none is there twice
                    return name, arguments
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:  # all that such text can raise
        raise CodecError(wrong) from error
    raise CodecError(wrong)


def _typed(name: str, argument: str, value: Any, wanted: type) -> Any:
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise CodecError(f"{argument} of the codec {name} is of type {wanted.__name__}, which {value!r} is not")
    return value


def _nearest(name: str, known: Iterable[str]) -> str:
    return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
