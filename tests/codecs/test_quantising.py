"""Codecs that send all elements in fewer bits: what arrives, what is left, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.codecs import CodecError, Layout, Span, parse
from fusion_rt.codecs.quantising import Quantising, QuantisingBucketCodec
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels.quantisation import INT2, INT4, INT8, ONEBIT
from fusion_rt.kernels.random_bits import key
from fusion_rt.kernels.team import Team
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

F32 = DTYPES["float32"]
BITS = {"int8": 8, "int4": 4, "int2": 2, "onebit": 1}
NAMES = list(BITS)
SPECIALS = np.array([0.0, -0.0, 1.0, -1.0, 1.0, 1e-45, -1e-40, 3.4e38, -3.4e38, 2**-20], np.float32)
BY_NAME = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    for kind in (INT8, INT4, INT2, ONEBIT):
        kind.prepare()


@pytest.fixture(scope="module")
def team() -> Any:
    team = Team(2)
    yield team
    team.close()


def layout(n: int, dtype: DType = F32) -> Layout:
    """Two tensors that are quantised, around one that is sent whole, and padding."""
    third = n // 3
    return Layout(
        dtype,
        n + 5,
        (
            Span("a.weight", 0, third),
            Span("a.bias", third, n // 10),
            Span("b.weight", third + n // 10 + 3, n - third - n // 10),
        ),
    )


def opened(text: str, where: Layout, team: Team | None = None) -> QuantisingBucketCodec:
    codec = parse(text)
    assert isinstance(codec, Quantising)
    return codec.open(where) if team is None else codec.open(where, team)


def residual(codec: QuantisingBucketCodec) -> Array:
    """As it is saved, with zeros for padding."""
    state, whole = codec.state_dict(), np.zeros(codec.layout.elements, np.float32)
    for span in codec.layout.spans:
        whole[span.start : span.end] = state[f"residual/{span.name}"]
    return whole


def decoded(codec: QuantisingBucketCodec, payload: memoryview | bytes, start: int, end: int) -> Array:
    out = np.full(end - start, 7, codec.layout.dtype.storage)
    codec.decode(start, payload, out)
    return out


def without_padding(where: Layout, values: Array) -> Array:
    kept = np.zeros_like(values)
    for span in where.spans:
        kept[span.start : span.end] = values[span.start : span.end]
    return kept


def gradient(n: int, seed: int, special: float = 0.0) -> Array:
    rng = np.random.default_rng(seed)
    values: Array = rng.standard_normal(n, dtype=np.float32) * np.float32(10.0 ** rng.integers(-5, 5))
    chosen = rng.random(n) < special
    values[chosen] = rng.choice(SPECIALS, int(chosen.sum()))
    return values


def blocks(where: Layout, block: int) -> list[tuple[int, int]]:
    """The blocks of the tensors that are quantised."""
    found = []
    for span in where.spans:
        if "bias" not in span.name and span.numel:
            inner = range(span.start // block * block + block, span.end, block)
            found += list(itertools.pairwise([span.start, *inner, span.end]))
    return found


@settings(deadline=None)
@given(
    name=st.sampled_from(NAMES),
    block=st.sampled_from([32, 64, 256]),
    n=st.integers(0, 700),
    special=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_sent_and_what_remains_is_what_was_given(
    name: str, block: int, n: int, special: float, seed: int
) -> None:
    where = layout(n)
    codec = opened(f"{name}(block={block}, minimum=0)", where)
    for step in range(3):
        before, given_values = residual(codec), gradient(where.elements, seed + step, special)
        untouched = given_values.tobytes()
        with np.errstate(over="ignore"):
            wanted = without_padding(where, before + given_values)
        payload = codec.encode(0, given_values)
        assert given_values.tobytes() == untouched
        assert len(payload) == payload.nbytes <= codec.max_encoded_nbytes(where.elements)
        sent, after = decoded(codec, payload, 0, where.elements), residual(codec)
        if not np.isfinite(wanted).all():
            break  # the largest numbers were added up; what is not finite has a test of its own
        assert (after == wanted - sent).all()
        exact = sent.astype(np.float64) + after - wanted
        assert (np.abs(exact) <= np.spacing(np.abs(after)) / 2).all()
        for low, high in blocks(where, block):
            part = wanted[low:high].astype(np.float64)
            if name in ("int8", "int4"):
                step_size = max(np.abs(part).max() / (127 if name == "int8" else 7), 2.0**-126)
                assert (np.abs(sent[low:high] - part) <= step_size * (1.01 if name == "int8" else 0.51)).all()
            elif name == "int2":
                step_size = 1.25 * np.abs(part).mean()
                within = np.abs(part) <= 2 * step_size
                most = max(0.51 * step_size, 2.0**-126)
                assert (np.abs(sent[low:high] - part)[within] <= most).all()
                assert (np.abs(sent[low:high] - part) <= np.abs(part) + most).all()
            else:
                assert np.array_equal(np.signbit(sent[low:high]), np.signbit(part))
                assert np.abs(sent[low:high]) == pytest.approx(np.abs(part).mean(), rel=1e-6, abs=2.0**-149)
        assert sent[where.tensors[1].start : where.tensors[1].end].tobytes() == (
            wanted[where.tensors[1].start : where.tensors[1].end].tobytes()
        )


@BY_NAME
def test_payloads_are_those_of_the_reference(name: str) -> None:
    n, block = 1000, 64
    text = f"{name}(block=64, minimum=0)" if name == "onebit" else f"{name}(block=64, minimum=0, seed=5)"
    codec = opened(text, Layout(F32, n))
    codec.node = 3
    values = gradient(n, 1)
    payload = codec.encode(0, values)
    if name == "onebit":
        expected, left, _ = reference.onebit(values, block, 0)
    else:
        bits, nearest = key(5, 1, 3, 0), name != "int8"
        drawn = bits >> 32, bits & 0xFFFFFFFF
        expected, left, _ = reference.integers(BITS[name], values, block, 0, 0, *drawn, nearest)
    assert bytes(payload) == expected
    assert residual(codec).tobytes() == left.tobytes()


@BY_NAME
@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 20), max_size=4), n=st.integers(0, 600), seed=st.integers(0, 2**32 - 1))
def test_any_division_at_blocks_gives_the_same_result(name: str, cuts: list[int], n: int, seed: int) -> None:
    where = layout(n)
    text = f"{name}(block=32, minimum=0)"
    whole, parts = opened(text, where), opened(text, where)
    edges = sorted({0, where.elements, *(min(32 * cut, where.elements) for cut in cuts)})
    for step in range(2):
        values = gradient(where.elements, seed + step)
        expected = decoded(whole, whole.encode(0, values), 0, where.elements)
        for low, high in itertools.pairwise(edges):
            payload = parts.encode(low, values[low:high])
            assert payload.nbytes <= parts.max_encoded_nbytes(high - low)
            assert decoded(parts, payload, low, high).tobytes() == expected[low:high].tobytes()
        assert residual(parts).tobytes() == residual(whole).tobytes()


@BY_NAME
@for_each(("low", "high"), [(0, 7), (3, 250), (101, 102), (140, 505), (505, 505)])
def test_any_range_is_encoded_by_itself(name: str, low: int, high: int) -> None:
    where = layout(500)
    codec = opened(f"{name}(block=32, minimum=0)", where)
    values = gradient(where.elements, 1)
    sent = decoded(codec, codec.encode(low, values[low:high]), low, high)
    left = residual(codec)
    wanted = without_padding(where, values)
    assert sent + left[low:high] == pytest.approx(wanted[low:high], rel=1e-6, abs=1e-6 * float(np.abs(values).max()))
    left[low:high] = 0
    assert not left.any()


@BY_NAME
@for_each("n", [0, 1, 2])
@for_each("minimum", [0, 100])
def test_buckets_of_hardly_any_elements(name: str, n: int, minimum: int) -> None:
    codec = opened(f"{name}(minimum={minimum})", Layout(F32, n))
    for step in range(4):
        values = np.full(n, 8.0 + step, np.float32)
        payload = codec.encode(0, values)
        assert payload.nbytes == (0 if n == 0 else 4 * n if minimum else 4 + (n if name == "int8" else 1))
        if minimum or name != "int2":  # which leaves something of a block of equal numbers
            assert decoded(codec, payload, 0, n) == pytest.approx(values, rel=0.01)
    assert codec.residual_norm() >= 0
    assert codec.step == 4


@for_each("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_a_payload_nan_and_leaves_the_residual_as_it_was(bad: float) -> None:
    where = Layout(F32, 200, (Span("weight", 0, 128), Span("bias", 128, 8)))
    values = gradient(200, 1)
    values[[70, 130]] = bad
    values[150] = np.nan  # padding
    for name in NAMES:
        for momentum in (0, 0.9):
            codec = opened(f"{name}(block=32, minimum=0, momentum={momentum}, decay=0.9)", where)
            codec.encode(0, gradient(200, 2))
            before = codec.state_dict()
            sent = decoded(codec, codec.encode(0, values), 0, 200)
            assert np.isnan(sent[:136]).all()
            after = codec.state_dict()
            for memory in sorted(before.keys() - {"step"}):
                assert np.allclose(after[memory], before[memory], rtol=0, atol=2e-6), memory
            assert np.isfinite(decoded(codec, codec.encode(0, np.zeros(200, np.float32)), 0, 200)).all()


@BY_NAME
def test_without_feedback_nothing_is_kept(name: str) -> None:
    codec = opened(f"{name}(feedback=False, minimum=0)", layout(300))
    with_feedback = opened(f"{name}(minimum=0)", layout(300))
    values = gradient(305, 1)
    assert bytes(codec.encode(0, values)) == bytes(with_feedback.encode(0, values))
    assert codec.residual_norm() == 0
    assert with_feedback.residual_norm() > 0
    portion = codec.contribute(values)
    codec.conclude(codec.add(portion, portion), 2)
    codec.reclaim(portion)
    assert codec.residual_norm() == 0


@BY_NAME
@for_each("momentum", [0.0, 0.9])
def test_what_waits_decays_before_a_gradient_is_added(name: str, momentum: float) -> None:
    where = layout(300)
    codec = opened(f"{name}(minimum=0, decay=0.75, momentum={momentum})", where)
    velocity: Array | None = np.zeros(305, np.float32) if momentum else None
    for step in range(4):
        values, before = gradient(305, step), residual(codec)
        total, velocity = reference.added(before, values, velocity, momentum, False, 1.0, 0.75)
        portion = codec.contribute(values)
        sent = decoded(codec, codec.pack(portion, 0, 305), 0, 305)
        assert (residual(codec) == without_padding(where, total) - sent).all()
    before, values = residual(codec), gradient(305, 9)
    codec.undo(codec.contribute(values), values)
    assert residual(codec) == pytest.approx(before, abs=1e-5 * float(np.abs(np.concatenate([before, values])).max()))


@BY_NAME
@for_each("nesterov", [False, True])
def test_momentum_is_that_of_the_reference(name: str, nesterov: bool) -> None:
    where = layout(300)
    codec = opened(f"{name}(minimum=0, momentum=0.9, nesterov={nesterov})", where)
    velocity: Array | None = np.zeros(305, np.float32)
    for step in range(3):
        values = gradient(305, step)
        total, velocity = reference.added(residual(codec), values, velocity, 0.9, nesterov, 1.0)
        sent = decoded(codec, codec.encode(0, values), 0, 305)
        assert (residual(codec) == without_padding(where, total) - sent).all()


@for_each("text", ["int8(minimum=0)", "int4(minimum=0)", "int4(minimum=0, rounding='random')",
                                  "int2(minimum=0)", "int2(minimum=0, rounding='random')",
                                  "int2(minimum=0, decay=0.9)", "onebit(block=64, minimum=0)"])  # fmt: skip
def test_with_feedback_descent_on_a_quadratic_converges(text: str) -> None:
    n, steps = 256, 600
    rng = np.random.default_rng(1)
    optimum, curvature = rng.standard_normal(n), rng.uniform(0.1, 1, n)
    codecs = [opened(text, Layout(F32, n)) for _ in range(2)]
    for node, codec in enumerate(codecs):
        codec.node = node
    x = np.zeros(n)
    for step in range(steps):
        gradients = [curvature * (x - optimum) + 0.3 * (-1) ** node * np.cos(np.arange(n)) for node in range(2)]
        payloads = [c.encode(0, g.astype(np.float32)) for c, g in zip(codecs, gradients, strict=True)]
        sent = [decoded(codecs[0], payload, 0, n) for payload in payloads]
        x -= 0.2 / (1 + step / 50) * (sent[0] + sent[1]) / 2
    assert np.linalg.norm(x - optimum) < 0.05 * np.linalg.norm(optimum)


def test_nodes_and_steps_round_by_draws_of_their_own() -> None:
    payloads = []
    for node, seed in ((0, 0), (1, 0), (0, 1), (0, 0)):
        codec = opened(f"int8(feedback=False, minimum=0, seed={seed})", Layout(F32, 1000))
        codec.node = node
        payloads += [bytes(codec.encode(0, gradient(1000, 1))) for _ in range(2)]
    assert payloads[:2] == payloads[6:], "the same draws in the same case"
    assert len(set(payloads)) == 6


@BY_NAME
@for_each("nodes", [2, 3])
def test_owners_sum_and_nothing_is_lost(name: str, nodes: int) -> None:
    where = layout(20_000)
    elements = where.elements
    codecs = [opened(f"{name}(minimum=0)", where) for _ in range(nodes)]
    bounds = [
        0,
        *(elements * i // nodes // codecs[0].alignment * codecs[0].alignment for i in range(1, nodes)),
        elements,
    ]
    for step in range(3):
        gradients = [gradient(elements, 10 * step + i) for i in range(nodes)]
        before: Array = np.stack([residual(codec) for codec in codecs]).sum(axis=0, dtype=np.float64)
        portions = [codec.contribute(values) for codec, values in zip(codecs, gradients, strict=True)]
        results = [np.full(elements, 7, np.float32) for _ in range(nodes)]
        for owner, (low, high) in enumerate(itertools.pairwise(bounds)):
            total: Any = None
            for codec, portion in zip(codecs, portions, strict=True):
                payload = codec.pack(portion, low, high)
                assert payload.nbytes <= codecs[owner].max_encoded_nbytes(high - low)
                received = codecs[owner].unpack(payload, low, high)
                total = received if total is None else codecs[owner].add(total, received)
            payload = codecs[owner].pack(codecs[owner].conclude(total, nodes), low, high)
            for codec, result in zip(codecs, results, strict=True):
                codec.write(codec.unpack(payload, low, high), [result, result.copy()], 1.0, 1)
        assert len({result.tobytes() for result in results}) == 1
        after = sum(residual(codec).astype(np.float64) for codec in codecs)
        given_values = without_padding(where, before + sum(g.astype(np.float64) for g in gradients))
        size = max(float(np.abs(g).max()) for g in gradients) + float(np.abs(before).max())
        assert results[0] + after == pytest.approx(given_values, rel=1e-5, abs=1e-5 * size)


def signs(values: Array, block: int) -> Array:
    """EF-signSGD's compressor by blocks (Karimireddy et al. 2019, algorithm 1): mean magnitude times sign; float32."""
    parts = [values[at : at + block] for at in range(0, len(values), block)]
    means = [np.float32(np.abs(part).mean(dtype=np.float64)) for part in parts]
    return np.concatenate([np.where(np.signbit(part), -mean, mean) for part, mean in zip(parts, means, strict=True)])


