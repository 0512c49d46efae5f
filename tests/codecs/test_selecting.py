"""Codecs that send some of the elements: what is selected, what is left, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.codecs import CODECS, CodecError, Layout, Span, parse
from fusion_rt.codecs.packing import Selection
from fusion_rt.codecs.selecting import Selecting, SelectingBucketCodec
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import coding, selection
from fusion_rt.kernels.team import Team
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

F32 = DTYPES["float32"]
NAMES = sorted(name for name, codec in CODECS.items() if codec.selecting and name != "demo")  # of elements
BY_MAGNITUDE = [name for name in NAMES if name != "randomk"]
SPECIALS = np.array([0.0, -0.0, 1.0, -1.0, 1.0, 1e-45, -1e-40, 3e37, -3e37, 2**-20], np.float32)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    selection.prepare()
    coding.prepare()


@pytest.fixture(scope="module")
def team() -> Any:
    team = Team(2)
    yield team
    team.close()


def layout(n: int, dtype: DType = F32) -> Layout:
    """Two tensors that are selected from, around one that is always sent, and padding."""
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


def opened(text: str, where: Layout, team: Team | None = None) -> SelectingBucketCodec:
    codec = parse(text)
    assert isinstance(codec, Selecting)
    return codec.open(where) if team is None else codec.open(where, team)


def residual(codec: SelectingBucketCodec) -> Array:
    """As it is saved, with zeros for padding."""
    state, whole = codec.state_dict(), np.zeros(codec.layout.elements, np.float32)
    for span in codec.layout.spans:
        whole[span.start : span.end] = state[f"residual/{span.name}"]
    return whole


def expanded(codec: SelectingBucketCodec, selected: Selection) -> Array:
    out = np.empty(selected.high - selected.low, codec.layout.dtype.storage)
    codec.expand(selected, out)
    return out


def without_padding(where: Layout, values: Array) -> Array:
    kept = np.zeros_like(values)
    for span in where.spans:
        kept[span.start : span.end] = values[span.start : span.end]
    return kept


def gradient(n: int, seed: int, special: float = 0.0) -> Array:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n, dtype=np.float32) * np.float32(10.0 ** rng.integers(-5, 5))
    chosen = rng.random(n) < special
    values[chosen] = rng.choice(SPECIALS, int(chosen.sum()))
    return values


@settings(deadline=None)
@given(
    name=st.sampled_from(NAMES),
    value=st.sampled_from(["fp32", "fp16", "bf16", "int8", "int4"]),
    scope=st.sampled_from(["bucket", "tensor"]),
    decay=st.sampled_from([1.0, 0.75]),
    n=st.integers(0, 300),
    density=st.sampled_from([0.001, 0.1, 0.5, 1.0]),
    special=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_sent_and_what_remains_is_what_was_given(
    name: str, value: str, scope: str, decay: float, n: int, density: float, special: float, seed: int
) -> None:
    where = layout(n)
    codec = opened(f"{name}(density={density}, value='{value}', scope='{scope}', minimum=0, decay={decay})", where)
    for step in range(3):
        before, given_values = residual(codec), gradient(where.elements, seed + step, special)
        wanted = without_padding(where, before * np.float32(decay) + given_values)
        selected = codec.accumulate_and_select(given_values)
        sent, after = expanded(codec, selected), residual(codec)
        assert (sent.astype(np.float64) + after == wanted).all()
        if value == "fp32":
            assert ((sent == 0) | (after == 0)).all()
        assert (np.diff(selected.indices) > 0).all()
        assert codec.sparse.hold(selected.indices)


@settings(deadline=None)
@given(
    scope=st.sampled_from(["bucket", "tensor"]),
    n=st.integers(0, 300),
    density=st.sampled_from([0.001, 0.1, 0.5, 1.0]),
    special=st.sampled_from([0.0, 0.9, 1.0]),
    rule=st.sampled_from(["", ", momentum=0.9", ", momentum=0.9, nesterov=True"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_topk_sends_what_the_reference_selects(
    scope: str, n: int, density: float, special: float, rule: str, seed: int
) -> None:
    where = layout(n)
    codec = opened(f"topk(density={density}, value='fp32', scope='{scope}', minimum=0, masking=False{rule})", where)
    velocity = np.zeros(where.elements, np.float32) if rule else None
    for step in range(3):
        values = gradient(where.elements, seed + step, special)
        with np.errstate(over="ignore", invalid="ignore"):
            total, velocity = reference.added(residual(codec), values, velocity, 0.9, "nesterov" in rule, 1.0)
        selected = codec.accumulate_and_select(values)
        weights = [span for span in where.tensors if "bias" not in span.name and span.numel]
        groups = [[span] for span in weights] if scope == "tensor" else [weights] if weights else []
        expected = []
        for group in groups:
            places = np.concatenate([np.arange(span.start, span.end) for span in group])
            k = max(1, round(sum(density * span.numel for span in group)))
            expected += places[reference.largest(total[places], k)].tolist()
        assert selected.indices.tolist() == sorted(expected)
        assert selected.values.tobytes() == total[selected.indices].tobytes()
        assert selected.dense.tobytes() == codec.dense.gather(total, 0, where.elements).tobytes()


@settings(deadline=None)
@given(
    chunk=st.sampled_from([1, 7, 32, 1000]),
    n=st.integers(0, 300),
    density=st.sampled_from([0.001, 0.1, 0.5, 1.0]),
    special=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_topk_by_chunks_sends_the_largest_of_each_and_at_least_one(
    chunk: int, n: int, density: float, special: float, seed: int
) -> None:
    where = layout(n)
    codec = opened(f"topk(density={density}, value='fp32', chunk={chunk}, minimum=0)", where)
    for step in range(3):
        selected = codec.accumulate_and_select(gradient(where.elements, seed + step, special))
        total = residual(codec) + expanded(codec, selected)
        expected = []
        for span in (span for span in where.tensors if "bias" not in span.name):
            for low in range(span.start, span.end, chunk):
                part = total[low : min(low + chunk, span.end)]
                expected += (low + reference.largest(part, max(1, round(density * len(part))))).tolist()
        assert selected.indices.tolist() == sorted(expected)


@for_each("name", NAMES)
@for_each("n", [0, 1, 2])
@for_each("minimum", [0, 100])
def test_buckets_of_hardly_any_elements(name: str, n: int, minimum: int) -> None:
    codec = opened(f"{name}(minimum={minimum}, value='int8')", Layout(F32, n))
    for step in range(4):
        values = np.full(n, 8.0 + step, np.float32)
        before = residual(codec)
        selected = codec.accumulate_and_select(values)
        assert len(selected) == min(n, 1 if minimum == 0 else n)
        got = codec.unpack(codec.pack(selected, 0, n), 0, n)
        assert (expanded(codec, got) + residual(codec) == before + values).all()
    assert codec.residual_norm() >= 0


def patterns(n: int) -> dict[str, Array]:
    """Data for which a sample is misleading."""
    rng = np.random.default_rng(7)
    ordinary = rng.standard_normal(n, dtype=np.float32)
    few = np.zeros(n, np.float32)
    few[rng.integers(0, n, 50)] = 1
    clustered = ordinary * np.float32(0.01)
    clustered[n // 2 : n // 2 + 3000] *= 1e5
    return {
        "ordinary": ordinary,
        "zeros": np.zeros(n, np.float32),
        "negative zeros": np.full(n, -0.0, np.float32),
        "equal": np.full(n, -3.0, np.float32),
        "two values": rng.choice(np.array([1, 2], np.float32), n),
        "few": few,
        "clustered": clustered,
        "rising": np.linspace(0, 1, n, dtype=np.float32),
        "denormal": (ordinary * np.float32(1e-40)).astype(np.float32),
        "huge": ordinary * np.float32(1e37),
        "heavy": rng.standard_cauchy(n).astype(np.float32) ** 3,
    }


@pytest.mark.parametrize("pattern", patterns(1))
@pytest.mark.parametrize("density", [0.001, 0.02, 0.6])
def test_topk_is_exact_for_any_data_and_number_of_threads(pattern: str, density: float, team: Team) -> None:
    n = 300_000
    values = patterns(n)[pattern]
    where = Layout(F32, n, (Span("a", 0, 70_000), Span("tiny", 70_000, 100), Span("b", 70_112, n - 70_112)))
    for workers in (None, team):
        codec = opened(f"topk(density={density}, value='fp32')", where, workers)
        total = values
        for _ in range(2):
            selected = codec.accumulate_and_select(values)
            places = codec.sparse.all_indices(0, n)
            expected = places[reference.largest(total[places], round(density * len(places)))]
            assert np.array_equal(selected.indices, expected)
            assert selected.values.tobytes() == total[expected].tobytes()
            left = without_padding(where, total)
            left[expected] = 0
            left[70_000:70_100] = 0
            assert np.array_equal(residual(codec), left, equal_nan=True)
            with np.errstate(over="ignore", invalid="ignore"):
                total = left + values


@for_each("name", NAMES)
@for_each("value", ["fp32", "fp16", "bf16", "int8", "int4", "int2"])
def test_what_is_not_finite_makes_a_payload_nan_and_leaves_the_residual_as_it_was(name: str, value: str) -> None:
    n = 50_000
    how = "momentum=0.9, masking=True" if value == "fp32" else "clip=30.0"
    codec = opened(f"{name}(density=0.001, value='{value}', {how})", Layout(F32, n, (Span("w", 0, n),)))
    for seed in range(2):
        codec.encode(0, gradient(n, seed))
    before = codec.state_dict()
    values = gradient(n, 3)
    values[[3, 77, 20_000, 49_999]] = [np.nan, np.inf, -np.inf, np.nan]
    sent = expanded(codec, codec.unpack(codec.encode(0, values), 0, n))
    assert np.isnan(sent).any()
    after = codec.state_dict()
    for key in ("residual/w", "velocity/w"):
        if key in before:
            size = np.abs(values[np.isfinite(values)]).max()
            assert np.allclose(after[key], before[key], rtol=0, atol=1e-6 * size), key
    assert np.isfinite(expanded(codec, codec.unpack(codec.encode(0, gradient(n, 4)), 0, n))).all()


def test_a_state_that_is_not_finite_is_loaded_without_what_is_not() -> None:
    codec = opened("topk(density=0.1, minimum=0)", Layout(F32, 100, (Span("w", 0, 100),)))
    residuals = np.array([np.nan, np.inf, 1.0] + [0.0] * 97, np.float32)
    codec.load_state_dict({"step": np.array(3), "residual/w": residuals})
    assert codec.state_dict()["residual/w"][:3].tolist() == [0, 0, 1]


@for_each("name", NAMES)
@for_each("dtype", ["float64", "float16", "bfloat16"])
def test_other_floating_types_go_by_way_of_float32(name: str, dtype: str) -> None:
    kind = DTYPES[dtype]
    assert parse(name).applies_to(kind)
    values = reference.narrow(kind, gradient(200, 3))
    wide, narrow = (
        opened(f"{name}(minimum=0, value='fp32', density=0.2)", Layout(F32, 200)),
        opened(f"{name}(minimum=0, value='fp32', density=0.2)", Layout(kind, 200)),
    )
    expected = wide.accumulate_and_select(reference.widen(kind, values).astype(np.float32))
    actual = narrow.accumulate_and_select(values)
    assert actual.indices.tolist() == expected.indices.tolist()
    assert actual.values.tobytes() == expected.values.tobytes()
    assert expanded(narrow, actual).tobytes() == reference.narrow(kind, expanded(wide, expected)).tobytes()
    narrow.give_back(0, values)
    assert narrow.residual_norm() > 0


@for_each("name", NAMES)
def test_integers_are_refused(name: str) -> None:
    assert not parse(name).applies_to(DTYPES["int32"])
    with pytest.raises(CodecError, match="for floating types, not for int32"):
        parse(name).open(Layout(DTYPES["int32"], 10))


def test_a_bucket_whose_elements_cannot_be_counted_is_refused() -> None:
    with pytest.raises(CodecError, match="make the fusion threshold smaller"):
        parse("topk").open(Layout(F32, 2**31))


@for_each("name", NAMES)
def test_whole_buckets_are_encoded_and_decoded(name: str) -> None:
    where = layout(300)
    codec = opened(f"{name}(minimum=0, density=0.1)", where)
    payload = codec.encode(0, gradient(where.elements, 1))
    assert payload.nbytes <= codec.max_encoded_nbytes(where.elements)
    out = np.full(where.elements, 7, np.float32)
    opened(f"{name}(minimum=0, density=0.1)", where).decode(0, payload, out)
    assert 0 < np.count_nonzero(out) <= 28 + 30
    with pytest.raises(CodecError, match="encodes whole buckets"):
        codec.encode(5, gradient(10, 1))
    with pytest.raises(ValueError, match="is not a whole bucket of 305 elements"):
        codec.accumulate_and_select(gradient(10, 1))


def test_what_is_given_back_is_in_the_residual() -> None:
    where = layout(300)
    codec = opened("topk(minimum=0, density=0.1, value='fp32')", where)
    values = without_padding(where, gradient(where.elements, 1))
    selected = codec.accumulate_and_select(values)
    codec.give_back_selection(selected)
    assert residual(codec).tobytes() == values.tobytes()
    part = codec.unpack(codec.pack(selected, 90, 250), 90, 250)
    codec.give_back_selection(part)
    twice = values.copy()
    twice[90:250] += expanded(codec, selected)[90:250]
    assert residual(codec).tobytes() == twice.tobytes()
    codec.give_back(200, np.ones(50, np.float32))
    codec.scale_residual([0.5] * len(where.tensors))
    twice[200:250] += 1
    expected = without_padding(where, twice * np.float32(0.5))
    assert residual(codec).tobytes() == expected.tobytes()
    assert codec.residual_norm() == pytest.approx(np.linalg.norm(expected), rel=1e-6)


@for_each("name", NAMES)
def test_a_restored_codec_goes_on_bit_by_bit(name: str) -> None:
    where = layout(30_000)
    text = f"{name}(minimum=0, density=0.01, momentum=0.9, warmup=6)"
    codec, other = opened(text, where), opened(text, where)
    for step in range(4):
        codec.accumulate_and_select(gradient(where.elements, step))
    state = codec.state_dict()
    kept = {key: value.copy() for key, value in state.items()}
    following = [codec.accumulate_and_select(gradient(where.elements, 10 + step)) for step in range(4)]
    assert all(kept[key].tobytes() == state[key].tobytes() for key in kept), "the state is a copy"
    other.accumulate_and_select(gradient(where.elements, 99))
    other.load_state_dict(state)
    for step, expected in enumerate(following):
        actual = other.accumulate_and_select(gradient(where.elements, 10 + step))
        assert actual.indices.tobytes() == expected.indices.tobytes()
        assert actual.values.tobytes() == expected.values.tobytes()
        assert actual.dense.tobytes() == expected.dense.tobytes()
    final, expected_final = other.state_dict(), codec.state_dict()
    assert final.keys() == expected_final.keys()
    assert all(final[key].tobytes() == expected_final[key].tobytes() for key in final)


def test_the_residual_follows_its_tensors_into_other_buckets() -> None:
    where = layout(300)
    codec = opened("thresholdk(minimum=0, momentum=0.5)", where)
    codec.accumulate_and_select(gradient(where.elements, 1))
    state = codec.state_dict()
    a, bias, b = where.tensors
    new = Layout(F32, 400, (Span(b.name, 0, b.numel), Span("new", b.numel, 9), Span(a.name, b.numel + 20, a.numel)))
    moved = opened("thresholdk(minimum=0, momentum=0.5)", new)
    moved.accumulate_and_select(gradient(400, 2))
    moved.load_state_dict(state, partial=True)
    after = moved.state_dict()
    for kind in ("residual", "velocity"):
        for name in (a.name, b.name):
            assert after[f"{kind}/{name}"].tobytes() == state[f"{kind}/{name}"].tobytes()
        assert not after[f"{kind}/new"].any()
    assert moved.step == 1
    assert bias.name not in str(after.keys())


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    codec = opened("topk(minimum=0)", layout(300))
    codec.accumulate_and_select(gradient(305, 1))
    before = codec.state_dict()
    for wrong in (
        {},
        {**before, "residual/c": np.zeros(3, np.float32)},
        {**before, "velocity/a.weight": np.zeros(100, np.float32)},
        {**before, "residual/b.weight": np.zeros(3, np.float32)},
    ):
        with pytest.raises(CodecError, match=r"is in one of them only|has shape"):
            codec.load_state_dict(wrong)
        assert all(value.tobytes() == before[key].tobytes() for key, value in codec.state_dict().items())


def test_the_velocity_of_what_is_sent_starts_again_only_at_low_densities() -> None:
    for density, masking, cleared in ((0.01, True, 10), (0.1, True, 0), (0.01, False, 0)):
        codec = opened(f"topk(density={density}, minimum=0, momentum=0.9, masking={masking})", Layout(F32, 1000))
        codec.accumulate_and_select(gradient(1000, 1))
        assert (codec.state_dict()["velocity/"] == 0).sum() == cleared


def test_what_is_added_is_clipped_and_padding_does_not_count() -> None:
    where = layout(300)
    codec = opened("topk(density=1, value='fp32', clip=2.0, minimum=0)", where)
    codec.nodes = 4
    values = gradient(where.elements, 1)
    norm = float(np.linalg.norm(without_padding(where, values)))
    assert norm > 1
    values[where.tensors[1].end] = 1e30  # padding
    sent = expanded(codec, codec.accumulate_and_select(values))
    assert np.linalg.norm(sent) == pytest.approx(1.0, rel=1e-5)
    small = without_padding(where, values) / np.float32(2 * norm)
    assert expanded(codec, codec.accumulate_and_select(small)).tobytes() == small.tobytes()


def test_statistics_say_how_much_was_asked_sent_and_saved() -> None:
    where = layout(300)
    codec = opened("topk(density=0.1, minimum=0)", where)
    for step in range(3):
        codec.accumulate_and_select(gradient(where.elements, step))
        codec.note_sent(100 + step, 305 * 4)
    told = codec.statistics()
    assert told.pop("seconds") > 0
    assert told == {
        "steps": 3, "asked": 81, "selected": 81, "always": 90, "packed_nbytes": 303, "dense_nbytes": 3 * 305 * 4,
        "elements": 900, "encoded": 810,
    }  # fmt: skip


@for_each(
    ("text", "said"),
    [
        ("topk(density=0.0)", "above 0 and at most 1, not 0.0"),
        ("topk(density=2)", "above 0 and at most 1, not 2.0"),
        ("randomk(density=-1.0)", "above 0 and at most 1, not -1.0"),
        ("topk(value='fp8')", "values are sent as fp32, fp16, bf16, int8, int4, int2, not as 'fp8'"),
        ("topk(index='rle')", "indices are sent as auto, delta, bitmap, raw, not as 'rle'"),
        ("topk(warmup=-1)", "warmup is a number of steps from 0 on, not -1"),
        ("topk(momentum=1.0)", "momentum of the codec topk is from 0 to below 1, not 1.0"),
        ("gaussiank(nesterov=True)", r"nesterov needs a momentum; write gaussiank\(momentum=0.9"),
        ("topk(clip=-1.0)", "clip is an L2 norm, or 0 for none, not -1.0"),
        ("thresholdk(every=0)", "every is a number of steps from 1 on, not 0"),
        ("randomk(seed=-1)", "seed of the codec randomk is from 0"),
        ("randomk(index='raw')", "randomk sends no indices"),
        ("topk(seed=1)", "topk has no argument 'seed'"),
        ("topk(every=1)", "topk has no argument 'every'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_a_sentence(text: str, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        parse(text)


@for_each("name", NAMES)
def test_a_selecting_codec_says_what_it_is(name: str) -> None:
    codec = parse(f"{name}(density=0.25, exclude='*bias')")
    assert (codec.stateful, codec.selecting, codec.lossless) == (True, True, False)
    assert parse(str(codec)) == codec
    assert str(parse(f"{name}()")) == name
