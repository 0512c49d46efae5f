"""Mixing graphs: their weights, how fast they average, what is read from a file, and what suits which algorithm."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt.core.mixing import (
    GRAPHS,
    MAX_RANKS,
    Mixing,
    MixingError,
    check_dpsgd,
    check_pairwise,
    check_push_sum,
    parse,
)
from tests.for_each import for_each

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@st.composite
def mixings(draw: st.DrawFn) -> Mixing:
    """Any graph with a number of ranks for which it exists."""
    name = draw(st.sampled_from(sorted(GRAPHS)))
    if name == "hypercube":
        ranks = 2 ** draw(st.integers(0, 5))
    elif name == "torus":
        ranks = draw(st.integers(1, 40).filter(lambda n: n not in PRIMES))
    else:
        ranks = draw(st.integers(1, 40))
    return parse(name, ranks)


@given(mixing=mixings())
def test_every_graph_of_ours_keeps_the_mean_and_leaves_agreement_alone(mixing: Mixing) -> None:
    for clock in range(mixing.period):
        weights = mixing.matrix(clock)
        assert weights.shape == (mixing.ranks, mixing.ranks)
        assert weights.dtype == np.float64
        assert weights.min() >= 0
        np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
        assert np.diag(weights).min() > 0
    assert mixing.row_stochastic
    assert mixing.column_stochastic
    assert mixing.doubly_stochastic
    check_dpsgd(mixing)
    check_push_sum(mixing)


@given(mixing=mixings(), clock=st.integers(0, 1000))
def test_what_ranks_take_and_give_is_the_matrix(mixing: Mixing, clock: int) -> None:
    taken, given_away = np.zeros((2, mixing.ranks, mixing.ranks))
    for rank in range(mixing.ranks):
        taken[rank, rank] = given_away[rank, rank] = mixing.own(rank, clock)
        for sender, weight in mixing.incoming(rank, clock):
            taken[rank, sender] = weight
        for receiver, weight in mixing.outgoing(rank, clock):
            given_away[receiver, rank] = weight
        assert rank not in dict(mixing.incoming(rank, clock))
        assert rank not in dict(mixing.outgoing(rank, clock))
    np.testing.assert_array_equal(taken, mixing.matrix(clock))
    np.testing.assert_array_equal(given_away, mixing.matrix(clock))
    np.testing.assert_array_equal(mixing.matrix(clock + mixing.period), mixing.matrix(clock))


@settings(deadline=None)  # a matrix to a high power is slow the first time
@given(mixing=mixings())
def test_the_spectral_gap_is_the_rate_at_which_ranks_come_to_agree(mixing: Mixing) -> None:
    """All our matrices are normal, so that a step takes off the gap's part of the farthest start, and not only in the
    long run. The reference is the largest part of any distance that 12 periods leave."""
    period = np.eye(mixing.ranks)
    for clock in range(mixing.period):
        period = mixing.matrix(clock) @ period
    left = np.linalg.matrix_power(period - 1 / mixing.ranks, 12) if mixing.ranks > 1 else np.zeros((1, 1))
    expected = (1 - mixing.spectral_gap()) ** (12 * mixing.period)
    assert np.linalg.norm(left, 2) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@for_each(("ranks", "ring", "exponential"), [(8, 0.195, 0.5), (16, 0.051, 0.4), (64, 0.0032, 0.286)])
def test_spectral_gaps_of_ring_and_exponential_graphs(ranks: int, ring: float, exponential: float) -> None:
    """Published numbers; the exponential graph's is 2 / (1 + log2 n), the ring's 2/3 (1 - cos(2 pi / n))."""
    assert parse("ring", ranks).spectral_gap() == pytest.approx(ring, abs=5e-4 if ring > 0.01 else 5e-5)
    assert parse("exponential", ranks).spectral_gap() == pytest.approx(exponential, abs=5e-4)
    assert parse("ring", ranks).spectral_gap() == pytest.approx(2 / 3 * (1 - math.cos(2 * math.pi / ranks)))
    assert parse("exponential", ranks).spectral_gap() == pytest.approx(2 / (1 + math.log2(ranks)))


@for_each("exponent", range(1, 8))
def test_one_peer_exponential_averages_exactly_in_log2_of_two_to_the_k_steps(exponent: int) -> None:
    ranks = 2**exponent
    mixing = parse("one-peer-exponential", ranks)
    values = np.random.default_rng(1).integers(-1000, 1000, ranks).astype(float)  # sums of these are exact
    mean = values.mean()
    for clock in range(5, 5 + exponent):  # from any clock on
        assert not np.all(values == mean)
        values = mixing.matrix(clock) @ values
    assert np.all(values == mean)
    assert mixing.period == exponent
    assert mixing.spectral_gap() == 1.0
    assert mixing.note == f"It averages exactly every {exponent} steps."


def test_one_peer_exponential_of_six_ranks_leaves_22_percent() -> None:
    mixing = parse("one-peer-exponential", 6)
    period = mixing.matrix(2) @ mixing.matrix(1) @ mixing.matrix(0)
    left = np.linalg.svd(period - 1 / 6, compute_uv=False)[0]
    assert left == pytest.approx(0.22, abs=5e-3)
    assert mixing.spectral_gap() == pytest.approx(1 - left ** (1 / 3))
    assert "'exponential' may suit better" in mixing.note


def test_who_takes_from_whom() -> None:
    assert parse("ring", 5).incoming(0, 0) == ((1, 1 / 3), (4, 1 / 3))
    assert parse("ring", 2).incoming(0, 7) == ((1, 0.5),)
    assert parse("exponential", 8).incoming(1, 0) == ((0, 0.25), (5, 0.25), (7, 0.25))
    assert parse("exponential", 8).outgoing(1, 0) == ((2, 0.25), (3, 0.25), (5, 0.25))
    one_peer = parse("one-peer-exponential", 6)
    assert [one_peer.incoming(0, clock) for clock in range(4)] == [((5, 0.5),), ((4, 0.5),), ((2, 0.5),), ((5, 0.5),)]
    assert [one_peer.outgoing(0, clock) for clock in range(3)] == [((1, 0.5),), ((2, 0.5),), ((4, 0.5),)]
    assert parse("complete", 4).incoming(2, 0) == ((0, 0.25), (1, 0.25), (3, 0.25))
    assert [sender for sender, _ in parse("hypercube", 8).incoming(5, 0)] == [1, 4, 7]


@for_each("name", sorted(GRAPHS))
def test_one_rank_keeps_what_it_has(name: str) -> None:
    mixing = parse(name, 1)
    assert mixing.matrix(3).tolist() == [[1.0]]
    assert mixing.incoming(0, 0) == mixing.outgoing(0, 0) == ()
    assert mixing.spectral_gap() == 1.0
    check_pairwise(mixing)


def test_a_torus_is_as_square_as_possible_and_joins_ranks_in_sequence() -> None:
    mixing = parse("torus", 12)
    assert mixing.note == "The torus has 3 rows of 4 ranks."
    #  0 1 2 3
    #  7 6 5 4
    #  8 9 10 11
    assert [sender for sender, _ in mixing.incoming(5, 0)] == [2, 4, 6, 10]
    assert [sender for sender, _ in mixing.incoming(0, 0)] == [1, 3, 7, 8]
    assert mixing.own(0, 0) == pytest.approx(1 / 5)
    assert parse("torus", 4).own(0, 0) == pytest.approx(1 / 3)  # above and below is the same rank
    assert parse("torus", 16).bipartite
    assert not parse("torus", 9).bipartite


@for_each("ranks", PRIMES)
def test_a_torus_of_a_prime_number_of_ranks_is_refused(ranks: int) -> None:
    with pytest.raises(MixingError, match=f"since {ranks} is a prime number; use 'ring' or 'exponential'"):
        parse("torus", ranks)


@for_each("ranks", [3, 6, 12, 100])
def test_a_hypercube_needs_a_power_of_two(ranks: int) -> None:
    with pytest.raises(MixingError, match=f"has 2, 4, 8, ... ranks, not {ranks}; use 'exponential'"):
        parse("hypercube", ranks)


@given(ranks=st.integers(2, 40))
def test_bipartite_joins_only_even_with_odd_ranks(ranks: int) -> None:
    mixing = parse("bipartite", ranks)
    assert mixing.bipartite
    assert mixing.symmetric
    assert mixing.doubly_stochastic
    assert all(
        mixing.partners(rank) == tuple(sender for sender, _ in mixing.incoming(rank, 0)) for rank in range(ranks)
    )
    check_pairwise(mixing)
    if ranks % 2 == 0:
        np.testing.assert_allclose(mixing.matrix(0), parse("ring", ranks).matrix(0), atol=1e-12)
    else:
        assert mixing.own(0, 0) == mixing.own(ranks - 1, 0) == pytest.approx(2 / 3)  # Metropolis: ends of a chain
        assert "it is a chain" in mixing.note


def test_symmetry_and_parity_of_graphs() -> None:
    assert parse("ring", 6).symmetric
    assert parse("ring", 6).bipartite
    assert not parse("ring", 5).bipartite
    assert not parse("exponential", 8).symmetric
    assert not parse("one-peer-exponential", 8).symmetric
    assert parse("one-peer-exponential", 2).symmetric
    assert not parse("complete", 4).bipartite


def test_partners_are_neighbours_of_the_other_parity_at_any_clock() -> None:
    assert parse("ring", 5).partners(0) == (1,)
    assert parse("complete", 5).partners(0) == (1, 3)
    assert parse("exponential", 8).partners(0) == (1, 7)
    assert parse("one-peer-exponential", 8).partners(3) == (2, 4)
    assert parse("one-peer-exponential", 5).partners(0) == (1, 3)  # it takes from 4, 3 and 1, and gives to 1, 2 and 4


def test_a_matrix_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        parse("ring", 4).matrix(0)[0, 0] = 1


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    mixing = parse("ring", 4)
    asked: list[Callable[[], object]] = [
        lambda: mixing.incoming(rank, 0),
        lambda: mixing.outgoing(rank, 0),
        lambda: mixing.own(rank, 0),
        lambda: mixing.partners(rank),
    ]
    for ask in asked:
        with pytest.raises(MixingError, match=f"there is no rank {rank} in a mixing graph of 4 ranks"):
            ask()


@for_each(
    ("text", "near"),
    [
        ("rign", "ring"),
        ("Ring", "ring"),
        ("onepeer-exponential", "one-peer-exponential"),
        ("expo", "exponential"),
        ("file", "file:PATH"),
        ("full", "file:PATH"),
        ("hyper-cube", "hypercube"),
    ],
)
def test_an_unknown_graph_is_told_with_the_nearest_name(text: str, near: str) -> None:
    with pytest.raises(MixingError, match=f"there is no mixing graph '{text}'; did you mean '{near}'?"):
        parse(text, 4)


@given(text=st.text(max_size=30), ranks=st.integers(-1, 20))
def test_any_text_is_a_graph_or_a_mixing_error(text: str, ranks: int) -> None:
    with contextlib.suppress(MixingError):
        parse(text, ranks)


@for_each("ranks", [0, -1, MAX_RANKS + 1])
def test_a_number_of_ranks_that_makes_no_sense_is_refused(ranks: int) -> None:
    with pytest.raises(MixingError, match=f"has from 1 to {MAX_RANKS} ranks, not {ranks}"):
        parse("ring", ranks)


def test_spaces_around_a_name_do_not_matter() -> None:
    assert parse(" ring ", 4) == parse("ring", 4)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str | bytes], str]:
    """`file:PATH` of a file with this content."""

    def write(content: str | bytes) -> str:
        path = tmp_path / "weights.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return f"file:{path}"

    return write


def test_a_matrix_from_a_file(written: Callable[[str | bytes], str]) -> None:
    mixing = parse(written("# a chain\n0.5, 0.5, 0\n\n.5\t0.25  2.5e-1 # the middle\n0,0.25,0.75\n"), 3)
    assert mixing.matrix(0).tolist() == [[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0.25, 0.75]]
    assert mixing.period == 1
    assert mixing.incoming(0, 9) == ((1, 0.5),)
    assert mixing.symmetric
    assert mixing.doubly_stochastic
    assert mixing.bipartite
    assert mixing.spectral_gap() == pytest.approx(1 - np.sort(np.abs(np.linalg.eigvals(mixing.matrix(0))))[-2])


def test_six_decimals_are_enough(written: Callable[[str | bytes], str]) -> None:
    """What sums to 1 as far as six decimals say sums to 1 exactly afterwards, rows and columns, and stays symmetric."""
    ring = parse("ring", 7).matrix(0) * (1 + 5e-7 * np.random.default_rng(3).uniform(-1, 1, (7, 7)))
    ring = (ring + ring.T) / 2
    mixing = parse(written("\n".join(" ".join(f"{w:.9f}" for w in row) for row in ring)), 7)
    np.testing.assert_allclose(mixing.matrix(0).sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(mixing.matrix(0).sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(mixing.matrix(0), ring, atol=1e-6)
    assert mixing.symmetric
    assert mixing.doubly_stochastic


WRONG_FILES = {
    "too few rows": ("0.5 0.5 0\n0.5 0.5 0\n", "has 2 rows; write 3, one for each rank"),
    "no row": ("# nothing\n", "has 0 rows; write 3"),
    "a short row": ("0.5 0.5 0\n\n0.5 0.5\n0 0 1\n", r"the row of rank 1 \(line 3\) has 2 weights; write 3"),
    "a word": ("0.5 0.5 0\n0.5 half 0\n0 0 1\n", r"the row of rank 1 \(line 2\) has 'half', which is no number"),
    "not finite": ("0.5 0.5 0\n0.5 nan 0\n0 0 1\n", "in the row of rank 1 the weight for rank 1 is nan"),
    "infinite": ("0.5 0.5 0\n0.5 0.5 1e999\n0 0 1\n", "in the row of rank 1 the weight for rank 2 is inf"),
    "negative": ("0.5 0.5 0\n0.5 0.5 0\n-1 1 1\n", "in the row of rank 2 the weight for rank 0 is -1; write a number"),
    "a sum": ("0.5 0.5 0\n0.5 0.4 0\n0 0.5 0.5\n", "the row of rank 1 sums to 0.9; make every row sum to 1"),
    "nobody takes from 2": ("0.5 0.5 0\n0.5 0.5 0\n0 0.5 0.5\n", "values of rank 2 never come to rank 0; put a weight"),
    "2 takes from nobody": ("0.5 0.5 0\n0.4 0.3 0.3\n0 0 1\n", "values of rank 0 never come to rank 2; in the row of"),
    "in a circle": ("0 1 0\n0 0 1\n1 0 0\n", "values come back to a rank only every 3 steps"),
    "to and fro": ("0 1 0\n.5 0 .5\n0 1 0\n", "values come back to a rank only every 2 steps"),
    "not a text": (b"\xff\xfe0.5", "is not a text"),
    "too large": (b"# " + b"x" * 10_000, r"has 10002 bytes, more than 3 x 3 weights can need \(4456\)"),
}


@pytest.mark.parametrize(("content", "complaint"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_a_wrong_file_is_told_with_its_name_and_what_to_do(
    written: Callable[[str | bytes], str], content: str | bytes, complaint: str
) -> None:
    with pytest.raises(MixingError, match=rf"weights\.txt.*{complaint}") as caught:
        parse(written(content), 3)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MixingError, match="pipe is not a file"):
        parse(f"file:{tmp_path / 'pipe'}", 2)
    with pytest.raises(MixingError, match="is not a file"):
        parse(f"file:{tmp_path}", 2)
    with pytest.raises(MixingError, match=r"nowhere cannot be read \(No such file or directory\)"):
        parse(f"file:{tmp_path / 'nowhere'}", 2)
    with pytest.raises(MixingError, match="cannot be read"):
        parse("file:a\0b", 2)
    with pytest.raises(MixingError, match="'file:' names no file"):
        parse("file:", 2)


def test_dpsgd_refuses_weights_that_would_move_the_mean(written: Callable[[str | bytes], str]) -> None:
    rows_only = parse(written("0.5 0.5\n0.25 0.75\n"), 2)
    assert rows_only.row_stochastic
    assert not rows_only.doubly_stochastic
    with pytest.raises(MixingError, match=r"what rank 0 gives sums to 0\.75 instead of 1 .*column-stochastic"):
        check_dpsgd(rows_only)
    with pytest.raises(MixingError, match=r"push-sum cannot use .*what rank 0 gives sums to 0\.75"):
        check_push_sum(rows_only)


def test_push_sum_takes_what_only_keeps_the_sum(written: Callable[[str | bytes], str]) -> None:
    """Push-sum's x / w then comes to the mean, though the rows do not sum to 1."""
    columns_only = parse(written("0.5 0.25 0\n0.5 0.5 0.5\n0 0.25 0.5\n"), 3)
    check_push_sum(columns_only)
    assert not columns_only.row_stochastic
    with pytest.raises(MixingError, match=r"what rank 1 takes sums to 1\.5 instead of 1 .*row-stochastic"):
        check_dpsgd(columns_only)
    values, weights = np.array([3.0, -1.0, 7.0]), np.ones(3)
    for clock in range(60):
        values, weights = columns_only.matrix(clock) @ values, columns_only.matrix(clock) @ weights
    np.testing.assert_allclose(values / weights, 3.0, rtol=1e-12)
    assert weights.sum() == pytest.approx(3)


