"""What `--auto` chooses under which conditions, and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_rt import codecs
from fusion_rt.choice import candidates as all_candidates
from fusion_rt.choice import prediction
from fusion_rt.choice.candidates import Mathematics, Setting
from fusion_rt.choice.codec_costs import ALLREDUCE, CODECS, LOCAL
from fusion_rt.choice.prediction import Conditions, Decision, decide, predict
from fusion_rt.units import MIB
from tests.for_each import for_each

DEFAULT = Setting(16 * MIB, codec="dense", late=False)
GIGABIT = 8e-9  # seconds a byte
SLOW = Conditions(4, 1, 1e-4, 10 * GIGABIT, 0.1, (MIB,) * 24, 2 * MIB)
TOPK, TWO_BITS = "topk(density=0.01)", "topk(density=0.01, value='int2', minimum=1024)"


def candidates(
    level: str, default: Setting, conditions: Conditions, *, codecs: bool, late: bool, local: bool = False
) -> list[Setting]:
    sizes = {name: getattr(conditions, name) for name in ("nbytes", "nodes", "largest_chunk")}
    return all_candidates.candidates(level, default, **sizes, codecs=codecs, late=late, local=local)


def chosen(conditions: Conditions, level: str, default: Setting = DEFAULT, *, compresses: bool = True) -> Decision:
    return decide(conditions, candidates(level, default, conditions, codecs=compresses, late=True), level)


def by_hand(conditions: Conditions, share: float) -> float:
    """Seconds of the bytes of a ring on the slowest link."""
    return share * 2 * (conditions.nodes - 1) / conditions.nodes * conditions.nbytes * conditions.seconds_per_byte


@for_each("codec", CODECS)
def test_on_a_slow_link_a_step_takes_as_long_as_its_bytes(codec: str) -> None:
    conditions = replace(SLOW, seconds_per_byte=1000 * GIGABIT, latency=0.0)
    found = predict(conditions, replace(DEFAULT, codec=codec, threshold=MIB))
    assert found.step == pytest.approx(by_hand(conditions, CODECS[codec].share), rel=0.2)
    assert found.sent == pytest.approx(CODECS[codec].share * 1.5 * 24 * MIB)


def test_where_links_are_fast_a_step_takes_as_long_as_it_computes() -> None:
    conditions = replace(SLOW, seconds_per_byte=1e-12, latency=1e-6, computing=1.0)
    assert predict(conditions, DEFAULT).step == pytest.approx(1.0, rel=0.05)


def test_late_updates_hide_what_is_shorter_than_computing() -> None:
    conditions = replace(SLOW, computing=1.2 * by_hand(SLOW, 1.0))
    late = predict(conditions, replace(DEFAULT, late=True))
    assert late.exposed == 0
    assert predict(conditions, DEFAULT).exposed > 0.2


def test_several_buckets_begin_while_gradients_still_arrive() -> None:
    conditions = replace(SLOW, computing=1.0)
    assert predict(conditions, replace(DEFAULT, threshold=2 * MIB)).step < predict(conditions, DEFAULT).step


def test_many_small_buckets_cost_their_overhead() -> None:
    conditions = replace(SLOW, tensors=(1000,) * 2000, seconds_per_byte=GIGABIT / 10, computing=0.01)
    assert predict(conditions, replace(DEFAULT, threshold=1)).step > 10 * predict(conditions, DEFAULT).step


@for_each("speed", [1e-12, GIGABIT, 10 * GIGABIT, 1000 * GIGABIT])
@for_each("nodes", [1, 2, 4, 16])
def test_lossless_never_changes_the_mathematics(speed: float, nodes: int) -> None:
    conditions = replace(SLOW, seconds_per_byte=speed, nodes=nodes)
    choices = candidates("lossless", DEFAULT, conditions, codecs=True, late=True)
    assert choices[0] == DEFAULT
    assert {choice.kind for choice in choices} == {Mathematics("dense")}


def test_each_level_allows_what_those_before_it_do() -> None:
    lossy = candidates("lossy", DEFAULT, SLOW, codecs=True, late=True)
    assert {choice.codec for choice in lossy} == set(CODECS)
    assert {(choice.late, choice.algorithm) for choice in lossy} == {(False, ALLREDUCE)}
    free = candidates("async", DEFAULT, SLOW, codecs=True, late=True, local=True)
    assert set(lossy) < set(free)
    assert {choice.kind for choice in free} - {choice.kind for choice in lossy} == (
        {Mathematics(codec, True) for codec in CODECS}
        | {Mathematics(codec, False, name) for name, codec in LOCAL.items()}
    )
    without = candidates("async", DEFAULT, SLOW, codecs=True, late=True)
    assert {choice.algorithm for choice in without} == {ALLREDUCE}


def test_what_goes_through_owners_of_ranges_has_no_choice_of_another_way() -> None:
    for choice in candidates("lossy", DEFAULT, SLOW, codecs=True, late=False):
        assert choice.exchange == "auto" or CODECS[choice.codec].exchange == "chunks"


def test_a_codec_that_was_asked_for_stays() -> None:
    own = replace(DEFAULT, codec="powersgd(rank=4)")
    for level in ("lossless", "lossy", "async"):
        choices = candidates(level, own, SLOW, codecs=False, late=True)
        assert {choice.codec for choice in choices} == {"powersgd(rank=4)"}


def test_what_cannot_be_late_is_not() -> None:
    assert not any(choice.late for choice in candidates("async", DEFAULT, SLOW, codecs=True, late=False))


def test_a_node_alone_compresses_nothing() -> None:
    alone = replace(SLOW, nodes=1)
    for level in ("lossless", "lossy", "async"):
        assert {c.kind for c in candidates(level, DEFAULT, alone, codecs=True, late=True)} == {Mathematics("dense")}


def test_the_slower_the_links_the_more_is_changed() -> None:
    speeds = (1e-12, GIGABIT / 2, GIGABIT, 3 * GIGABIT, 10 * GIGABIT, 100 * GIGABIT)
    conditions = [replace(SLOW, seconds_per_byte=speed, computing=0.25) for speed in speeds]
    order = [list(CODECS).index(chosen(one, "lossy").setting.codec) for one in conditions]
    assert order == sorted(order)
    assert order[0] == 0
    assert order[-1] == len(CODECS) - 1


def test_of_what_is_about_as_fast_the_one_that_changes_least_is_taken() -> None:
    conditions = replace(SLOW, seconds_per_byte=GIGABIT / 10, computing=1.0)
    found = chosen(conditions, "lossy")
    fastest = min(found.predictions, key=lambda one: one.step)
    assert found.setting.codec == "dense"
    assert predict(conditions, found.setting).step <= prediction.ALIKE * fastest.step


def test_the_default_stays_where_nothing_is_gained() -> None:
    conditions = replace(SLOW, tensors=(MIB,), computing=10.0)
    assert chosen(conditions, "lossy").setting == DEFAULT


def test_small_tensors_are_known_to_be_sent_whole() -> None:
    conditions = replace(SLOW, tensors=(4000,) * 6000)
    assert predict(conditions, replace(DEFAULT, codec=TOPK)).sent == pytest.approx(0.5 * 1.5 * 24e6)


def test_the_paragraph_has_the_numbers_it_was_decided_by() -> None:
    found = chosen(SLOW, "lossy")
    assert "\n" not in found.why
    for part in (
        "there are 4 nodes, whose worst link carries 100 Mbit/s with a latency of 0.1 ms",
        "a step computes for 100 ms and has 25.17 MB of gradients",
        f"{predict(SLOW, found.setting).step * 1e3:.4g} ms",
        f"--auto=lossy chose {found.setting}, predicted to take",
        *CODECS,
    ):
        assert part in found.why
    assert found.setting.codec == TOPK


def test_the_paragraph_says_when_nothing_changes() -> None:
    why = chosen(replace(SLOW, nodes=1, tensors=(MIB,), computing=10.0), "lossless").why
    assert "there is 1 node, and a step" in why
    assert "which is the default" in why


def test_what_was_tried_counts_as_it_was_measured() -> None:
    choices = candidates("lossy", DEFAULT, SLOW, codecs=True, late=True)
    took = {TOPK: 1.0, TWO_BITS: 1.0, "int8": 0.5}
    tried = {choice: took[choice.codec] for choice in choices if choice.codec in took}
    found = decide(SLOW, choices, "lossy", tried)
    assert found.setting.codec == "int8"
    assert "int8 500 ms (measured" in found.why
    assert "measured to take" in found.why


def test_only_what_was_tried_can_be_kept() -> None:
    choices = candidates("lossy", DEFAULT, SLOW, codecs=True, late=True)
    kept = decide(SLOW, choices, "lossy", {replace(DEFAULT, codec="fp16"): 5.0}, only_tried=True)
    assert kept.setting == replace(DEFAULT, codec="fp16")
    assert f"of the default's {predict(SLOW, DEFAULT).step * 1e3:.4g} ms" in kept.why


@for_each("codec", CODECS)
def test_the_codecs_are_there(codec: str) -> None:
    assert codecs.parse(codec)
