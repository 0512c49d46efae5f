"""Properties of every codec that remembers something from step to step, whatever its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from fusion_rt.codecs import CODECS, BucketCodec, CodecError, Layout, Span, open_bucket, parse
from fusion_rt.codecs.base import Array, Codec
from fusion_rt.codecs.dense import DenseBucket
from fusion_rt.codecs.summing import SummingBucketCodec
from fusion_rt.core.dtypes import DTYPES, DType
from tests.for_each import for_each

NAMES = sorted(name for name, codec in CODECS.items() if codec().stateful)
ELEMENTS = 3000


def opened(name: str) -> BucketCodec:
    return open_bucket(parse(name), Layout(DTYPES["float32"], ELEMENTS))


def received(codec: BucketCodec, payload: memoryview) -> Array:
    out = np.empty(ELEMENTS, np.float32)
    codec.decode(0, payload, out)
    return out


def gradient(step: int) -> Array:
    return np.random.default_rng(step).standard_normal(ELEMENTS, dtype=np.float32)


@for_each("name", NAMES)
@for_each("spoiler", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_arrives_as_one_and_leaves_no_trace(name: str, spoiler: float) -> None:
    spoiled, plain, receiver = opened(name), opened(name), opened(name)
    for codec in (spoiled, plain):
        codec.encode(0, gradient(0))
    values = gradient(1)
    values[ELEMENTS // 2] = spoiler
    assert not np.isfinite(received(receiver, spoiled.encode(0, values))).all()
    assert np.isfinite(spoiled.residual_norm())
    assert spoiled.residual_norm() == pytest.approx(plain.residual_norm(), rel=1e-4)


@for_each("name", NAMES)
def test_each_encoding_is_a_step_and_every_receiver_gets_the_same_bits(name: str) -> None:
    sender, first, second = opened(name), opened(name), opened(name)
    for step in range(3):
        assert sender.step == step
        payload = sender.encode(0, gradient(step))
        assert received(first, payload).tobytes() == received(second, payload).tobytes()


@for_each("name", NAMES)
def test_a_sender_that_is_told_what_it_sends_is_told_what_receivers_get(name: str) -> None:
    where = Layout(DTYPES["float32"], ELEMENTS, (Span("weight", 0, ELEMENTS, (60, 50)),))
    sender, receiver = (open_bucket(parse(f"{name}(minimum=0)"), where) for _ in range(2))
    for step in range(3):
        payload, told = sender.tell(gradient(step))
        assert len(payload) < 4 * ELEMENTS / 2
        assert told.any()
        assert received(receiver, payload).tobytes() == told.tobytes()


@for_each("name", NAMES)
def test_a_codec_of_sums_that_keeps_nothing_else_has_the_number_of_its_steps(name: str) -> None:
    """A package's codec without a residual, whose draws follow from the step."""
    codec = parse(name)

    class Forgetful(codec.bucket):  # type: ignore[name-defined, misc]
        state_dict, load_state_dict = BucketCodec.state_dict, BucketCodec.load_state_dict

    sender, other = (Forgetful(Layout(DTYPES["float32"], ELEMENTS), codec) for _ in range(2))
    sender.encode(0, gradient(0))
    assert sender.state_dict() == {"step": 1}
    other.load_state_dict(sender.state_dict())
    assert other.step == 1
    with pytest.raises(CodecError, match=f"has residual/, which the codec {name} does not have"):
        other.load_state_dict({"step": np.array(2), "residual/": np.zeros(3)})
    assert other.step == 1
    other.load_state_dict({"residual/": np.zeros(3)}, partial=True)
    assert other.step == 0


def test_a_codec_that_says_no_more_than_how_nodes_add_it_up_is_for_sums_only() -> None:
    @dataclass(frozen=True)
    class Summed(Codec):
        name: ClassVar[str] = "summed"
        bucket: ClassVar[type[BucketCodec]] = SummingBucketCodec

        def applies_to(self, dtype: DType) -> bool:
            return True

    Summed().check_use("average", DTYPES["float32"])
    for op in ("max", "min", "product"):
        with pytest.raises(CodecError, match="sends parts of sums, which cannot be combined by"):
            Summed().check_use(op, DTYPES["float32"])


def test_a_codec_that_remembers_and_is_encoded_on_its_way_is_refused() -> None:
    class RememberingBucket(DenseBucket):
        def state_dict(self, copies: bool = True) -> dict[str, Array]:
            return {"last": np.zeros(self.layout.elements, np.float32)}

    @dataclass(frozen=True)
    class Remembering(Codec):
        name: ClassVar[str] = "remembering"
        bucket: ClassVar[type[BucketCodec]] = RememberingBucket

        def applies_to(self, dtype: DType) -> bool:
            return True

    with pytest.raises(CodecError, match="remembering remembers something from step to step, and its exchange"):
        open_bucket(Remembering(), Layout(DTYPES["float32"], 10))