def test_pairs_need_partners_of_the_other_parity(written: Callable[[str | bytes], str]) -> None:
    """Ranks 0 - 2 - 1 - 3: rank 0 knows another even one only."""
    chain = parse(written("0.5 0 0.5 0\n0 0.25 0.5 0.25\n0.5 0.5 0 0\n0 0.25 0 0.75\n"), 4)
    with pytest.raises(MixingError, match="rank 0 has no neighbour that is odd; use 'bipartite', or 'ring'"):
        check_pairwise(chain)


def test_pairs_have_to_connect_all_ranks() -> None:
    """In a hypercube only one of the bits changes the parity."""
    assert parse("hypercube", 8).partners(0) == (1,)
    with pytest.raises(MixingError, match=r"by such pairs .* nothing comes from rank 0 to rank 2"):
        check_pairwise(parse("hypercube", 8))


@for_each("name", ["ring", "torus", "exponential", "one-peer-exponential", "complete", "bipartite"])
@for_each("ranks", [4, 6, 9, 12, 15, 16])
def test_averaging_pairs_alone_brings_all_ranks_to_the_mean(name: str, ranks: int) -> None:
    mixing = parse(name, ranks)
    check_pairwise(mixing)
    random = np.random.default_rng(ranks)
    values = random.normal(size=ranks)
    mean = values.mean()
    for _ in range(200 * ranks):
        active = int(random.choice(np.arange(1, ranks, 2)))
        passive = int(random.choice(mixing.partners(active)))
        assert passive % 2 == 0
        values[[active, passive]] = values[[active, passive]].mean()
    np.testing.assert_allclose(values.mean(), mean, rtol=1e-12)
    np.testing.assert_allclose(values, mean, atol=0.01)  # a chain of 15 is slow; ranks apart would differ by 0.1 to 1
