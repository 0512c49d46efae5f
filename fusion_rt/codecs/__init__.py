"""Codecs by name. A codec is written as text, in a setting or a signature: `dense`, `fp16`, `name(field=value, ...)`.

A new codec is one file with a subclass of `Codec` and one of `BucketCodec`, and an entry here; or an entry point of
another package (docs/extending.md).
"""

from __future__ import annotations

from functools import lru_cache

from fusion_rt.codecs.base import BucketCodec, Codec, CodecError, Layout, Span, byte_view, check_length, layout_of
from fusion_rt.codecs.demo import Demo
from fusion_rt.codecs.dense import Dense
from fusion_rt.codecs.gaussiank import GaussianK
from fusion_rt.codecs.half import Bf16, Fp16
from fusion_rt.codecs.integers import Int2, Int4, Int8
from fusion_rt.codecs.onebit import OneBit
from fusion_rt.codecs.powersgd import PowerSGD
from fusion_rt.codecs.randomk import RandomK
from fusion_rt.codecs.thresholdk import ThresholdK
from fusion_rt.codecs.topk import TopK
from fusion_rt.core import spec_parser
from fusion_rt.core.plugins import Registry
from fusion_rt.kernels.team import ALONE, Team

__all__ = [
    "CODECS",
    "BucketCodec",
    "Codec",
    "CodecError",
    "Layout",
    "Span",
    "byte_view",
    "check_length",
    "layout_of",
    "open_bucket",
    "parse",
]

_ALL: tuple[type[Codec], ...] = (
    Dense, Fp16, Bf16, TopK, GaussianK, ThresholdK, RandomK, Demo, Int8, Int4, Int2, OneBit, PowerSGD
)  # fmt: skip
_PARTS = {"bucket": BucketCodec}
CODECS: Registry[Codec] = Registry("codec", "fusion_rt.codecs", Codec, _ALL, _PARTS)  # type: ignore[type-abstract]


def open_bucket(codec: Codec, layout: Layout, team: Team = ALONE) -> BucketCodec:
    """The codec of a bucket; dense where it does not apply.

    Args:
        team: the threads that it may use.

    Raises:
        CodecError: of a bucket like this, its chunks may be longer than their elements are, for which no peer has room;
            or it remembers something, and has chunks.
    """
    codec = codec if codec.applies_to(layout.dtype) else Dense()
    opened = codec.open(layout, team)
    most, plain = opened.max_encoded_nbytes(layout.elements), layout.elements * layout.dtype.itemsize
    if opened.exchange == "chunks" and most > plain:
        raise CodecError(f"the codec {codec} makes up to {most} bytes of elements that take {plain}; use none")
    if opened.exchange == "chunks" and opened.state_dict():
        raise CodecError(
            f"the codec {codec} remembers something from step to step, and its exchange is `chunks`, by which elements "
            "are encoded more than once in a step, so that ranks would get different sums; derive its bucket codec "
            "from SummingBucketCodec (docs/extending.md)"
        )
    return opened


@lru_cache(maxsize=256)  # codecs are frozen, and a signature brings its text with every operation
def parse(text: str) -> Codec:
    """The codec that is written as `text`; see `spec_parser`.

    Raises:
        CodecError: `text` is not written like this, or names a codec or an argument that does not exist (then the error
            has the nearest that does), or a value has the wrong type or is out of range.
    """
    try:
        return spec_parser.parse(text, CODECS)
    except spec_parser.SpecError as error:
        raise CodecError(str(error)) from None
