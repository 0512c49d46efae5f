"""Training algorithms as people choose them: their text, their arguments, and what goes together."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from fusion_rt import algorithms, codecs
from fusion_rt.algorithms import ALGORITHMS, Algorithm, AlgorithmError, Place, Signal, check_use, parse
from fusion_rt.core.errors import MixingError
from tests.for_each import for_each

NOT_DEFAULT: list[Algorithm] = [
    algorithms.AllReduce(),
    algorithms.BSP(),
    algorithms.LocalSGD(steps=4, after=100),
    algorithms.DiLoCo(steps=20, outer_rate=0.5, outer_momentum=0.0),
    algorithms.SparseLoCo(steps=20, density=0.1, decay=0.9),
    algorithms.ASP(aware=True),
    algorithms.SSP(staleness=0, aware=True),
    algorithms.Softsync(contributions=3, aware=False),
    algorithms.DCASGD(variance=2.0, adaptive=True, decay=0.5),
    algorithms.Hogwild(),
    algorithms.Partial(backup=0, deadline=3.5),
    algorithms.Collaborative(samples=7),
    algorithms.EASGD(steps=3, alpha=0.2, synchronous_home=True),
    algorithms.EAWild(steps=3, alpha=0.2),
    algorithms.DPSGD(topology="exponential"),
    algorithms.ADPSGD(topology="bipartite"),
    algorithms.SGP(topology="one-peer-exponential"),
    algorithms.Choco(gamma=0.25, topology="torus"),
    algorithms.NoLoCo(steps=7, consensus=0.75),
    algorithms.Decoupled(steps=7, fragments=3, quorum=2, grace=0.25),
]


def test_every_algorithm_is_in_these_tests() -> None:
    assert {type(algorithm) for algorithm in NOT_DEFAULT} == set(ALGORITHMS.values())


@for_each("algorithm", NOT_DEFAULT)
def test_an_algorithm_is_read_as_it_is_written(algorithm: Algorithm) -> None:
    assert parse(str(algorithm)) == algorithm
    assert str(parse(str(algorithm))) == str(algorithm)
    default = type(algorithm)()
    assert str(default) == algorithm.name
    assert parse(algorithm.name) == default
    assert (algorithm == default) == (not fields(algorithm))


@for_each("algorithm", NOT_DEFAULT)
def test_an_algorithm_fits_into_a_plan(algorithm: Algorithm) -> None:
    assert len(str(algorithm)) < 200
    assert hash(algorithm) == hash(parse(str(algorithm)))


def test_where_homes_are_and_what_is_posted() -> None:
    nowhere = {name for name, kind in ALGORITHMS.items() if kind.place is Place.NOWHERE}
    replicas = {name for name, kind in ALGORITHMS.items() if kind.place is Place.REPLICA}
    assert nowhere == {"allreduce", "local_sgd", "diloco", "sparseloco"}
    assert replicas == {"dpsgd", "adpsgd", "sgp", "choco", "noloco"}
    gradients = {name for name, kind in ALGORITHMS.items() if kind.signal is Signal.GRADIENT}
    assert gradients == {
        "allreduce", "bsp", "asp", "ssp", "softsync", "dc_asgd", "hogwild", "partial", "collaborative",
    }  # fmt: skip
    assert ALGORITHMS["diloco"].signal is ALGORITHMS["decoupled"].signal is Signal.DELTA
    assert ALGORITHMS["noloco"].signal is Signal.CONSENSUS


def test_periods_and_who_overlaps() -> None:
    assert parse("local_sgd(steps=7)").period == 7
    assert parse("diloco").period == 500
    assert parse("easgd(steps=5)").period == 5
    assert parse("asp").period == parse("dpsgd").period == 1
    assert {name for name in ALGORITHMS if parse(name).overlaps} == {
        "easgd", "ea_wild", "dpsgd", "adpsgd", "sgp", "choco", "decoupled",
    }  # fmt: skip
    assert {parse(name).lag for name in ALGORITHMS if parse(name).overlaps} == {1}, "an answer is used one step later"


@pytest.mark.parametrize("text", ["diloco(steps=10, fragments=4)", "decoupled(steps=7, fragments=7)", "easgd(steps=3)"])
def test_each_fragment_is_due_once_in_a_period_and_the_last_one_at_its_end(text: str) -> None:
    spec = parse(text)
    for start in (0, 5 * spec.period):
        due = [spec.due(start + step) for step in range(1, spec.period + 1)]
        assert sorted(piece for pieces in due for piece in pieces) == list(range(spec.pieces))
        assert due[-1] == [spec.pieces - 1]
        assert max(map(len, due)) == 1


def test_after_which_exchanges_all_ranks_are_alike() -> None:
    assert {name for name in ALGORITHMS if parse(name).agrees} == {
        "allreduce", "bsp", "local_sgd", "diloco", "sparseloco",
    }  # fmt: skip
    for arguments in ("fragments=2", "delay=1", "mix=0.5"):
        assert not parse(f"diloco({arguments})").agrees


@for_each(
    ("text", "why"),
    [
        ("spp", "there is no algorithm 'spp'; did you mean 'ssp'?"),
        ("bsp(steps=1)", "the algorithm bsp has no arguments"),
        ("ssp(stale=1)", "has no argument 'stale'; did you mean 'staleness'?"),
        ("ssp(staleness=1.5)", "is of type int"),
        ("ssp 4", "an algorithm is written as"),
        ("ssp(staleness=-1)", "staleness of ssp cannot be -1: it is 0 or more"),
        ("local_sgd(steps=0)", "steps of local_sgd has to be above 0, and 0 is not"),
        ("local_sgd(after=-1)", "after of local_sgd cannot be -1"),
        ("sparseloco(density=2)", "density of sparseloco is a share of at most 1, not 2.0"),
        ("sparseloco(decay=0)", "decay of sparseloco has to be above 0, and 0.0 is not"),
        ("diloco(steps=0)", "steps of diloco has to be above 0"),
        ("diloco(outer_rate=0)", "outer_rate of diloco has to be above 0, and 0.0 is not"),
        ("diloco(steps=3, fragments=4)", "4 fragments do not fit into 3 steps"),
        ("diloco(steps=3, delay=4)", "delay of diloco cannot be above its 3 steps"),
        ("diloco(mix=1)", "mix of diloco is from 0 up to 1, and not 1.0"),
        ("decoupled(delay=0)", "delay of decoupled has to be above 0"),
        ("decoupled(quorum=-1)", "quorum of decoupled cannot be -1"),
        ("noloco(consensus=0.5)", "consensus of noloco has to be between outer_momentum and outer_momentum + 2"),
        ("diloco(outer_momentum=1)", "outer_momentum of diloco is from 0 up to 1, and not 1.0"),
        ("softsync(contributions=0)", "contributions of softsync has to be above 0"),
        ("dc_asgd(variance=-1)", "variance of dc_asgd cannot be -1.0"),
        ("dc_asgd(decay=1)", "decay of dc_asgd is from 0 up to 1"),
        ("partial(backup=-1)", "backup of partial cannot be -1"),
        ("partial(deadline=-1)", "deadline of partial cannot be -1.0"),
        ("collaborative(samples=0)", "samples of collaborative has to be above 0"),
        ("easgd(steps=0)", "steps of easgd has to be above 0"),
        ("easgd(alpha=-0.1)", "alpha of easgd cannot be -0.1"),
        ("ea_wild(synchronous_home=True)", "ea_wild is asynchronous; use easgd(synchronous_home=True)"),
        ("choco(gamma=-1)", "gamma of choco cannot be -1"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_a_sentence(text: str, why: str) -> None:
    with pytest.raises(AlgorithmError) as error:
        parse(text)
    assert why in str(error.value)


@for_each(
    ("text", "ranks", "error", "why"),
    [
        ("softsync(contributions=5)", 4, AlgorithmError, "waits for 5 contributions, and there are 4 ranks"),
        ("partial(backup=4)", 4, AlgorithmError, "there are 4 ranks, and 4 are backups"),
        ("partial", 1, AlgorithmError, "would wait for no rank"),
        ("dpsgd(topology='rong')", 4, MixingError, "did you mean 'ring'?"),
        ("dpsgd(topology='hypercube')", 6, MixingError, "a hypercube has"),
        ("adpsgd(topology='hypercube')", 3, MixingError, "a hypercube has"),
        ("choco(topology='one-peer-exponential')", 4, AlgorithmError, "needs a graph that stays as it is"),
    ],
)
def test_what_so_many_ranks_cannot_do_is_refused(text: str, ranks: int, error: type[Exception], why: str) -> None:
    with pytest.raises(error) as raised:
        parse(text).check(ranks)
    assert why in str(raised.value)


def test_matrices_are_checked_for_what_the_algorithm_needs(tmp_path: Path) -> None:
    pushing = tmp_path / "columns"  # columns add up to 1, rows do not
    pushing.write_text("0.5 0.2\n0.5 0.8\n")
    parse(f"sgp(topology='file:{pushing}')").check(2)
    for name in ("dpsgd", "choco"):
        with pytest.raises(MixingError, match="stochastic"):
            parse(f"{name}(topology='file:{pushing}')").check(2)


CODECS = {name: codecs.parse(name) for name in ("dense", "fp16", "bf16", "topk", "int8", "int2", "powersgd", "demo")}
CODECS["signs"] = codecs.parse("demo(signed=True)")


def refusal(algorithm: str, codec: str, op: str = "average", ranks: int = 4) -> str:
    """Why a combination is refused; empty if it is not."""
    try:
        check_use(parse(algorithm), CODECS[codec], op, ranks)
    except AlgorithmError as error:
        return str(error)
    return ""


@for_each("codec", CODECS)
@for_each("name", ALGORITHMS)
def test_which_codec_goes_with_which_algorithm(name: str, codec: str) -> None:
    kind = ALGORITHMS[name]
    why = refusal(name, codec)
    if name == "allreduce":
        assert not why
    elif codec == "signs":
        assert "makes signs of a sum of gradients" in why
        assert name in why
    elif codec == "powersgd" and kind.place is not Place.NOWHERE:
        assert "all-reduces its factors" in why
    elif name == "choco":
        assert ("selects nothing" in why) == CODECS[codec].lossless
    elif kind.signal in (Signal.PARAMETER, Signal.CONSENSUS) and CODECS[codec].stateful:
        assert "would leave out most" in why
    else:
        assert not why


@for_each("op", ["sum", "min", "max", "product", "adasum"])
@for_each("name", ALGORITHMS)
def test_only_allreduce_combines_other_than_by_means(name: str, op: str) -> None:
    codec = "topk" if name == "choco" else "dense"
    why = refusal(name, codec, op)
    assert why == "" if name == "allreduce" else f"cannot combine by {op}; use op=Average, or allreduce" in why


def test_a_use_is_checked_for_the_number_of_ranks() -> None:
    assert "would wait for no rank" in refusal("partial", "dense", ranks=1)
    assert not refusal("partial", "dense", ranks=2)