def test_onebit_is_sign_compression_with_error_feedback_as_it_was_published() -> None:
    """Of contributions and of sums, as in DoubleSqueeze (Tang et al. 2019), in plain numpy."""
    block, elements, cut, nodes = 1024, 9000, 4096, 2
    codecs = [opened("onebit(minimum=0)", Layout(F32, elements)) for _ in range(nodes)]
    errors = [np.zeros(elements, np.float32) for _ in range(nodes)]
    for step in range(5):
        gradients = [gradient(elements, 10 * step + i) for i in range(nodes)]
        portions = [codec.contribute(values) for codec, values in zip(codecs, gradients, strict=True)]
        corrected = [error + values for error, values in zip(errors, gradients, strict=True)]
        sent = [signs(values, block) for values in corrected]
        errors = [values - mine for values, mine in zip(corrected, sent, strict=True)]
        for owner, (low, high) in enumerate([(0, cut), (cut, elements)]):
            parts = [
                codecs[owner].unpack(codec.pack(portion, low, high), low, high)
                for codec, portion in zip(codecs, portions, strict=True)
            ]
            result = np.zeros(elements, np.float32)
            total = codecs[owner].add(*parts)
            codecs[owner].write(codecs[owner].conclude(total, nodes), [result], 1.0, 1)
            added = sent[0][low:high] + sent[1][low:high]
            expected = signs(added, block)
            errors[owner][low:high] += added - expected
            assert result[low:high] == pytest.approx(expected, rel=1e-5)
        for codec, error in zip(codecs, errors, strict=True):
            assert residual(codec) == pytest.approx(error, rel=1e-4, abs=1e-5 * float(np.abs(error).max()))


