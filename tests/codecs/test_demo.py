"""`demo` against its paper in plain numpy, and what else holds of it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.codecs import CodecError, Layout, Span, parse
from fusion_rt.codecs.demo import DemoBucket
from fusion_rt.core.dtypes import DTYPES
from fusion_rt.kernels.team import Team
from tests.for_each import for_each
from tests.kernels import reference

Array = npt.NDArray[Any]

F32 = DTYPES["float32"]
SHAPES = {"a.weight": (150, 70), "a.bias": (70,), "b.weight": (20, 3, 33), "c": (700,)}


def layout(shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: str = "float32") -> Layout:
    """With padding between tensors and at the end."""
    spans, at = [], 0
    for name, shape in shapes.items():
        spans.append(Span(name, at, int(np.prod(shape)), shape))
        at = spans[-1].end + 5
    return Layout(DTYPES[dtype], at, tuple(spans))


def opened(text: str, where: Layout | None = None, *more: Any) -> DemoBucket:
    return cast(DemoBucket, parse(text).open(where or layout(), *more))


def gradient(seed: int, where: Layout | None = None) -> Array:
    where = where or layout()
    values = np.random.default_rng(seed).standard_normal(where.elements, dtype=np.float32)
    for low, high in ((span.end, span.end + 5) for span in where.tensors):
        values[low:high] = 0
    return values


def matrix_of(span: Span) -> tuple[int, int]:
    return (span.shape[0], span.numel // span.shape[0]) if len(span.shape) > 1 else (1, span.numel)


def summed(codecs: list[DemoBucket], gradients: list[Array], divisor: int = 1) -> Array:
    """A step of all nodes, each of which sends everybody what it has selected (`Gathered`)."""
    total: Any = None
    for codec, values in zip(codecs, gradients, strict=True):
        portion = codec.unpack(codec.pack(codec.contribute(values), 0, len(values)), 0, len(values))
        total = portion if total is None else codec.add(total, portion)
    results = []
    for codec in codecs:
        out = np.full(codec.layout.elements, 7, codec.layout.dtype.storage)
        codec.write(total, [out], 1.0, divisor)
        codec.complete([out], 1.0, divisor)
        results.append(out)
    assert len({result.tobytes() for result in results}) == 1
    return results[0]


class Paper:
    """Algorithm 1 of arXiv 2411.19870 for one tensor on all nodes, in float64; `momenta` as matrices."""

    def __init__(self, rows: int, columns: int, nodes: int, density: float, decay: float, size: int) -> None:
        self.shape, self.density, self.decay, self.size = (rows, columns), density, decay, size
        self.momenta = [np.zeros((rows, columns)) for _ in range(nodes)]

    def step(self, gradients: list[Array]) -> Array:
        shared = np.zeros(self.shape)
        for node, values in enumerate(gradients):
            self.momenta[node] = self.decay * self.momenta[node] + values.reshape(self.shape)
            coefficients, done = reference.cosines(self.momenta[node], self.size), 0
            for low, high in reference._powers(self.shape[0], self.size):
                for first, end in reference._powers(self.shape[1], self.size):
                    tile = coefficients[done : done + (high - low) * (end - first)]
                    k = max(1, round(len(tile) * self.density))
                    tile[np.argsort(-np.abs(tile))[k:]] = 0
                    done += len(tile)
            fast = reference.cosines_back(coefficients, *self.shape, self.size)
            self.momenta[node] -= fast
            shared += fast
        return shared.ravel()


@pytest.mark.parametrize(("nodes", "size", "density", "decay"), [(1, 64, 0.01, 0.999), (3, 16, 0.05, 0.9)])
def test_results_and_momenta_are_those_of_the_paper(nodes: int, size: int, density: float, decay: float) -> None:
    where = layout()
    text = f"demo(density={density}, decay={decay}, chunk={size}, minimum=0, value='fp32')"
    codecs = [opened(text) for _ in range(nodes)]
    papers = {
        span.name: Paper(*matrix_of(span), nodes, density, decay, size)
        for span in where.tensors
        if "bias" not in span.name
    }
    for step in range(5):
        gradients = [gradient(10 * step + node) for node in range(nodes)]
        result = summed(codecs, gradients)
        for span in where.tensors:
            part = slice(span.start, span.end)
            if span.name not in papers:
                expected: Array = np.sum([values[part] for values in gradients], axis=0)
            else:
                expected = papers[span.name].step([values[part].astype(np.float64) for values in gradients])
            assert result[part] == pytest.approx(expected, abs=1e-4), span.name
        assert not result[where.tensors[-1].end :].any()
        for node, codec in enumerate(codecs):
            state = codec.state_dict()
            for name, paper in papers.items():
                assert state[f"residual/{name}"] == pytest.approx(paper.momenta[node].ravel(), abs=1e-4), name
            assert codec.residual_norm() == pytest.approx(
                np.sqrt(sum(np.square(paper.momenta[node]).sum() for paper in papers.values())), rel=1e-4
            )


def test_with_signs_the_result_is_those_of_the_sum_whatever_it_is_divided_by() -> None:
    plain, signed = ([opened(f"demo(minimum=0, value='fp32', signed={on})") for _ in range(2)] for on in (False, True))
    for step in range(3):
        gradients = [gradient(10 * step + node) for node in range(2)]
        assert (summed(signed, gradients, 2) == np.sign(summed(plain, gradients, 2))).all()


@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 80),
    columns=st.integers(1, 80),
    chunk=st.sampled_from([2, 8, 64]),
    density=st.sampled_from([0.001, 0.1, 1.0]),
    value=st.sampled_from(["fp32", "fp16", "int4"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_sent_and_what_remains_is_what_was_given(
    rows: int, columns: int, chunk: int, density: float, value: str, seed: int
) -> None:
    where = layout({"w": (rows, columns)})
    codec = opened(f"demo(density={density}, chunk={chunk}, value='{value}', minimum=0, decay=0.5)", where)
    before = np.zeros(where.elements, np.float32)
    for step in range(3):
        values = gradient(seed + step, where)
        payload, sent = codec.encode(0, values), np.empty(where.elements, np.float32)
        assert payload.nbytes <= codec.max_encoded_nbytes(where.elements)
        codec.decode(0, payload, sent)
        after = np.append(codec.state_dict()["residual/w"], np.zeros(5, np.float32))
        assert sent + after == pytest.approx(0.5 * before + values, abs=1e-4)
        before = after
    assert codec.statistics()["asked"] >= 3 * len(codec._edges[0][1:])


def test_smooth_gradients_need_few_coefficients() -> None:
    """Of a plane and a wave 2 % of the coefficients have nearly all; 2 % of the elements have hardly anything."""
    where = layout({"w": (128, 128)})
    x, y = np.meshgrid(np.arange(128), np.arange(128))
    smooth = np.append((np.sin(x / 20) + y / 64).astype(np.float32).ravel(), np.zeros(5, np.float32))
    kept = {}
    for name in ("demo", "topk"):
        codec, got = parse(f"{name}(density=0.02, minimum=0)").open(where), np.empty(where.elements, np.float32)
        codec.decode(0, codec.encode(0, smooth), got)
        kept[name] = np.square(got).sum() / np.square(smooth).sum()
    assert kept["demo"] > 0.99
    assert kept["topk"] < 0.2


def test_a_restored_codec_goes_on_to_within_rounding_also_in_another_bucket() -> None:
    text = "demo(minimum=0, value='fp32')"
    codec = opened(text)
    for step in range(3):
        codec.encode(0, gradient(step))
    state, values = codec.state_dict(), gradient(9)
    expected = summed([codec], [values])
    same, moved = opened(text), opened(text, layout({"new": (30, 30), "a.weight": SHAPES["a.weight"]}))
    same.load_state_dict(state)
    assert summed([same], [values]) == pytest.approx(expected, abs=1e-4)
    moved.load_state_dict(state, partial=True)
    first, then = layout().tensors[0], moved.layout.tensors[1]
    elsewhere = gradient(5, moved.layout)
    elsewhere[then.start : then.end] = values[first.start : first.end]
    found = summed([moved], [elsewhere])
    assert found[then.start : then.end] == pytest.approx(expected[first.start : first.end], abs=1e-4)
    assert moved.step == 4


def test_what_comes_back_is_in_the_residual_and_a_step_can_be_undone() -> None:
    codec = opened("demo(minimum=0, density=0.05)")
    codec.encode(0, gradient(1))
    before, values = codec.state_dict(), gradient(2)
    codec.undo(codec.contribute(values), values)
    for key, found in codec.state_dict().items():
        if key != "step":
            assert found == pytest.approx(before[key], abs=1e-4), key
    codec.give_back(0, values)
    after = codec.state_dict()
    span = layout().tensors[0]
    assert after["residual/a.weight"] - before["residual/a.weight"] == pytest.approx(
        values[span.start : span.end], abs=1e-4
    )
    codec.scale_residual([0.5, 1.0, 1.0, 1.0])
    assert codec.state_dict()["residual/a.weight"] == pytest.approx(after["residual/a.weight"] / 2, abs=1e-4)
    with pytest.raises(CodecError, match="cannot be given back parts of a bucket"):
        codec.give_back(5, values[5:])


@for_each("dtype", ["float64", "float16", "bfloat16"])
def test_other_floating_types_go_by_way_of_float32(dtype: str) -> None:
    where = layout(dtype=dtype)
    kind = DTYPES[dtype]
    values = reference.narrow(kind, gradient(1))
    narrow = summed([opened("demo(minimum=0)", where)], [values])
    wide = summed([opened("demo(minimum=0)")], [reference.widen(kind, values).astype(np.float32)])
    assert narrow.tobytes() == reference.narrow(kind, wide).tobytes()


def test_the_number_of_threads_changes_nothing() -> None:
    where = layout({"w": (1000, 700)})
    team, results = Team(3), []
    for more in ((), (team,)):
        codec = opened("demo", where, *more)
        payload = codec.encode(0, gradient(1, where))
        results.append((bytes(payload), codec.state_dict()["residual/w"].tobytes()))
    team.close()
    assert results[0] == results[1]


def test_what_a_peer_sends_is_checked() -> None:
    codec = opened("demo(minimum=0)")
    payload, out = bytes(codec.encode(0, gradient(1))), np.empty(layout().elements, np.float32)
    for wrong in (b"", payload[:-1], payload[:8], bytes(1 << 20)):
        with pytest.raises(CodecError, match="a peer sent an invalid selection"):
            codec.decode(0, wrong, out)
    with pytest.raises(CodecError, match="cannot decode parts of a bucket"):
        codec.decode(0, payload, out[:-1])
    with pytest.raises(CodecError, match="workers cannot select for the codec demo"):
        codec.tray()


@for_each(
    ("text", "said"),
    [
        ("demo(momentum=0.9)", r"the momentum of the codec demo is its decay; write demo\(decay=0.999\)"),
        ("demo(scope='tensor')", "selects from each tile by itself; leave out scope"),
        ("demo(chunk=48)", "a power of two from 2 to 64, not 48"),
        ("demo(chunk=128)", "a power of two from 2 to 64, not 128"),
        ("demo(decay=0)", "above 0 and at most 1, not 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_a_sentence(text: str, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        parse(text)
