"""`powersgd` on some nodes in one process, against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.codecs import CodecError, Layout, Span, parse
from fusion_rt.codecs.powersgd import PowerSGD, PowerSGDBucket
from fusion_rt.core.dtypes import DTYPES, DType
from fusion_rt.kernels import low_rank
from fusion_rt.kernels.team import Team
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

F32 = DTYPES["float32"]
SHAPES = {"a.weight": (40, 30), "a.bias": (40,), "conv.weight": (16, 8, 3, 3), "thin.weight": (3, 50), "unknown": ()}


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    low_rank.prepare()


def layout(shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: DType = F32) -> Layout:
    """Tensors with padding between them; those without a shape have 20 elements."""
    spans, start = [], 0
    for name, shape in shapes.items():
        numel = int(np.prod(shape)) if shape else 20
        spans.append(Span(name, start, numel, shape))
        start += numel + 3
    return Layout(dtype, start, tuple(spans))


def opened(text: str, where: Layout, nodes: int = 1) -> list[PowerSGDBucket]:
    codec = parse(text)
    assert isinstance(codec, PowerSGD)
    return [codec.open(where) for _ in range(nodes)]


def residual(codec: PowerSGDBucket) -> Array:
    state, whole = codec.state_dict(), np.zeros(codec.layout.elements, np.float32)
    for span in codec.layout.spans:
        whole[span.start : span.end] = state[f"residual/{span.name}"]
    return whole


def without_padding(where: Layout, values: Array) -> Array:
    kept = np.zeros_like(values)
    for span in where.spans:
        kept[span.start : span.end] = values[span.start : span.end]
    return kept


def gradient(where: Layout, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(where.elements, dtype=np.float32)


def of_rank(where: Layout, rank: int, seed: int) -> Array:
    """Matrices of this rank, in the tensors that have two dimensions or more."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(where.elements, dtype=np.float32)
    for span in where.spans:
        if len(span.shape) > 1:
            rows = span.shape[0]
            left, right = rng.standard_normal((rows, rank)), rng.standard_normal((rank, span.numel // rows))
            values[span.start : span.end] = (left @ right).ravel()
    return values


def summed(arrays: list[Array]) -> Array:
    return np.sum(np.stack(arrays), axis=0, dtype=np.float32)


def step_of(codecs: list[PowerSGDBucket], gradients: list[Array]) -> list[Array]:
    """What each node gets; sums are made as a collective would."""
    pairs = list(zip(codecs, gradients, strict=True))
    first = summed([codec.start(values) for codec, values in pairs])
    assert first.shape == (codecs[0].first_elements,)
    second = summed([codec.second(first) for codec in codecs])
    assert second.shape == (codecs[0].second_elements,)
    outputs = [np.full(codec.layout.elements, 7, codec.layout.dtype.storage) for codec in codecs]
    for codec, output in zip(codecs, outputs, strict=True):
        codec.finish(second, [output])
    return outputs


def factors(codec: PowerSGDBucket) -> dict[str, Array]:
    return {key[7:]: value for key, value in codec.state_dict().items() if key.startswith("factor/")}


def test_large_matrices_are_approximated_and_the_rest_travels_whole() -> None:
    where = layout()
    (codec,) = opened("powersgd(rank=2, minimum=0)", where)
    assert {name: value.shape for name, value in factors(codec).items()} == {
        "a.weight": (2, 30),
        "conv.weight": (2, 72),
    }
    whole = 40 + 150 + 20
    assert (codec.first_elements, codec.second_elements) == (2 * (40 + 16) + whole, 2 * (30 + 72))
    assert codec.dense.size == whole
    (codec,) = opened("powersgd(rank=2, minimum=1200, exclude='a.*')", where)
    assert not factors(codec)
    assert (codec.first_elements, codec.second_elements) == (codec.dense.size, 0)
    assert codec.dense.size == sum(span.numel for span in where.spans)
    (codec,) = opened("powersgd(rank=4, minimum=0)", where)
    assert set(factors(codec)) == {"a.weight", "conv.weight"}
    (codec,) = opened("powersgd(rank=9, minimum=0)", where)
    assert not factors(codec), "no factors that would be hardly smaller"


@for_each("nodes", [1, 2, 3, 4])
def test_results_and_residuals_are_those_of_numpy(nodes: int) -> None:
    where = layout()
    codecs = opened("powersgd(rank=2, minimum=0)", where, nodes)
    left_over = [np.zeros(where.elements) for _ in range(nodes)]
    start: dict[str, Array] = {}
    for step in range(4):
        gradients = [gradient(where, 10 * step + node) for node in range(nodes)]
        results = step_of(codecs, gradients)
        assert len({result.tobytes() for result in results}) == 1
        given_values = [r + without_padding(where, g) for r, g in zip(left_over, gradients, strict=True)]
        expected, left_over = sum(given_values), [np.zeros(where.elements) for _ in range(nodes)]
        for span in where.spans:
            if span.name not in factors(codecs[0]):
                continue
            matrices = [values[span.start : span.end].reshape(span.shape[0], -1) for values in given_values]
            if step == 0:  # the random factors of the first step are the codec's own affair
                left = np.linalg.svd(results[0][span.start : span.end].reshape(span.shape[0], -1))[0][:, :2]
            else:
                left = np.linalg.qr(sum(matrices) @ start[span.name])[0]
            right = [matrix.T @ left for matrix in matrices]
            start[span.name] = sum(right)
            expected[span.start : span.end] = (left @ sum(right).T).ravel()
            for node in range(nodes):
                left_over[node][span.start : span.end] = (matrices[node] - left @ right[node].T).ravel()
        assert results[0] == pytest.approx(expected, abs=1e-3)
        for node in range(nodes):
            assert residual(codecs[node]) == pytest.approx(left_over[node], abs=1e-3)
    q = [factors(codec) for codec in codecs]
    assert all(each[name].tobytes() == q[0][name].tobytes() for each in q for name in each)


@for_each("nodes", [1, 3])
@for_each("rank", [1, 3])
def test_a_sum_of_small_enough_rank_arrives_exactly(nodes: int, rank: int) -> None:
    where = layout()
    codecs = opened("powersgd(rank=3, minimum=0)", where, nodes)
    for step in range(3):
        whole = of_rank(where, rank, step)
        shares = [gradient(where, 100 + node) for node in range(nodes - 1)]
        shares.append(whole - summed([np.zeros_like(whole), *shares]))
        if step:  # what is left on the nodes adds up to nothing but rounding
            assert sum(residual(codec) for codec in codecs) == pytest.approx(0, abs=2e-3)
        (result, *_) = step_of(codecs, shares)
        assert result == pytest.approx(without_padding(where, whole), abs=2e-3)


def test_over_steps_the_warm_start_finds_the_largest_directions() -> None:
    where = layout({"weight": (60, 50)})
    rng = np.random.default_rng(1)
    left, right = np.linalg.qr(rng.standard_normal((60, 50)))[0], np.linalg.qr(rng.standard_normal((50, 50)))[0]
    sizes = 2.0 ** -np.arange(50)
    values = np.zeros(where.elements, np.float32)
    values[:3000] = (left * sizes @ right.T).ravel()
    best = np.linalg.norm(sizes[2:])
    errors = {}
    for warm in (True, False):
        (codec,) = opened(f"powersgd(rank=2, minimum=0, feedback=False, warm_start={warm})", where)
        for _ in range(8):
            (result,) = step_of([codec], [values])
        errors[warm] = np.linalg.norm(result - values)
        assert codec.residual_norm() == 0
    assert errors[True] < 1.001 * best < 1.05 * best < errors[False]


@settings(deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 40)) | st.tuples(st.integers(0, 60)) | st.just(()), max_size=4
    ),
    rank=st.integers(1, 4),
    nodes=st.integers(1, 3),
    kind=st.sampled_from(["ordinary", "zeros", "negative zeros", "denormal", "huge", "ties", "sparse"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_nothing_is_lost_whatever_the_shapes_and_numbers(
    shapes: list[tuple[int, ...]], rank: int, nodes: int, kind: str, seed: int
) -> None:
    where = layout({str(i): shape for i, shape in enumerate(shapes)})
    codecs = opened(f"powersgd(rank={rank}, minimum=0)", where, nodes)
    for step in range(3):
        gradients = []
        for node in range(nodes):
            values = gradient(where, seed + 10 * step + node)
            gradients.append({
                "ordinary": values, "zeros": np.zeros_like(values), "negative zeros": np.full_like(values, -0.0),
                "denormal": values * np.float32(1e-40), "huge": values * np.float32(1e30),
                "ties": np.sign(values), "sparse": np.where(values > 2, values, np.float32(0)),
            }[kind])  # fmt: skip
        before = [residual(codec).astype(np.float64) for codec in codecs]
        results = step_of(codecs, gradients)
        assert len({result.tobytes() for result in results}) == 1
        given_values = without_padding(where, sum(before) + sum(g.astype(np.float64) for g in gradients))
        after = sum(residual(codec).astype(np.float64) for codec in codecs)
        size = sum(np.linalg.norm(each) for each in [*before, *(g.astype(np.float64) for g in gradients)])
        assert np.abs(results[0] + after - given_values).max(initial=0) <= 1e-5 * size + 1e-42


def test_with_feedback_descent_on_a_quadratic_converges() -> None:
    where = layout({"weight": (24, 20)})
    rng = np.random.default_rng(1)
    optimum, x = rng.standard_normal(where.elements), np.zeros(where.elements)
    distances = {}
    for feedback in (True, False):
        codecs = opened(f"powersgd(rank=1, minimum=0, feedback={feedback})", where, 2)
        x = np.zeros(where.elements)
        for _ in range(300):
            gradients = [(x - optimum + 0.3 * (-1) ** node).astype(np.float32) for node in range(2)]
            x[:480] -= 0.05 * step_of(codecs, gradients)[0][:480] / 2
        distances[feedback] = np.linalg.norm((x - optimum)[:480])
    assert distances[True] < 0.02 * np.linalg.norm(optimum)
    assert distances[True] < distances[False]


@for_each("bad", [np.nan, np.inf, -np.inf])
def test_a_step_with_what_is_not_finite_is_noticed_by_all_and_undone(bad: float) -> None:
    where = layout()
    codecs = opened("powersgd(rank=2, minimum=0)", where, 2)
    a, bias, conv, *_ = where.spans
    step_of(codecs, [gradient(where, 20 + node) for node in range(2)])
    gradients = [gradient(where, node) for node in range(2)]
    gradients[0][[a.start + 7, bias.start]] = bad
    gradients[1][a.end] = bad  # padding
    before = [residual(codec) for codec in codecs]
    total = summed([codec.start(values) for codec, values in zip(codecs, gradients, strict=True)])
    assert [codec.usable(total) for codec in codecs] == [False, False]
    for codec, values, left in zip(codecs, gradients, before, strict=True):
        codec.undo(values)
        assert np.allclose(residual(codec), left, rtol=0, atol=1e-6)
    for step in range(2):
        result = step_of(codecs, [gradient(where, 10 + step + node) for node in range(2)])[0]
        assert np.isfinite(result).all()
        assert np.linalg.matrix_rank(result[a.start : a.end].reshape(a.shape)) == 2
    assert conv.name in factors(codecs[0])


def test_a_step_that_is_not_finished_has_lost_nothing() -> None:
    where = layout()
    one, other = opened("powersgd(rank=2, minimum=0)", where, 2)
    first, second = gradient(where, 1), gradient(where, 2)
    total = one.start(first)
    assert residual(one).tobytes() == without_padding(where, first).tobytes()
    one.second(total)
    assert residual(one).tobytes() == without_padding(where, first).tobytes()
    with pytest.raises(RuntimeError, match="second was called where a step of powersgd goes on with finish"):
        one.second(total)
    result, expected = step_of([one], [second])[0], step_of([other], [first + second])[0]
    assert result + residual(one) == pytest.approx(expected + residual(other), abs=1e-4)
    with pytest.raises(RuntimeError, match="finish was called where a step of powersgd goes on with start"):
        one.finish(np.zeros(one.second_elements, np.float32), [result])
    one.start(first)
    with pytest.raises(ValueError, match="is given the sum of"):
        one.second(total[:-1])
    with pytest.raises(ValueError, match="is not a whole bucket"):
        one.start(first[:-1])


@for_each("dtype", ["float64", "float16", "bfloat16"])
def test_other_floating_types_go_by_way_of_float32(dtype: str) -> None:
    kind = DTYPES[dtype]
    where = layout(dtype=kind)
    (narrow,), (wide,) = opened("powersgd(minimum=0)", where), opened("powersgd(minimum=0)", layout())
    values = reference.narrow(kind, gradient(where, 1))
    result = step_of([narrow], [values])[0]
    expected = step_of([wide], [reference.widen(kind, values).astype(np.float32)])[0]
    assert result.tobytes() == reference.narrow(kind, expected).tobytes()


def test_results_are_scaled_divided_and_written_to_all_outputs() -> None:
    where = layout()
    one, other = opened("powersgd(minimum=0)", where, 2)
    values = gradient(where, 1)
    expected = step_of([other], [values])[0] * np.float32(0.5) / np.float32(3)
    second = one.second(one.start(values))
    outputs = [values, np.zeros_like(values)]  # in place
    one.finish(second, outputs, 0.5, 3)
    assert outputs[0].tobytes() == outputs[1].tobytes() == expected.tobytes()


def test_the_number_of_threads_changes_nothing() -> None:
    where = layout({"weight": (700, 600), "other": (1000, 300)})
    team = Team(2)
    codec = parse("powersgd(rank=2)")
    assert isinstance(codec, PowerSGD)
    results = []
    for bucket in (codec.open(where), codec.open(where, team)):
        results.append([step_of([bucket], [gradient(where, step)])[0].tobytes() for step in range(2)])
        results[-1].append(residual(bucket).tobytes())
    team.close()
    assert results[0] == results[1]


def test_a_restored_codec_goes_on_bit_by_bit() -> None:
    where = layout()
    codec, other = opened("powersgd(rank=2, minimum=0)", where, 2)
    for step in range(2):
        step_of([codec], [gradient(where, step)])
    state = codec.state_dict()
    assert state["factor/a.weight"].shape == (2, 30)
    following = [step_of([codec], [gradient(where, 10 + step)])[0].tobytes() for step in range(3)]
    step_of([other], [gradient(where, 99)])
    other.load_state_dict(state)
    assert [step_of([other], [gradient(where, 10 + step)])[0].tobytes() for step in range(3)] == following
    with pytest.raises(CodecError, match=r"factor/a\.weight has shape"):
        other.load_state_dict({**state, "factor/a.weight": np.zeros((3, 30), np.float32)})
    with pytest.raises(CodecError, match="is in one of them only"):
        other.load_state_dict({key: value for key, value in state.items() if key != "factor/a.weight"})
    (moved,) = opened("powersgd(rank=2, minimum=0)", layout({"new.weight": (20, 20), "a.weight": (40, 30)}))
    moved.load_state_dict(state, partial=True)
    assert moved.state_dict()["factor/a.weight"].tobytes() == state["factor/a.weight"].tobytes()
    assert moved.state_dict()["residual/a.weight"].tobytes() == state["residual/a.weight"].tobytes()
    assert not moved.state_dict()["factor/new.weight"].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whole_buckets_are_encoded_and_decoded(dtype: str) -> None:
    where = layout(dtype=DTYPES[dtype])
    one, other = opened("powersgd(minimum=0)", where, 2)
    for step in range(2):
        values = reference.narrow(DTYPES[dtype], gradient(where, step))
        payload = one.encode(0, values)
        assert payload.nbytes == one.max_encoded_nbytes(where.elements)
        out = np.full(where.elements, 7, where.dtype.storage)
        (receiver,) = opened("powersgd(minimum=0)", where)
        receiver.decode(0, payload, out)
        assert out.tobytes() == step_of([other], [values])[0].tobytes()
        assert residual(one).tobytes() == residual(other).tobytes()
    for wrong in (b"", bytes(payload)[:-1], bytes(payload) + b"\0", bytes(payload) * 100):
        with pytest.raises(CodecError, match=f"take {payload.nbytes} bytes in the codec powersgd"):
            one.decode(0, wrong, out)
    for start, part in ((3, slice(3, None)), (0, slice(-3)), (3, slice(None))):
        with pytest.raises(CodecError, match="cannot encode parts of a bucket"):
            one.encode(start, values[part])
        with pytest.raises(CodecError, match="cannot decode parts of a bucket"):
            one.decode(start, payload, out[part])


@for_each(
    ("text", "said"),
    [
        ("powersgd(rank=0)", "rank of the codec powersgd is a number of columns from 1 on, not 0"),
        ("powersgd(seed=-1)", "seed of the codec powersgd is from 0"),
        ("powersgd(minimum=-1)", "minimum is a number of elements from 0 on, not -1"),
        ("powersgd(momentum=0.9)", "powersgd has no argument 'momentum'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_a_sentence(text: str, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        parse(text)


def test_powersgd_says_what_it_is() -> None:
    codec = parse("powersgd(rank=1, warm_start=False)")
    assert (codec.stateful, codec.selecting, codec.lossless) == (True, False, False)
    assert parse(str(codec)) == codec
    assert str(parse("powersgd(rank=4)")) == "powersgd"
    with pytest.raises(CodecError, match="for floating types, not for int64"):
        codec.open(layout(dtype=DTYPES["int64"]))
    with pytest.raises(ValueError, match="has not 5 elements"):
        Span("a", 0, 5, (2, 3))
    (bucket,) = opened("powersgd", layout())
    step_of([bucket], [gradient(bucket.layout, 1)])
    bucket.note_sent(10, 40)
    told = bucket.statistics()
    assert told.pop("seconds") > 0
    assert told == {"steps": 1, "packed_nbytes": 10, "dense_nbytes": 40, "elements": 2562, "encoded": 2352}