@BY_NAME
@for_each("dtype", ["float32", "float64", "bfloat16"])
def test_sums_are_scaled_divided_and_given_back(name: str, dtype: str) -> None:
    kind = DTYPES[dtype]
    where = layout(600, kind)
    codec = opened(f"{name}(minimum=0)", where)
    values = reference.narrow(kind, gradient(605, 1))
    portion = codec.contribute(values)
    once = np.zeros(605, kind.storage)
    codec.write(portion, [once], 1.0, 1)
    assert once.tobytes() == decoded(codec, codec.pack(portion, 0, 605), 0, 605).tobytes()
    plain = reference.widen(kind, once)
    outputs = [np.zeros(605, kind.storage) for _ in range(2)]
    codec.write(codec.add(portion, codec.add(portion, portion)), outputs, 0.5, 3)
    assert outputs[0].tobytes() == outputs[1].tobytes()
    assert reference.widen(kind, outputs[0]) == pytest.approx(plain / 2, rel=0.01)
    before = residual(codec)
    codec.reclaim(portion)
    assert residual(codec) - before == pytest.approx(plain, rel=0.01, abs=1e-2 * float(np.abs(plain).max()))


def test_the_number_of_threads_changes_nothing(team: Team) -> None:
    n = (1 << 20) + 12_345
    values = gradient(n, 1)
    for text in NAMES:
        results = []
        for workers in (None, team):
            codec = opened(text, Layout(F32, n), workers)
            payload = codec.encode(0, values)
            results.append((bytes(payload), residual(codec).tobytes(), decoded(codec, payload, 0, n).tobytes()))
        assert results[0] == results[1]


