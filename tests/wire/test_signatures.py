"""Signatures: when ranks agree, and what stands for that."""

from __future__ import annotations

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from fusion_rt import wire

SIGNATURES = st.builds(
    wire.Signature,
    kind=st.sampled_from(get_args(wire.Kind)),
    dtype=st.sampled_from(["float32", "int32"]),
    shape=st.lists(st.integers(0, 2), max_size=2).map(tuple),
    op=st.sampled_from(["sum", "average"]),
    prescale=st.sampled_from([1.0, 0.5]),
    root=st.integers(0, 1),
    codec=st.sampled_from(["dense", "fp16"]),
)


@given(first=SIGNATURES, second=SIGNATURES)
def test_digests_are_equal_exactly_when_ranks_agree(first: wire.Signature, second: wire.Signature) -> None:
    assert (wire.digest(first) == wire.digest(second)) == (first.common() == second.common())
    assert 0 <= wire.digest(first) < 2**63


def test_ranks_may_differ_in_the_rows_of_gathers_only() -> None:
    for kind in get_args(wire.Kind):
        short, long = wire.Signature(kind, "float32", (2, 3)), wire.Signature(kind, "float32", (5, 3))
        narrow = wire.Signature(kind, "float32", (2, 4))
        assert (short.common() == long.common()) == (kind in ("allgather", "alltoall"))
        assert short.common() != narrow.common()
