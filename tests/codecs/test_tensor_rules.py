"""Which elements are always sent, and how many are selected of the others."""

from __future__ import annotations

import pytest

from fusion_rt.codecs import CodecError, Layout, Span
from fusion_rt.codecs.tensor_rules import TensorRules
from fusion_rt.core.dtypes import DTYPES
from tests.for_each import for_each

LAYOUT = Layout(
    DTYPES["float32"],
    1200,
    (Span("a.weight", 0, 400), Span("a.bias", 400, 100), Span("tiny", 512, 9), Span("b.weight", 528, 600)),
)


def rules(
    density: float = 0.1, scope: str = "bucket", minimum: int = 10, exclude: str = "*bias", densities: str = ""
) -> TensorRules:
    return TensorRules(density, scope, minimum, exclude, densities)


def test_small_and_excluded_tensors_are_always_sent_and_padding_never() -> None:
    assert rules().dense(LAYOUT) == ((400, 500), (512, 521))
    (group,) = rules().groups(LAYOUT)
    assert group.ranges == ((0, 400), (528, 1128))
    assert group.size == 1000


def test_ranges_that_touch_are_one() -> None:
    (group,) = rules(exclude="").groups(LAYOUT)
    assert group.ranges == ((0, 500), (528, 1128))


def test_each_tensor_is_a_group_by_itself_when_asked_for() -> None:
    groups = rules(scope="tensor").groups(LAYOUT)
    assert [(group.name, group.ranges, group.k(0, 0)) for group in groups] == [
        ("a.weight", ((0, 400),), 40),
        ("b.weight", ((528, 1128),), 60),
    ]


def test_tensors_may_have_densities_of_their_own() -> None:
    named = "a.*: 0.5, *: 0.01"
    assert [group.k(0, 0) for group in rules(scope="tensor", densities=named).groups(LAYOUT)] == [200, 6]
    assert [group.k(0, 0) for group in rules(densities=named).groups(LAYOUT)] == [206]


def test_without_tensors_the_bucket_is_one() -> None:
    (group,) = rules().groups(Layout(DTYPES["float32"], 50))
    assert (group.ranges, group.k(0, 0)) == (((0, 50),), 5)
    assert rules().dense(Layout(DTYPES["float32"], 9)) == ((0, 9),)
    assert rules().groups(Layout(DTYPES["float32"], 0)) == rules().dense(Layout(DTYPES["float32"], 0)) == ()


def test_at_least_one_element_is_sent() -> None:
    (group,) = rules(density=1e-9).groups(LAYOUT)
    assert group.k(0, 0) == 1


def test_the_density_falls_from_a_quarter_like_that_of_deep_gradient_compression() -> None:
    (group,) = rules(density=0.001, exclude="*", minimum=0).groups(Layout(DTYPES["float32"], 10**6)) or (None,)
    assert group is None, "excluded by a pattern that fits everything"
    (group,) = rules(density=0.001).groups(Layout(DTYPES["float32"], 10**6))
    assert [group.k(step, 400) for step in (0, 100, 200, 300, 400, 500)] == pytest.approx(
        [250_000, 62_500, 15_625, 4_000, 1_000, 1_000], rel=0.02
    )
    (dense,) = rules(density=0.5).groups(Layout(DTYPES["float32"], 1000))
    assert dense.k(0, 400) == 500


@for_each(
    ("changed", "said"),
    [
        ({"density": 0.0}, "the density is the share of elements that is sent, above 0 and at most 1, not 0.0"),
        ({"density": 1.01}, "above 0 and at most 1, not 1.01"),
        ({"density": float("nan")}, "above 0 and at most 1, not nan"),
        ({"scope": "layer"}, 'by scope "bucket" or "tensor", not \'layer\''),
        ({"minimum": -1}, "from 0 on, not -1"),
        ({"densities": "a.*"}, "written as 'pattern: density, ...', not as 'a.*'"),
        ({"densities": "a.*: 2"}, "the density of 'a.*' is the share"),
    ],
)
def test_what_is_wrong_with_a_rule_is_said(changed: dict[str, object], said: str) -> None:
    with pytest.raises(CodecError) as caught:
        rules(**changed)  # type: ignore[arg-type]
    assert said in str(caught.value)


@for_each(
    "tensors",
    [
        (Span("a", 0, 5), Span("b", 4, 2)),
        (Span("a", 5, 2), Span("b", 0, 2)),
        (Span("a", 0, 11),),
        (Span("a", 0, 2), Span("a", 2, 2)),
    ],
)
def test_tensors_that_do_not_fit_are_no_layout(tensors: tuple[Span, ...]) -> None:
    with pytest.raises(ValueError, match=r"does not fit|same name"):
        Layout(DTYPES["float32"], 10, tensors)