@BY_NAME
def test_payloads_that_are_none_are_refused(name: str) -> None:
    where = layout(300)
    codec = opened(f"{name}(block=64, minimum=0)", where)
    payload = bytes(codec.encode(0, gradient(305, 1)))
    for wrong in (b"", payload[:-1], payload + b"\0", payload * 1000, bytes(1 << 20)):
        out = np.full(305, 7, np.float32)
        with pytest.raises(CodecError, match=f"take {len(payload)} bytes in the codec {name}, but a peer sent"):
            codec.decode(0, wrong, out)
        assert (out == 7).all()
    scales = [-1.0, np.inf, -np.inf, -3.0e38 if name == "onebit" else 3.0e38]
    more = {"int8": [np.nan, 0.0, 1e-40], "int4": [np.nan, 0.0, 1e-40], "int2": [1e-40], "onebit": []}
    for scale in scales + more[name]:
        with pytest.raises(CodecError, match=f"a scale that is none of the codec {name}"):
            codec.decode(0, np.float32(scale).tobytes() + payload[4:], np.empty(305, np.float32))


@BY_NAME
@settings(deadline=None)
@given(payload=st.binary(max_size=80), n=st.integers(0, 40), start=st.integers(0, 60))
def test_any_payload_is_decoded_or_a_codec_error(name: str, payload: bytes, n: int, start: int) -> None:
    codec = opened(f"{name}(block=32, minimum=0)", Layout(F32, 100))
    guarded = np.full(n + 2, 7, np.float32)
    padded = (payload * 80)[: codec._records_nbytes(start, start + n)] if payload else b""
    for each in (payload, padded):
        try:
            codec.decode(start, each, guarded[1:-1])
        except CodecError:
            continue
        assert guarded[0] == guarded[-1] == 7


