"""What a codec may be used for."""

from __future__ import annotations

from fusion_rt.codecs.base import Codec, CodecError
from fusion_rt.dtypes import DType

_OPS = ("sum", "average")


def check_use(codec: Codec, op: str, dtype: DType | None = None, kind: str = "allreduce") -> None:
    """Raises `CodecError` where a codec makes no sense.

    What a stateful codec has not sent is added to the next gradient, which is right for sums only.

    Args:
        op: how elements are combined.
        dtype: of the elements, when somebody has asked for the codec for just these; of an optimizer's gradients, those
            to which a codec does not apply travel as they are.
        kind: the collective.
    """
    if not codec.stateful:
        return
    if kind != "allreduce":
        raise CodecError(f"the codec {codec.name} is for all-reduces, not for {kind}; use fp16 or bf16, or none")
    if op not in _OPS:
        raise CodecError(
            f"the codec {codec.name} sends parts of sums, which cannot be combined by {op}; use Average or Sum, or "
            f"another codec"
        )
    if dtype is not None and not codec.applies_to(dtype):
        raise CodecError(f"the codec {codec.name} is for floating-point elements, not for {dtype}; use none for these")