@BY_NAME
def test_a_restored_codec_goes_on_bit_by_bit(name: str) -> None:
    where = layout(3000)
    text = f"{name}(minimum=0, momentum=0.9, decay=0.9)"
    codec, other = opened(text, where), opened(text, where)
    for step in range(3):
        codec.encode(0, gradient(3005, step))
    state = codec.state_dict()
    following = [bytes(codec.encode(0, gradient(3005, 10 + step))) for step in range(3)]
    other.encode(0, gradient(3005, 99))
    other.load_state_dict(state)
    assert [bytes(other.encode(0, gradient(3005, 10 + step))) for step in range(3)] == following
    with pytest.raises(CodecError, match="is in one of them only"):
        other.load_state_dict({**state, "residual/c": np.zeros(1, np.float32)})
    moved = opened(text, Layout(F32, 4000, (Span("new", 0, 10), Span("a.weight", 10, 1000))))
    moved.load_state_dict(state, partial=True)
    assert moved.state_dict()["residual/a.weight"].tobytes() == state["residual/a.weight"].tobytes()
    assert moved.step == 3


@BY_NAME
def test_a_part_that_is_none_of_the_bucket_is_refused(name: str) -> None:
    codec = opened(name, layout(300))
    for start, values in ((300, gradient(10, 1)), (-1, gradient(10, 1)), (0, np.zeros(10)), (0, np.zeros((2, 5)))):
        with pytest.raises(ValueError, match="is no part of a bucket of 305 elements"):
            codec.encode(start, values)
    with pytest.raises(ValueError, match="is not a whole bucket"):
        codec.contribute(gradient(10, 1))
    assert codec.step == 0


@BY_NAME
def test_a_quantising_codec_says_what_it_is_and_what_it_costs(name: str) -> None:
    codec = parse(f"{name}(block=512, exclude='')")
    assert (codec.stateful, codec.selecting, codec.lossless) == (True, False, False)
    assert parse(str(codec)) == codec
    assert str(parse(f"{name}()")) == name
    with pytest.raises(CodecError, match="for floating types, not for int32"):
        codec.open(Layout(DTYPES["int32"], 10))
    bucket = opened(f"{name}(block=512)", layout(30_000))
    assert bucket.wanted() == 30_000
    bits = BITS[name]
    weights = bucket.weights()
    assert [weight for _, _, weight in weights] == pytest.approx([bits / 32 + 1 / 512, 1.0, bits / 32 + 1 / 512])
    expected = sum((high - low) * weight * 4 for low, high, weight in weights)
    payload = bucket.encode(0, gradient(30_005, 1))
    assert payload.nbytes == pytest.approx(expected, rel=0.01)
    bucket.contribute(gradient(30_005, 1))
    bucket.note_sent(10, 40)
    told = bucket.statistics()
    assert told.pop("seconds") > 0
    assert told == {"steps": 2, "packed_nbytes": 10, "dense_nbytes": 40, "elements": 30_000, "encoded": 27_000}


@for_each(
    ("text", "said"),
    [
        ("int8(block=100)", "a block of the codec int8 is a power of two from 32 to 4096, not 100"),
        ("onebit(block=16)", "a power of two from 32 to 4096, not 16"),
        ("onebit(block=8192)", "a power of two from 32 to 4096, not 8192"),
        ("int8(block=-32)", "a power of two from 32 to 4096, not -32"),
        ("int8(seed=-1)", "seed of the codec int8 is from 0"),
        ("onebit(seed=1)", "onebit has no argument 'seed'"),
        ("onebit(momentum=1.0)", "momentum of the codec onebit is from 0 to below 1, not 1.0"),
        ("int8(nesterov=True)", r"nesterov needs a momentum; write int8\(momentum=0.9"),
        (
            "int4(decay=0.0)",
            "decay of the codec int4 is the share of the residual that a step keeps, above 0 and at most 1, not 0.0",
        ),
        ("onebit(decay=1.5)", "above 0 and at most 1, not 1.5"),
        ("int2(rounding='up')", 'the codec int2 rounds to "nearest" or at "random", not \'up\''),
        ("int8(minimum=-1)", "minimum is a number of elements from 0 on, not -1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_a_sentence(text: str, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        parse(text)
